import contextlib
import json
import math
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util import tensor_util

from scalerl_jax.run import metrics
from scalerl_jax.run.metrics import MetricsWriter

FILES = ("metrics.jsonl", "evals.jsonl", "rollouts.jsonl")


def rows(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def load(directory):
    """What TensorBoard itself reads."""
    accumulator = plugin_event_accumulator.EventAccumulator(
        str(directory / "tensorboard")
    )
    accumulator.Reload()
    return accumulator


def scalars(directory, tag):
    """Step and value of each point that TensorBoard itself would show."""
    return [
        (event.step, tensor_util.make_ndarray(event.tensor_proto).item())
        for event in load(directory).Tensors(tag)
    ]


def test_steps_evals_and_rollouts_go_to_their_files(tmp_path):
    with MetricsWriter(tmp_path, after=-1) as writer:
        writer.write_step(1, {"loss": 0.5, "reward/mean": -1.0})
        writer.write_step(2, {"loss": np.float32(0.1), "steps": 3})
        writer.write_eval({"pass_rate": 0.25, "step": 2, "passes": [1, 0], "tag": "x"})
        writer.write_rollouts([{"step": 2, "text": "a\nb\u2028\ud800"}] * 2)
    assert rows(tmp_path) == [
        {"step": 1, "loss": 0.5, "reward/mean": -1.0},
        {"step": 2, "loss": float(np.float32(0.1)), "steps": 3},
    ]
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 1, ')
    assert (tmp_path / "evals.jsonl").read_text().startswith('{"step": 2, "pass')
    assert rows(tmp_path, "evals.jsonl") == [
        {"step": 2, "pass_rate": 0.25, "passes": [1, 0], "tag": "x"}
    ]
    assert (
        rows(tmp_path, "rollouts.jsonl")
        == [{"step": 2, "text": "a\nb\u2028\ud800"}] * 2
    )
    assert scalars(tmp_path, "loss") == [(1, 0.5), (2, pytest.approx(0.1))]
    assert scalars(tmp_path, "eval/pass_rate") == [(2, 0.25)]


def tensorboard_order(tag):
    """TensorBoard's own order of tags, without that of numbers: compareTagNames."""
    return [(letter not in "/_0123456789", letter) for letter in tag]


def test_tensorboard_shows_the_figures_that_matter_under_the_first_heading(tmp_path):
    step = {"reward/mean": -0.5, "completion/mean_tokens": 14.0, "loss": 1.0}
    step |= {"staleness/mean": 1.5, "throughput/generated_tokens_per_s": 2048.0}
    with MetricsWriter(tmp_path, after=-1) as writer:
        writer.write_step(3, step)
        writer.write_eval({"step": 3, "pass_rate": 0.25})
    expected = {"pass_rate": 0.25, "reward": -0.5, "length": 14.0}
    expected |= {"staleness": 1.5, "tokens_per_s": 2048.0}
    for name, value in expected.items():
        assert scalars(tmp_path, f"Run/{name}") == [(3, value)]
    tags = sorted(load(tmp_path).Tags()["tensors"], key=tensorboard_order)
    assert tags[: len(expected)] == [f"Run/{name}" for name in sorted(expected)]
    assert "Run/" not in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_has_histograms_texts_and_settings(tmp_path):
    chosen = {"seed": 3, "data.tasks": ["a", "b"], "model.remat": "none"}
    spread = {"reward": np.array([1.0, -1.0, 1.0]), "none": np.array([])}
    with MetricsWriter(tmp_path, after=-1, settings=chosen) as writer:
        writer.write_step(1, {"loss": 0.5}, spread)
        writer.write_rollouts([{"step": 2, "text": "a\n\ud800", "tokens": 3}])
    accumulator = load(tmp_path)

    def shown(tag):
        (event,) = accumulator.Tensors(tag)
        return event.step, tensor_util.make_ndarray(event.tensor_proto)

    step, buckets = shown("reward")  # left, right, count
    assert (step, buckets[:, 2].sum()) == (1, 3)
    assert buckets[0].tolist()[::2] == [-1.0, 1.0] and buckets[-1, 1] == 1.0
    assert shown("none")[1][:, 2].sum() == 0
    step, text = shown("rollouts/0")
    assert (step, text.item()) == (
        2,
        b"step: 2\n\ntext:\n\n    a\n    ?\n\ntokens: 3\n",
    )
    (session,) = accumulator.PluginTagToContent("hparams").values()
    found = HParamsPluginData.FromString(session).session_start_info.hparams
    assert found["seed"].number_value == 3
    assert found["data.tasks"].string_value == "['a', 'b']"


@settings(deadline=None)
@given(value=st.floats())
def test_floats_read_back_bit_for_bit(tmp_path_factory, value):
    directory = tmp_path_factory.mktemp("run")
    with MetricsWriter(directory, after=-1) as writer:
        writer.write_step(1, {"value": value})
        writer.write_eval({"step": 1, "nested": {"values": [value]}})
    expected = struct.pack("d", value) if math.isfinite(value) else None
    for found in (
        rows(directory)[0]["value"],
        rows(directory, "evals.jsonl")[0]["nested"]["values"][0],
    ):
        assert (None if found is None else struct.pack("d", found)) == expected


def test_each_line_is_there_as_soon_as_it_is_written(tmp_path):
    with MetricsWriter(tmp_path, after=-1) as writer:
        for step in (1, 2, 3):
            writer.write_step(step, {"loss": float(step)})
            assert len(rows(tmp_path)) == step
            assert len(scalars(tmp_path, "loss")) == step


def test_a_failure_of_the_machine_loses_no_line_that_was_synced(tmp_path, monkeypatch):
    """In a bucket that gcsfuse mounts only what is closed is kept."""
    kept, fsync = [], os.fsync
    alone = contextlib.nullcontext()  # without the thread that syncs now and then
    monkeypatch.setattr(metrics, "repeated", lambda *_, **__: alone)

    def synced(number):
        kept.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    with MetricsWriter(tmp_path, after=-1) as writer:
        writer.write_step(1, {"loss": 1.0})
        file = tmp_path / "metrics.jsonl"
        monkeypatch.setattr(os, "fsync", synced)
        for _ in range(2):
            writer.sync()
        assert [name.partition(".")[0] for name in kept] == ["metrics", "events"]
        assert len(open_files(file)) == 1
        writer.write_step(2, {"loss": 1.0})
        file.rename(tmp_path / "moved")
        writer.write_step(3, {"loss": 1.0})
        writer.sync()  # closes it
        writer.write_step(4, {"loss": 1.0})
    assert [row["step"] for row in rows(tmp_path, "moved")] == [1, 2, 3]
    assert [row["step"] for row in rows(tmp_path)] == [4]
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3, 4]


