"""Reading: TensorBoard, TRL, Weights & Biases, columns, groups, scales."""

import json
import re
import warnings

import numpy as np
import pytest

from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.scaling import CurveError, load_curve, load_curves
from scalerl_jax.scaling.__main__ import main

RATES = [0.2, 0.35, 0.5, 0.55]


def summary_writer(path):
    """Torch's writer of event files: neither ours nor the reader's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(path))


def test_event_files_are_read_by_tag_and_joined_on_the_step(tmp_path, monkeypatch):
    with summary_writer(tmp_path) as writer:
        for i, rate in enumerate(RATES):
            writer.add_scalar("val/pass_rate", rate, global_step=100 * i)
            writer.add_scalar("gpu_hours", 2.5 * i + 1, global_step=100 * i)
            writer.add_scalar("loss", 1.0, global_step=100 * i + 50)
        writer.add_histogram("weights", np.arange(9.0), global_step=0)
    by_step = load_curve(tmp_path, y="val/pass_rate")
    np.testing.assert_array_equal(by_step.x, [100, 200, 300])
    np.testing.assert_allclose(by_step.y, RATES[1:], rtol=1e-6)  # stored in float32
    assert by_step.r0 == pytest.approx(0.2) and by_step.x_name == "step"
    hours = load_curve(tmp_path, x="gpu_hours", y="val/pass_rate")
    np.testing.assert_allclose(hours.x, [3.5, 6.0, 8.5])
    with pytest.raises(CurveError, match="--y from: step, run, .*val/pa"):
        load_curve(tmp_path)
    assert by_step.name == tmp_path.name
    tmp_path = tmp_path.rename(tmp_path.with_name("lr0.1"))
    monkeypatch.chdir(tmp_path)
    for given in (".", tmp_path):  # nothing of a directory's name is an ending
        assert load_curve(given, y="val/pass_rate").name == "lr0.1"


def test_each_directory_with_event_files_is_a_run(tmp_path):
    for run, gain in (("a/seed0", 0.0), ("b", 0.1)):
        with summary_writer(tmp_path / run) as writer:
            for i, rate in enumerate(RATES):
                writer.add_scalar("score", rate + gain, global_step=i)
    first, second = load_curves(tmp_path, y="score")
    assert (first.name, second.name) == ("a/seed0", "b")
    np.testing.assert_allclose(second.y - first.y, 0.1, rtol=1e-5)
    with pytest.raises(CurveError, match="2 curves where one is needed: a/seed0, b"):
        load_curve(tmp_path, y="score")
    only = load_curve(tmp_path, y="score", where=(("run", "b"),))
    np.testing.assert_array_equal(only.y, second.y)


def test_scalars_stored_as_tensors_are_read(tmp_path):
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))  # as tf.summary.scalar lays them out
    for step, rate in enumerate(RATES):
        value = summary_pb2.Summary.Value(tag="pass_rate")
        value.metadata.plugin_data.plugin_name = "scalars"
        value.tensor.CopyFrom(
            tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[rate])
        )
        summary = summary_pb2.Summary(value=[value])
        writer.add_event(event_pb2.Event(wall_time=step, step=step, summary=summary))
    writer.close()
    np.testing.assert_allclose(load_curve(tmp_path, y="pass_rate").y, RATES[1:])


def test_a_resumed_runs_event_files_say_what_its_rows_say(tmp_path):
    def write(writer, steps, bonus):
        for step in steps:
            row = {"compute_chip_hours": step / 8, "pass_rate": 0.1 + step / 64 + bonus}
            writer.write_eval({"step": step, **row})

    with MetricsWriter(tmp_path, after=-1) as writer:
        write(writer, range(6), 0.0)
    with MetricsWriter(tmp_path, after=3) as writer:
        write(writer, range(4, 8), 0.25)
    rows, events = load_curve(tmp_path), load_curve(tmp_path / "tensorboard")
    assert events.x_name == "eval/compute_chip_hours"
    assert events.r0 == pytest.approx(rows.r0)
    np.testing.assert_array_equal(events.x, rows.x)
    np.testing.assert_allclose(events.y, rows.y, rtol=1e-6)


TRL_HISTORY = [
    {"step": 1, "reward": -1.0, "num_tokens": 10.0},
    {"step": 2, "reward": -0.5, "num_tokens": 20.0},
    {"step": 2, "eval_loss": 0.3},
    {"step": 3, "reward": 0.5, "num_tokens": 30.0},
    {"step": 3, "train_runtime": 7.0},
]


def test_the_log_of_a_trl_run_is_a_curve_of_its_rewards(tmp_path):
    for steps in (2, 10):  # the newest checkpoint counts, by number and not by text
        state = tmp_path / f"checkpoint-{steps}" / "trainer_state.json"
        state.parent.mkdir()
        state.write_text(json.dumps({"log_history": TRL_HISTORY[: steps // 2]}))
    curve = load_curve(tmp_path, reward_range=(-1.0, 1.0))
    assert curve.y_name == "reward, mapped from [-1, 1]" and curve.x_name == "step"
    np.testing.assert_array_equal(curve.x, [1, 2, 3])
    np.testing.assert_allclose(curve.y, [0.0, 0.25, 0.75])  # (reward + 1) / 2
    curve = load_curve(tmp_path, x="num_tokens", reward_range=(-1.0, 1.0))
    np.testing.assert_array_equal(curve.x, [10, 20, 30])
    with pytest.raises(CurveError, match="--map-rewards -1 1"):
        load_curve(tmp_path)
    with pytest.raises(CurveError, match="reaches from -1 to 0.5, outside"):
        load_curve(tmp_path, reward_range=(0.0, 2.0))


WANDB = """\
"train/global_step","base - eval/acc","base - eval/acc__MIN","base - eval/acc__MAX",\
"base - _step","fp32 - head - eval/acc","fp32 - head - eval/acc__MIN",\
"fp32 - head - eval/acc__MAX"
"0","0.1","0.1","0.1","0","0.1","0.1","0.1"
"100","0.2","0.15","0.25","7","","",""
"150","","","","","0.4","0.4","0.4"
"200","0.3","0.3","0.3","9","0.5","0.4","0.6"
"""


def test_a_wandb_export_has_one_curve_per_run(tmp_path):
    file = tmp_path / "wandb_export.csv"
    file.write_text(WANDB)
    base, head = load_curves(file)
    assert (base.name, head.name) == ("base", "fp32 - head")
    assert (base.x_name, base.y_name) == ("train/global_step", "eval/acc")
    assert base.r0 == head.r0 == 0.1
    np.testing.assert_array_equal(base.x, [100, 200])
    np.testing.assert_array_equal(head.x, [150, 200])
    np.testing.assert_array_equal(head.y, [0.4, 0.5])
    with pytest.raises(CurveError, match="'loss'; choose --y from: train/gl"):
        load_curves(file, y="loss")


def test_rows_are_chosen_and_runs_told_apart_by_columns(tmp_path):
    file = tmp_path / "many.csv"
    file.write_text(
        "recipe,split,step,n,rate\n"
        "a,eval,1,100,0.5\na,train,1,100,0.9\nb,eval,1,400,0.5\n"
        "a,eval,2,100,1\nb,eval,2,400,0.6\n"
    )
    chosen = {"x": "step", "y": "rate", "where": (("split", "eval"),)}
    a, b = load_curves(file, group="recipe", samples="n", **chosen)
    np.testing.assert_array_equal(a.y, [0.5, 1.0])
    # Binomial, with one success and one failure more: of 102, 101 passed.
    expected = [0.05, np.sqrt(101 / 102 * 1 / 102 / 100)]
    np.testing.assert_allclose(a.y_se, expected)
    assert b.y_se[0] == pytest.approx(0.025)
    with pytest.raises(CurveError, match="--group, .*: recipe$"):
        load_curves(file, **chosen)
    with pytest.raises(CurveError, match="split=test; .*: eva"):
        load_curves(file, x="step", y="rate", where=(("split", "test"),))


def test_compute_can_be_counted_in_another_unit(tmp_path):
    file = tmp_path / "steps.csv"
    file.write_text("step,pass_rate\n0,0.1\n1,0.2\n2,0.4\n")
    curve = load_curve(file, x="step", x_scale=768.0, x_name="rollouts")
    np.testing.assert_array_equal(curve.x, [768, 1536])
    assert curve.x_name == "rollouts" and curve.r0 == 0.1


def test_rows_of_another_kind_are_left_out_with_a_warning(tmp_path):
    file = tmp_path / "log.jsonl"
    rows = [{"h": i, "r": i / 8} if i % 2 else {"h": i, "loss": 1.0} for i in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = load_curve(file, x="h", y="r")
    np.testing.assert_array_equal(curve.x, [1, 3, 5])
    assert "3 of 6 rows left out: no number in r" in curve.warnings[0]


@pytest.mark.parametrize(
    "name, text, message",
    [
        pytest.param("a.json", "{}", "no list log_history", id="no trainer state"),
        pytest.param("a.json", "{", "not valid JSON", id="torn"),
        pytest.param("a.csv", "h,r\n1,0.2,0.3\n", "more cells than", id="long row"),
        pytest.param("a.csv", b"\xff\xfe", "not UTF-8", id="encoding"),
        pytest.param("sub/x", "", "nothing to read in this directory", id="directory"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name, text, message):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CurveError, match=message):
        load_curve(file if "." in name else file.parent, x="h", y="r")


def test_pass_rates_of_each_prompt_come_with_the_curve(tmp_path, capsys):
    """Two runs on the same 40 prompts, b better on each by 0.1."""
    generator = np.random.default_rng(0)
    skill = generator.uniform(-0.2, 0.2, 40)
    for name, gain in (("a", 0.0), ("b", 0.1)):
        rows = []
        for step in range(12):
            middle = 0.25 + gain + 0.4 / (1 + (4 / step) ** 2 if step else np.inf)
            rates = np.clip(middle + skill + generator.normal(0, 0.01, 40), 0, 1)
            row = {"step": step, "compute_chip_hours": 1000 * step}
            row |= {"pass_rate": rates.mean(), "prompt_pass_rates": rates.tolist()}
            rows.append(row | {"samples_per_prompt": 16})
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "evals.jsonl").write_text(text)
    curve = load_curve(tmp_path / "a")
    assert curve.prompt_rates.shape == (11, 40) and curve.samples_per_prompt == 16
    np.testing.assert_allclose(curve.prompt_rates.mean(axis=1), curve.y)
    runs = [str(tmp_path / name) for name in ("a", "b")]
    assert main(["fit", runs[0], "--bootstrap=20", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prompt_bootstrap"]["method"] == "prompts, samples"
    # R0 is the measured rate at zero compute, which is no point of the refits.
    assert main(["fit", runs[0], "--bootstrap=20", "--protocol=paper", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    found = record["prompt_bootstrap"]
    assert found["num_failed"] == 0 and "R0" not in found["intervals"]
    assert found["intervals"]["A"]["low"] < record["A"] < 1.0
    with (tmp_path / "a" / "evals.jsonl").open() as file:
        rows = [{**json.loads(line), "se": 0.01} for line in file]
    write_lines(tmp_path / "a" / "evals.jsonl", rows)
    flags = ["--weighted", "--se=se", "--json"]
    assert main(["fit", runs[0], "--bootstrap=20", *flags]) == 0
    said = capsys.readouterr()
    assert "prompt_bootstrap" not in json.loads(said.out)
    assert "no bootstrap over prompts: its refits are not weighted" in said.err
    rows = [row | {"samples_per_prompt": "x"} for row in rows]
    write_lines(tmp_path / "a" / "evals.jsonl", rows)
    assert load_curve(tmp_path / "a").samples_per_prompt is None
    for rate in ("x", [0.5], 10**400, 1.5):  # no rate
        rows[3]["prompt_pass_rates"][2] = rate
        write_lines(tmp_path / "a" / "evals.jsonl", rows)
        assert load_curve(tmp_path / "a").prompt_rates is None


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_objects_in_objects_are_columns(tmp_path):
    """One wrapper, as verl's file logger has it; or several, each with its name."""
    rows = [{"step": 5 * i, "data": {"acc/mean@1": r}} for i, r in enumerate(RATES)]
    rows.insert(2, {"step": 7, "data": {"lr": 1e-6}})
    curve = load_curve(write_lines(tmp_path / "a.jsonl", rows), y="acc/mean@1")
    assert curve.r0 == 0.2 and curve.warnings == ()
    np.testing.assert_array_equal(curve.x, [5, 10, 15])
    np.testing.assert_array_equal(curve.y, RATES[1:])
    rows = [
        {"step": i, "train": {"acc": 0.9}, "eval": {"set": {"acc": r}}}
        for i, r in enumerate(RATES)
    ]
    curve = load_curve(write_lines(tmp_path / "b.jsonl", rows), y="eval/set/acc")
    np.testing.assert_array_equal(curve.y, RATES[1:])
    file = write_lines(tmp_path / "c.jsonl", [{"step": 1, "a" * 501: {"b": 1}}])
    with pytest.raises(CurveError, match="name has 501 letters; 500 at most"):
        load_curve(file)


