"""Logs of runs that were resumed: which rows count, whatever file they stand in."""

import itertools
import json
import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as property_settings
from hypothesis import strategies as st
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from scalerl_jax.scaling import CurveError, load_curve, load_curves
from scalerl_jax.scaling.resumed import settle


def event_file(folder, rows, *, seconds, host="host", at=None, restart=None):
    """Rows (step, {tag: value}) as one file of events; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"events.out.tfevents.{seconds}.{host}"
    time = float(seconds if at is None else at)
    events = [event_pb2.Event(wall_time=time, file_version="brain.Event:2")]
    if restart is not None:
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        start = event_pb2.Event(wall_time=time, step=restart, session_log=start)
        events.append(start)
    for step, values in rows:
        time += 0.125
        value = [
            summary_pb2.Summary.Value(tag=tag, simple_value=number)
            for tag, number in values.items()
        ]
        summary = summary_pb2.Summary(value=value)
        events.append(event_pb2.Event(wall_time=time, step=step, summary=summary))
    with file.open("wb") as stream:
        writer = RecordWriter(stream)
        for event in events:
            writer.write(event.SerializeToString())
    return file


@pytest.mark.parametrize(
    "keys, kept, resumed, unsorted",
    [
        pytest.param([1, 2, 3, 2, 3, 4], [0, 3, 4, 5], True, False, id="resumed"),
        pytest.param([1, 2, 3, 4, 2, 3], [0, 4, 5], True, False, id="a shorter life"),
        pytest.param([1, 2, 3, 3, 4, 2, 3], [0, 5, 6], True, False, id="resumed twice"),
        pytest.param([1, 2, 3, 0, 1, 2], [3, 4, 5], True, False, id="from 0 again"),
        pytest.param(
            [10, 20, 30, 25, 30, 40], [0, 1, 3, 4, 5], True, False, id="one step more"
        ),
        pytest.param([3, 1, 2], [1, 2, 0], False, True, id="no order"),
        pytest.param([5, 4, 3], [2, 1, 0], False, True, id="backwards"),
        pytest.param([4, 1, 5, 2, 5], [1, 3, 0, 4], False, True, id="the last counts"),
        # 3 was replaced with 2; the step back to it replaces neither 5 nor 6.
        pytest.param(
            [1, 2, 3, 4, 2, 5, 6, 3], [0, 4, 7, 5, 6], True, True, id="replaced before"
        ),
        pytest.param([], [], False, False, id="nothing"),
    ],
)
def test_rows_that_count_by_hand(keys, kept, resumed, unsorted):
    found = settle(keys)
    assert (found.order, found.resumed, found.unsorted) == (kept, resumed, unsorted)
    assert found.num_left_out == len(keys) - len(kept)


@st.composite
def histories(draw):
    """Lives of a run: each goes on from a checkpoint, or from the start."""
    lives, reached = [], 0
    for _ in range(draw(st.integers(1, 5))):
        first = draw(st.integers(0, reached))
        count = draw(st.integers(1, 8))
        lives.append(range(first, first + count))
        reached = first + count
    return lives


@property_settings(max_examples=60, deadline=None)
@given(lives=histories(), restarts=st.booleans(), one_file=st.booleans())
def test_a_resumed_run_is_one_curve_from_a_table_and_from_event_files(
    tmp_path_factory, lives, restarts, one_file
):
    folder = tmp_path_factory.mktemp("run")
    right, table, files = {}, [], []
    for number, life in enumerate(lives):
        right = {step: rate for step, rate in right.items() if step < life[0]}
        rows = []
        for step in life:
            right[step] = (1 + number + step / 64) / 8  # exact in float32
            rows.append((10 * (step + 1), {"acc": right[step], "hours": step + 1.0}))
        table += rows
        files.append(rows)
    if one_file:
        files = [[row for rows in files for row in rows]]
    for number, rows in enumerate(files):
        start = rows[0][0] if restarts and not one_file else None
        event_file(folder / "tb", rows, seconds=100 + number, restart=start)
    lines = [json.dumps({"step": step, **values}) for step, values in table]
    (folder / "log.jsonl").write_text("\n".join(lines))
    if len(right) < 2:
        return
    steps = [step for step, _ in table]
    twice = {step for step, again in itertools.pairwise(steps) if step == again}
    if len(twice) > 1 and 2 * len(twice) >= len({*steps}):
        # Written as two evaluations of each step would be.
        with pytest.raises(CurveError, match="as most do, of several evaluations"):
            load_curve(folder / "log.jsonl", x="hours", y="acc")
        return
    notes = []
    for file in (folder / "log.jsonl", folder / "tb"):
        curve = load_curve(file, x="hours", y="acc")
        np.testing.assert_array_equal(curve.x, [step + 1.0 for step in right])
        np.testing.assert_array_equal(curve.y, list(right.values()))
        notes.append([note.removeprefix(str(file)) for note in curve.warnings])
    assert notes[0] == notes[1]
    left_out = len(table) - len(right)
    assert bool(left_out) == any(f"{left_out} rows left out" in n for n in notes[1])


def test_files_of_a_run_are_in_the_order_of_their_making(tmp_path):
    """Within one second by what they say, else by the seconds of their names."""
    late, early = [(3, {"acc": 0.5})], [(1, {"acc": 0.1}), (2, {"acc": 0.2})]
    event_file(tmp_path, late, seconds=1000, host="a", at=1000.75)
    event_file(tmp_path, early, seconds=1000, host="b", at=1000.25)
    event_file(tmp_path, [(2, {"acc": 0.25})], seconds=999, host="c", at=5000.0)
    curve = load_curve(tmp_path, y="acc")
    np.testing.assert_allclose(curve.y, [0.1, 0.2, 0.5], rtol=1e-6)
    assert "1 rows left out: a resumed run wrote" in curve.warnings[0]


def test_each_tag_of_a_resumed_run_has_its_own_steps(tmp_path):
    """Training is logged at every step, evaluation at every second one."""
    first = [(s, {"hours": s / 4, **({"acc": 0.5} if s % 2 else {})}) for s in range(6)]
    again = [(3, {"hours": 1.0, "acc": 0.625}), (4, {"hours": 1.5})]
    event_file(tmp_path, first, seconds=1)
    event_file(tmp_path, again, seconds=2)
    curve = load_curve(tmp_path, x="hours", y="acc")
    np.testing.assert_array_equal(curve.x, [0.25, 1.0])
    np.testing.assert_array_equal(curve.y, [0.5, 0.625])
    assert "2 rows left out: a resumed run wrote" in curve.warnings[0]


ROWS = [(10 * step, {"acc": 0.1 + step / 64}) for step in range(1, 9)]


def record_at(data, number):
    """The place of a record in a file of records, by their lengths."""
    place = 0
    for _ in range(number):
        place += 16 + struct.unpack("<Q", data[place : place + 8])[0]
    return place


def length_of(size):
    """The length of a record, with its right checksum."""
    length = struct.pack("<Q", size)
    return length + struct.pack("<I", masked_crc32c(length))


@pytest.mark.parametrize(
    "harm, said",
    [
        pytest.param(
            lambda data, at: data[: at + 14] + b"\xff" + data[at + 15 :],
            "is damaged .* read up to step 40",
            id="a byte of a record",
        ),
        pytest.param(
            lambda data, at: data[:at] + bytes(50) + data[at + 50 :],
            "is damaged .* read up to step 40",
            id="zeros",
        ),
        pytest.param(
            lambda data, at: data[: at + 20],
            "ends within a record, .* read up to step 40",
            id="cut within a record",
        ),
        pytest.param(
            lambda data, at: data[: at + 3],
            "ends within a record, .* read up to step 40",
            id="cut within a length",
        ),
        pytest.param(
            lambda data, at: data[:at] + length_of(2**62) + bytes(50),
            "ends within a record, .* read up to step 40",
            id="a record of 2^62 bytes",
        ),
    ],
)
def test_a_damaged_file_says_up_to_which_step_it_was_read(tmp_path, harm, said):
    file = event_file(tmp_path / "run", ROWS, seconds=1)
    data = file.read_bytes()
    file.write_bytes(harm(data, record_at(data, 5)))  # the version, then steps 10 to 40
    (warning,) = load_curve(tmp_path / "run", y="acc").warnings
    assert np.all(np.diff(load_curve(tmp_path / "run", y="acc").x) > 0)
    assert re.search(said, warning)
    # What the run wrote after it was resumed counts.
    event_file(tmp_path / "run", ROWS[4:], seconds=2)
    curve = load_curve(tmp_path / "run", y="acc")
    np.testing.assert_array_equal(curve.x, [step for step, _ in ROWS])
    assert len(curve.warnings) == 1


def test_a_run_that_cannot_be_read_is_told_of_beside_the_others(tmp_path):
    event_file(tmp_path / "good", ROWS, seconds=1)
    file = event_file(tmp_path / "bad", ROWS, seconds=1)
    file.write_bytes(b"\x00" * 100)
    (curve,) = load_curves(tmp_path, y="acc")
    assert curve.name == "good"
    assert "is damaged (byte 0 of 100): nothing was read" in curve.warnings[0]
    with pytest.raises(CurveError, match="no scalars in its event files: .*damaged"):
        load_curve(tmp_path / "bad", y="acc")