def open_files(path):
    """Numbers of this process's open files of a path."""
    return [
        int(each)
        for each in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{each}") == str(path)
    ]


def write_until(directory, first, last):
    with MetricsWriter(directory, after=first - 1) as writer:
        for step in range(first, last + 1):
            writer.write_step(step, {"loss": float(step + 100 * first)})
            if step % 2 == 0:
                writer.write_eval({"step": step, "pass_rate": step / 10})
                writer.write_rollouts([{"step": step}, {"step": step}])


def test_a_resumed_run_holds_no_step_twice(tmp_path):
    write_until(tmp_path, 1, 7)
    write_until(tmp_path, 5, 8)  # within the same second
    write_until(tmp_path, 4, 6)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows(tmp_path)] == [101, 102, 103, 404, 405, 406]
    assert [row["step"] for row in rows(tmp_path, "evals.jsonl")] == [2, 4, 6]
    steps = [row["step"] for row in rows(tmp_path, "rollouts.jsonl")]
    assert steps == [2, 2, 4, 4, 6, 6]
    assert scalars(tmp_path, "loss") == [
        *((1, 101), (2, 102), (3, 103)),
        *((4, 404), (5, 405), (6, 406)),
    ]
    assert scalars(tmp_path, "eval/pass_rate") == [
        (step, pytest.approx(step / 10)) for step in (2, 4, 6)
    ]


def test_a_resume_after_the_clock_was_set_back_comes_last(tmp_path):
    write_until(tmp_path, 1, 3)
    (events,) = (tmp_path / "tensorboard").iterdir()
    seconds = int(events.name.split(".")[3]) + 3600
    events.rename(events.with_name(f"events.out.tfevents.{seconds}.9999999"))
    write_until(tmp_path, 2, 2)
    assert scalars(tmp_path, "loss") == [(1, 101), (2, 202)]


def test_a_resume_from_the_start_drops_everything(tmp_path):
    write_until(tmp_path, 1, 3)
    with MetricsWriter(tmp_path, after=0) as writer:
        writer.write_step(1, {"loss": 9.0})
    assert rows(tmp_path) == [{"step": 1, "loss": 9.0}]
    assert scalars(tmp_path, "loss") == [(1, 9.0)]


def test_a_line_torn_anywhere_is_dropped(tmp_path):
    write_until(tmp_path, 1, 2)
    whole = {name: (tmp_path / name).read_bytes() for name in FILES}
    last = whole["metrics.jsonl"].splitlines(keepends=True)[-1]
    for length in range(1, len(last)):
        for name in FILES:
            (tmp_path / name).write_bytes(whole[name] + last[:length])
        MetricsWriter(tmp_path, after=2).close()
        assert {name: (tmp_path / name).read_bytes() for name in FILES} == whole


