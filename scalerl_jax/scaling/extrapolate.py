"""The extrapolation test: fit the first part of a curve, predict the rest.

Laws are chosen by this held-out error, never by R^2: every law here that has three
parameters bends through the points it was fitted to.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.curves import Curve, CurveError, make_curve
from scalerl_jax.scaling.fit import (
    check_settings,
    fit_alone,
    fit_curve,
    keep_from,
)
from scalerl_jax.scaling.laws import LAWS
from scalerl_jax.scaling.records import Record
from scalerl_jax.scaling.result import Fit, Settings

LAST_VALUE = "last_value"
DEFAULT_FRACTIONS = (0.25, 0.33, 0.5)
LAST_POINTS = 3  # whose mean is the last value: one alone has all of its noise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction(Record):
    """How well one law, fitted to the first part of the compute, foretells the rest.

    Errors are predicted minus measured pass rates over the held-out points; None
    where the law could not be fitted, for the `reason` given.
    """

    law: str
    fraction: float  # of the last compute that the fit may see
    fit_until: float  # compute of the last point that was fitted
    num_fitted: int
    num_held_out: int
    mean_absolute_error: float | None
    root_mean_square_error: float | None
    mean_error: float | None  # > 0: too hopeful
    last_predicted: float | None  # pass rate at the last evaluation
    last_actual: float
    last_error: float | None
    share_in_band: float | None  # of held-out points in the prediction band
    identified: bool
    reason: str | None  # why not identified, or not fitted
    fit: Fit | None = dataclasses.field(repr=False, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extrapolation(Record):
    """The table of predictions and the law that the held-out error chooses."""

    x_name: str
    y_name: str
    fractions: tuple[float, ...]
    laws: tuple[str, ...]  # with "last_value" at the end
    predictions: tuple[Prediction, ...]  # by fraction, then law
    # Fractions that every law could be fitted to, if it could be to any: the ranking
    # goes by these, as a smaller part is harder to foretell from.
    ranked_on: tuple[float, ...]
    best_law: str | None  # least mean absolute error, averaged over `ranked_on`
    mean_errors: dict[str, float | None]  # that average; None: fitted to no fraction
    beats_last_value: bool  # the best law is better than the last value
    curve: Curve = dataclasses.field(repr=False)

    def get(self, law: str, fraction: float) -> Prediction:
        """One prediction of the table."""
        for prediction in self.predictions:
            if (prediction.law, prediction.fraction) == (law, fraction):
                return prediction
        raise ValueError(
            f"no prediction of law {law!r} from fraction {fraction:g}; laws: "
            f"{list(self.laws)}, fractions: {list(self.fractions)}"
        )


def extrapolate(
    x: ArrayLike,
    y: ArrayLike,
    *,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    laws: Sequence[str] = tuple(LAWS),
    settings: Settings | None = None,
    standard_errors: ArrayLike | None = None,
) -> Extrapolation:
    """Fit each law on the first fractions of the compute, and predict the rest.

    Args:
        x: [n] compute, increasing; a first value of 0 measures R0.
        y: [n] pass rates in [0, 1].
        fractions: shares of the last compute; the paper fits on a half.
        laws: names out of `LAWS`.
        settings: of the fits, besides the law.
        standard_errors: [n] of y, as weights.
    """
    curve = make_curve(x, y, y_se=standard_errors)
    settings = settings or Settings()
    if standard_errors is not None:
        settings = dataclasses.replace(settings, weighted=True)
    return extrapolate_curve(curve, fractions=fractions, laws=laws, settings=settings)


def extrapolate_curve(
    curve: Curve,
    *,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    laws: Sequence[str] = tuple(LAWS),
    settings: Settings | None = None,
) -> Extrapolation:
    """`extrapolate`, for a curve that is already checked."""
    settings = settings or Settings()
    for fraction in fractions:
        if not 0 < fraction < 1:
            raise CurveError(
                f"fractions: {fraction:g} is not in (0, 1); give shares of the "
                "compute, such as 0.25 0.33 0.5"
            )
    used = keep_from(curve, settings.fit_from)
    unsaid = dataclasses.replace(settings, fit_from=None)
    predictions = tuple(
        _predict(used, fraction, law, unsaid)
        for fraction in fractions
        for law in (*laws, LAST_VALUE)
    )
    if all(prediction.fit is None for prediction in predictions):
        raise CurveError(
            f"no law can be fitted to {100 * max(fractions):.0f} % of the compute or "
            f"less: {predictions[-2].reason}"
        )
    ranked_on = _fractions_of_all(predictions, fractions, laws)
    errors = {
        law: _mean_error(predictions, law, ranked_on) for law in (*laws, LAST_VALUE)
    }
    rated = {law: error for law, error in errors.items() if error is not None}
    candidates = [law for law in laws if law in rated]
    best = min(candidates, key=rated.__getitem__) if candidates else None
    return Extrapolation(
        x_name=curve.x_name,
        y_name=curve.y_name,
        fractions=tuple(fractions),
        laws=(*laws, LAST_VALUE),
        predictions=predictions,
        ranked_on=ranked_on,
        best_law=best,
        mean_errors=errors,
        beats_last_value=best is not None
        and rated[best] < rated.get(LAST_VALUE, np.inf),
        curve=used,
    )


def _fractions_of_all(
    predictions: Sequence[Prediction], fractions: Sequence[float], laws: Sequence[str]
) -> tuple[float, ...]:
    """The fractions to which all laws that fit any were fitted."""
    fitted = {(p.law, p.fraction) for p in predictions if p.fit is not None}
    usable = [law for law in laws if any((law, f) in fitted for f in fractions)]
    return tuple(f for f in fractions if all((law, f) in fitted for law in usable))


def _mean_error(
    predictions: Sequence[Prediction], law: str, fractions: Sequence[float]
) -> float | None:
    """Mean absolute error of a law over these fractions; None if it was not fitted."""
    found = {p.fraction: p.mean_absolute_error for p in predictions if p.law == law}
    errors = [error for f in fractions if (error := found[f]) is not None]
    return float(np.mean(errors)) if errors else None


def _fit(curve: Curve, settings: Settings) -> Fit:
    """The fit without its companions, which the table has no use for."""
    check_settings(settings)
    if settings.protocol == "paper":
        return fit_curve(curve, settings)
    return fit_alone(curve, settings)


def _predict(curve: Curve, fraction: float, law: str, settings: Settings) -> Prediction:
    """One cell of the table."""
    seen = curve.x <= fraction * curve.x[-1]
    num_seen = int(seen.sum())
    fit: Fit | None = None
    predicted, share = None, None
    reason: str | None = None
    if law == LAST_VALUE:
        if num_seen:
            last = curve.y[seen][-LAST_POINTS:].mean()
            predicted = np.full(int((~seen).sum()), last)
    else:
        first = curve.part(seen)
        try:
            if not num_seen:
                raise CurveError(f"no point up to {fraction:g} of the compute")
            fit = _fit(first, dataclasses.replace(settings, law=law))
        except CurveError as failure:
            reason = str(failure)
        else:
            reason = fit.reason
            predicted = fit.forecast(curve.x[~seen])
            low, high = fit.prediction_band(curve.x[~seen])
            inside = (low <= curve.y[~seen]) & (curve.y[~seen] <= high)
            share = float(inside.mean())
    errors = None if predicted is None else predicted - curve.y[~seen]
    return Prediction(
        law=law,
        fraction=fraction,
        fit_until=float(curve.x[seen][-1]) if num_seen else 0.0,
        num_fitted=num_seen,
        num_held_out=int((~seen).sum()),
        mean_absolute_error=None if errors is None else float(np.abs(errors).mean()),
        root_mean_square_error=None
        if errors is None
        else float(np.sqrt((errors**2).mean())),
        mean_error=None if errors is None else float(errors.mean()),
        last_predicted=None if predicted is None else float(predicted[-1]),
        last_actual=float(curve.y[-1]),
        last_error=None if errors is None else float(errors[-1]),
        share_in_band=share,
        identified=fit is not None and fit.identified,
        reason=reason,
        fit=fit,
    )
