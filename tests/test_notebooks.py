"""The notebooks run from their first cell to their last, and say what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import scalerl_jax

FOLDER = Path(scalerl_jax.__file__).resolve().parents[1] / "notebooks"
FITTER, TRAINER = FOLDER / "fit_scaling_laws.ipynb", FOLDER / "train_tiny.ipynb"
# Of a run, whose programs other tests compile too.
SMALL = {
    "batch.num_prompts": 4,
    "batch.group_size": 4,
    "sampler.slots": 16,
    "optimizer.learning_rate": 3e-4,
    "optimizer.warmup_steps": 2,
    "eval.num_prompts": 100,
    "eval.samples_per_prompt": 1,
}
BOTH = pytest.mark.parametrize("path", [FITTER, TRAINER], ids=lambda path: path.stem)


def execute(path, folder, *changes):
    """Run a notebook in `folder`, after exact changes of its text; its outputs."""
    notebook = nbformat.read(path, as_version=4)
    for old, new in changes:
        (cell,) = [cell for cell in notebook.cells if old in cell.source]
        cell.source = cell.source.replace(old, new)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return said_and_shown(notebook)


def said_and_shown(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") for output in outputs)
    return said, [out for out in outputs if "image/png" in out.get("data", {})]


def is_a_fitted_example(said):
    assert "identified: True" in said  # the whole run
    assert "identified: False\n" in said and "2.4 times" in said  # the early stop
    assert "at 32,000 gpu_hours: 0.6" in said  # twice the data; A is 0.61
    assert "winner: None" in said and "rule: float32 head" in said


def is_a_study(said):
    """Whether the verdict is that of docs/studies.md."""
    assert "winner: None - not decided: the intervals of the differences" in said
    assert "+0.095 Interval(low=-0.02" in said


def test_the_scaling_notebook_fits_plots_and_forecasts(tmp_path):
    said, pictures = execute(FITTER, tmp_path)
    is_a_fitted_example(said)
    assert len(pictures) == 4


@pytest.mark.slow
def test_the_scaling_notebook_takes_an_uploaded_file(tmp_path):
    """Colab's dialog, which leaves the file in the working directory."""
    rows = (f"{step},{0.2 + 0.5 * step / (step + 60)}\n" for step in range(0, 601, 20))
    (tmp_path / "mine.csv").write_text("step,pass_rate\n" + "".join(rows))
    (tmp_path / "google").mkdir()
    (tmp_path / "google" / "colab.py").write_text(
        "class files:\n    upload = staticmethod(lambda: {'mine.csv': b''})\n"
    )
    said, pictures = execute(FITTER, tmp_path, ("UPLOAD = False", "UPLOAD = True"))
    assert "30 points, step up to 600, R0 = 0.200" in said
    assert "rule:" not in said, "one curve has nothing to be compared with"
    assert len(pictures) == 3


@pytest.mark.slow
def test_the_scaling_notebook_compares_arms_of_a_published_study(tmp_path):
    study = FOLDER.parent / "studies" / "leave_one_out"
    said, pictures = execute(FITTER, tmp_path, ("../studies/leave_one_out", str(study)))
    is_a_study(said)
    assert len(pictures) == 5


@pytest.mark.slow
def test_the_training_notebook_trains_fits_and_forecasts(tmp_path):
    said, pictures = execute(
        TRAINER,
        tmp_path,
        ("STEPS = 300\nEVALUATE_EVERY = 10", "STEPS = 24\nEVALUATE_EVERY = 1"),
        (
            '    f"--config.eval.every={EVALUATE_EVERY}",\n',
            '    f"--config.eval.every={EVALUATE_EVERY}",\n'
            + "".join(f'    "--config.{name}={at}",\n' for name, at in SMALL.items()),
        ),
        (
            "config.data.train_prompts = 20, 0\n",
            "config.data.train_prompts = 2, 0\n"
            f"config.update_from_flattened_dict({SMALL})\n",
        ),
    )
    assert "evaluation at step 24: pass rate" in said
    starts_where_the_run_did(said)
    before, after = (
        re.findall(rf"^  step +{step}: (.+): \w+$", said, re.M) for step in (0, 24)
    )
    assert len(before) == len(after) > 0 and before != after  # rollouts
    assert re.search(r"^[1-9]\d* of 20 were wrong before; ", said, re.M)
    assert "identified:" in said and "forecast 0." in said and "measured 0." in said
    assert len(pictures) == 1
    assert re.search(r"^own problem: 0\.\d{3} 1 point ", said, re.M), "of two steps"
    kept = tmp_path / "runs" / "mine"
    assert len((kept / "prompts.jsonl").read_text().splitlines()) == 500
    assert (kept / "reward.py").read_text().startswith("def score(")


def starts_where_the_run_did(said):
    """The pass rate before the first step: the curve's first point comes later."""
    run = re.search(r"held-out prompts (\S+) before, (\S+) at step", said)
    assert run and f"pass rate {run[1]} before, {run[2]} after" in said


def test_the_training_notebook_keeps_its_outputs():
    said, _ = said_and_shown(nbformat.read(TRAINER, as_version=4))
    starts_where_the_run_did(said)


@BOTH
def test_a_notebook_opens_in_colab(path):
    assert "colab-badge" in nbformat.read(path, as_version=4).cells[0].source


def test_the_scaling_notebook_keeps_its_outputs():
    notebook = nbformat.read(FITTER, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if "outputs" in cell]
    assert counts == list(range(1, len(counts) + 1)), "run by `make notebooks`"
    said, pictures = said_and_shown(notebook)
    is_a_fitted_example(said)
    is_a_study(said)
    assert len(pictures) == 5


@BOTH
def test_outside_of_a_checkout_a_notebook_installs_the_package_from_its_source(
    tmp_path, path
):
    """The install cell, by a Python that has no packages (-S) in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    install = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    (tmp_path / "inside").mkdir()
    nowhere = install.replace('"scalerl_jax"\n', f"{str(tmp_path / 'nowhere')!r}\n", 1)
    assert nowhere != install
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", nowhere],
        cwd=tmp_path / "inside",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "nowhere" in done.stderr.split("RuntimeError")[0]  # pip's own words
    assert "set SOURCE to the address of a copy" in done.stderr
