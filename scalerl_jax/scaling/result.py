"""The result of a fit: numbers with units, intervals, verdict, predictions.

A `Fit` always says whether it converged and whether its asymptote is identified;
in JSON too.  `fit.py` makes it.
"""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.laws import LAWS, Law, log_compute
from scalerl_jax.scaling.records import Array, Curve, Interval, Parameter, Record
from scalerl_jax.scaling.search import Problem
from scalerl_jax.scaling.uncertainty import MeanCurve, mean_curve, student_quantile

LEAST_SPREAD = 1e-4  # of a pass rate, R (1 - R): one completion in 10,000 differs
LAST_POINTS = 3  # averaged for the last value: a single evaluation is noisier


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Choices of a fit."""

    law: str = "sigmoid"  # one of `laws.LAWS`
    # Pass rate at zero compute, exactly, or "free" to leave a point at x = 0 out.  By
    # default it is fitted, and such a point observes it.
    initial_reward: float | Literal["free"] | None = None
    fit_from: float | None = None  # points with 0 < x < fit_from are left out
    robust: bool = False  # Huber's loss, against single bad evaluations
    # "paper" searches the paper's grid, unweighted (`protocol.py`).
    protocol: Literal["default", "paper"] = "default"
    level: float = 0.9  # of the profile-likelihood intervals, in (0, 1)
    # Points weigh 1 / y_se^2.  Off by default: the errors that come with evaluations
    # are mostly those of the choice of prompts, which moves all points together.
    weighted: bool = False
    # Take the standard errors as exact; otherwise only their ratios count, and the
    # scatter around the fit sets their size.
    errors_known: bool = False

    @property
    def weighs(self) -> bool:
        """Return whether points weigh 1 / y_se^2; known errors do too."""
        return self.weighted or self.errors_known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast(Record):
    """The last evaluation, predicted from the first half of the compute."""

    fit_until: float  # compute of the last point that was fitted
    predicted: float  # pass rate
    actual: float  # pass rate
    error: float  # predicted - actual

    @classmethod
    def of(cls, fit_until: float, predicted: float, actual: float) -> "Forecast":
        """Return the forecast with its error."""
        until, actual = float(fit_until), float(actual)
        error = predicted - actual
        return cls(fit_until=until, predicted=predicted, actual=actual, error=error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit(Record):
    """The curve of one law that fits best.

    x is in the unit of `x_name`.  `parameters` are in the order of the law's formula;
    the properties `initial_reward`, `asymptote`, `exponent`, `midpoint` and their
    intervals name the sigmoid's.
    """

    law: str
    formula: str
    protocol: str
    x_name: str
    y_name: str
    x_last: float  # the compute that the data reach
    num_points: int  # fitted: without the zero-compute point
    num_left_out: int  # early points that were not fitted
    level: float  # of the intervals, 0.9 for 90 %
    parameters: dict[str, Parameter]

    converged: bool  # False: the numbers are where the search was stopped
    climbs: bool  # False when the curve falls or stays: no law here describes it
    flat: bool  # it stays: it climbs by no more than its noise explains
    climb_p_value: float  # share of constant curves that noise makes climb as much
    identified: bool  # the data bound A from above; else its interval's high is None
    bounded: bool  # a weaker claim: A = 1 is outside the interval, half the gain inside
    reason: str | None  # why A is not identified
    r_squared: float  # over the fitted points, without the zero-compute one
    sigma: float  # noise of one evaluation of average weight, in pass rate
    autocorrelation: float  # of neighbouring residuals; 0 is independent noise
    residual_p_value: float  # share of curves of the law whose noise correlates as much
    warnings: tuple[str, ...] = ()
    r0_free: "Fit | None" = None  # the fit with R0 free, if there are enough points
    half_forecast: Forecast | None = None  # None: too few points, or they fall

    settings: Settings = dataclasses.field(repr=False)
    curve: Curve = dataclasses.field(repr=False)  # the points that were fitted
    whole_curve: Curve = dataclasses.field(repr=False)  # with those left out
    problem: Problem = dataclasses.field(repr=False)  # what was minimised
    theta: Array = dataclasses.field(repr=False)  # [4] R0, A, u, v of `laws.Law`
    cost: float = dataclasses.field(repr=False)  # the objective at theta
    unit_growth: float = dataclasses.field(repr=False)  # of the cost, for one sigma
    degrees: int | None = dataclasses.field(repr=False)  # n - p; None: errors known
    accepted: Array = dataclasses.field(repr=False)  # [K, 4] fits within `level`

    # The sigmoid's parameters by words: floats, and intervals.
    initial_reward = property(lambda self: self.value("R0"), doc="R0, in [0, 1].")
    asymptote = property(lambda self: self.value("A"), doc="A, in [0, 1].")
    exponent = property(lambda self: self.value("B"), doc="B.")
    midpoint = property(lambda self: self.value("C_mid"), doc="C_mid, in x's unit.")
    # Its high is None if A is not identified.
    asymptote_interval = property(lambda self: self.interval("A"), doc="Interval.")
    exponent_interval = property(lambda self: self.interval("B"), doc="Interval.")
    midpoint_interval = property(lambda self: self.interval("C_mid"), doc="Interval.")

    @property
    def initial_reward_source(self) -> str:
        """Source of R0: measured, given, or free (fitted)."""
        source = self.parameters["R0"].source
        return "free" if source == "fitted" else source

    @property
    def num_means(self) -> int:
        """Number of fitted points: means of bins (`bins.py`), or single evaluations."""
        return self.problem.t.size - self.problem.observes_zero

    @property
    def definition(self) -> Law:
        """The law itself."""
        return LAWS[self.law]

    def value(self, name: str) -> float:
        """Return a parameter's value.

        Raises:
            ValueError: the law has no such parameter; the message lists its own.
        """
        if name not in self.parameters:
            raise ValueError(
                f"the law {self.law!r} has no parameter {name!r}; it has "
                f"{', '.join(self.parameters)}"
            )
        return self.parameters[name].value

    def interval(self, name: str) -> Interval:
        """Return a parameter's interval; its value twice when it was not fitted."""
        value = self.value(name)
        return self.parameters[name].interval or Interval(value, value)

    def public(self, theta: Array) -> dict[str, Array]:
        """Return the law's parameters [K] by name, of rows theta [K, 4]."""
        values = self.definition.values(theta, float(np.log(self.x_last)))
        return dict(zip(self.parameters, values.T, strict=True))

    def _log_share(self, x: ArrayLike) -> Array:
        """Return log(x / x_last) [n] of compute of any shape."""
        return np.atleast_1d(log_compute(x)).ravel() - np.log(self.x_last)

    def curves(self, theta: Array, x: ArrayLike) -> Array:
        """Return the pass rates at x [n] by parameter rows theta [K, 4]: [K, n]."""
        return self.definition.rates(theta, self._log_share(x))

    def predict(self, x: ArrayLike) -> Array:
        """Return the pass rate at compute x, in the shape of x."""
        return self.curves(self.theta[None], x)[0].reshape(np.shape(x))

    def residuals(self, x: ArrayLike, y: ArrayLike) -> Array:
        """Return measured minus predicted pass rate, in the shape of x."""
        return np.asarray(y, np.float64) - self.predict(x)

    def forecast(self, x: ArrayLike) -> Array:
        """Return the mean pass rate at x over all curves of the law, by likelihood.

        In the shape of x.  `predict` gives the best curve, which is the same where the
        noise leaves little choice; on few or noisy evaluations the mean is the better
        guess.  The forecast of a flat curve is its last value.  The paper's protocol
        has the best curve only.
        """
        if self.flat:
            return np.full(np.shape(x), self.curve.y[-LAST_POINTS:].mean())
        if self.protocol == "paper":
            return self.predict(x)
        rates = self.mean_curve.rates(self._log_share(x))
        return np.clip(rates, 0.0, 1.0).reshape(np.shape(x))

    @functools.cached_property
    def mean_curve(self) -> MeanCurve:
        """The mean of all curves of the law."""
        return mean_curve(
            self.problem,
            self.theta,
            known=self.sigma if self.degrees is None else None,
            thinning=max(self.unit_growth / self.sigma**2, 1.0),
        )

    def band(self, x: ArrayLike) -> tuple[Array, Array]:
        """Return the lowest and highest pass rate at x among the accepted fits.

        The profile-likelihood interval of the curve at each x, in [0, 1] and in the
        shape of x.  It bounds the curve; single noisy evaluations scatter around that
        by `sigma` (`prediction_band`).
        """
        curves = np.clip(self.curves(self.accepted, x), 0.0, 1.0)
        shape = np.shape(x)
        return curves.min(axis=0).reshape(shape), curves.max(axis=0).reshape(shape)

    def forecast_band(self, x: ArrayLike) -> tuple[Array, Array]:
        """Return `band` at x, wider where the forecast lies outside of it.

        Many curves that are each unlikely may move the mean beyond the likely ones.
        """
        (low, high), middle = self.band(x), self.forecast(x)
        return np.minimum(low, middle), np.maximum(high, middle)

    def prediction_band(self, x: ArrayLike) -> tuple[Array, Array]:
        """Return the range in [0, 1] that holds an evaluation at x with chance `level`.

        It adds noise to `band`: the distances of the band's edges from the curve and
        the noise's quantile add up in squares, as independent errors do.
        """
        middle = self.predict(x)
        noise = self._noise_reach(middle)
        low, high = self.band(x)
        return (
            np.maximum(middle - np.hypot(middle - low, noise), 0.0),
            np.minimum(middle + np.hypot(high - middle, noise), 1.0),
        )

    def _noise_reach(self, rates: Array) -> Array:
        """Return the reach of evaluation noise at these pass rates, at `level`.

        It is the noise's quantile; for a robust loss, it is at least the quantile of
        the residuals with outliers, as the next evaluation may be one.  A pass rate R
        of n completions has the variance R (1 - R) / n: where that is larger than the
        average of the fitted points, the noise grows by the ratio.
        """
        reach = self.sigma * student_quantile(self.level, self.degrees)
        if self.problem.huber is not None:
            z = np.abs(self.problem.scaled_residuals(self.theta[None])[0])
            spare = z.size - len(self.problem.free)
            seen = float(np.quantile(z, self.level)) * np.sqrt(z.size / spare)
            reach = max(reach, seen)
        spread = rates * (1.0 - rates)
        seen = self.predict(self.curve.x)
        seen = np.maximum(seen * (1.0 - seen), LEAST_SPREAD)
        # sigma is of a point of average weight: that of the mean precision.
        usual = 1.0 / np.mean(1.0 / seen) if self.settings.weighs else np.mean(seen)
        return reach * np.sqrt(np.maximum(spread / usual, 1.0))

    def to_record(self) -> dict[str, Any]:
        """Return the fit as a dict of JSON values.

        Besides `parameters`, every parameter is at the top level as NAME, NAME_low and
        NAME_high; limits that the data do not set are None.  A curve whose points are
        binned also has `n_means`.
        """
        record = super().to_record()
        record["n_points"] = record.pop("num_points")
        if self.problem.whole is not None:
            record["n_means"] = self.num_means
        for name, parameter in record["parameters"].items():
            interval = parameter["interval"] or {"low": None, "high": None}
            record[name] = parameter["value"]
            record |= {f"{name}_{end}": limit for end, limit in interval.items()}
        if "R0" in self.parameters:
            record["R0_source"] = self.initial_reward_source
        return record
