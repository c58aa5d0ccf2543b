"""A user's reward functions: each fault is the status of its own completion."""

import contextlib
import dataclasses
import json
import math
import sys
import textwrap

import psutil
import pytest
import small_run

from scalerl_jax.config import RewardConfig
from scalerl_jax.data import judging
from scalerl_jax.environments.own_file import read_own
from scalerl_jax.environments.run_verifiers import check_own, make_pool
from scalerl_jax.environments.verdict import More, Step, Verdict, figures_of_parts

SOURCE = """
    import asyncio, os, sys, time
    from scalerl_jax.environments.verdict import Done

    RUNNING, MOST = 0, 0

    def score(prompt, completion, reference):
        return len(completion) / reference["of"]

    def short(prompt, completion, reference):
        return completion == prompt

    class Unsaid(Exception):
        def __str__(self):
            raise self

    def hostile(prompt, completion, reference):
        if completion == "unsaid":
            raise Unsaid
        if completion == "raise":
            raise ArithmeticError("no such column\\nof two lines")
        if completion == "exit":
            sys.exit(3)
        if completion == "die":
            os._exit(4)
        if completion == "sleep":
            time.sleep(600)
        if completion == "loop":
            while True:
                pass
        if completion == "recurse":
            return hostile(prompt, completion, reference)
        if completion == "fork" and os.fork() == 0:
            return 0.25
        if completion == "package":
            import no_such_package
        if completion == "print":
            print("printed")
            os.write(2, b"written")
        return {
            "nan": math_nan, "text": "1", "none": None, "many": 1000, "huge": 10**400
        }.get(completion, 1)

    math_nan = float("nan")

    def forking(prompt, completion, reference):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(reference + ".new", "w") as file:
                    file.write(str(os.getpid()))
                os.rename(file.name, reference)
                time.sleep(600)
            os._exit(0)
        while not os.path.exists(reference):
            time.sleep(0.01)
        return 1.0

    def parts(prompt, completion, reference):
        return Done(0.75, {"style": 0.5})

    def taking(prompt, completion, reference):
        return float(len(reference)) + 0 * reference.pop()

    def steady(prompt, completion, reference):
        time.sleep(0.2)
        return 1.0

    async def crowd(prompt, completion, reference):
        global RUNNING, MOST
        RUNNING += 1
        MOST = max(MOST, RUNNING)
        await asyncio.sleep(600 if completion == "late" else 0.02)
        RUNNING -= 1
        return MOST

    def two(prompt, completion):
        return 1.0
"""
SLOW = """
    import time
    from scalerl_jax.environments.verdict import More

    class Slow:
        def begin(self, prompt, reference):
            pass

        def step(self, completion):
            time.sleep(0.7)
            return More("on")
"""
JUDGING = """
    from scalerl_jax.environments.verdict import Verdict

    class Judging:
        def begin(self, prompt, reference) -> None:
            pass

        def step(self, completion):
            return eval(completion)
"""
FAST = RewardConfig(timeout_s=30.0, num_workers=1)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


def judge(file, functions, answers, reward=FAST, *, prompt="ab", reference=None):
    """The verdicts on these completions of one prompt."""
    own = read_own(f"{file}:{functions}", reward)
    found = []
    pool = make_pool(reward, unnamed="reasoning_gym", own=own)
    with contextlib.closing(pool):
        pool.submit(0, "any", answers, reference or {"answer": None}, prompt=prompt)
        while pool.pending:
            pool.wait(60.0)
            found += pool.poll()
    return found[0].verdicts


def test_a_reward_is_partial_credit_and_passes_from_a_setting_on(file):
    half = RewardConfig(timeout_s=30.0, num_workers=1, passed_at=0.5)
    reference = {"verifier": "math", "answer": {"of": 4}}  # its own verifier or not
    found = judge(file, "score", ["a", "ab"], half, reference=reference)
    assert found == [Verdict("wrong", reward=0.25), Verdict("correct", reward=0.5)]


def test_what_one_does_to_its_reference_reaches_no_other(file):
    found = judge(file, "taking", ["a", "b"], reference={"answer": [1, 2]})
    assert [each.reward for each in found] == [2.0, 2.0]


