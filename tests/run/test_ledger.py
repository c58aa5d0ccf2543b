import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_ledger import Clock, chip_seconds, started

from scalerl_jax.run import ledger as ledger_module
from scalerl_jax.run.ledger import (
    ACTIVITIES,
    COUNTS,
    LEDGER_FILE,
    Ledger,
    kept_on_disk,
)
from scalerl_jax.run.lost_work import read_ledger


@pytest.fixture
def clock():
    return Clock()


def test_two_pools_by_hand(clock):
    ledger = started(clock, learner=4, sampler=2)
    with ledger.activity("startup", pool="learner"):
        clock.now += 10  # startup 40; the sampler's 20 wait for it
    with ledger.activity("generate", pool="sampler"):
        clock.now += 3  # generate 6, idle 12
        with ledger.activity("train", pool="learner"):
            clock.now += 5  # generate 10, train 20
            with ledger.activity("publish", pool="learner"):
                clock.now += 1  # generate 2, train 2, publish 2
    clock.now += 2  # idle 12
    assert chip_seconds(ledger) == pytest.approx(
        {"startup": 60, "generate": 18, "train": 22, "publish": 2, "idle": 24}
    )
    assert ledger.report()["compute/charged_chip_hours"] == pytest.approx(
        (18 + 22 + 2 + 24) / 3600
    )


def test_chips_that_wait_for_an_evaluation_are_its_cost(clock):
    ledger = started(clock, learner=4, sampler=2)
    with ledger.activity("eval", pool="sampler"):
        clock.now += 10  # 20 of the sampler, 40 of the waiting learner
        with ledger.activity("train", pool="learner"):
            clock.now += 1  # 2 of the sampler; the learner's 4 are work of its own
    assert chip_seconds(ledger) == {"eval": 62, "train": 4}
    assert ledger.report()["compute/charged_chip_hours"] == pytest.approx(4 / 3600)
    assert ledger.idle_shares() == {"learner": 0.0, "sampler": 0.0}


def test_an_evaluation_beside_the_run_costs_only_its_own_pool(clock):
    ledger = started(clock, learner=4, sampler=2)
    with ledger.activity("eval", pool="sampler", beside=True):
        clock.now += 10  # 20 of the sampler; the learner's 40 wait for groups
        with ledger.activity("generate", pool="sampler"):
            clock.now += 1  # 1 and 1 of the sampler, 4 of the learner
        with ledger.activity("eval", pool="sampler"):
            clock.now += 1  # in the loop as well: 2 and 4
    assert chip_seconds(ledger) == {"eval": 20 + 1 + 6, "generate": 1, "idle": 44}
    assert ledger.report()["compute/charged_chip_hours"] == pytest.approx(45 / 3600)


def test_a_pool_that_waits_for_two_is_split_between_them(clock):
    ledger = started(clock, a=1, b=1, c=4)
    with ledger.activity("eval", pool="a"), ledger.activity("startup", pool="b"):
        clock.now += 1
    assert chip_seconds(ledger) == {"eval": 3, "startup": 3}


def test_a_shared_chip_is_split_evenly_among_kinds_of_activity(clock):
    ledger = started(clock, shared=1)
    with ledger.activity("generate", pool="shared"):
        with ledger.activity("train", pool="shared"):
            with ledger.activity("generate", pool="shared"):
                clock.now += 8
            clock.now += 2
        clock.now += 1
    assert chip_seconds(ledger) == {"generate": 6, "train": 5}


def test_an_activity_ends_when_its_block_raises(clock):
    ledger = started(clock, shared=1)
    with pytest.raises(KeyError), ledger.activity("train", pool="shared"):
        clock.now += 1
        raise KeyError
    clock.now += 1
    assert chip_seconds(ledger) == {"train": 1, "idle": 1}


def test_wasted_tokens_take_their_part_of_generation(clock):
    ledger = started(clock, shared=2)
    with ledger.activity("generate", pool="shared"):
        clock.now += 10
    ledger.count(wasted_tokens=25)
    assert chip_seconds(ledger) == {"generate": 20}  # nothing generated: no share
    ledger.count(generated_tokens=100, train_tokens=75, train_flops=1e12)
    assert chip_seconds(ledger) == {"generate": 15, "wasted": 5}
    report = ledger.report()
    assert {name: report[f"compute/{name}"] for name in COUNTS} == {
        "generated_tokens": 100,
        "wasted_tokens": 25,
        "train_tokens": 75,
        "train_flops": 1e12,
        "generate_flops": 0,
        "teacher_flops": 0,
        "asked_teacher_tokens": 0,
        "lost_tokens": 0,
        "lost_flops": 0,
    }
    assert report["compute/charged_chip_hours"] == pytest.approx(20 / 3600)


