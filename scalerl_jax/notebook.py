"""Run the training from Python, for notebooks:

from scalerl_jax.notebook import run

result = run("tiny", "runs/mine", prompts=rows, reward=score)
result.evaluations[-1]["pass_rate"], result.fit
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from scalerl_jax import config as config_lib
from scalerl_jax import main
from scalerl_jax.environments.function_text import text_of
from scalerl_jax.formats.bounded import read_lines, read_text
from scalerl_jax.formats.reading import is_remote, parse_json
from scalerl_jax.process.printing import shown
from scalerl_jax.run.directory import EVALS_FILE
from scalerl_jax.run.writing import replace_file
from scalerl_jax.scaling.fit import fit_curve
from scalerl_jax.scaling.load import load_curve
from scalerl_jax.scaling.result import Fit
from scalerl_jax.train import RunOutcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run: its evaluations (rows of evals.jsonl) and its fit."""

    outcome: RunOutcome
    evaluations: list[dict[str, Any]]
    fit: Fit | None
    why_no_fit: str = ""


def run(
    config: ml_collections.ConfigDict | str,
    workdir: str | Path,
    *,
    prompts: Sequence[Mapping[str, Any]] | None = None,
    reward: Callable[..., Any] | str = "",
) -> Result:
    """Train, or resume the run in the directory, and fit its curve.

    Args:
        config: settings, as a config file's `get_config` returns them, or the name of
            a config of the package: "tiny", "recipes/dapo:tiny".
        workdir: directory of the run, on this machine.
        prompts: rows like {"prompt": ..., "reference": ...}, written to the directory;
            eval.num_prompts of them are held out.  None: the config's prompts.
        reward: a function, whose source is written to the directory
            (`environments.function_text`), or "FILE.py:FUNCTION".

    Raises:
        ValueError: a setting, a row or the function cannot be used.
    """
    if not workdir or is_remote(workdir):
        raise ValueError(f"workdir = {workdir!r} must be a directory of this machine")
    if isinstance(config, str):
        config = config_lib.named(config)
    directory = Path(workdir).expanduser().absolute()
    settings: dict[str, Any] = {}
    if callable(reward):
        file = directory / "reward.py"
        _write(file, text_of(reward))
        reward = f"{file}:{reward.__name__}"
    if reward:
        settings["environment"] = reward
    if prompts is not None:
        file = directory / "prompts.jsonl"
        text = "".join(_line(place, row) for place, row in enumerate(prompts))
        begun = (directory / EVALS_FILE).exists() and file.exists()
        if begun and not _holds(file, text):  # it is all that a resume has
            raise ValueError(
                f"prompts: the run in {directory} was started with other rows, those "
                f"of {file.name}; give the same, or choose another workdir"
            )
        _write(file, text)
        settings |= {"data.tasks": (f"jsonl:{file}",), "data.train_prompts": 0}
    config = ml_collections.ConfigDict(config.to_dict())
    config.update_from_flattened_dict(settings)
    outcome = main.run(config_lib.resolve(config), str(directory))
    evaluations = [parse_json(line) for line in read_lines(directory / EVALS_FILE)]
    try:
        fit, why_not = fit_curve(load_curve(directory)), ""
    except ValueError as error:  # usually too few points
        fit, why_not = None, str(error)
    return Result(outcome=outcome, evaluations=evaluations, fit=fit, why_no_fit=why_not)


def _line(place: int, row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON."""
    if not isinstance(row, Mapping):
        raise ValueError(
            f"prompts[{place}] = {shown(repr(row))} is of type {type(row).__name__}, "
            f'and must be a row: {{"prompt": ..., "reference": ...}}'
        )
    try:
        return json.dumps(dict(row)) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"prompts[{place}] = {shown(str(row))} cannot be written as JSON: {error}; "
            f"of NumPy's values give .item() or .tolist()"
        ) from error


def _holds(file: Path, text: str) -> bool:
    size = len(text.encode())
    return file.stat().st_size == size and read_text(file, most=size) == text


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, text.encode())
