"""Conditions of a verdict: runs that are independent, measured alike, over one window.

Runs that break a condition get no verdict, a warning, or a fit of the common window.
"""

import itertools
from collections.abc import Iterable, Sequence

from scalerl_jax.scaling.fit import quick_fit
from scalerl_jax.scaling.records import DEFAULT_X, Curve, CurveError, amount
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.run_settings import DIGESTS
from scalerl_jax.scaling.tables import unit_of

FEWEST_RUNS = 2  # of each recipe, for a winner
# Evaluations further than this many times the shortest run's end are not compared: of
# equal recipes that end 1.1, 1.25 and 2 times apart up to 13, 65 and 96 % had a winner
# (benchmarks/scaling.py --only=ends).
COMMON_END = 1.02
FAR_END = 1.25  # ranks of runs that end further apart get a warning
Names = tuple[str, str]
Runs = tuple[tuple[Fit, ...], tuple[Fit, ...]]


def copies(curves: Iterable[Curve]) -> str | None:
    """Return the names of two runs that have the same evaluations; None: none have.

    A copy of a run, or a second run that repeated all of its random draws, may end
    earlier; its compute may differ, as hours do.
    """
    for one, other in itertools.combinations(curves, 2):
        shorter = min(one.y.size, other.y.size)
        if (one.y[:shorter] == other.y[:shorter]).all():
            return f"{one.name or 'one run'} and {other.name or 'another'}"
    return None


def refuse_copies(curves: Iterable[Curve]) -> None:
    """Raise CurveError if two runs that are taken as seeds have equal evaluations."""
    found = copies(curves)
    if found is not None:
        raise CurveError(
            f"{found} have the same evaluations, as a run and its copy: they show no "
            "spread between seeds; leave one of them out"
        )


def measured_alike(
    runs: Runs, names: Names
) -> tuple[Runs, tuple[str, ...], str | None]:
    """Return the runs over one window, warnings, and why they cannot be compared."""
    cut, unlike = (), _incomparable(runs, names)  # a late fall is not cut away
    if unlike is None:
        runs, cut, unlike = _on_one_window(runs)
        unlike = unlike or _incomparable(runs, names)
    return runs, (*cut, *_different_measures(runs, names)), unlike


def _incomparable(runs: Runs, names: Names) -> str | None:
    """Return the reason why two recipes cannot be compared at all; None: they can."""
    recipes = list(zip(names, runs, strict=True))
    still = [name for name, fits in recipes if not all(fit.climbs for fit in fits)]
    if still:
        return f"not decided: {' and '.join(still)} does not climb"
    every = [fit.curve for fits in runs for fit in fits]
    if any(curve.is_wall_time for curve in every):
        return "not decided: chip-hours of a CPU are wall time; --x generated_tokens"
    for name, fits in recipes:
        found = copies(fit.whole_curve for fit in fits)
        if found is not None:
            return (
                f"not decided: {found} of {name} have the same evaluations, as a run "
                "and its copy; leave one of them out"
            )
    found = _other_prompts(every)
    if found is not None:
        return f"not decided: the runs are evaluated on different prompts: {found}"
    columns = _columns_of_y(every)
    if len(columns) > 1:
        return (
            f"not decided: y is {' in one run and '.join(columns[:2])} in another; "
            "columns that measure the same need one name"
        )
    return None


def too_few(runs: Runs, names: Names) -> str | None:
    """Return the verdict that a recipe has too few runs; None: both have enough."""
    single = [n for n, fits in zip(names, runs, strict=True) if len(fits) < FEWEST_RUNS]
    if len(single) == len(names):
        return "one run each: not decided"
    return f"not decided: there is one run of {single[0]}" if single else None


def _on_one_window(runs: Runs) -> tuple[Runs, tuple[str, ...], str | None]:
    """Return the runs, long ones fitted up to the end of the shortest.

    No law is exact, and the A that fits best depends on where the data end: of equal
    recipes the one that ran for longer, or for less, would win.

    Returns:
        The runs, a warning if some are cut, and why the recipes cannot be compared, if
        there are too few evaluations up to there.
    """
    ends = [fit.x_last for fits in runs for fit in fits]
    end = min(ends)
    if max(ends) <= COMMON_END * end:
        return runs, (), None
    try:
        first, second = (tuple(_up_to(fit, end) for fit in fits) for fits in runs)
    except CurveError as failure:
        return runs, (), f"not decided: the first run ends at {amount(end)}; {failure}"
    warning = (
        f"the runs end at {amount(end)} to {amount(max(ends))}, and A depends on where "
        f"the data end: all are compared by their fits up to {amount(end)}"
    )
    return (first, second), (warning,), None