def test_an_array_of_objects_is_a_table(tmp_path):
    rows = [{"step": i, "acc": rate} for i, rate in enumerate(RATES)]
    file = tmp_path / "array.json"
    file.write_text(json.dumps(rows))
    np.testing.assert_array_equal(load_curve(file, y="acc").y, RATES[1:])
    file.write_text(json.dumps([*rows, 3]))
    with pytest.raises(CurveError, match=r"\[4\] holds int, not an object"):
        load_curve(file, y="acc")


def test_the_lines_that_verl_prints_are_rows(tmp_path):
    file = tmp_path / "console.log"
    lines = [
        "loading step: done",
        "\x1b[36m(TaskRunner pid=7)\x1b[0m step:0 - val-core/own/acc:np.float64(0.2)",
        "(TaskRunner pid=7) step:1 - lr:1e-06 - val-core/own/acc:0.35",
        "(TaskRunner pid=7) step:2 - lr:1e-06",
        "step:3 - val-core/own/acc:0.5 - time:12.5",
    ]
    file.write_text("\n".join(lines))
    curve = load_curve(file, y="val-core/own/acc")
    np.testing.assert_array_equal(curve.x, [1, 3])
    np.testing.assert_array_equal(curve.y, [0.35, 0.5])
    assert curve.r0 == 0.2
    file.write_text("no such line")
    with pytest.raises(CurveError, match="no line has .*as verl prints"):
        load_curve(file, y="acc")


