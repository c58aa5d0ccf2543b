import threading

import pytest

from scalerl_jax.process.background import Background, repeated

LIMIT_S = 60.0


def test_nothing_under_way_is_nothing_to_wait_for():
    work = Background("work")
    work.check()
    work.wait(0.0)


def test_a_second_piece_waits_for_the_first():
    work, release, done = Background("work"), threading.Event(), []

    def first():
        assert release.wait(LIMIT_S)
        done.append("first")

    work.start(first, timeout_s=LIMIT_S)
    work.check()  # under way: nothing to say
    with pytest.raises(TimeoutError, match="^work has not ended within 0.01 s$"):
        work.start(lambda: done.append("early"), timeout_s=0.01)
    release.set()
    work.start(lambda: done.append("second"), timeout_s=LIMIT_S)
    work.wait(LIMIT_S)
    assert done == ["first", "second"]


@pytest.mark.parametrize("call", ["check", "wait", "start"])
def test_a_failure_is_raised_once_with_its_own_traceback(call):
    work, ended = Background("work"), threading.Event()

    def fail():
        try:
            raise ArithmeticError("a bad number")
        finally:
            ended.set()

    work.start(fail, timeout_s=LIMIT_S)
    calls = {
        "check": lambda: until_raised(work),
        "wait": lambda: work.wait(LIMIT_S),
        "start": lambda: work.start(lambda: None, timeout_s=LIMIT_S),
    }
    with pytest.raises(ArithmeticError, match="a bad number") as failure:
        calls[call]()
    assert failure.traceback[-1].name == "fail"
    work.check()
    work.wait(0.0)


def until_raised(work):
    """Ask until the thread has ended."""
    pause = threading.Event()
    for _ in range(6000):
        work.check()
        pause.wait(0.01)


def test_work_is_done_at_once_and_at_the_end():
    done, begun = [], threading.Event()

    def work(last):
        done.append(last)
        begun.set()

    with repeated(work, name="work", every_s=LIMIT_S, last_s=LIMIT_S):
        assert begun.wait(LIMIT_S)
    assert done == [False, True]


def test_a_failure_is_told_once_until_the_work_succeeds_again(caplog):
    results, over = iter("ffsff"), threading.Event()

    def work(last):
        result = next(results, None)
        if result == "f":
            raise OSError("no room")
        if result is None:
            over.set()

    with repeated(work, name="work", every_s=0.001, last_s=LIMIT_S):
        assert over.wait(LIMIT_S)
    assert [record.getMessage() for record in caplog.records] == ["no room"] * 2


def test_an_end_that_hangs_is_left_behind():
    hang = threading.Event()

    def work(last):
        if last:
            hang.wait(LIMIT_S)

    with repeated(work, name="hangs", every_s=LIMIT_S, last_s=0.05):
        pass
    left = [each for each in threading.enumerate() if each.name == "hangs"]
    hang.set()
    for each in left:
        each.join(LIMIT_S)
    assert len(left) == 1