def _up_to(fit: Fit, end: float) -> Fit:
    """Return the fit of a run's evaluations up to the end of another run."""
    if fit.x_last <= COMMON_END * end:
        return fit
    whole = fit.whole_curve
    name, before = whole.name or "a run", whole.x <= COMMON_END * end
    if not before.any():
        raise CurveError(
            f"{name} has no evaluation up to there, its first is at "
            f"{amount(whole.x[0])}; are both counted in one unit?"
        )
    try:
        return quick_fit(whole.part(before), fit.settings)
    except CurveError as failure:
        raise CurveError(f"{name} up to there: {failure}") from failure


def _different_measures(runs: Runs, names: Names) -> tuple[str, ...]:
    """Return warnings on what recipes differ in besides their curves."""
    found = []
    sources = [sorted({fit.initial_reward_source for fit in fits}) for fits in runs]
    if sources[0] != sources[1]:
        found.append(
            f"R0 is {' or '.join(sources[0])} for {names[0]} and "
            f"{' or '.join(sources[1])} for {names[1]}: A and B depend on it"
        )
    found += _different_axes([fit.curve for fits in runs for fit in fits])
    for name, fits in zip(names, runs, strict=True):
        kinds = len({fit.curve.recipe for fit in fits if fit.curve.recipe})
        if kinds > 1:
            found.append(
                f"runs of {name} are of {kinds} recipes, by their settings or their "
                "files, and are taken for one"
            )
        seeds = [fit.curve.seed for fit in fits if fit.curve.seed]
        again = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        if again:
            found.append(
                f"runs of {name} have one seed, {', '.join(again)}: they may differ "
                "less than runs of different seeds, and the spread would be too small"
            )
    return tuple(found)


def _different_axes(curves: Sequence[Curve]) -> tuple[str, ...]:
    """Return warnings on runs whose y, or whose hours, do not mean the same."""
    found = []
    sampled = _differing(curves, "sampling")
    if sampled is not None:
        found.append(f"the runs are evaluated differently: {sampled}")
    chips = sorted({curve.chip for curve in curves if curve.chip})
    if len(chips) > 1 and (curves[0].x_column or curves[0].x_name).endswith(DEFAULT_X):
        found.append(
            f"the hours are of different chips, {' and '.join(chips)}, whose work "
            "differs: --x generated_tokens or train_flops"
        )
    return tuple(found)


def unlike_ranks(fits: Sequence[Fit]) -> tuple[str, ...]:
    """Return warnings on ranks of runs that are not measured alike."""
    if not fits:
        return ()
    curves = [fit.curve for fit in fits]
    found = list(_different_axes(curves))
    columns = _columns_of_y(curves)
    if len(columns) > 1:
        found.append(f"runs of different y are ranked: {' and '.join(columns)}")
    prompts = _other_prompts(curves)
    if prompts is not None:
        found.append(f"runs evaluated on different prompts are ranked: {prompts}")
    ends = [fit.x_last for fit in fits]
    if max(ends) > FAR_END * min(ends):
        found.append(
            f"runs that end at {amount(min(ends))} to {amount(max(ends))} are ranked, "
            "and A depends on where the data end"
        )
    return tuple(found)


def _columns_of_y(curves: Sequence[Curve]) -> list[str]:
    """Return the names of y; two of them seldom mean the same."""
    return sorted({unit_of(curve.y_name) for curve in curves})


def _other_prompts(curves: Sequence[Curve]) -> str | None:
    """Return in what the prompts of evaluations differ; None: the same are asked."""
    digests = [curve.prompts.get(DIGESTS) for curve in curves]
    if not all(digests):
        return _differing(curves, "prompts")
    others = [c for c, d in zip(curves, digests, strict=True) if d != digests[0]]
    # The same prompts are the same, whatever their files are called.
    return _differing([curves[0], others[0]], "prompts") if others else None


def _differing(curves: Sequence[Curve], field: str) -> str | None:
    """Return the evaluations' settings in which runs differ, with two of the values."""
    known = [getattr(curve, field) for curve in curves if getattr(curve, field)]
    for name, value in known[0].items() if known else ():
        others = [each[name] for each in known if each.get(name, value) != value]
        if others:
            return f"{name} = {value!r} and {others[0]!r}"
    return None