def test_a_reward_that_is_a_sum_lists_its_parts(tmp_path):
    history = [
        {
            "step": i,
            "reward": r + 0.1,
            "rewards/right/mean": r,
            "rewards/form/mean": 0.1,
        }
        for i, r in enumerate(RATES)
    ]
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": history}))
    parts = "--y, from: rewards/right/mean, rewards/form/mean;"
    with pytest.raises(CurveError, match=parts):
        load_curve(file)
    np.testing.assert_array_equal(load_curve(file, y="rewards/right/mean").y, RATES[1:])
    assert load_curve(file, y="reward").y[-1] == pytest.approx(0.65)
    history[-1]["reward"] = 1.5
    file.write_text(json.dumps({"log_history": history}))
    with pytest.raises(CurveError, match=parts):
        load_curve(file, y="reward")
    assert load_curve(file, reward_range=(0.0, 2.0)).y[-1] == 0.75


def test_of_evaluations_without_a_token_between_them_the_last_is_read(tmp_path):
    """As at the end of a run whose sampler has made all that is still needed."""
    tokens = (0, 300, 600, 900, 900, 900)
    rows = [
        {"step": i, "generated_tokens": made, "pass_rate": 0.2 + i / 10}
        for i, made in enumerate(tokens)
    ]
    file = tmp_path / "evals.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = load_curve(tmp_path, x="generated_tokens")
    np.testing.assert_array_equal(curve.x, [300, 600, 900])
    np.testing.assert_allclose(curve.y, [0.3, 0.4, 0.7])
    assert any("2 of 6 rows left out: no generated_tokens" in w for w in curve.warnings)


