"""Tasks of packages that are played by turns: with tools, and by their own `run`."""

import contextlib
import importlib.util
import json
import runpy
import shutil
import textwrap
from pathlib import Path

import pytest
import small_run

from scalerl_jax import config as config_lib
from scalerl_jax import main
from scalerl_jax.config import RewardConfig
from scalerl_jax.data.own import read_own
from scalerl_jax.environments import packages
from scalerl_jax.environments.run_verifiers import make_pool
from scalerl_jax.environments.verdict import More, Step

HERE = Path(__file__).parent / "tasksets"
FAST = RewardConfig(timeout_s=60.0, num_workers=1)
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="verifiers is not installed: make test-verifiers",
)


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    """Child processes import from the folders of this one."""
    monkeypatch.syspath_prepend(str(HERE))
    packages.tasks_file.cache_clear()


class Table:
    """Episodes of a package's tasks, turn by turn, in one verifier process."""

    def __init__(self, name, directory, *, end_of_thinking=""):
        file = packages.tasks_file(name, directory, ())
        self.play = packages.play_of(file)
        self.rows = [json.loads(line) for line in file.read_text().splitlines()]
        self.own = packages.own_of(
            (name,), FAST, end_of_thinking=end_of_thinking, by_turns=self.play.by_turns
        )
        self.count = 0

    @contextlib.contextmanager
    def open(self):
        """A pool of one process."""
        with contextlib.closing(make_pool(FAST, unnamed="math", own=self.own)) as pool:
            self.pool = pool
            yield self

    def episode(self, place, completions, *, killed=-1, cut=False):
        """What is said to each turn; the process is killed before one of them."""
        self.count += 1
        reference = read_own(self.rows[place]).reference
        said, turns = [], ()
        for number, completion in enumerate([*completions, *[""] * cut]):
            if number == killed:
                (worker,) = self.pool._workers
                worker.process.kill()
                worker.process.wait()
            step = Step(
                episode=self.count, turns=turns, cut=cut and number == len(completions)
            )
            self.pool.submit(number, "any", [completion], reference, step=step)
            while self.pool.pending:
                self.pool.wait(60.0)
                for found in self.pool.poll():
                    said += found.verdicts
            if isinstance(said[-1], More):
                turns += ((completion, said[-1]),)
        return said


def called(name, **arguments):
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def test_tools_are_listed_and_called_and_have_the_state_of_their_episode(tmp_path):
    table = Table("env:ledger", tmp_path, end_of_thinking="</think>")
    assert table.play == packages.Play(by_turns=True, with_tools=True)
    first, second = table.rows
    assert first["messages"] == [{"role": "user", "content": "total 10"}]
    listed = {each["function"]["name"]: each["function"] for each in first["tools"]}
    assert sorted(listed) == ["ledger_add", "reverse"]
    assert listed["ledger_add"]["description"] == "Add an amount to the total."
    parameters = listed["ledger_add"]["parameters"]
    assert parameters["required"] == ["amount"]
    assert parameters["properties"]["amount"]["type"] == "integer"
    # They come with the question, for a chat template to list.
    assert read_own(first).reference["tools"] == first["tools"]
    add, calls = called("ledger_add", amount=5), called("reverse", text="abc")
    turns = [
        f"so</think>I add. {add}{calls}",
        called("ledger_add", amount="much"),
        called("ledger_add", amount=-1),
        f"{called('ledger_take')}<tool_call>never ended",
        f"{add} and this is </think>16",
    ]
    with table.open():
        *said, end = table.episode(0, turns)
        assert {each.role for each in said} == {"tool"}
        assert said[0].text == "total 16\ncba (1)"  # its setup had added 1
        assert "validation error" in said[1].text and "amount" in said[1].text
        assert said[2].text.endswith("nothing is taken away")
        assert said[3].text == (
            "no tool 'ledger_take'; there are ledger_add, reverse\n"
            "malformed call: a call ends with </tool_call>"
        )
        assert (end.status, end.reward) == ("correct", 1.0)
        parts = {"right": 1.0, "metric.added": 6.0, "metric.told": 6.0}
        assert end.parts == parts
        # Another one has a state of its own; the toolset of all is the same.
        assert [each.text for each in table.episode(1, [add + calls])] == [
            "total 26\ncba (2)"
        ]
        # Nothing is sampled behind its stop, and what it was told is not scored.
        more, end = table.episode(0, [add, called("ledger_add", amount=95)])
        assert more.text == "total 16"
        assert (end.reward, end.parts["metric.told"]) == (0.0, 1.0)
        # In another process it is given its turns again.
        said = table.episode(0, [add, add, "</think>21"], killed=2)
        assert [each.text for each in said[:2]] == ["total 16", "total 21"]
        assert said[2].parts == {"right": 1.0, "metric.added": 11.0, "metric.told": 2.0}
        assert table.episode(1, [add], cut=True)[-1].parts["metric.added"] == 6.0


def test_an_environment_speaks_in_turns_and_opens_its_prompts(tmp_path):
    table = Table("env:guessing(env={'most': 8})", tmp_path)
    assert table.play == packages.Play(by_turns=True)
    assert [row["messages"] for row in table.rows] == [
        [
            {"role": "system", "content": "Guess."},
            {"role": "user", "content": "a number from 0 to 8"},
        ]
    ] * 2
    # They read alike, and are two questions all the same.
    three, seven = (row["reference"]["unlike"] for row in table.rows)
    assert three != seven
    with table.open():
        small, large, end = table.episode(0, ["1", "5", "3"], killed=2)
        assert (small, large) == (More("too small"), More("too large"))
        assert (end.status, end.reward) == ("correct", 1.03)
        metrics = {"metric.asked": 3.0, "metric.ended": 1.0}
        assert end.parts == {"found": 1.0, "tried": 3.0} | metrics
        *_, end = table.episode(1, ["1", "1", "1", "1"])  # its agent's max_turns
        assert end.reward == pytest.approx(0.04)
        assert end.parts == {"tried": 4.0, "metric.asked": 4.0, "metric.ended": 0.0}
        *_, end = table.episode(1, ["1"], cut=True)
        assert (end.status, end.parts["tried"]) == ("wrong", 1.0)
        table.rows[0]["reference"]["said"] = "other"
        (end,) = table.episode(0, ["1"])
        assert end.status == "verifier_error"
        assert "it begins otherwise than when its prompt was written" in end.detail