def test_a_last_line_of_zeros_is_dropped(tmp_path):
    write_until(tmp_path, 1, 2)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b"\0" * 20 + b"\n")
    MetricsWriter(tmp_path, after=2).close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    write_until(tmp_path, 1, 1)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"loss": 3}\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 of .*metrics.jsonl"):
        MetricsWriter(tmp_path, after=1)


def row(step, **values):
    return json.dumps({"step": step, **values}).encode() + b"\n"


KEPT = {  # files whose rows up to step 2 are looked for
    "in order": [row(1, loss=0.5), row(2), row(3), row(3, text="x")],
    "one goes, and later ones stay": [row(1), row(7, loss=1.0), row(2), row(9), row(0)],
    "a row inside of a row": [row(1, inner={"step": 9}), row(2, inner=[{"step": 9}])],
    "a row inside of a text": [row(2, text='{"step": 9, "a": 1}\n{"step": 9}'), row(3)],
    "another order of names": [b'{"loss": 1, "step": 2}\n', b'{"a": 2, "step": 3}\n'],
    "blanks": [b' {"step" :2 }\r\n', b'{"step":3}\n', b'{"step":1}\n'],
    "other numbers": [b'{"step": 2.0}\n', b'{"step": -1}\n', b'{"step": 2e1}\n'],
    "letters beyond ASCII": ['{"step": 2, "é": 1}\n'.encode(), row(3, a="é")],
    "the first goes": [row(5), row(1)],
    "all go": [row(5), row(6)],
    "none": [],
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("torn", [b"", b'{"step": 1, "lo', b"\0\0\n", b'{"step": 1\n'])
def test_the_rows_that_are_kept_are_kept_byte_for_byte(tmp_path, name, torn):
    """Against all rows parsed; what is torn at the end is dropped."""
    file = tmp_path / "evals.jsonl"
    file.write_bytes(b"".join(KEPT[name]) + torn)
    kept = [line for line in KEPT[name] if json.loads(line)["step"] <= 2]
    with MetricsWriter(tmp_path, after=2) as writer:
        assert file.read_bytes() == b"".join(kept)
        steps = {json.loads(line)["step"] for line in kept}
        assert [writer.has_eval(step) for step in range(10)] == [
            step in steps for step in range(10)
        ]
        writer.write_eval({"step": 8, "pass_rate": 0.5})
        assert writer.has_eval(8)


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "loss": 0.{"step": 3, "loss": 0.5}\n',
        b'{"step": 2, "loss": ' + b"\0" * 40 + b"}\n",
        b'{"step": 02}\n',
        b'{"step": 2, "a": "\xff"}\n',
        b'{"step": "2"}\n',
        b"[2]\n",
        b"\n",
    ],
)
def test_what_is_no_row_before_others_is_named(tmp_path, line):
    (tmp_path / "evals.jsonl").write_bytes(row(1) + line + row(3))
    with pytest.raises(ValueError, match="line 2 of .*evals.jsonl is not a row"):
        MetricsWriter(tmp_path, after=9)


def test_rows_of_our_form_are_not_parsed_and_not_read_again(tmp_path):
    """Of 100,000 rows that would take minutes; who reads a row tells what is in it."""
    lines = [row(1), b'{"step": 2, "loss": 0.5.5}\n', row(3)]
    (tmp_path / "evals.jsonl").write_bytes(b"".join(lines))
    with MetricsWriter(tmp_path, after=3) as writer:
        (tmp_path / "evals.jsonl").unlink()
        assert [writer.has_eval(step) for step in (0, 2, 3)] == [False, True, True]


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_named(tmp_path, name):
    with MetricsWriter(tmp_path, after=-1) as writer:
        (opened,) = open_files(tmp_path / name)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, opened)
        os.close(full)
        with pytest.raises(RuntimeError, match=rf"{name} \(No space left.*resume"):
            writer.write_step(1, {"loss": 1.0})
            writer.write_eval({"step": 1})
            writer.write_rollouts([{"step": 1}])


def test_a_directory_in_the_way_is_named(tmp_path):
    (tmp_path / metrics.TENSORBOARD_DIRECTORY).touch()
    with pytest.raises(RuntimeError, match="tensorboard"):
        MetricsWriter(tmp_path, after=-1)


def test_values_beyond_float32_do_not_stop_tensorboard(tmp_path):
    with MetricsWriter(tmp_path, after=-1) as writer:
        writer.write_step(1, {"flops": 1e300, "count": 10**30, "nan": math.nan})
    assert rows(tmp_path) == [{"step": 1, "flops": 1e300, "count": 10**30, "nan": None}]
    assert scalars(tmp_path, "flops") == [(1, math.inf)]
