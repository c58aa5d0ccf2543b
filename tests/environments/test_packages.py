"""Environments of packages: what is asked, scored, and refused by name."""

import contextlib
import importlib.util
import json
import os
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
import small_run

from scalerl_jax import wiring
from scalerl_jax.config import RewardConfig
from scalerl_jax.data import judging
from scalerl_jax.environments import packages
from scalerl_jax.environments.package_names import PackageName, read_name
from scalerl_jax.environments.run_verifiers import make_pool
from scalerl_jax.wiring.prompts import check_environment, load_prompts
from scalerl_jax.wiring.sampling import make_checked_tokenizer

HERE = Path(__file__).parent / "tasksets"
PAGE = small_run.ROOT / "docs" / "environments.md"
needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="verifiers is not installed: make test-verifiers",
)
FAST = RewardConfig(timeout_s=60.0, num_workers=1)


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    """Child processes import from the folders of this one."""
    monkeypatch.syspath_prepend(str(HERE))
    packages.tasks_file.cache_clear()


def test_a_name_has_a_package_a_count_and_settings():
    assert read_name("env:mine") == PackageName("mine", None, {})
    assert read_name("env:me/my-env@20(split='test', n=3)") == PackageName(
        "me/my-env", 20, {"split": "test", "n": 3}
    )


@pytest.mark.parametrize(
    "name, words",
    [
        ("env:", "must be env:PACKAGE, env:PACKAGE@COUNT or env:PACKAGE(setting=value"),
        ("env:../up", "must be env:PACKAGE"),
        ("env:a@0", "must be env:PACKAGE"),
        ("env:a b", "must be env:PACKAGE"),
        ("env:a(split=open('x'))", "is no number, text, list, True, False or None"),
        ("env:a('x')", "gives a value without its setting's name"),
        ("env:a(n=1e12)", "must be within 1,000,000,000 of 0"),
        ("env:" + "a" * 500, "in 500 characters at most"),
    ],
)
def test_a_name_that_is_none_is_refused(name, words):
    with pytest.raises(ValueError, match="environment = ['\"]env:") as error:
        read_name(name)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"eval.sets": ("gsm8k",)}, "eval.sets holds 'gsm8k' with config.environment"),
        (
            {"reward.weights": (1.0,)},
            "environment = env:mine: a package weighs its rew",
        ),
        (
            {"environment": "", "data.tasks": ("env:a",)},
            "data.tasks holds 'env:a' with config.environment = ; the prompts of",
        ),
    ],
)
def test_prompts_of_others_are_refused(changes, words):
    with pytest.raises(ValueError) as error:
        small_run.make_config({"environment": "env:mine"} | changes)
    assert words in str(error.value)


def test_a_machine_without_verifiers_is_told_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot be used: .*pip install 'verifiers>"):
        packages.tasks_file("env:mine", tmp_path, ())


def put_example(folder):
    """Write the package that the documentation shows."""
    _, _, shown = PAGE.read_text().partition("`my_words.py` is one")
    (folder / "my_words.py").write_text(shown.split("```")[1].removeprefix("python"))


def run_config(tmp_path, environment, changes):
    settings = {"environment": environment, "data.directory": str(tmp_path)}
    return small_run.make_config(settings | changes)


