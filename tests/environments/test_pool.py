"""The verifier pool: right verdicts, and no score function that can stop it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from scalerl_jax.data import tasks
from scalerl_jax.environments import pool as verifier
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.verdict import Verifier, late

# What a verifier may do to its process; `answer` says what.
HOSTILE = """
    import os, signal, subprocess, sys, time

    def score(task, answer, reference):
        if answer == "sleep":
            time.sleep(600)
        if answer == "nap":
            time.sleep(0.02)
            return 1.0
        if answer == "hold on":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            while True:
                pass
        if answer == "start another":
            other = subprocess.Popen(["sleep", "600"])
            with open(reference["file"], "w") as file:
                file.write(str(other.pid))
            time.sleep(600)
        if answer == "raise":
            raise ArithmeticError("no such number")
        if answer == "exit":
            os._exit(3)
        if answer == "compute for a while":
            end = time.process_time() + 0.05
            while time.process_time() < end:
                pass
            return 1.0
        if answer == "nest":
            return score(task, answer, reference)
        if answer == "overflow":
            os.kill(os.getpid(), signal.SIGSEGV)
        if answer == "hoard":
            bytearray(2**31)
        if answer == "jax":
            return float(any(name in sys.modules for name in ("jax", "flax")))
        return float(answer.strip())