def test_several_are_summed_by_their_weights_and_kept_by_name(file):
    weighted = RewardConfig(timeout_s=30.0, num_workers=1, weights=(1.0, 0.5, 2.0))
    (found,) = judge(
        file, "score,short,parts", ["ab"], weighted, reference={"answer": {"of": 2}}
    )
    # 1 * 1 + 0.5 * 1 + 2 * 0.75
    parts = {"score": 1.0, "short": 1.0, "parts": 0.75, "parts.style": 0.5}
    assert found == Verdict("correct", reward=3.0, parts=parts)


def test_one_that_fails_leaves_the_others_to_be_read_and_the_sum_unjudged(file):
    first, second = judge(file, "short,hostile", ["ab", "nan"])
    assert first.reward == 2.0
    assert (second.status, second.reward) == ("bad_reward", None)
    assert second.parts == {"short": 0.0, "hostile": None}
    assert figures_of_parts([first.parts, second.parts, {}]) == {
        "reward/short": 0.5,
        "reward/short/unjudged_share": 0.0,
        "reward/hostile": 1.0,
        "reward/hostile/unjudged_share": 0.5,
    }


def test_a_part_that_nobody_could_judge_has_no_mean():
    found = figures_of_parts([{"a": None}])
    assert math.isnan(found["reward/a"]) and found["reward/a/unjudged_share"] == 1.0


def test_what_a_function_does_wrong_is_said_of_its_own_completion(file, capfd):
    expected = {
        "raise": ("verifier_error", "line 21: ArithmeticError: no such column"),
        "exit": ("verifier_error", "line 23: SystemExit: 3"),
        "die": ("verifier_error", "the verifier process ended with exit code 4"),
        "recurse": ("verifier_error", "RecursionError: maximum recursion depth"),
        "package": (
            "verifier_error",
            "ModuleNotFoundError: No module named 'no_",
        ),
        "fork": ("correct", ""),
        "print": ("correct", ""),
        "nan": ("bad_reward", "the reward is nan, and must be a finite number"),
        "text": ("bad_reward", "the reward is '1' of type str, and must be a number"),
        "none": ("bad_reward", "the reward is None of type NoneType"),
        "many": ("bad_reward", "1000, further from 0 than reward.max_magnitude = 100"),
        "unsaid": ("verifier_error", "the verifier process ended with exit code 1"),
        "huge": ("bad_reward", "and must be a finite number"),
        "good": ("correct", ""),
    }
    found = judge(file, "hostile", list(expected))
    for verdict, (status, words) in zip(found, expected.values(), strict=True):
        assert verdict.status == status and words in verdict.detail
        assert "\n" not in verdict.detail
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="a process adopts on Linux alone")
def test_what_a_function_has_forked_ends_with_its_process(file, tmp_path):
    """Also one that sleeps, in a session of its own, whose parent has ended."""
    told = tmp_path / "process"
    (found,) = judge(file, "forking", ["a"], reference={"answer": str(told)})
    assert found.status == "correct"
    assert not psutil.pid_exists(int(told.read_text()))


@pytest.mark.parametrize("hang", ["sleep", "loop"])
def test_one_that_hangs_is_ended_whatever_it_computes(file, hang):
    short = RewardConfig(timeout_s=1.0, num_workers=1)
    found = judge(file, "hostile", ["good", hang, "good"], short)
    statuses = [verdict.status for verdict in found]
    assert statuses == ["correct", "verifier_timeout", "correct"]


def test_turns_of_a_lost_process_have_a_time_limit_each(tmp_path):
    """Five turns take longer than the limit of one."""
    file = tmp_path / "slow.py"
    file.write_text(textwrap.dedent(SLOW))
    reward = RewardConfig(timeout_s=2.0, num_workers=1)
    own = read_own(f"{file}:Slow", reward)
    turns = (("a", More("on")),) * 4
    with contextlib.closing(make_pool(reward, unnamed="math", own=own)) as pool:
        assert pool.kind.by_turns
        pool.submit(0, "any", ["a"], {"answer": None}, step=Step("first", turns))
        pool.wait(60.0)
        ((_, said),) = pool.poll()
    assert said == [More("on")]


