"""Work of remote pools, told to the ledger afterwards."""

import contextlib

import pytest
from small_ledger import Clock

from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.work_log import RemoteLedger, WorkLog


@pytest.fixture
def clock():
    return Clock()


def test_a_remote_pool_that_says_later_that_it_evaluated_was_waited_for(clock):
    ledger = RemoteLedger(
        pools={"learner": 1, "sampler": 2}, chip="x", remote=["sampler"], clock=clock
    )
    ledger.start()
    clock.now += 10.0
    with ledger.activity("eval", pool="learner"):
        clock.now += 4.0
        before = ledger.report()
        ledger.book("sampler", {"generate": 9.0, "eval": 4.0})
    found = ledger.report()
    assert found["compute/eval_chip_s"] == before["compute/eval_chip_s"] == 12.0
    assert found["compute/generate_chip_s"] == 18.0
    assert found["compute/idle_chip_s"] == 10.0 + 2.0
    # Beside the run: what was taken for idle was an evaluation.
    clock.now += 5.0
    charged = ledger.report()["compute/charged_chip_hours"]
    ledger.book("sampler", {"eval": 5.0})
    assert ledger.report()["compute/eval_chip_s"] == 22.0
    assert ledger.report()["compute/charged_chip_hours"] == charged
    clock.now += 1.0
    assert ledger.report()["compute/charged_chip_hours"] == charged
    clock.now += 9.0
    charged = ledger.report()["compute/charged_chip_hours"]
    assert charged * 3600 == pytest.approx(29.0 * 3 - 22.0)


def test_a_work_log_splits_what_overlaps_as_a_ledger_does(clock):
    ledger = Ledger(pools={"a": 1}, chip="x", clock=clock)
    log = WorkLog("a", clock=clock)
    ledger.start()
    with contextlib.ExitStack() as opened:

        def begin(name):
            for books in (log, ledger):
                opened.enter_context(books.activity(name, pool="a"))

        begin("verify")
        clock.now += 1.0
        begin("eval")
        clock.now += 2.0
        begin("eval")  # another thread
        clock.now += 4.0
        begin("generate")
        clock.now += 8.0
    seconds, _ = log.take()
    assert seconds == {"verify": 1.0, "eval": 6.0 + 4.0, "generate": 4.0}
    report = ledger.report()
    assert {name: report[f"compute/{name}_chip_s"] for name in seconds} == seconds
    assert log.take() == ({}, {})
