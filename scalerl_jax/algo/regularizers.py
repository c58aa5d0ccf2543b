"""Regularisers of a token's loss: a KL to a reference policy, and an entropy bonus.

A KL estimator is a function of d = logprob - reference_logprob of the sampled token
alone.  Its expected value and its expected gradient are two different things.  For
tokens sampled from the policy, and KL = KL(policy || reference):

    estimator             expected value     expected gradient, used in the loss
    k1 = d                KL                 0: it regularises nothing
    k2 = d^2 / 2          KL + O(d^3)        that of KL
    k3 = exp(-d) + d - 1  KL                 that of KL(reference || policy)

In the reward, where no gradient flows through the estimator, k1 gives the policy
gradient of the KL.  Schulman 2020, http://joschu.net/blog/kl-approx.html; Tang and
Munos, https://arxiv.org/abs/2506.09477.  Off policy the expectations are over the
behavior policy's tokens: no estimator is weighted by a ratio.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from scalerl_jax.algo.losses import MAX_LOG_RATIO, TokenLoss, log_ratio
from scalerl_jax.types import Tokens

# logprobs, reference_logprobs -> nats of each token
KlEstimator = Callable[[Array, Array], Float[Array, "..."]]


def kl_k1(
    logprobs: Float[Array, "..."], reference_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """d = logprob - reference_logprob, in nats.

    Use it in the reward only: in the loss its expected gradient is E[grad logprob] = 0.
    """
    return log_ratio(logprobs, reference_logprobs)


def kl_k2(
    logprobs: Float[Array, "..."], reference_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """d^2 / 2.  Its gradient, d * grad logprob, has the KL's gradient as its mean."""
    return 0.5 * log_ratio(logprobs, reference_logprobs) ** 2


def kl_k3(
    logprobs: Float[Array, "..."], reference_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """exp(-d) + d - 1: unbiased, never negative, with small variance.

    Its expected gradient is that of KL(reference || policy).  exp(-d) is constant where
    the reference is more than e^MAX_LOG_RATIO times as probable as the policy.  GRPO,
    https://arxiv.org/abs/2402.03300, equation 4.
    """
    difference = log_ratio(logprobs, reference_logprobs)
    difference = jnp.maximum(difference, -MAX_LOG_RATIO)
    return jnp.expm1(-difference) + difference


def entropy_bonus(
    entropy: Float[Array, "..."], *, coefficient: float
) -> Float[Array, "..."]:
    """Return the loss term of the exact entropy:  -coefficient * entropy.

    A3C, https://arxiv.org/abs/1602.01783, section 4.
    """
    return -coefficient * entropy


def easy_prompts(
    passed: Bool[Array, " B"],
    judged: Bool[Array, " B"],
    *,
    group_size: int,
    from_pass_rate: float,
) -> Float[Array, " B"]:
    """Factor of the regularisers: 1 where pass rate >= from_pass_rate, else 0.

    The pass rate is that of a rollout's group, over its `judged` rollouts.  IsoCompute,
    https://arxiv.org/abs/2603.12151: KL and entropy bonus stabilise training on easy
    problems, and limit exploration on hard ones.
    """
    num_passed, num_judged = (
        each.reshape(-1, group_size).sum(axis=1, dtype=jnp.float32)
        for each in (passed, judged)
    )
    pass_rates = num_passed / jnp.maximum(num_judged, 1.0)
    easy = (pass_rates >= from_pass_rate).astype(jnp.float32)
    return jnp.repeat(easy, group_size)


def regularized(loss: TokenLoss, terms: Sequence[TokenLoss]) -> TokenLoss:
    """Return a loss with terms added to it.

        loss + regularization * sum of the terms

    `regularization` is the token's own factor; 1 if the batch has no such score.
    """

    def of_tokens(tokens: Tokens) -> Float[Array, "..."]:
        value = loss(tokens)
        for term in terms:
            added = term(tokens)
            if "regularization" in tokens.scores:
                added = tokens.scores["regularization"] * added
            value += added
        return value

    return of_tokens
