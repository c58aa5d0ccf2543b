"""Statistics of the importance ratios, from sums over microbatches."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.algo.losses import MAX_LOG_RATIO, MAX_NATS, bounded_exp

# Names of the sums of `token_statistics`.
SUMS = frozenset(
    "tokens entropy ratio ratio_squared capped fresh fresh_abs fresh_kl".split()
)


def token_statistics(
    logprobs: Float[Array, "..."],
    behavior_logprobs: Float[Array, "..."],
    entropy: Float[Array, "..."],
    staleness: Int[Array, "..."],
    mask: Bool[Array, "..."],
    *,
    max_importance_ratio: float,
) -> tuple[dict[str, Float[Array, ""]], dict[str, Float[Array, ""]]]:
    """Return sums and maxima over the sampled tokens, for `token_summary`.

    "fresh" tokens are those of the learner's own version: their difference comes only
    from numerics (the mismatch).  A maximum is 0 if there is no token.
    """
    difference = jnp.where(mask, logprobs - behavior_logprobs, 0.0)
    ratio = jnp.where(mask, bounded_exp(difference), 0.0)
    fresh = mask & (staleness == 0)
    fresh_difference = jnp.where(fresh, difference, 0.0)
    fresh_abs = jnp.abs(fresh_difference)
    # k3 estimator of KL(behavior || trainer): ratio - 1 - log ratio, never negative.
    bounded = jnp.clip(fresh_difference, -MAX_NATS, MAX_LOG_RATIO)
    fresh_kl = jnp.expm1(bounded) - bounded
    sums = {
        "tokens": mask.sum(dtype=jnp.float32),
        "entropy": jnp.where(mask, entropy, 0.0).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": (ratio * ratio).sum(),
        "capped": (ratio > max_importance_ratio).sum(dtype=jnp.float32),
        "fresh": fresh.sum(dtype=jnp.float32),
        "fresh_abs": fresh_abs.sum(),
        "fresh_kl": fresh_kl.sum(),
    }
    return sums, {"ratio_max": ratio.max(), "fresh_abs_max": fresh_abs.max()}


def token_summary(
    sums: dict[str, Float[Array, ""]], maxima: dict[str, Float[Array, ""]]
) -> dict[str, Float[Array, ""]]:
    """Return metrics by name, from the sums and maxima of the whole batch.

    The effective sample size is normalised: (sum ratio)^2 / (tokens * sum ratio^2),
    1 on policy.  PipelineRL, https://arxiv.org/abs/2509.19128.
    """
    tokens = jnp.maximum(sums["tokens"], 1.0)
    fresh = jnp.maximum(sums["fresh"], 1.0)
    squares = jnp.maximum(sums["ratio_squared"] * tokens, 1e-30)
    return {
        "entropy": sums["entropy"] / tokens,
        "ratio/mean": sums["ratio"] / tokens,
        "ratio/max": maxima["ratio_max"],
        "ratio/capped_share": sums["capped"] / tokens,
        "ratio/effective_sample_size": sums["ratio"] ** 2 / squares,
        "mismatch/mean_abs": sums["fresh_abs"] / fresh,
        "mismatch/max_abs": maxima["fresh_abs_max"],
        "mismatch/kl": sums["fresh_kl"] / fresh,
        "mismatch/tokens": sums["fresh"],
    }
