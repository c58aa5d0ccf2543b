"""Tables as people have them: one curve, whatever the dialect it is written in."""

import csv
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from scalerl_jax.scaling import CurveError, load_curve, load_curves
from scalerl_jax.scaling.__main__ import main
from scalerl_jax.scaling.tables import to_number


def write_number(value, *, mark, grouped, percent):
    """A number as a spreadsheet shows it: 1.234.567,5 or 12.5%."""
    text = f"{100 * value:.6f}" if percent else f"{value:.8f}"
    text = text.rstrip("0").rstrip(".")
    if grouped:
        whole, _, rest = text.partition(".")
        text = f"{int(whole):,}" + (f".{rest}" if rest else "")
    if mark == ",":
        text = text.translate(str.maketrans(".,", ",."))
    return text + ("%" if percent else "")


@st.composite
def dialects(draw):
    return {
        "kind": draw(st.sampled_from(["csv", "tsv", "jsonl"])),
        "delimiter": draw(st.sampled_from([",", ";", "\t"])),
        "mark": draw(st.sampled_from([".", ","])),
        "grouped": draw(st.booleans()),
        "percent": draw(st.booleans()),
        "ending": draw(st.sampled_from(["\n", "\r\n"])),
        "bom": draw(st.booleans()),
        "step": draw(st.sampled_from(["step", "Step", "_step", "train/global_step"])),
        "empty": draw(st.sampled_from(["", "NaN", "nan", "null"])),
        "sparse": draw(st.integers(1, 4)),
        "resumed": draw(st.booleans()),
        "seed": draw(st.none() | st.integers(0, 9)),  # of a shuffle
    }


def write_table(folder, rows, dialect):
    """Rows (step, rate or None) in a dialect."""
    style = {"mark": dialect["mark"], "grouped": dialect["grouped"]}
    cells = [
        (
            write_number(step, **style, percent=False),
            dialect["empty"]
            if rate is None
            else write_number(rate, **style, percent=dialect["percent"]),
        )
        for step, rate in rows
    ]
    file = folder / f"table.{dialect['kind']}"
    header = (dialect["step"], "acc")
    if dialect["kind"] == "jsonl":
        text = "".join(
            json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in cells
        )
        file.write_text(text)
        return file
    stream = io.StringIO()
    writer = csv.writer(
        stream, delimiter=dialect["delimiter"], lineterminator=dialect["ending"]
    )
    writer.writerows([header, *cells])
    text = stream.getvalue().encode("utf-8-sig" if dialect["bom"] else "utf-8")
    file.write_bytes(text)
    return file


@settings(max_examples=120, deadline=None)
@given(
    dialect=dialects(),
    steps=st.lists(st.integers(1, 10**8), min_size=4, max_size=12, unique=True),
    seed=st.integers(0, 99),
)
def test_a_table_reads_as_the_same_curve_in_every_dialect(
    tmp_path_factory, dialect, steps, seed
):
    steps = sorted(steps)
    rates = np.round(np.random.default_rng(seed).uniform(0.05, 0.949, len(steps)), 4)
    rates[0] += 0.00005  # five digits: cannot be taken for grouped thousands
    rows = []
    for i, (step, rate) in enumerate(zip(steps, rates.tolist(), strict=True)):
        rows.append((step, rate))
        # Steps between two evaluations, as a log of training has them.
        gap = steps[i + 1] - step if i + 1 < len(steps) else 10
        rows += [(step + k, None) for k in range(1, min(dialect["sparse"], gap))]
    if dialect["resumed"]:  # what a killed run wrote before, and then wrote again
        cut = len(rows) // 2
        stale = [(s, None if r is None else 0.5 * r) for s, r in rows[cut:]]
        rows = [*rows[:cut], *stale, *rows[cut:]]
    elif dialect["seed"] is not None:
        np.random.default_rng(dialect["seed"]).shuffle(rows)
        rows = [(int(step), rate) for step, rate in rows]
    file = write_table(tmp_path_factory.mktemp("table"), rows, dialect)
    curve = load_curve(file, x="step", y="acc")
    np.testing.assert_array_equal(curve.x, steps)
    np.testing.assert_allclose(curve.y, rates, rtol=1e-12)
    said = " ".join(curve.warnings)
    assert ("rows left out: no number in acc" in said) == any(
        r is None for _, r in rows
    )
    assert ("a resumed run wrote" in said) == dialect["resumed"]
    assert ("has percent signs" in said) == dialect["percent"]


@pytest.mark.parametrize(
    "cell, mark, expected",
    [
        ("20,000,000", ".", 2e7),
        ("20.000.000,5", ",", 20000000.5),
        ("0,53", ",", 0.53),
        ("20.3%", ".", 0.203),
        ("20,3 %", ",", 0.203),
        ("1\u202f234,5", ",", 1234.5),
        ("\u22121.5e-3", ".", -0.0015),
        (7, ",", 7.0),
    ],
)
def test_cells_are_numbers_as_they_are_written(cell, mark, expected):
    assert to_number(cell, mark) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cell, mark", [("0,53", "."), ("1.5", ","), ("1,50,0", ".")])