FAULTS = """
    import verifiers.v1 as vf

    __all__ = ["Mine", "Own"]

    class MyTask(vf.Task[vf.TaskData]):
        @vf.reward
        async def right(self, trace) -> float:
            return 1.0

    class Mine(vf.Taskset[MyTask, vf.TasksetConfig]):
        def load(self):
            for kind in ("good", "again", "steer", "list", "silent", "raise", "import"):
                yield MyTask(vf.TaskData(prompt=kind), self.config.task)

    class Config(vf.EnvConfig):
        agent: vf.AgentConfig = vf.AgentConfig()

    class Own(vf.Env[Config]):
        async def run(self, task, agents):
            kind = task.data.prompt
            if kind in ("steer", "list", "silent"):
                async with agents.agent.interaction(task) as talk:
                    await talk.turn()
                    if kind == "steer":
                        await talk.steer("a")
                    await talk.turn([1, 2] if kind == "list" else None)
            await agents.agent.run(task)
            if kind == "again":
                await agents.agent.run(task)
            if kind == "raise":
                raise LookupError("no such board\\nof two lines")
            if kind == "import":
                import no_such_package
"""


def test_what_an_environment_does_wrong_is_its_own_episodes_status(
    tmp_path, monkeypatch
):
    (tmp_path / "own_faults.py").write_text(textwrap.dedent(FAULTS))
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = [
        "",
        "it begins a second conversation, and an episode is one token sequence",
        "it speaks to the policy in the midst of a turn",
        "turn() is given [1, 2], and not one text of a user",
        "ValueError: turn() needs a message: what the policy is told",
        "LookupError: no such board",
        "ModuleNotFoundError: No module named 'no_such_package'",
    ]
    with Table("env:own_faults", tmp_path).open() as table:
        for place, words in enumerate(expected):
            (end,) = table.episode(place, ["b"])
            assert end.status == ("verifier_error" if words else "correct")
            assert words in end.detail and "\n" not in end.detail


SUMS = '''
"""Products, which a tool of the package works out."""

import verifiers.v1 as vf

from scalerl_jax.environments.calculator import calculate

__all__ = ["SumsTaskset"]


class SumsToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        return calculate(expression)


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @classmethod
    def toolsets(cls, config):
        return [SumsToolset(vf.ToolsetConfig())]

    @vf.reward
    async def near(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) % 7 / 6

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        for number in range(80):
            first, second = 11 + number, 97 - number
            data = SumsData(
                prompt=f"State the final answer to the following arithmetic problem: "
                f"{first} * {second} =",
                answer=str(first * second),
            )
            yield SumsTask(data, self.config.task)
'''


# The base's own words, and the names of the tools as a chat template lists them.
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<tool_response>' + message.content + '</tool_response>' }}
{%- elif message.role == 'assistant' %}{{- message.content + '<eos>' }}
{%- else %}{{- message.content }}{% endif %}
{%- endfor %}
{%- for tool in tools or [] %}{{- ' ' + tool.function.name[:1] }}{% endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}
{{- '<think>' }}{% endif %}"""


@pytest.mark.slow
def test_a_run_calls_a_packages_tools_and_trains_on_its_own_tokens(
    tmp_path, monkeypatch
):
    (tmp_path / "my_sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = shutil.copytree(
        small_run.ROOT / "scalerl_jax" / "assets" / "tools_base", tmp_path / "base"
    )
    (base / "chat_template.jinja").write_text(TEMPLATE)
    settings = runpy.run_path(str(small_run.ROOT / "configs/tools.py"))["get_config"]()
    settings.update_from_flattened_dict(
        {
            "environment": "env:my_sums",
            "model.checkpoint": str(base),
            "data.template": "chat",
            "data.directory": str(tmp_path / "data"),
            "compile_cache": "",
            "data.train_prompts": 60,
            "queue.max_staleness": 0,
            "queue.max_waiting": 0,
            "batch.num_prompts": 8,
            "batch.group_size": 4,
            "sampler.slots": 16,
            "optimizer.learning_rate": 3e-4,
            "optimizer.warmup_steps": 2,
            "eval.num_prompts": 12,
            "eval.samples_per_prompt": 1,
            "eval.every": 2,
            "train.num_steps": 2,
        }
    )
    directory = tmp_path / "run"
    main.run(config_lib.resolve(settings), str(directory))
    for row in small_run.rows(directory):
        assert row["episode/mean_turns"] > 1.0
        assert row["verifier/unjudged_share"] == 0.0
        assert row["reward/metric.calls"] > 0.0
        # The learner has the tokens that the sampler had, observations among them.
        assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    rows = small_run.rows(directory, "rollouts.jsonl")
    assert all(row["prompt"].endswith(" c<think>") for row in rows)
    answered = [row["completion"] for row in rows if len(row["turns"]) > 1]
    assert answered and all("<eos><tool_response>" in each for each in answered)
    assert "make = Tasksets(" in (directory / "environment.py").read_text()