def test_a_verdict_that_an_environment_makes_is_read_like_its_rewards(tmp_path):
    file = tmp_path / "judging.py"
    file.write_text(textwrap.dedent(JUDGING))
    expected = {
        "Verdict('correct', reward=0.5, parts={'a': None})": ("correct", ""),
        "Verdict('wrong', detail=5)": ("wrong", "5"),
        "Verdict('passed')": ("bad_reward", "status is 'passed', and must be one of"),
        "Verdict('correct', reward=float('nan'))": ("bad_reward", "the reward is nan"),
        "Verdict('correct', reward='1')": ("bad_reward", "'1' of type str"),
        "Verdict('correct', reward=1e9)": ("bad_reward", "reward.max_magnitude = 100"),
        "Verdict('correct', parts={'a': None, 'b': []})": ("bad_reward", "is []"),
    }
    found = {}
    pool = make_pool(FAST, unnamed="math", own=read_own(f"{file}:Judging", FAST))
    with contextlib.closing(pool):
        for text in expected:
            pool.submit(text, "any", [text], {"own": None}, step=Step(episode=text))
        while pool.pending:
            pool.wait(60.0)
            found |= {each.key: each.verdicts[0] for each in pool.poll()}
    for text, (status, words) in expected.items():
        assert found[text].status == status and words in found[text].detail
    assert found[next(iter(expected))] == Verdict("correct", "", 0.5, {"a": None})


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param("lives=3, guesses=0, hints=()", id="three defaults"),
        pytest.param("*others, **named", id="anything"),
    ],
)
def test_a_class_with_begin_and_step_is_an_environment_whatever_it_may_take(
    tmp_path, fields
):
    file = tmp_path / "slow.py"
    made = textwrap.dedent(SLOW)
    file.write_text(f"{made}\n    def __init__(self, {fields}):\n        pass\n")
    assert check_own(read_own(f"{file}:Slow", FAST), FAST)


def test_async_calls_run_beside_each_other_up_to_a_limit(file):
    limited = RewardConfig(timeout_s=2.0, num_workers=1, max_concurrent=3)
    *found, late = judge(file, "crowd", ["a"] * 8 + ["late"], limited)
    assert max(verdict.reward for verdict in found) == 3.0
    assert late.status == "verifier_timeout"


def test_plain_functions_of_many_completions_have_a_time_limit_each(file):
    """Together they take more than the time of one completion, twice 1 s."""
    short = RewardConfig(timeout_s=1.0, num_workers=1, max_concurrent=12)
    found = judge(file, "steady,crowd", ["a"] * 12, short)
    assert {each.status for each in found} == {"correct"}


@pytest.mark.parametrize(
    "source, message",
    [
        ("def other(): pass", "has no function 'score'"),
        ("score = 3", "has 'score', which is no function"),
        ("def score(a): pass", r"score\(a\), which must take \(prompt, completion"),
        ("def score(completion, prompt, reference): pass", "reference.* in this order"),
        ("def score(): return open('/no/such')", "line 1: FileNotFoundError: "),
        ("def score(): return 3", r"score\(\), which makes a int; an environment"),
        ("import no_such_module", "line 1: ModuleNotFoundError: No module named 'no_s"),
        ("x = (", "line 1: SyntaxError: '\\(' was never closed"),
        ("import os; os._exit(5)", "ended with exit code 5 while it was imported"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_before_a_run(tmp_path, source, message):
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ValueError, match=message) as error:
        check_own(read_own(f"{file}:score", FAST), FAST)
    assert str(error.value).startswith("environment = ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "takes, name, changes, message",
    [
        ("reference, prompt", "Slow", {}, r"has begin\(prompt, reference\)"),
        ("prompt, reference", "Slow", {"weights": (2.0,)}, "weights = .2.0,. is of"),
        ("prompt, reference", "score", {"per_turn": True}, "per_turn = True is of env"),
    ],
)
def test_settings_and_arguments_of_the_other_kind_are_refused(
    tmp_path, takes, name, changes, message
):
    file = tmp_path / "mine.py"
    file.write_text(
        f"class Slow:\n    def begin(self, {takes}): pass\n"
        "    def step(self, completion): return 1.0\n"
        "def score(prompt, completion, reference): return 1.0\n"
    )
    reward = dataclasses.replace(FAST, **changes)
    with pytest.raises(ValueError, match=message):
        check_own(read_own(f"{file}:{name}", reward), reward)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("mine.py", {}, "must be FILE.py:FUNCTION"),
        ("mine.py:a,a", {}, "must name each function once"),
        ("no_such.py:score", {}, "no_such.py: there is no such file"),
        ("mine.py:score", {"weights": (1.0, 2.0)}, "has 2 weights for the 1 functions"),
        ("mine.py:score", {"variables": ("NO_SUCH",)}, "names 'NO_SUCH', which is not"),
    ],
)
def test_a_setting_that_names_nothing_is_refused(
    file, monkeypatch, name, changes, message
):
    monkeypatch.chdir(file.parent)
    with pytest.raises(ValueError, match=message):
        read_own(name, RewardConfig(**changes))