"""
# Dies as often as `places` says while it is imported; each start leaves a line.
DYING = """
    import os

    with open({path!r}, "a+") as file:
        file.write("started\\n")
        file.seek(0)
        if file.read().count("started") in {places}:
            os._exit(5)

    def score(task, answer, reference):
        return 1.0
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The name of a score function that does as the answer says."""
    (tmp_path / "hostile_score.py").write_text(textwrap.dedent(HOSTILE))
    monkeypatch.syspath_prepend(tmp_path)
    return "hostile_score:score"


@pytest.fixture
def make_pool():
    pools = []

    def make(score, *, timeout_s=20.0, num_workers=1):
        pools.append(
            VerifierPool(score=score, timeout_s=timeout_s, num_workers=num_workers)
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def collect(pool):
    """All verdicts that are pending, by key."""
    verdicts = {}
    end = time.monotonic() + 60.0
    while pool.pending:
        assert time.monotonic() < end, "the pool stands still"
        pool.wait(10.0)
        verdicts.update({verdict.key: verdict for verdict in pool.poll()})
    return verdicts


def is_alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid):
    end = time.monotonic() + 10.0
    while is_alive(pid):
        assert time.monotonic() < end, f"process {pid} lives on"
        time.sleep(0.01)


def test_real_tasks_are_judged_by_their_own_rules(make_pool):
    pool = make_pool("scalerl_jax.data.tasks:score")
    expected = {}
    for task in tasks.TASKS:
        for question in tasks.make_questions(task, count=5, seed=1, exclude=set()):
            answer = question.reference["answer"]
            answers = [answer, answer + "q", None, "#"]
            pool.submit(question.text, task, answers, question.reference)
            # answer + "q" holds the answer, or most of its letters: partial credit.
            partial = tasks.score(task, answer + "q", question.reference)
            assert (partial > 0.0) == (task != "needle_haystack"), "names are exact"
            expected[question.text] = ["correct", "wrong", "no_answer", "wrong"]
    verdicts = collect(pool)
    assert {key: verdict.statuses for key, verdict in verdicts.items()} == expected
    assert {verdict.detail for verdict in verdicts.values()} == {""}


def test_a_group_without_answers_needs_no_process(make_pool, hostile):
    pool = make_pool(hostile)
    pool.submit(0, "any", [None, None], {})
    assert pool.pending == 1
    assert [verdict.statuses for verdict in pool.poll()] == [["no_answer"] * 2]
    assert pool.pending == 0


@pytest.mark.parametrize(
    "bad, status, detail",
    [
        ("sleep", "verifier_timeout", "no verdict within reward.timeout_s = 1.0"),
        ("hold on", "too_costly", "still computing after reward.timeout_s = 1.0"),
    ],
)
def test_a_hanging_verifier_is_killed_and_the_pool_goes_on(
    make_pool, hostile, bad, status, detail, monkeypatch
):
    if bad == "hold on":  # a busy machine may give it little time to compute
        monkeypatch.setattr("scalerl_jax.environments.verdict._COMPUTING", 0.001)
    pool = make_pool(hostile, timeout_s=1.0)
    pool.submit("hangs", "any", ["1", "0", None, bad, "1", None], {})
    pool.submit("next", "any", ["1", "0.99"], {})
    verdicts = collect(pool)
    hangs = verdicts["hangs"]
    assert hangs.statuses == [
        "correct",
        "wrong",
        "no_answer",
        status,
        "correct",
        "no_answer",
    ]
    assert hangs.detail == detail
    assert verdicts["next"].statuses == ["correct", "wrong"]


def test_what_a_verifier_started_dies_with_it(make_pool, hostile, tmp_path):
    pool = make_pool(hostile, timeout_s=2.0)
    file = tmp_path / "pid"
    pool.submit(0, "any", ["start another"], {"file": str(file)})
    assert collect(pool)[0].statuses == ["verifier_timeout"]
    wait_until_dead(int(file.read_text()))


def test_an_exception_is_the_error_of_one_answer(make_pool, hostile):
    pool = make_pool(hostile)
    pool.submit(0, "any", ["1", "raise", "word", "0"], {})
    verdict = collect(pool)[0]
    assert verdict.statuses == ["correct", "verifier_error", "verifier_error", "wrong"]
    assert "ArithmeticError: no such number" in verdict.detail
    assert "ValueError: could not convert string to float: 'word'" in verdict.detail


def test_memory_is_limited_and_its_lack_the_error_of_one_answer(hostile):
    pool = VerifierPool(score=hostile, timeout_s=20.0, memory_mib=512)
    pool.submit(0, "any", ["1", "hoard", "1"], {})
    verdict = collect(pool)[0]
    pool.close()
    assert verdict.statuses == ["correct", "too_costly", "correct"]
    assert verdict.detail.startswith("MemoryError")


@pytest.mark.parametrize(
    "answer, detail",
    [("nest", "RecursionError: "), ("overflow", "ended with exit code -11")],
)
def test_an_answer_that_fills_the_stack_is_too_costly(
    make_pool, hostile, answer, detail
):
    pool = make_pool(hostile)
    pool.submit(0, "any", ["1", answer, "1"], {})
    verdict = collect(pool)[0]
    assert verdict.statuses == ["correct", "too_costly", "correct"]
    assert detail in verdict.detail


@pytest.mark.parametrize(
    "computed_s, status",
    [(0.0, "verifier_timeout"), (2.49, "verifier_timeout"), (2.5, "too_costly")],
)
def test_a_late_answer_is_too_costly_from_a_quarter_of_its_time_on(computed_s, status):
    assert late(computed_s=computed_s, timeout_s=10.0).status == status


def test_an_answer_does_not_answer_for_those_before_it(make_pool, hostile, monkeypatch):
    """Its process has computed for long, and then sleeps over one answer."""
    monkeypatch.setattr("scalerl_jax.environments.verdict._COMPUTING", 0.01)
    pool = make_pool(hostile, timeout_s=2.0)
    pool.submit(0, "any", ["compute for a while", "sleep", "1"], {})
    statuses = collect(pool)[0].statuses
    assert statuses == ["correct", "verifier_timeout", "correct"]


def test_named_verifiers_are_imported_when_they_are_asked_for(hostile):
    named = {
        "other": Verifier("math:hypot"),  # of three arguments, as a score is
        "missing": Verifier("no_such_module:score"),
    }
    pool = VerifierPool(score=hostile, timeout_s=20.0, named=named)
    pool.submit(0, 3, [4], {"verifier": "other"})
    found = collect(pool)[0]
    assert found.statuses == ["verifier_error"]
    assert "must be real number, not dict" in found.detail
    pool.submit(1, "any", ["1"], {"verifier": "missing"})
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        collect(pool)
    pool.close()


def test_a_crash_is_the_error_of_one_answer(make_pool, hostile):
    pool = make_pool(hostile)
    pool.submit(0, "any", ["1", "exit", "1"], {})
    pool.submit(1, "any", ["1"], {})
    verdicts = collect(pool)
    assert verdicts[0].statuses == ["correct", "verifier_error", "correct"]
    assert verdicts[0].detail == "the verifier process ended with exit code 3"
    assert verdicts[1].statuses == ["correct"]


@pytest.fixture
def dying(tmp_path, monkeypatch):
    """The name of a score function whose import ends the process at these starts."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(verifier, "_BACKOFF_S", 0.001)

    def make(*places):
        source = textwrap.dedent(DYING)
        (tmp_path / "dying_score.py").write_text(
            source.format(path=str(tmp_path / "starts"), places=places)
        )
        return "dying_score:score"

    return make


def test_a_process_killed_idle_and_again_while_it_restarts_is_replaced(
    make_pool, dying
):
    pool = make_pool(dying(1, 3, 4, 5))
    for key, restarts in enumerate((1, 5)):
        pool.submit(key, "any", ["1"], {})
        assert collect(pool)[key].statuses == ["correct"]
        assert pool.restarts == restarts
        (worker,) = pool._workers
        worker.process.kill()
        worker.process.wait()