@needs_verifiers
def test_prompts_are_those_of_the_splits_and_no_answer_comes_with_them(
    tmp_path, monkeypatch
):
    put_example(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    test = "env:my_words(split='test')"
    changes = {"eval.sets": (test,), "data.train_prompts": 0}
    config = run_config(tmp_path, "env:my_words", changes)
    assert config.data.tasks == ("env:my_words",)
    own = check_environment(config)
    tokenizer = make_checked_tokenizer(config, wiring.make_architecture(config))
    loaded = load_prompts(config, tokenizer)
    assert len(loaded.train) == 6
    (stone,), sun = loaded.held_out, loaded.train[0]
    assert (stone.text, sun.text) == (
        *("backward: stone<think>", "backward: sun<think>"),
    )
    kept = [file.read_text() for file in tmp_path.rglob("*.jsonl")]
    assert len(kept) == 2, "a file of each split"
    assert not [text for text in kept if "enots" in text or "nus" in text]
    found = judge(
        own,
        (sun, ["so</think>nus", "nus", "</think> nu?"]),
        (stone, ["</think>enots"]),
    )
    # Right: 1 + 0.5 * 1; two of three letters: 0.5 * 2 / 3; all of it thought: 0.
    assert [each.status for each in found] == ["correct", "wrong", "wrong", "correct"]
    assert [each.reward for each in found] == pytest.approx([1.5, 0.0, 1 / 3, 1.5])
    assert [each.parts for each in found] == [
        {"right": 1.0, "letters": 1.0, "metric.thought": 2.0},
        {"right": 0.0, "letters": 0.0, "metric.thought": 3.0},
        {"right": 0.0, "letters": pytest.approx(2 / 3), "metric.thought": 0.0},
        {"right": 1.0, "letters": 1.0, "metric.thought": 0.0},
    ]


def judge(own, *asked):
    """The verdicts on completions of prompts."""
    found = {}
    with contextlib.closing(make_pool(FAST, unnamed="math", own=own)) as pool:
        for key, (prompt, completions) in enumerate(asked):
            pool.submit(key, prompt.task, completions, prompt.reference)
        while pool.pending:
            pool.wait(120.0)
            found |= {each.key: each.verdicts for each in pool.poll()}
    return [verdict for key in sorted(found) for verdict in found[key]]


@needs_verifiers
def test_the_page_shows_what_the_command_says_of_a_package(
    tmp_path, monkeypatch, capfd
):
    put_example(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    _, _, shown = PAGE.read_text().partition("`words.jsonl`:")
    rows, command, printed = (
        block.split("\n", 1)[1] for block in shown.split("```")[1:6:2]
    )
    (tmp_path / "words.jsonl").write_text(rows)
    program, *words = shlex.split(command)
    assert program == "scalerl" and judging.main(words) == 0
    assert capfd.readouterr().out.startswith(printed)


@needs_verifiers
@pytest.mark.parametrize(
    "name, row, words",
    [
        ("env:ledger", {"task": 0, "turns": ["a"]}, "needs the field 'turns', a list"),
        (
            "env:no_such",
            {},
            "'env:no_such' cannot be used: the module 'no_such' is not",
        ),
        (
            "env:count_letters@3",
            {"task": 3},
            "3; env:count_letters@3 has the tasks 0 to",
        ),
        (
            "env:count_letters@3",
            {"prompt": "?"},
            "'prompt' is the last message of 0 of",
        ),
        (
            "env:count_letters@3",
            {},
            "line 1: field 'prompt' is the last message of 0 of",
        ),
    ],
)
def test_a_file_that_a_package_cannot_judge_is_one_line(
    tmp_path, capfd, name, row, words
):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"completion": "2", **row}))
    assert judging.main(["judge", f"--environment={name}", str(file)]) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("error: ") and words in said


@needs_verifiers
def test_written_turns_call_the_tools_of_a_package(tmp_path, capfd):
    call = {"name": "ledger_add", "arguments": {"amount": 5}}
    turns = [f"<tool_call>{json.dumps(call)}</tool_call>", "so</think>16"]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"task": 0, "turns": turns}))
    flags = ["--environment=env:ledger", "--answer-after=</think>", str(file)]
    assert judging.main(["judge", *flags]) == 0
    first, second, _ = capfd.readouterr().out.splitlines()
    assert first == 'rows.jsonl, line 1, after turn 1, tool: "total 16"'
    assert second.startswith("rows.jsonl, line 1  correct  reward 1  ")


class Asked:
    """What a prompt has, of which a test says the reference."""

    task = "any"

    def __init__(self, row):
        self.reference = {"verifier": "own", "answer": row["reference"]}