def mixed(column, cells, steps, rates=None):
    """Rows of a curve with a further column; None: the row has no such cell."""
    rates = rates or [0.01 * i for i in range(len(steps))]
    return [
        {"step": step, "pass_rate": rate} | ({} if cell is None else {column: cell})
        for step, rate, cell in zip(steps, rates, cells, strict=True)
    ]


TWICE = [step for step in range(1, 9) for _ in range(2)]
RUNS = [*range(10, 90, 10), *range(15, 95, 10)]  # one after the other


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param(
            mixed("run", ["a"] * 8 + ["b"] * 8, RUNS), "15 comes after 80", id="runs"
        ),
        pytest.param(
            mixed("set", [None, "hard"] * 8, TWICE), "1 appears twice", id="one named"
        ),
        pytest.param(mixed("k", [1, 8] * 8, TWICE), "candidates: k", id="pass@k"),
        pytest.param(mixed("y", [None] * 16, TWICE), "--where$", id="nothing tells"),
    ],
)
def test_rows_of_several_curves_are_no_resumed_run(tmp_path, rows, message):
    file = write_lines(tmp_path / "mixed.jsonl", rows)
    with pytest.raises(CurveError, match=message):
        load_curve(file, x="step")


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        pytest.param(
            mixed("set", ["easy", "hard"] * 8, range(16)), "easy, hard are", id="sets"
        ),
        pytest.param(
            mixed("size", [1] * 8 + [2] * 8, RUNS), "choose one.*: size", id="numbers"
        ),
        pytest.param(
            mixed("host", ["a"] * 8 + ["b"] * 8, range(16)), None, id="moved once"
        ),
        pytest.param(
            mixed("n", [1] * 16, TWICE, [0.02 * (i // 2) for i in range(16)]),
            "8 rows left out: a resumed run wrote their step again",
            id="written twice",
        ),
    ],
)
def test_rows_that_may_be_of_several_curves_get_a_note(tmp_path, rows, note):
    curve = load_curve(write_lines(tmp_path / "mixed.jsonl", rows), x="step")
    found = [each for each in curve.warnings if note and re.search(note, each)]
    assert len(found) == (note is not None) and (found or not curve.warnings)
