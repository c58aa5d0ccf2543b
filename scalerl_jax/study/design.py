"""A study: a base config, arms that differ from it, seeds, and a budget for each run.

A study is a Python file with a function `get_study`: one of the package's in
`configs/studies/`, or the user's.  All runs of one seed see the same prompts, random
keys and evaluation prompts, so that their differences are paired.
"""

import dataclasses
import itertools
import math
import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from ml_collections import ConfigDict

from scalerl_jax import config as config_lib
from scalerl_jax.config.names import FOLDER, STUDIES
from scalerl_jax.process.ending import first_line
from scalerl_jax.run.record import flatten

_HERE = Path("configs") / STUDIES
LEAST_EVALUATIONS = 4  # during training: fewer give no fit
# Settings that a study sets itself, with the field that does so.
_OWN = {"seed": "seeds", "train.num_steps": "steps"}
_MOST_RUNS = 2000
_LONGEST_NAME = 255  # bytes of a folder's name

Axis = Literal["generated_tokens", "train_flops", "compute_chip_hours"]
# Settings that choose the prompts of the evaluations, and how they are answered; see
# `_check_evaluations`.
_EVALUATED = ("eval.sets", "eval.num_prompts", "eval.temperature")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Arms of one base, their seeds, and the budget of each run.

    Args:
        base: the config, by its name or file, with its argument: "tiny",
            "configs/recipes/grpo.py:tiny".
        arms: settings in which each arm differs from the base, by the arm's name.  An
            arm without settings is the base itself.
        seeds: of each arm.
        steps: optimizer steps of every run, unless `tokens` or `chip_hours` end it.
        tokens: budget of sampled tokens, without those of evaluations: a run ends with
            the first evaluation after it has used them.
        chip_hours: likewise, in chip-hours.
        common: settings in which all arms differ from the base's file.
        pairs: names of arms that are compared; empty: every arm with the first one.
        axis: x axis of the curves.
    """

    base: str
    arms: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]
    steps: int
    tokens: float = math.inf
    chip_hours: float = math.inf
    common: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pairs: Sequence[tuple[str, str]] = ()
    axis: Axis = "generated_tokens"

    @property
    def compared(self) -> list[tuple[str, str]]:
        """The pairs of arms that the report compares."""
        first, *others = self.arms
        return list(self.pairs) or [(first, other) for other in others]

    def changes(self, arm: str, seed: int) -> dict[str, Any]:
        """Return the settings of a run that replace those of the base's file."""
        own = {"seed": seed, "train.num_steps": self.steps}
        return {**self.common, **self.arms[arm], **own}


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run of a study."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """The folder of the run, below the study's."""
        return f"{self.arm}/seed{self.seed}"


def interleaved(study: Study) -> list[Planned]:
    """Return the runs of a study in the order in which they start.

    All arms of a seed come before the next seed, and each seed begins with another arm,
    so that a machine that becomes slower affects all arms alike.
    """
    arms = list(study.arms)
    return [
        Planned(arms[(place + turn) % len(arms)], seed)
        for turn, seed in enumerate(study.seeds)
        for place in range(len(arms))
    ]


def read_study(name: str) -> Study:
    """Read and check a study: the path of its file, or its name in `configs/studies`.

    A file in the working directory's `configs/studies` has precedence over the
    package's.

    Raises:
        ValueError: there is no such file, or its study cannot be run; the message names
            the field and the way out.
    """
    file = _file_of(name)
    study = _call(file, "get_study", what=f"study {file}")
    if not isinstance(study, Study):
        raise ValueError(
            f"study {file}: it has no function get_study that returns a "
            f"scalerl_jax.study.design.Study"
        )
    try:
        check(study)
    except ValueError as error:
        raise ValueError(f"study {file}: {error}") from error
    return study


def _file_of(name: str) -> Path:
    """Return the file of a study by its name or path."""
    here = Path(name) if name.endswith(".py") else _HERE / f"{name}.py"
    own = FOLDER / STUDIES / here.name
    for file in (here, own) if here.parent == _HERE else (here,):
        if file.is_file():
            return file
    files = sorted((FOLDER / STUDIES).glob("*.py"))
    known = [file.stem for file in files if "def get_study" in file.read_text()]
    raise ValueError(
        f"study {name}: there is no file {here}; the package has {', '.join(known)}, "
        f"and the path of any other can be given"
    )


