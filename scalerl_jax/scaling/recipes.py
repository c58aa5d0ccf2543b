"""Which runs are of one recipe: those that differ in their seeds alone."""

import os
import re
from collections.abc import Collection, Mapping, Sequence

from scalerl_jax.scaling.result import Fit


def group_runs(
    fits: Mapping[str, Fit], *, second: Collection[str] = ()
) -> dict[str, tuple[Fit, ...]]:
    """Return the runs of each recipe, under what their names begin with alike.

    Args:
        fits: by name of run.
        second: names of the runs of the second recipe, where there are two: all others
            are of the first.
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


def _alike(names: Sequence[str]) -> str:
    """Return what names of runs begin with alike, without a seed's first digits."""
    start = os.path.commonprefix(list(names))
    if any(name[len(start) :][:1].isdigit() for name in names):
        start = start.rstrip("0123456789")
    return re.sub(r"[\W_]*(seed|run|trial)?[\W_]*$", "", start)