@needs_verifiers
def test_scores_have_their_names_and_a_failure_is_no_score(tmp_path):
    name = "env:count_letters@3"
    rows = packages.tasks_file(name, tmp_path, ()).read_text().splitlines()
    second = json.loads(rows[1])
    assert [each["role"] for each in second["messages"]] == ["system", "user"]
    assert len(rows) == 3 and second["messages"][1]["content"] == "How many a in abab?"
    own = packages.own_of((name,), FAST, end_of_thinking="")
    other = {"reference": {**second["reference"], "task": 0}}
    *right, broken, counted, silent, changed, stranger = judge(
        own,
        (Asked(second), ["2", "3", "broken", "counted", "silent"]),
        (Asked(other), ["2"]),
        (Asked({"reference": "2"}), ["2"]),
    )
    assert [each.parts for each in right] == [
        {"near": 1.0, "asked": 1.0},
        {"near": 0.5, "asked": 1.0},
    ]
    for verdict, words in (
        (broken, "CountTask scoring: ZeroDivisionError: the scorer divides by 0"),
        (counted, "reads trace.num_output_tokens, which is not known here"),
        (silent, "Refusal: CountTask has recorded no reward"),
        (changed, "Refusal: task 0 of env:count_letters@3 is not the one whose prompt"),
        (stranger, "Refusal: the prompt is of no package; name env:PACKAGE"),
    ):
        assert verdict.status == "verifier_error" and words in verdict.detail
        assert "\n" not in verdict.detail


@needs_verifiers
@pytest.mark.slow
def test_a_run_trains_on_a_package_and_has_its_rewards_by_name(tmp_path):
    changes = {
        "environment": "env:my_words",
        "data.directory": tmp_path / "data",
        "data.train_prompts": 0,
        "eval.sets": ("env:my_words(split='test')",),
        "train.num_steps": 1,
    }
    put_example(tmp_path)
    path = os.pathsep.join(map(str, (tmp_path, small_run.ROOT)))
    process = small_run.start(
        *("-m", "scalerl_jax.main", *small_run.arguments(tmp_path / "run", changes)),
        environment={"PYTHONPATH": path},
    )
    _, said = process.communicate()
    assert process.returncode == 0, said
    (row,) = small_run.rows(tmp_path / "run")
    assert row["reward/metric.thought"] > 0.0
    assert row["reward/right/unjudged_share"] == row["verifier/error_share"] == 0.0
    parts = row["reward/right"] + 0.5 * row["reward/letters"]
    assert row["reward/mean"] == pytest.approx(parts)
    kept = (tmp_path / "run" / "environment.py").read_text()
    assert "scored by verifiers 0.4" in kept and "env:my_words" in kept


TASKSET = """
    import verifiers.v1 as vf

    __all__ = [{names}]

    class Tools(vf.Toolset[vf.ToolsetConfig]):
        pass

    class Agents(vf.EnvConfig):
        agent: vf.AgentConfig = vf.AgentConfig()
        {agents}

    class Own(vf.Env[Agents]):
        async def run(self, task, agents): {run}

    class Data(vf.TaskData):
        pass

    class MyTask(vf.Task[Data]):
        @vf.reward
        async def right(self, trace) -> float:
            return 1.0
        {task}

    class Mine(vf.Taskset[MyTask, vf.TasksetConfig]):
        def load(self):
            return [MyTask(Data({data}), self.config.task)]
        {taskset}
"""


OWN = {"names": "'Mine', 'Own'"}
PROGRAM = """
    class Program(vf.Harness[vf.HarnessConfig]):
        async def launch(self, *given): ...
"""


def tools_of(settings):
    """A task with a toolset of these settings."""
    body = f"def toolsets(cls, config): return [Tools(vf.ToolsetConfig({settings}))]"
    return {"task": f"@classmethod\n        {body}"}