def test_a_key_reaches_the_process_only_where_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\ndef score(p, c, r):\n    return 'MY_KEY' in os.environ\n"
    )
    for variables, expected in (((), 0.0), (("MY_KEY",), 1.0)):
        reward = RewardConfig(timeout_s=30.0, num_workers=1, variables=variables)
        assert judge(file, "score", ["a"], reward)[0].reward == expected


def test_an_installed_package_names_a_reward_of_its_own(
    file, tmp_path, monkeypatch, capsys
):
    """By an entry point, whose module the verifier process imports."""
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[scalerl.environments]\nmy_parts = mine:parts\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = read_own("my_parts", FAST)
    assert (own.file, own.text, own.functions) == ("mine", None, ("parts",))
    pool = make_pool(FAST, unnamed="reasoning_gym", own=own)
    with contextlib.closing(pool):
        pool.submit(0, "any", ["a"], {"answer": None})
        pool.wait(60.0)
        ((_, (verdict,)),) = pool.poll()
    assert verdict == Verdict("wrong", reward=0.75, parts={"style": 0.5})
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"completion": "a"}')
    assert judging.main(["judge", "--environment=my_parts", str(rows)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "rows.jsonl, line 1  wrong  reward 0.75  style 0.5"
    )


def test_a_relative_path_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small_run.make_config({"environment": "mine.py:score"})
    assert config.environment == str(tmp_path / "mine.py:score")


def test_a_file_is_judged_before_anything_is_trained(file, tmp_path, capfd):
    rows = [
        {"completion": "a", "reference": {"of": 4}, "prompt": "b"},
        {"completion": "ab", "reference": {}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = judging.main(["judge", f"--environment={file}:score,short", str(path)])
    out, err = capfd.readouterr()
    assert (status, err) == (0, "")
    lines = out.replace(str(tmp_path), "").splitlines()
    assert lines == [
        "rows.jsonl, line 1  wrong  reward 0.25  score 0.25  short 0",
        "rows.jsonl, line 2  verifier_error  score unjudged  short 0  "
        "/mine.py, line 8: KeyError: 'of'",
        "2 rows: wrong 1 (50.0%), verifier_error 1 (50.0%); reward 0.25, "
        "reward/score 0.25, reward/score/unjudged_share 0.5, reward/short 0, "
        "reward/short/unjudged_share 0",
    ]


SAYING = """
def score(prompt, completion, reference):
    return 1.0 if json.dumps([prompt, reference]) == completion else 0.0
"""


@pytest.mark.parametrize(
    "row, prompt, reference",
    [
        ({"prompt": "4?", "answer": 7}, "4?", "7"),
        ({"prompt": "4?", "answer": "So.\n#### 1,007"}, "4?", "1007"),
        ({"prompt": "4?", "choices": ["x", "y"], "answerKey": 1}, "4?", "B"),
        ({"answer": "7", "reference": {"of": [4]}}, "", {"of": [4]}),
        ({"verifier": "own", "answer": [7]}, "", [7]),
        ({"prompt": [{"role": "user", "content": "4?"}], "reference": 0}, "4?", 0),
        ({"question": "4?", "tools": [{"name": "f"}]}, "4?", None),
        ({}, "", None),
    ],
)
def test_a_row_is_judged_by_the_reference_that_a_run_reads(
    tmp_path, capfd, row, prompt, reference
):
    file, rows = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    file.write_text(f"import json\n{SAYING}")
    row = row | {"completion": json.dumps([prompt, reference])}
    rows.write_text(json.dumps(row))
    assert judging.main(["judge", f"--environment={file}:score", str(rows)]) == 0
    assert "line 1  correct" in capfd.readouterr().out
