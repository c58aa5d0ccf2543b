"""Terms beside a token's loss: KL to a reference policy and an entropy bonus.

A KL estimator looks at the sampled token alone:  d = logprob - reference_logprob.  Its
value and its gradient are two different things.  With tokens sampled from the policy,
and KL = KL(policy || reference):

    estimator             expected value     expected gradient, used in the loss
    k1 = d                KL                 0: it regularises nothing
    k2 = d^2 / 2          KL + O(d^3)        that of KL
    k3 = exp(-d) + d - 1  KL                 that of KL(reference || policy)

In the reward, where no gradient flows through it, k1 is the one whose policy gradient
is that of KL.  Schulman 2020, http://joschu.net/blog/kl-approx.html; Tang and Munos,
https://arxiv.org/abs/2506.09477.  Off policy all of this holds for the behavior
policy's tokens: none is weighted by a ratio.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.algo.losses import MAX_LOG_RATIO, log_ratio

# logprobs, reference_logprobs -> nats of each token
KlEstimator = Callable[[Array, Array], Float[Array, "..."]]


def kl_k1(
    logprobs: Float[Array, "..."], reference_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """d = logprob - reference_logprob.

    In the reward alone: in the loss its expected gradient is E[grad logprob] = 0.
    """
    return log_ratio(logprobs, reference_logprobs)


def kl_k2(
    logprobs: Float[Array, "..."], reference_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """d^2 / 2.  Its gradient, d * grad logprob, is in expectation that of the KL."""
    return 0.5 * log_ratio(logprobs, reference_logprobs) ** 2


def kl_k3(
    logprobs: Float[Array, "..."], reference_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """exp(-d) + d - 1: unbiased, never negative, of small variance.

    Its gradient is that of KL(reference || policy).  Constant where the reference is
    more than e^MAX_LOG_RATIO times as probable.  GRPO,
    https://arxiv.org/abs/2402.03300, equation 4.
    """
    difference = log_ratio(logprobs, reference_logprobs)
    difference = jnp.maximum(difference, -MAX_LOG_RATIO)
    return jnp.expm1(-difference) + difference


def entropy_bonus(
    entropy: Float[Array, "..."], *, coefficient: float
) -> Float[Array, "..."]:
    """Return what the exact entropy adds to the loss:  -coefficient * entropy.

    A3C, https://arxiv.org/abs/1602.01783, section 4.
    """
    return -coefficient * entropy


def easy_prompts(
    pass_rates: Float[Array, "..."], *, from_pass_rate: float
) -> Float[Array, "..."]:
    """1 where the pass rate is at least from_pass_rate, else 0: what to regularise.

    IsoCompute, https://arxiv.org/abs/2603.12151: KL and entropy bonus steady training
    on easy problems, and hold back exploration on hard ones.
    """
    return (pass_rates >= from_pass_rate).astype(jnp.float32)
