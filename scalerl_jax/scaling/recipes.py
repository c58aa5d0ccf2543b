"""Grouping of runs into recipes, and the choice of recipes to compare.

Runs of one recipe differ only in their seeds.
"""

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence

from scalerl_jax.scaling.compare import (
    Comparison,
    Recipe,
    RunTable,
    compare,
    compare_many,
    spread_between,
)
from scalerl_jax.scaling.differences import RUN_SD
from scalerl_jax.scaling.identifiability import ASYMPTOTE_MARGIN
from scalerl_jax.scaling.records import Curve
from scalerl_jax.scaling.result import Fit

MOST_PAIRED = 4  # recipes that are all compared pairwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """All runs by rank, and their recipes compared pairwise."""

    runs: RunTable
    pairs: tuple[Comparison, ...]
    num_left_out: int  # pairs beyond the limit, which were not compared


def compare_recipes(
    fits: Mapping[str, Fit],
    recipes: Mapping[str, Sequence[Fit]],
    *,
    margin: float = ASYMPTOTE_MARGIN,
    run_sd: float | None = None,
    paired: bool = False,
    most_pairs: int | None = None,
) -> Compared:
    """Compare a few recipes pairwise, and many with the recipe of the best run.

    Args:
        fits: by name of run.
        recipes: the same runs, as `group_runs` returns them.
        margin: as in `compare`, like the next two.
        most_pairs: largest number of pairs compared: those next to the best.
    """
    every = {name: Recipe(tuple(group)) for name, group in recipes.items()}
    runs = rank(fits, recipes, margin=margin, run_sd=run_sd)
    recipe_of = {id(fit): name for name, group in recipes.items() for fit in group}
    best, *others = dict.fromkeys(recipe_of[id(row.fit)] for row in runs.rows)
    pairs = [(best, other) for other in others]
    if len(recipes) <= MOST_PAIRED:
        pairs = list(itertools.combinations(recipes, 2))
    found = tuple(
        compare(
            recipes[a],
            recipes[b],
            names=(a, b),
            margin=margin,
            run_sd=run_sd,
            paired=paired,
            # The best one was chosen among all, so all pairs share the error.
            num_pairs=math.comb(len(recipes), 2),
            others=[each for name, each in every.items() if name not in (a, b)],
        )
        for a, b in pairs[:most_pairs]
    )
    return Compared(runs=runs, pairs=found, num_left_out=len(pairs) - len(found))


def rank(
    fits: Mapping[str, Fit],
    recipes: Mapping[str, Sequence[Fit]],
    *,
    margin: float = ASYMPTOTE_MARGIN,
    run_sd: float | None = None,
) -> RunTable:
    """Rank runs by A, allowing for a spread between runs of one recipe.

    By default the spread is estimated from recipes with several runs; if there are
    none, it is ScaleRL's.
    """
    if run_sd is None:
        run_sd = spread_between(Recipe(tuple(group)) for group in recipes.values())
    spread = RUN_SD if run_sd is None else run_sd
    return compare_many(fits, margin=margin, run_sd=spread)


def group_runs(
    fits: Mapping[str, Fit], *, second: Collection[str] = ()
) -> dict[str, tuple[Fit, ...]]:
    """Return the runs of each recipe, keyed by the common start of their names.

    Args:
        fits: by name of run.
        second: names of the second recipe's runs, if there are two recipes; all other
            runs are of the first.
    """
    groups: dict[str, list[str]] = {}
    for name, fit in fits.items():
        recipe = fit.curve.recipe or f"run {name}"
        if second:
            recipe = "second" if name in second else "first"
        groups.setdefault(recipe, []).append(name)
    found: dict[str, tuple[Fit, ...]] = {}
    for names in groups.values():
        alike = _alike(names)
        taken = alike in ("", *fits, *found)
        title = names[0] if len(names) == 1 or taken else alike
        found[title] = tuple(fits[name] for name in names)
    return found


def seeds_of(curves: Mapping[str, Curve]) -> dict[str, list[str]]:
    """Return the names of runs by recipe, for runs that are taken as seeds.

    All are of one recipe, called "", unless their files name several.
    """
    groups: dict[str, list[str]] = {}
    for name, curve in curves.items():
        groups.setdefault(curve.recipe or "", []).append(name)
    if len(groups) < 2:
        return {"": list(curves)}
    titles = {key: _alike(names) or names[0] for key, names in groups.items()}
    if len(set(titles.values())) < len(titles):
        titles = {key: names[0] for key, names in groups.items()}
    return {titles[key]: names for key, names in groups.items()}


def _alike(names: Sequence[str]) -> str:
    """Return the common start of runs' names, without a seed's first digits."""
    start = os.path.commonprefix(list(names))
    if any(name[len(start) :][:1].isdigit() for name in names):
        start = start.rstrip("0123456789")
    return re.sub(r"[\W_]*(seed|run|trial)?[\W_]*$", "", start)