@pytest.mark.parametrize("name", ["", "named"])
def test_only_so_many_starts_in_a_row_may_fail(hostile, dying, name):
    """Of the verifier that every process imports, and of one that it is asked for."""
    score = dying(*range(100))
    pool = VerifierPool(
        score=hostile if name else score,
        named={"named": Verifier(score)},
        timeout_s=20.0,
        num_workers=2,
    )
    pool.submit(0, "any", ["1"], {"verifier": name})
    for wait in (lambda: collect(pool), pool.poll):
        with pytest.raises(
            verifier.NoVerifierError,
            match="exit code 5 .*'dying_score:score'.* 16 ",
        ):
            wait()
    pool.close()


def test_a_process_that_is_stopped_is_replaced(make_pool, hostile, monkeypatch):
    """Before it is given more than fits, before it is given a little, and at work."""
    monkeypatch.setattr("scalerl_jax.environments.verdict._MAX_SEND_S", 1)
    pool = make_pool(hostile, timeout_s=1.0)
    for key, answer in enumerate([" " * 2**22 + "1", "1", "nap"]):
        pool.submit("warm", "any", ["1"], {})
        collect(pool)
        (worker,) = pool._workers
        if answer == "nap":
            pool.submit(key, "any", [answer] * 10, {})
            time.sleep(0.1)
        os.kill(worker.process.pid, signal.SIGSTOP)
        if answer != "nap":
            pool.submit(key, "any", [answer], {})
        verdict = collect(pool)[key]
        assert pool.restarts == key + 1
        assert verdict.statuses.count("verifier_timeout") == (key > 0)
        assert verdict.statuses.count("correct") == len(verdict.statuses) - (key > 0)
        assert verdict.detail == (key > 0) * "no verdict within reward.timeout_s = 1.0"


def test_a_free_process_has_work_before_anybody_looks(make_pool, hostile):
    pool = make_pool(hostile, num_workers=2)
    pool.submit("warm", "any", ["1"] * 2, {})
    collect(pool)
    for key in range(20):
        pool.submit(key, "any", ["nap"] * 2, {})
    time.sleep(2.0)  # of 0.4 that it takes
    assert len(pool.poll()) == 20


def test_neither_order_nor_number_of_processes_changes_a_verdict(make_pool, hostile):
    groups = {key: [str(key % 3 / 2), str(key % 2), None] for key in range(20)}
    groups[7] = ["1", "raise"]
    groups[11] = ["exit"]
    results = []
    for num_workers, keys in [(1, list(groups)), (3, list(reversed(groups)))]:
        pool = make_pool(hostile, num_workers=num_workers)
        for key in keys:
            pool.submit(key, "any", groups[key], {})
        assert pool.pending == len(groups)
        results.append(dict(sorted(collect(pool).items())))
        assert pool.poll() == []
    assert results[0] == results[1]


def test_submit_and_poll_do_not_wait(make_pool, hostile):
    pool = make_pool(hostile)
    start = time.monotonic()
    for key in range(50):
        pool.submit(key, "any", ["sleep"] * 8, {})
        pool.poll()
    assert time.monotonic() - start < 1.0
    start = time.monotonic()
    pool.wait(0.05)
    assert 0.04 < time.monotonic() - start < 5.0


def test_close_leaves_no_process_behind(hostile):
    pool = VerifierPool(score=hostile, timeout_s=20.0, num_workers=2)
    pool.submit(0, "any", ["hold on"], {})
    pool.submit(1, "any", ["sleep"], {})
    pool.wait(1.0)
    pids = [worker.process.pid for worker in pool._workers]
    assert all(is_alive(pid) for pid in pids)
    pool.close()
    assert not any(is_alive(pid) for pid in pids)
    pool.close()
    with pytest.raises(AssertionError, match="closed"):
        pool.submit(2, "any", ["1"], {})


def test_the_process_does_not_import_jax(make_pool, hostile):
    pool = make_pool(hostile)
    pool.submit(0, "any", ["jax"], {})
    assert collect(pool)[0].statuses == ["wrong"]
    imports = "import sys, scalerl_jax.data.tasks; sys.exit('jax' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", imports], cwd=os.getcwd()).returncode == 0
    )


def test_the_process_ends_when_the_program_is_killed(hostile, tmp_path):
    program = """
        import sys
        from scalerl_jax.environments.pool import VerifierPool
        pool = VerifierPool(score="hostile_score:score", timeout_s=60.0)
        pool.submit(0, "any", ["1"], {})
        pool.wait(60.0)
        print(pool._workers[0].process.pid, flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    ) as process:
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    wait_until_dead(pid)


@pytest.mark.parametrize(
    "score, message",
    [
        ("no_such_module:score", "No module named 'no_such_module'"),
        ("math:score", "has no attribute 'score'"),
    ],
)
def test_a_score_function_that_cannot_be_imported_is_reported(
    make_pool, score, message
):
    pool = make_pool(score)
    pool.submit(0, "any", ["1"], {})
    with pytest.raises(RuntimeError, match=message):
        collect(pool)
