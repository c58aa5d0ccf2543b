"""What a run that goes on has cost, and what of that is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_ledger import Clock, chip_seconds, started

from scalerl_jax.run import lost_work
from scalerl_jax.run.ledger import ACTIVITIES, COUNTS, LEDGER_FILE, Ledger


@pytest.fixture
def clock():
    return Clock()


def test_a_resumed_ledger_goes_on_and_does_not_count_the_downtime(clock):
    first = started(clock, shared=1)
    with first.activity("train", pool="shared"):
        clock.now += 7
        first.count(train_tokens=3)
        saved = json.loads(json.dumps(first.state()))
    clock.now += 1e6
    second = Ledger(pools={"shared": 1}, chip="abacus", clock=clock)
    clock.now += 1e6  # before its start
    second.start()
    with second.activity("startup", pool="shared"):
        clock.now += 2
        lost_work.restore(second, saved, latest=None)
        clock.now += 1
    with second.activity("train", pool="shared"):
        clock.now += 4
        second.count(train_tokens=2)
    assert chip_seconds(second) == {"startup": 3, "train": 11}
    assert second.report()["compute/train_tokens"] == 5


@pytest.mark.parametrize("place", ["saved", "latest"])
def test_hours_of_two_chips_are_not_added(clock, place):
    states = {"saved": None, "latest": None, place: started(clock, shared=1).state()}
    other = Ledger(pools={"shared": 1}, chip="slide rule", clock=clock)
    with pytest.raises(ValueError, match="hours of 'abacus'.*has 'slide rule'"):
        lost_work.restore(other, states["saved"], latest=states["latest"])


def spend(ledger, clock, **seconds):
    """So many seconds of each activity, a token and 10 FLOPs for each of some."""
    for name, amount in seconds.items():
        with ledger.activity(name, pool="shared"):
            clock.now += amount
    made, trained = seconds.get("generate", 0), seconds.get("train", 0)
    ledger.count(generated_tokens=made, train_tokens=trained)
    ledger.count(generate_flops=10 * made, train_flops=10 * trained)
    return json.loads(json.dumps(ledger.state()))


def test_two_kills_by_hand(clock):
    first = started(clock, shared=2)
    saved = spend(first, clock, startup=1, generate=10, train=20, eval=3)
    latest = spend(first, clock, checkpoint=2, generate=4, train=5, eval=6)
    for _ in range(2):  # the second one comes before another checkpoint
        ledger = started(clock, shared=2)
        lost_work.restore(ledger, saved, latest=latest)
        assert ledger.report()["compute/charged_chip_hours"] * 3600 == pytest.approx(
            2 * (30 + 2 + 9)
        )
        latest = spend(ledger, clock, startup=1)
    assert chip_seconds(ledger) == pytest.approx(
        {
            "startup": 2 * 3,
            "generate": 2 * 10,
            "train": 2 * 20,
            "eval": 2 * (3 + 6),  # seen, and not undone
            "checkpoint": 2 * 2,
            "lost": 2 * (4 + 5),
        }
    )
    counts = {name: ledger.report()[f"compute/{name}"] for name in COUNTS}
    assert counts == {
        "generated_tokens": 10,
        "wasted_tokens": 0,
        "train_tokens": 20,
        "train_flops": 200,
        "generate_flops": 100,
        "teacher_flops": 0,
        "asked_teacher_tokens": 0,
        "lost_tokens": 4,
        "lost_flops": 90,
    }


def test_before_the_first_checkpoint_everything_is_lost(clock):
    first = started(clock, shared=1)
    latest = spend(first, clock, startup=7, generate=4, train=5, eval=6)
    again = started(clock, shared=1)
    lost_work.restore(again, None, latest=latest)
    assert chip_seconds(again) == pytest.approx({"startup": 7, "eval": 6, "lost": 9})
    assert again.report()["compute/train_tokens"] == 0
    fresh = started(clock, shared=1)
    lost_work.restore(fresh, None, latest=None)
    assert chip_seconds(fresh) == {}


def test_a_checkpoint_may_be_newer_than_what_is_on_file(clock):
    first = started(clock, shared=1)
    on_file = spend(first, clock, train=3, eval=1)
    saved = spend(first, clock, train=4, checkpoint=1)
    again = started(clock, shared=1)
    lost_work.restore(again, saved, latest=on_file)
    assert chip_seconds(again) == pytest.approx(
        {"train": 7, "eval": 1, "checkpoint": 1}
    )


RUNS = st.lists(
    st.tuples(
        st.sampled_from([*ACTIVITIES, "idle", "save", "note", "kill"]),
        st.integers(1, 100),  # seconds, tokens
    )
)


@given(RUNS)
@settings(deadline=None)
def test_whatever_is_killed_the_axis_never_goes_back(events):
    """What is on file is charged, or was start-up or evaluation; nothing twice."""
    clock, saved, latest = Clock(), None, None
    ledger = started(clock, shared=3)
    lost_work.restore(ledger, None, latest=None)
    spent = {"saved": 0, "latest": 0, "all": 0}  # seconds that count
    for name, amount in events:
        if name == "kill":
            before = latest and sum(latest["chip_s"].values())
            ledger = started(clock, shared=3)
            lost_work.restore(ledger, saved, latest=latest)
            # What nobody had written down is gone.
            spent["all"] = spent["latest"] = max(spent["saved"], spent["latest"])
            assert before is None or sum(chip_seconds(ledger).values()) >= before
        elif name == "save":
            saved, spent["saved"] = ledger.state(), spent["all"]
        elif name == "note":
            latest, spent["latest"] = ledger.state(), spent["all"]
        elif name == "idle":
            clock.now += amount
            spent["all"] += amount
        else:
            spend(ledger, clock, **{name: amount})
            spent["all"] += amount
        assert sum(chip_seconds(ledger).values()) == pytest.approx(3 * spent["all"])


def ledger_of(**chip_s):
    return json.dumps({"chip": "abacus", "chip_s": chip_s, "counts": {}})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"chip": "abacus"}', ledger_of().replace("{}", "[]")),
        *(ledger_of(idle="x"), ledger_of(idle=None), ledger_of(idle=float("nan"))),
    ],
)
def test_a_broken_file_is_named_with_the_way_out(tmp_path, text):
    (tmp_path / LEDGER_FILE).write_text(text)
    with pytest.raises(ValueError, match="ledger.json is broken"):
        lost_work.read_ledger(tmp_path)
