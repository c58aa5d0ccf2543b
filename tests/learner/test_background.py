import threading

import pytest

from scalerl_jax.learner.background import Background

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
