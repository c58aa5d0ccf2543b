"""Early stopping of hopeless runs, by comparison with finished runs of the same seed.

A run is stopped if its forecast for the end is below what a finished run reached, by
more than the bands of both and the spread between runs of one recipe explain.  A curve
that falls has no forecast, so that no run is stopped for or by it.
`replay` computes what that would have saved, and how often it would have been wrong.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from scalerl_jax.scaling.differences import RUN_SD, RecipeSample, difference
from scalerl_jax.scaling.fit import quick_fit
from scalerl_jax.scaling.records import Curve, CurveError, Record
from scalerl_jax.scaling.result import LAST_POINTS, Fit, Settings

LEVEL = 0.99  # of one check; a run is checked several times
FROM_SHARE = 0.25  # share of a run's compute from which it is checked
FEWEST = 8  # evaluations from which a run is checked
MOST_LOOKS = 8  # checks of one run in a replay


def cannot_reach(
    curve: Curve,
    finished: Mapping[str, Fit],
    end: float,
    *,
    run_sd: float = RUN_SD,
) -> str | None:
    """Return the finished run that a run will not reach by `end`; None: it may.

    The finished run's curve at `end`, or its last evaluations if they are lower, and
    the forecast are compared as two recipes with one run each; the run cannot reach the
    other if the interval of the difference is above 0.  A run that falls is left out.

    Args:
        curve: of the run under way.
        finished: fits by `fit_to_judge` of finished runs with the same seed, by name.
        end: compute at which the run would end.
        run_sd: between runs of one recipe.
    """
    if curve.x.size < FEWEST or curve.x[-1] < FROM_SHARE * end:
        return None
    fit = fit_to_judge(curve)
    if fit is None or _falls(fit):
        return None
    best: tuple[float, str] | None = None
    for name, other in finished.items():
        if _falls(other):
            continue
        reached = _foretold(other, end, most=_last(other.whole_curve))
        found = difference(reached, _foretold(fit, end), level=LEVEL, run_sd=run_sd)
        if found.sign > 0:
            best = max(best or (0.0, name), (found.value, name))
    return best[1] if best else None


def fit_to_judge(curve: Curve) -> Fit | None:
    """Fit a curve at the level of a check, or return None if it cannot be fitted."""
    try:
        return quick_fit(curve, Settings(level=LEVEL))
    except CurveError:
        return None


def _falls(fit: Fit) -> bool:
    return not (fit.climbs or fit.flat)


def _foretold(fit: Fit, end: float, *, most: float = 1.0) -> RecipeSample:
    """Return the forecast rate of a curve at `end`, cut at `most`, and its band."""
    value = min(float(fit.forecast(end)), most)
    low, high = (float(each) for each in fit.band(end))
    reach = [[max(value - low, 0.0), max(high - value, 0.0)]]
    return RecipeSample(np.array([value]), np.array(reach))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopped(Record):
    """A run that would have been stopped."""

    arm: str
    seed: int
    at: float  # share of its compute
    behind: str  # arm of the finished run that it could not reach
    wrong: bool  # it ended no lower than that run
    lost: float  # pass rate by which it ended higher; 0 where it did not


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayedStudy(Record):
    """The effect that stopping hopeless runs would have had on a complete study."""

    num_runs: int
    saved: float  # share of the compute of all runs
    stopped: tuple[Stopped, ...]


def replay(
    runs: Sequence[tuple[str, int, Curve]],
    *,
    run_sd: float = RUN_SD,
) -> ReplayedStudy:
    """Replay `cannot_reach` on finished runs, one after the other.

    Args:
        runs: arm, seed and whole curve, in the order in which they were started.
    """
    stopped: list[Stopped] = []
    done: dict[int, dict[str, Fit]] = {}
    total = saved = 0.0
    for arm, seed, curve in runs:
        finished = done.setdefault(seed, {})
        end, found = float(curve.x[-1]), None
        for count in _looks(curve):
            seen = curve.part(np.arange(curve.x.size) < count)
            behind = cannot_reach(seen, finished, end, run_sd=run_sd)
            if behind is not None:
                gain = _last(curve) - _last(finished[behind].curve)
                at = float(seen.x[-1]) / end
                found = Stopped(
                    arm=arm,
                    seed=seed,
                    at=at,
                    behind=behind,
                    wrong=gain >= 0.0,
                    lost=max(gain, 0.0),
                )
                break
        total += end
        if found is None:
            fit = fit_to_judge(curve)
            finished |= {} if fit is None else {arm: fit}
        else:
            stopped.append(found)
            saved += (1.0 - found.at) * end
    return ReplayedStudy(
        num_runs=len(runs),
        saved=saved / total if total else 0.0,
        stopped=tuple(stopped),
    )


def _looks(curve: Curve) -> list[int]:
    """Return the numbers of evaluations after which a run is checked."""
    first = int(np.searchsorted(curve.x, FROM_SHARE * curve.x[-1])) + 1
    first = max(first, FEWEST)
    counts = np.linspace(first, curve.x.size - 1, MOST_LOOKS).astype(int)
    return sorted(set(counts.tolist())) if first < curve.x.size else []


def _last(curve: Curve) -> float:
    return float(curve.y[-LAST_POINTS:].mean())