def test_a_number_with_the_other_mark_is_none(cell, mark):
    with pytest.raises(ValueError, match="could not convert|decimal point"):
        to_number(cell, mark)


def write(folder, text, name="a.csv"):
    file = folder / name
    file.write_text(text)
    return file


RATES = [0.1, 0.25, 0.3, 0.35, 0.4]


def test_an_empty_cell_and_nan_are_left_out_alike_with_a_count(tmp_path):
    table = write(tmp_path, "h,r\n1,0.1\n2,\n3,nan\n4,0.3\n5,0.4\n")
    rows = [(1, 0.1), (2, None), (3, float("nan")), (4, 0.3), (5, 0.4)]
    lines = "".join(json.dumps({"h": h, "r": r}) + "\n" for h, r in rows)
    for file in (table, write(tmp_path, lines, "a.jsonl")):
        curve = load_curve(file, x="h", y="r")
        np.testing.assert_array_equal(curve.x, [1, 4, 5])
        assert curve.warnings == (f"{file}: 2 of 5 rows left out: no number in r",)


def test_unsorted_rows_are_sorted_and_the_last_of_a_step_counts(tmp_path):
    file = write(tmp_path, "h,r\n4,0.3\n1,0.1\n5,0.9\n2,0.2\n5,0.4\n")
    curve = load_curve(file, x="h", y="r")
    np.testing.assert_array_equal(curve.x, [1, 2, 4, 5])
    np.testing.assert_array_equal(curve.y, [0.1, 0.2, 0.3, 0.4])
    assert "1 rows left out: their h comes again" in curve.warnings[0]
    assert "not in the order of h, and are sorted" in curve.warnings[1]