def test_idle_shares_are_since_the_previous_call(clock):
    ledger = started(clock, learner=4, sampler=2)
    assert ledger.idle_shares() == {"learner": 0.0, "sampler": 0.0}
    with ledger.activity("train", pool="learner"):
        clock.now += 3
    clock.now += 1
    assert ledger.idle_shares() == {"learner": 0.25, "sampler": 1.0}
    with ledger.activity("generate", pool="sampler"):
        clock.now += 1
        assert ledger.idle_shares() == {"learner": 1.0, "sampler": 0.0}


@pytest.mark.parametrize(
    "misuse, message",
    [
        (lambda ledger: ledger.count(tokens=1), "counter 'tokens'; choose from"),
        (lambda ledger: ledger.count(train_tokens=-1), "cannot fall"),
        (lambda ledger: ledger.activity("idle", pool="a").__enter__(), "'idle'"),
        (lambda ledger: ledger.activity("train", pool="b").__enter__(), "pool 'b'"),
    ],
)
def test_misuse_is_named(clock, misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse(started(clock, a=1))
    with pytest.raises(ValueError, match="must each have chips"):
        Ledger(pools={"a": 0}, chip="abacus")


EVENTS = st.lists(
    st.tuples(
        st.floats(0, 1e5),  # seconds before the event
        st.sampled_from(["a", "b", "c"]),  # pool
        st.sampled_from(ACTIVITIES),
        st.booleans(),  # enter one, or leave the latest open one of that pool
    )
)


@given(EVENTS, st.integers(0, 200), st.integers(0, 200))
def test_categories_sum_to_chips_times_wall_clock(events, generated, wasted):
    clock = Clock()
    pools = {"a": 1, "b": 3, "c": 16}
    ledger = started(clock, **pools)
    ledger.count(generated_tokens=generated)
    ledger.count(wasted_tokens=wasted)
    opened = {pool: [] for pool in pools}
    for elapsed_s, pool, name, enter in events:
        clock.now += elapsed_s
        if enter:
            opened[pool].append(ledger.activity(name, pool=pool))
            opened[pool][-1].__enter__()
        elif opened[pool]:
            opened[pool].pop().__exit__(None, None, None)
    clock.now += 1
    spent = chip_seconds(ledger)
    assert min(spent.values()) >= 0
    assert sum(spent.values()) == pytest.approx(20 * (clock.now - 1000), rel=1e-12)
    free = spent.get("startup", 0) + spent.get("eval", 0)
    assert ledger.report()["compute/charged_chip_hours"] * 3600 == pytest.approx(
        sum(spent.values()) - free, rel=1e-9, abs=1e-6
    )


def test_threads_lose_nothing():
    ledger = Ledger(pools={"shared": 2}, chip="abacus")
    ledger.start()

    def work(name):
        for _ in range(300):
            with ledger.activity(name, pool="shared"):
                ledger.count(train_tokens=1)

    threads = [threading.Thread(target=work, args=(name,)) for name in ACTIVITIES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = ledger.report()
    assert report["compute/train_tokens"] == 300 * len(ACTIVITIES)
    before = chip_seconds(ledger)["idle"]
    assert chip_seconds(ledger)["idle"] > before  # nothing was left open


def counting():
    ledger = Ledger(pools={"shared": 1}, chip="abacus")
    ledger.start()
    return ledger


def until(condition):
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def train_tokens(directory):
    state = read_ledger(directory)
    return state and state["counts"]["train_tokens"]


def test_the_file_follows_the_ledger_and_has_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "WRITE_EVERY_S", 0.01)
    ledger = counting()
    assert read_ledger(tmp_path) is None
    with kept_on_disk(ledger, tmp_path):
        for tokens in (1, 2):
            ledger.count(train_tokens=1)
            until(lambda tokens=tokens: train_tokens(tmp_path) == tokens)
    monkeypatch.setattr(ledger_module, "WRITE_EVERY_S", 1000.0)
    with kept_on_disk(ledger, tmp_path):
        ledger.count(train_tokens=1)
    assert train_tokens(tmp_path) == 3
    assert [path.name for path in tmp_path.iterdir()] == [LEDGER_FILE]


def test_a_disk_that_takes_nothing_is_reported_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ledger_module, "WRITE_EVERY_S", 0.001)
    ledger, directory = counting(), tmp_path / "run"
    directory.mkdir()
    with kept_on_disk(ledger, directory):
        until(lambda: read_ledger(directory))
        directory.rename(tmp_path / "gone")
        until(lambda: caplog.records)
        time.sleep(0.05)
        directory.mkdir()
        ledger.count(train_tokens=5)
    assert train_tokens(directory) == 5  # there is room again
    (record,) = caplog.records
    assert f"cannot write {directory / LEDGER_FILE}" in record.getMessage()


def test_the_file_is_for_people_too(tmp_path):
    with kept_on_disk(counting(), tmp_path):
        pass
    state = json.loads((tmp_path / LEDGER_FILE).read_text())
    assert state["chip"] == "abacus" and "lost" in state["chip_s"]