def check(study: Study) -> dict[str, dict[str, Any]]:
    """Return the resolved settings of each arm, by name, with the first seed.

    Raises:
        ValueError: a field of the study, or a setting of an arm, is invalid.
    """
    _check_fields(study)
    settings = {arm: _resolved(study, arm) for arm in study.arms}
    for a, b in itertools.combinations(settings, 2):
        if settings[a] == settings[b]:
            raise ValueError(
                f"arms {a} and {b} differ in nothing: all their settings are equal; "
                f"give one of them another value, or leave it out"
            )
    for arm, more in _unsaid(study, settings):
        raise ValueError(
            f"arm {arm} differs from the base in more than it says: "
            f"{', '.join(more)}; name these settings in the arm, or in common"
        )
    _check_evaluations(settings)
    for arm, resolved in settings.items():
        if (stop := resolved["scaling.stop"]) != "never":
            raise ValueError(
                f"scaling.stop = {stop!r} of arm {arm} would end its runs before the "
                f"study's budget; leave it at 'never': study run --prune stops runs "
                f"that cannot catch up"
            )
        every = resolved["eval.every"]
        if (count := study.steps // every) < LEAST_EVALUATIONS:
            raise ValueError(
                f"steps = {study.steps} with eval.every = {every} of arm {arm} are "
                f"{count} evaluations, and a fit needs {LEAST_EVALUATIONS}; take more "
                f"steps, or evaluate more often"
            )
        rollouts = resolved["batch.num_prompts"] * resolved["batch.group_size"]
        if study.tokens < (least := LEAST_EVALUATIONS * every * rollouts):
            raise ValueError(
                f"tokens = {study.tokens:g} are sampled before the evaluation "
                f"{LEAST_EVALUATIONS} of arm {arm}, which a fit needs: {rollouts} "
                f"rollouts a step have {least:,} by then, of one token each; give more"
            )
    return settings


def _check_evaluations(settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError if arms are evaluated on different prompts, or differently.

    Without `eval.sets` the prompts are held out from those of `data.tasks`.
    """
    first, *others = settings
    held_out = () if settings[first]["eval.sets"] else ("data.tasks",)
    for other in others:
        for name in (*_EVALUATED, *held_out):
            values = [settings[arm][name] for arm in (first, other)]
            if values[0] != values[1]:
                way_out = ", or name eval.sets in common" if name in held_out else ""
                raise ValueError(
                    f"arms {first} and {other} are not evaluated alike: "
                    f"{name} = {values[0]!r} and {values[1]!r}; give both the same"
                    f"{way_out}"
                )


def _check_fields(study: Study) -> None:
    """Raise ValueError if names, seeds, budgets, pairs or the axis are invalid."""
    _check_forms(study)
    if not study.arms:
        raise ValueError("arms is empty; name one at least")
    for arm in study.arms:
        unusable = set(arm) & set("/\\\0\n") or len(arm.encode()) > _LONGEST_NAME
        if not arm or arm.startswith(".") or unusable:
            raise ValueError(f"arm {arm!r} cannot be the name of a folder; rename it")
    if not study.seeds or len(set(study.seeds)) < len(study.seeds):
        raise ValueError(
            f"seeds = {tuple(study.seeds)}: give at least one, and each one once"
        )
    for seed in study.seeds:
        config_lib.SETTINGS["seed"].check(seed, given=f"seed {seed} of seeds")
    if (count := len(study.arms) * len(study.seeds)) > _MOST_RUNS:
        raise ValueError(f"{count} runs; {_MOST_RUNS} are the most of one study")
    if study.axis not in get_args(Axis):
        raise ValueError(
            f"axis = {study.axis!r}; choose from {', '.join(get_args(Axis))}"
        )
    _check_budget(study)
    _check_pairs(study)


def _check_forms(study: Study) -> None:
    """Raise ValueError for a field of another type, since a study is a user's program.

    `steps` is checked as the setting that it is, and `axis` by its choices.
    """

    def is_named(values: Any) -> bool:
        named = isinstance(values, Mapping)
        return named and all(isinstance(name, str) for name in values)

    def is_list(values: Any, kind: type) -> bool:
        several = isinstance(values, Sequence) and not isinstance(values, str)
        return several and all(type(value) is kind for value in values)

    arms, pairs = study.arms, study.pairs
    several = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    forms = {
        "base": (isinstance(study.base, str), "the name or file of a config"),
        "arms": (
            is_named(arms) and all(map(is_named, arms.values())),
            "settings by the arm's name: {'base': {}, 'other': {'batch.epochs': 2}}",
        ),
        "common": (is_named(study.common), "settings by name: {'eval.every': 10}"),
        "seeds": (is_list(study.seeds, int), "whole numbers: (0, 1, 2)"),
        "steps": (type(study.steps) is int, "a whole number"),
        "tokens": (type(study.tokens) in (int, float), "a number"),
        "chip_hours": (type(study.chip_hours) in (int, float), "a number"),
        "pairs": (
            several and all(is_list(pair, str) and len(pair) == 2 for pair in pairs),
            "names of arms by twos: [('base', 'other')]",
        ),
    }
    for name, (holds, form) in forms.items():
        if not holds:
            raise ValueError(f"{name} = {getattr(study, name)!r} must be {form}")


def _check_budget(study: Study) -> None:
    """Raise ValueError for budgets of 0, and for arms that set the study's settings."""
    for name in ("steps", "tokens", "chip_hours"):
        if not getattr(study, name) > 0:
            raise ValueError(f"{name} = {getattr(study, name)}; it must be above 0")
    arms = {f"arm {arm}": values for arm, values in study.arms.items()}
    for where, values in {"common": study.common, **arms}.items():
        for name in _OWN.keys() & values.keys():
            raise ValueError(
                f"{where} sets {name}, which is the study's own; use {_OWN[name]}"
            )


def _check_pairs(study: Study) -> None:
    """Raise ValueError for pairs that are not of two arms."""
    for a, b in study.compared:
        if unknown := {a, b} - study.arms.keys():
            raise ValueError(
                f"pairs has {min(unknown)!r}, which is no arm; choose from "
                f"{list(study.arms)}"
            )
        if a == b:
            raise ValueError(f"pairs compares arm {a!r} with itself; name another one")


def _resolved(study: Study, arm: str) -> dict[str, Any]:
    """Resolve the settings of an arm, flat; errors name the arm."""
    try:
        config = load_base(study.base)
        config.update_from_flattened_dict(study.changes(arm, study.seeds[0]))
        return flatten(config_lib.to_json(config_lib.resolve(config)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = str(error.args[0] if error.args else error)
        raise ValueError(f"arm {arm}: {said}") from error


def _unsaid(
    study: Study, settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield arms that differ from the base in settings that they do not name."""
    config = load_base(study.base)
    config.update_from_flattened_dict(
        {**study.common, "seed": study.seeds[0], "train.num_steps": study.steps}
    )
    base = flatten(config_lib.to_json(config_lib.resolve(config)))
    for arm, resolved in settings.items():
        differing = {name for name in resolved if resolved[name] != base.get(name)}
        if more := sorted(differing - set(study.arms[arm])):
            yield arm, more


def load_base(base: str) -> ConfigDict:
    """Return the settings of a config file: "FILE" or "FILE:ARGUMENT".

    Raises:
        ValueError: there is no such file, or its get_config gives no ConfigDict.
    """
    try:
        name, _, argument = config_lib.find_config(base).partition(":")
    except ValueError as error:
        said = str(error).removeprefix(f"--config={base}: ")
        raise ValueError(f"base = {base}: {said}") from error
    words = [argument] if argument else []
    config = _call(Path(name), "get_config", *words, what=f"base = {base}")
    config_lib.check(config)
    return config


def _call(file: Path, function: str, *arguments: str, what: str) -> Any:
    """Run a user's Python file and call a function of it; None if it has no such one.

    Raises:
        ValueError: the file is too large, or fails.
    """
    config_lib.check_program(file, called=f"{what}: {file}")
    try:
        made = runpy.run_path(str(file)).get(function)
        return made(*arguments) if callable(made) else None
    except (Exception, SystemExit) as error:  # whatever a program does
        kind = type(error).__name__
        raise ValueError(f"{what} fails: {kind}: {first_line(error)}") from error
