"""Scaling laws of reinforcement learning, fitted to evaluation curves.

NumPy and SciPy do the fits; this package imports neither JAX nor a role of the trainer,
so that curves of any system can be fitted anywhere.

    from scalerl_jax import scaling

    curve = scaling.load_curve("runs/tiny")
    result = scaling.fit_curve(curve)
    result.identified, result.asymptote, result.predict(10 * curve.x[-1])

x is compute, [n], at least 0 and increasing, in any unit (chip-hours, FLOPs, tokens,
rollouts, steps); y is [n] pass rates in [0, 1].  Every result has `to_record()` (a dict
of JSON values) and `to_json()`.

    fit, fit_curve              one law, one run: Fit
    sensitivity                 the fit over early cut-offs: Cutoff rows
    bootstrap, bootstrap_prompts, region    other intervals of a fit
    pool_seeds                  several seeds of one recipe: Pooled
    extrapolate_curve           fit early, predict the rest: Extrapolation
    pool_extrapolations         these of several seeds: PooledExtrapolation
    compare, compare_many       recipes by A and B: Comparison, RunTable
    plan                        compute and cost to a target, when to stop: Plan
    fit_tan, fit_plateau        Tan et al.'s laws over model sizes: TanFit, SurfaceFit
    extrapolate_intra, extrapolate_inter    their extrapolation protocols
    fit_isocompute              rollouts per prompt for a budget: IsoCompute
    fit_kaplan, fit_kaplan_one, fit_chinchilla, compute_optimal     pre-training loss
"""

# ruff: noqa: F401  the names of the package
from scalerl_jax.scaling.bootstrap import (
    Bootstrap,
    Region,
    bootstrap,
    bootstrap_prompts,
    region,
)
from scalerl_jax.scaling.compare import (
    Comparison,
    Pooled,
    RunRow,
    RunTable,
    compare,
    compare_many,
    linearise,
    pool_seeds,
)
from scalerl_jax.scaling.fit import Cutoff, fit, fit_curve, sensitivity
from scalerl_jax.scaling.forecasts import (
    Estimate,
    Extrapolation,
    Plan,
    PooledExtrapolation,
    PooledPrediction,
    Prediction,
    Target,
    extrapolate_curve,
    plan,
    pool_extrapolations,
)
from scalerl_jax.scaling.isocompute import (
    Allocation,
    IsoCompute,
    SweepRun,
    fit_isocompute,
)
from scalerl_jax.scaling.laws import LAWS, Law, sigmoid
from scalerl_jax.scaling.laws_over_sizes import (
    SurfaceFit,
    TanExtrapolation,
    TanFit,
    compute_optimal,
    extrapolate_inter,
    extrapolate_intra,
    fit_chinchilla,
    fit_kaplan,
    fit_kaplan_one,
    fit_plateau,
    fit_tan,
)
from scalerl_jax.scaling.load import Selection, load_curve, load_curves
from scalerl_jax.scaling.records import (
    Curve,
    CurveError,
    Interval,
    Parameter,
    make_curve,
)
from scalerl_jax.scaling.result import Fit, Forecast, Settings