@needs_verifiers
@pytest.mark.parametrize(
    "parts, words",
    [
        ({"task": "NEEDS_CONTAINER = True"}, "MyTask needs a container, and there is"),
        ({"task": "async def setup(self, trace, runtime): ..."}, "MyTask.setup() prep"),
        (
            {"task": "@vf.metric\n        async def a(self, runtime): return 1.0"},
            "MyTask.a() reads a container, and there is none",
        ),
        (
            {"taskset": "@classmethod\n        def toolsets(cls, config): return [1]"},
            "MyTask gives 1 for a toolset",
        ),
        (tools_of("url='http://a/mcp'"), "Tools is a server at http://a/mcp, over the"),
        (tools_of("colocated=True"), "Tools runs in the container of a program, and"),
        (tools_of("runtime=vf.DockerConfig()"), "Tools runs in a container (docker)"),
        (
            {"task": "@vf.stop\n        async def s(self, request: vf.Request): ..."},
            "MyTask.s() is a @vf.stop that looks at a Request, and there is none",
        ),
        (
            {"task": "@vf.intercept\n        async def i(self, sent: vf.Request): ..."},
            "MyTask.i() is a @vf.intercept, which changes what was sampled or said",
        ),
        ({"task": "right = None"}, "MyTask has no @vf.reward"),
        ({"taskset": "INFINITE = True"}, "tasks without end; say how many: env:"),
        ({"data": ""}, "task 0 has no prompt: a user begins, and there is none"),
        ({"data": "prompt='a', image='ubuntu'"}, "task 0 has image = 'ubuntu', and"),
        ({"data": "prompt='a', network_allow=[]"}, "task 0 has network_allow, and"),
        ({"source": "import verifiers.v1 as vf\n__all__ = []"}, "names no subclass of"),
        ({"source": "def load_environment(): ..."}, "is of verifiers before 0.4"),
        (
            {"source": "import no_such"},
            "the module 'no_such' is not installed, which",
        ),
        (
            {"source": "import verifiers as v\nclass Mine(v.MultiTurnEnv): ..."},
            "is for verifiers before 0.4, whose environments are not those of 0.4: "
            "module 'verifiers' has no attribute 'MultiTurnEnv'",
        ),
        (
            {"source": "from verifiers import ToolEnv"},
            "is for verifiers before 0.4, whose environments are not those of 0.4: "
            "cannot import name 'ToolEnv' from 'verifiers'",
        ),
        ({"source": "raise KeyError('a\\nb')"}, "KeyError: "),
        (
            {"settings": "(task={'judges': [{'id': 'reference'}]})"},
            "MyTask asks a judge of verifiers, over the network",
        ),
        ({"settings": "(split='a')"}, "split: Extra inputs are not permitted; its set"),
        (
            {"names": "'Mine', 'Program'", "taskset": PROGRAM},
            "has Program, a program of its own that calls the policy over HTTP",
        ),
        (
            OWN | {"agents": "judge: vf.AgentConfig = vf.AgentConfig()"},
            "Own has the agents agent, judge, and an episode is the token sequence of",
        ),
        (
            OWN | {"settings": "(env={'agent': {'model': 'gpt'}})"},
            "Own has model = 'gpt' for its agent agent, which the settings of the run",
        ),
        (
            OWN | {"settings": "(env={'agent': {'harness': {'id': 'codex'}}})"},
            "Own has the harness 'codex' for its agent agent, a program that calls the",
        ),
        (OWN | {"settings": "(env={'no_such': 1})"}, "no_such: Extra inputs are not p"),
        (OWN | {"settings": "(env=1)"}, "env = 1 must be {'setting': value}"),
        (OWN, "Own.run() has ended without a turn of the policy"),
        (
            OWN | {"run": "await agents.agent.run(task)", "data": ""},
            "its agent runs a task without a prompt; speak to it in an interaction",
        ),
        (
            OWN | {"run": "await agents.agent.provision(task)"},
            "it asks for a container (agent.provision), and there is none",
        ),
    ],
)
def test_what_asks_for_what_is_not_here_is_refused_by_name(
    tmp_path, monkeypatch, parts, words
):
    name = f"mine_{len(sys.modules)}"  # of a module that is imported once
    filled = {"task": "", "taskset": "", "data": "prompt='a'", "names": "'Mine'"}
    filled |= {"agents": "", "run": "..."} | parts
    source = parts.get("source") or textwrap.dedent(TASKSET.format(**filled))
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = tmp_path / "said"
    assert packages.main(f"env:{name}{parts.get('settings', '')}", said) == 3
    assert words in said.read_text() and "\n" not in said.read_text()


@needs_verifiers
def test_a_package_that_ends_its_process_is_told_by_its_exit_code(
    tmp_path, monkeypatch
):
    (tmp_path / "leaving.py").write_text("import os; os._exit(5)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError) as error:
        packages.tasks_file("env:leaving", tmp_path, ())
    assert str(error.value) == (
        "environment = 'env:leaving' cannot be used: its process ended with exit code 5"
    )
