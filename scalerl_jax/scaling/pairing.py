"""Pairs of runs of one seed, which share the luck of that seed.

Where no run tells its seed, runs are paired by their order.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from scalerl_jax.scaling.records import CurveError
from scalerl_jax.scaling.result import Fit

FEWEST_SEEDS = 2  # that paired recipes share
PairedBy = Literal["seed", "order"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired:
    """Runs of several recipes, as many of each, those of one seed at one place."""

    runs: tuple[tuple[Fit, ...], ...]  # of each recipe
    by: PairedBy  # "order": no seed is known
    left_out: tuple[str, ...]  # names of runs whose seed not all recipes have

    @property
    def warnings(self) -> tuple[str, ...]:
        """A warning that names the runs without a partner, if there are some."""
        if not self.left_out:
            return ()
        names = "; ".join(self.left_out)
        return (f"paired by seed, so runs without a partner are left out: {names}",)


def pair(recipes: Sequence[tuple[str, Sequence[Fit]]]) -> Paired:
    """Pair the runs of two recipes or more, given with their names.

    Raises:
        CurveError: only some seeds are known, a recipe has two runs of one seed, fewer
            than two seeds are in all recipes; or, by order, the numbers differ.
    """
    fits = [fit for _, group in recipes for fit in group]
    unknown = [fit.curve.name or "a run" for fit in fits if not fit.curve.seed]
    if len(unknown) == len(fits):
        counts = {name: len(group) for name, group in recipes}
        if len({len(group) for _, group in recipes}) > 1:
            said = " and ".join(f"{count} of {name}" for name, count in counts.items())
            raise CurveError(
                f"paired runs are as many of each recipe, not {said}; leave pairing out"
            )
        return Paired(runs=tuple(tuple(g) for _, g in recipes), by="order", left_out=())
    if unknown:
        raise CurveError(
            f"paired runs need their seeds, and that of {'; '.join(unknown)} is not "
            f"known, but that of others is; leave pairing out"
        )
    by_seed = [_by_seed(name, group) for name, group in recipes]
    shared = [s for s in by_seed[0] if all(s in each for each in by_seed)]
    if len(shared) < FEWEST_SEEDS:
        said = "; ".join(
            f"{name}: {', '.join(found)}"
            for (name, _), found in zip(recipes, by_seed, strict=True)
        )
        raise CurveError(
            f"paired runs need {FEWEST_SEEDS} seeds or more that all recipes have, and "
            f"there are {len(shared)} ({said}); leave pairing out"
        )
    return Paired(
        runs=tuple(tuple(found[seed] for seed in shared) for found in by_seed),
        by="seed",
        left_out=tuple(f.curve.name for f in fits if f.curve.seed not in shared),
    )


def _by_seed(name: str, fits: Sequence[Fit]) -> Mapping[str, Fit]:
    """Return a recipe's runs by seed; raise CurveError if two have the same one."""
    found: dict[str, Fit] = {}
    for fit in fits:
        other = found.setdefault(fit.curve.seed, fit)
        if other is not fit:
            raise CurveError(
                f"{other.curve.name} and {fit.curve.name} of {name} have one seed, "
                f"{fit.curve.seed}, so it is not known which one to pair; leave one "
                f"of them out, or leave pairing out"
            )
    return found


def partners(fits: tuple[Fit, ...], of: Sequence[Fit]) -> tuple[Fit, ...] | None:
    """Return a further recipe's runs, ordered as paired ones; None: some are lacking.

    Runs that are all used in their own order are `fits` itself.
    """
    seeds = [fit.curve.seed for fit in of]
    if not all(seeds):
        return fits if len(fits) == len(seeds) else None
    found = {fit.curve.seed: fit for fit in fits}
    if len(found) < len(fits) or not found.keys() >= set(seeds):
        return None
    if list(found) == seeds:
        return fits
    return tuple(found[seed] for seed in seeds)