def test_a_resumed_run_is_read_alike_from_every_kind_of_file(tmp_path):
    """Steps 2 and 3 are written again; the old 4 belongs to what was lost."""
    steps, rates = [1, 2, 3, 4, 2, 3], [0.1, 0.7, 0.8, 0.9, 0.2, 0.3]
    rows = [{"step": s, "r": r} for s, r in zip(steps, rates, strict=True)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    files = [
        write(tmp_path, text, "a.jsonl"),
        write(tmp_path, json.dumps({"log_history": rows}), "trainer_state.json"),
        write(tmp_path, "step,r\n" + "".join(f"{r['step']},{r['r']}\n" for r in rows)),
        write(
            tmp_path,
            "Step,run - r\n" + "".join(f"{r['step']},{r['r']}\n" for r in rows),
            "wandb.csv",
        ),
    ]
    writer = EventFileWriter(str(tmp_path / "events"))
    for time, row in enumerate(rows):
        value = summary_pb2.Summary.Value(tag="r", simple_value=row["r"])
        summary = summary_pb2.Summary(value=[value])
        event = event_pb2.Event(wall_time=time, step=row["step"], summary=summary)
        writer.add_event(event)
    writer.close()
    for file in (*files, tmp_path / "events"):
        curve = load_curve(file, x="step", y="r")
        np.testing.assert_array_equal(curve.x, [1, 2, 3])
        np.testing.assert_allclose(curve.y, [0.1, 0.2, 0.3], rtol=1e-6)
        assert "3 rows left out: a resumed run wrote" in curve.warnings[0]


def test_runs_are_columns_of_a_wide_table(tmp_path):
    lines = [f"{i},{r},{r + 0.1},n{i}" for i, r in enumerate(RATES)]
    file = write(tmp_path, "step,base,head,note\n" + "\n".join(lines))
    for chosen in ({"wide": True}, {"y": "base,head"}):
        base, head = load_curves(file, **chosen)
        assert (base.name, head.name) == ("base", "head")
        assert base.y_name == head.y_name == "pass_rate" and base.r0 == 0.1
        np.testing.assert_allclose(head.y - base.y, 0.1)
    lines = [f"{line},{3 - i}" for i, line in enumerate(lines)]
    other = write(tmp_path, "step,base,head,note,loss\n" + "\n".join(lines), "b.csv")
    base, head = load_curves(other, wide=True)
    assert "a run is left out" in base.warnings[0]
    assert "b.csv:2: loss = 3 is outside" in base.warnings[0]
    with pytest.raises(CurveError, match="give one of the two"):
        load_curves(file, wide=True, y="base")


def test_runs_are_told_apart_by_several_columns(tmp_path):
    lines = [
        f"{recipe},{seed},{step},{rate}"
        for recipe in "ab"
        for seed in (0, 1)
        for step, rate in enumerate(RATES)
    ]
    file = write(tmp_path, "recipe,seed,step,pass_rate\n" + "\n".join(lines))
    curves = load_curves(file, group="recipe,seed")
    assert [curve.name for curve in curves] == ["a, 0", "a, 1", "b, 0", "b, 1"]
    with pytest.raises(CurveError, match="candidates: seed$"):
        load_curves(file, group="recipe")


@pytest.mark.parametrize("name", ["Step", "_step", "global_step", "train/global_step"])
def test_the_step_is_found_whatever_it_is_called(tmp_path, name):
    lines = [f"{i},{r}" for i, r in enumerate(RATES)]
    file = write(tmp_path, f"{name},Acc\n" + "\n".join(lines))
    curve = load_curve(file, y="acc")
    assert curve.x_name == name and curve.r0 == 0.1
    assert load_curve(file, x="step", y="acc").x_name == "step"


def test_a_scalar_that_tensorboard_exports_needs_no_flag(tmp_path):
    lines = [f"{1.7e9 + i},{i},{r}" for i, r in enumerate(RATES)]
    file = write(tmp_path, "Wall time,Step,Value\n" + "\n".join(lines))
    curve = load_curve(file)
    assert (curve.x_name, curve.y_name) == ("Step", "Value")
    np.testing.assert_array_equal(curve.y, RATES[1:])


@pytest.mark.parametrize("above", ["sep=;\n", "", "\n;\n"])
def test_a_spreadsheet_says_its_separator_and_leaves_empty_rows(tmp_path, above):
    text = "Rechenzeit;Quote\n1.000,5;10,5%\n2.000;20,25%\n3.000;30%\n;\n"
    text = above + text
    curve = load_curve(write(tmp_path, text), x="Rechenzeit", y="Quote")
    np.testing.assert_array_equal(curve.x, [1000.5, 2000, 3000])
    np.testing.assert_allclose(curve.y, [0.105, 0.2025, 0.3])
    assert any("decimal commas" in note for note in curve.warnings)


@pytest.mark.parametrize(
    "text, flags, message",
    [
        pytest.param("h;r\n1;0,1\n2;0.2\n", [], "a.csv:2: r = '0,1' has", id="marks"),
        pytest.param(
            "h,r\n1,10%\n2,0.2\n", [], "a.csv:3: r = '0.2' has no percent", id="mixed"
        ),
        pytest.param(
            "h,r\n1,10%\n2,20%\n",
            ["--map-rewards", "0", "100"],
            "leave --map-rewards out",
            id="twice percent",
        ),
        pytest.param("h,r,r\n1,1,1\n", [], "two columns are called 'r'", id="names"),
        pytest.param(
            "h,r,e\n1,.1,.1\n2,.2,\n", ["--se=e"], "a.csv:3: e is empty", id="errors"
        ),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused_on_one_line(
    tmp_path, capsys, text, flags, message
):
    assert main(["fit", str(write(tmp_path, text)), "--x=h", "--y=r", *flags]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_advice_for_a_falling_loss_works(tmp_path, capsys):
    x = np.arange(0, 20)
    loss = 3.0 * np.maximum(x, 0.5) ** -0.2
    lines = [f"{a},{b}" for a, b in zip(x, loss, strict=True)]
    file = str(write(tmp_path, "step,loss\n" + "\n".join(lines)))
    assert main(["fit", file, "--y=loss"]) == 2
    assert "fit a loss by --law kaplan_one" in capsys.readouterr().err
    assert main(["fit", file, "--y=loss", "--law=kaplan_one", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["parameters"]["alpha"]["value"] == pytest.approx(0.2)
    assert "1 rows at step = 0 left out" in record["warnings"][0]


def test_the_advice_for_a_falling_error_rate_works(tmp_path):
    lines = [f"{i},{1 - r}" for i, r in enumerate(RATES)]
    file = write(tmp_path, "step,err\n" + "\n".join(lines))
    assert "give --one-minus" in load_curve(file, y="err").warnings[0]
    curve = load_curve(file, y="err", one_minus=True)
    assert curve.y_name == "1 - err" and curve.warnings == ()
    np.testing.assert_allclose(curve.y, RATES[1:])


def test_every_command_says_what_reading_left_out(tmp_path, capsys):
    x = np.arange(1, 25)
    y = 0.2 + 0.4 / (1 + (5 / x) ** 2)
    lines = [f"{a},{b}" for a, b in zip(x, y, strict=True)]
    file = str(write(tmp_path, "step,acc\n" + "\n".join(lines) + "\n25,nan\n"))
    for command in ("fit", "plan", "extrapolate"):
        assert main([command, file, "--y=acc"]) == 0
        said = capsys.readouterr()
        assert (said.out + said.err).count("1 of 25 rows left out") == 1
