"""The result of a fit: numbers with units, intervals, verdict, predictions.

A `Fit` always says whether it converged and whether its asymptote is identified;
in JSON too.  How it came about is in `fit.py`.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.curves import Curve
from scalerl_jax.scaling.laws import LAWS, Array, Law, log_compute
from scalerl_jax.scaling.records import Interval, Record, to_plain
from scalerl_jax.scaling.search import Problem

if TYPE_CHECKING:
    from scalerl_jax.scaling.averaging import MeanCurve

Source = Literal["fitted", "measured", "given", "held"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to fit.  Limits and meanings: `scalerl_jax.scaling.fit`."""

    law: str = "sigmoid"
    initial_reward: float | Literal["free"] | None = None
    fit_from: float | None = None
    robust: bool = False
    protocol: Literal["default", "paper"] = "default"
    level: float = 0.9
    weighted: bool = False
    errors_known: bool = False

    @property
    def weighs(self) -> bool:
        """Points weigh 1 / y_se^2; known errors do too."""
        return self.weighted or self.errors_known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter(Record):
    """One parameter of a law, with its unit and interval."""

    name: str  # "A"
    meaning: str  # "asymptotic pass rate"
    unit: str  # "pass rate", "compute_chip_hours", "" for a plain number
    value: float
    interval: Interval | None  # None: not fitted
    source: Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast(Record):
    """The last evaluation, predicted from the first half of the compute."""

    fit_until: float  # compute of the last point that was fitted
    predicted: float  # pass rate
    actual: float  # pass rate
    error: float  # predicted - actual


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
    reason: str | None  # why not
    r_squared: float  # over the fitted points, without the zero-compute one
    sigma: float  # noise of one evaluation of average weight, in pass rate
    autocorrelation: float  # of neighbouring residuals; 0 is independent noise
    residual_p_value: float  # share of curves of the law whose noise correlates as much
    warnings: tuple[str, ...] = ()
    r0_free: "Fit | None" = None  # the same with R0 free, where n allows
    half_forecast: Forecast | None = None  # None: too few points, or they fall

    settings: Settings = dataclasses.field(repr=False)
    curve: Curve = dataclasses.field(repr=False)  # the points that were fitted
    whole_curve: Curve = dataclasses.field(repr=False)  # and those left out
    problem: Problem = dataclasses.field(repr=False)  # what was minimised
    theta: Array = dataclasses.field(repr=False)  # [4] R0, A, u, v of `laws.Law`
    cost: float = dataclasses.field(repr=False)  # the objective at theta
    unit_growth: float = dataclasses.field(repr=False)  # of it, for one sigma
    degrees: int | None = dataclasses.field(repr=False)  # n - p; None: errors known
    accepted: Array = dataclasses.field(repr=False)  # [K, 4] as likely as `level` asks

    @property
    def definition(self) -> Law:
        """The law itself."""
        return LAWS[self.law]

    def curves(self, theta: Array, x: ArrayLike) -> Array:
        """Pass rates at x [n] by the parameter rows theta [K, 4]: [K, n]."""
        t = np.atleast_1d(log_compute(x)).ravel() - np.log(self.x_last)
        share = self.definition.share(t, theta[:, 2, None], theta[:, 3, None])
        return theta[:, 0, None] + (theta[:, 1, None] - theta[:, 0, None]) * share

    def predict(self, x: ArrayLike) -> Array:
        """Pass rate at compute x, in the shape of x."""
        return self.curves(self.theta[None], x)[0].reshape(np.shape(x))

    def forecast(self, x: ArrayLike) -> Array:
        """Mean pass rate at x over all curves of the law, by their likelihood.

        In the shape of x.  `predict` is the best curve, and the same where noise leaves
        little choice; on few or noisy evaluations this is the better guess.  The
        paper's protocol knows the best curve only.
        """
        if self.protocol == "paper":
            return self.predict(x)
        t = np.atleast_1d(log_compute(x)).ravel() - np.log(self.x_last)
        return np.clip(self.mean_curve.rates(t), 0.0, 1.0).reshape(np.shape(x))

    @functools.cached_property
    def mean_curve(self) -> "MeanCurve":
        """The mean of all curves of the law (`averaging.py`)."""
        from scalerl_jax.scaling.averaging import mean_curve

        return mean_curve(
            self.problem,
            self.theta,
            known=self.sigma if self.degrees is None else None,
            thinning=max(self.unit_growth / self.sigma**2, 1.0),
        )

    def residuals(self, x: ArrayLike, y: ArrayLike) -> Array:
        """Measured minus predicted pass rate, in the shape of x."""
        return np.asarray(y, np.float64) - self.predict(x)

    def band(self, x: ArrayLike) -> tuple[Array, Array]:
        """Lowest and highest pass rate at x, in [0, 1], among the accepted fits.

        The profile-likelihood interval of the curve at each x, each in the shape of
        x.  It bounds the curve; single noisy evaluations scatter around that by
        `sigma` (`prediction_band`).
        """
        curves = np.clip(self.curves(self.accepted, x), 0.0, 1.0)
        shape = np.shape(x)
        return curves.min(axis=0).reshape(shape), curves.max(axis=0).reshape(shape)

    def prediction_band(self, x: ArrayLike) -> tuple[Array, Array]:
        """Where in [0, 1] an evaluation at x falls with probability `level`.

        `band` and noise: the distances of the band's edges from the curve and the
        noise's quantile add up in squares, as independent errors do.
        """
        from scalerl_jax.scaling.uncertainty import student_quantile

        noise = self.sigma * student_quantile(self.level, self.degrees)
        middle = self.predict(x)
        low, high = self.band(x)
        return (
            np.maximum(middle - np.hypot(middle - low, noise), 0.0),
            np.minimum(middle + np.hypot(high - middle, noise), 1.0),
        )

    def public(self, theta: Array) -> dict[str, Array]:
        """The law's parameters of rows theta [K, 4], by name: [K] each."""
        values = self.definition.public(theta, float(np.log(self.x_last)))
        return dict(zip(self.parameters, values.T, strict=True))

    def value(self, name: str) -> float:
        """A parameter's value; a name that the law lacks is answered with its own."""
        if name not in self.parameters:
            raise ValueError(
                f"the law {self.law!r} has no parameter {name!r}; it has "
                f"{', '.join(self.parameters)}"
            )
        return self.parameters[name].value

    def interval(self, name: str) -> Interval:
        """A parameter's interval; its value twice when it was not fitted."""
        value = self.value(name)
        return self.parameters[name].interval or Interval(value, value)

    @property
    def initial_reward(self) -> float:
        """R0."""
        return self.value("R0")

    @property
    def initial_reward_source(self) -> str:
        """measured, given, or free (fitted)."""
        source = self.parameters["R0"].source
        return "free" if source == "fitted" else source

    @property
    def initial_reward_free(self) -> bool:
        """True when R0 was fitted, False when it was measured or given."""
        return self.initial_reward_source == "free"

    @property
    def initial_reward_interval(self) -> Interval | None:
        """Of R0; None unless it was fitted."""
        return self.parameters["R0"].interval

    @property
    def asymptote(self) -> float:
        """A, in [0, 1]."""
        return self.value("A")

    @property
    def asymptote_interval(self) -> Interval:
        """Of A; its high is None when A is not identified."""
        return self.interval("A")

    @property
    def exponent(self) -> float:
        """B."""
        return self.value("B")

    @property
    def exponent_interval(self) -> Interval:
        """Of B."""
        return self.interval("B")

    @property
    def midpoint(self) -> float:
        """C_mid, in the unit of x."""
        return self.value("C_mid")

    @property
    def midpoint_interval(self) -> Interval:
        """Of C_mid, in the unit of x."""
        return self.interval("C_mid")

    def to_record(self) -> dict[str, Any]:
        """The fit as a dict of JSON values.

        Besides `parameters`, every parameter stands at the top level as NAME,
        NAME_low and NAME_high; limits that the data do not set are None.
        """
        record = to_plain(self)
        flat: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            interval = parameter.interval or Interval(None, None)
            flat[name] = parameter.value
            flat[f"{name}_low"], flat[f"{name}_high"] = interval.low, interval.high
        if "R0" in self.parameters:
            flat["R0_source"] = self.initial_reward_source
        record["n_points"] = record.pop("num_points")
        return record | to_plain(flat)
