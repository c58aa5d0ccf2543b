"""Load balancing of a mixture's experts: an auxiliary loss, and a routing bias.

Both are off by default: in RL they pull a trained router away from its routing.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.batching.replay import load_metrics
from scalerl_jax.config import Config
from scalerl_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadBalancing:
    """The load-balancing loss of a mixture, and its experts' biases; static.

        loss = coefficient * mean over layers of E * sum_e f[e] * P[e]

    f[e] is the share of the choices that fell on expert e, and P[e] its mean score,
    with a token's scores scaled to a sum of 1: Switch Transformers,
    https://arxiv.org/abs/2101.03961, equations 4 to 6.  Each microbatch, in each slice,
    has its own f and P, over all its tokens except padding, and its loss is weighted by
    the sum of its tokens' weights: even loads give a loss of `coefficient` if those of
    the batch sum to 1.  So the loss depends on the cut into microbatches and slices: f
    of the whole batch would need an extra pass.
    """

    coefficient: float = 0.0
    bias_rate: float = 0.0  # 0: no biases
    metrics = staticmethod(load_metrics)  # metrics of a step's choices

    def __call__(
        self, said: dict[str, Array], batch: PackedBatch
    ) -> tuple[Float[Array, ""], Float[Array, "L E"]]:
        """Return the loss, and the number of choices that fell on each expert.

        Args:
            said: outputs of the layers, "experts" [L, R, S, k], "scores" [L, R, S, E].
            batch: a microbatch [R, S].
        """
        chosen, scores = said["experts"], said["scores"]
        there = batch.segment_ids > 0
        count = scores.shape[-1]
        hits = (chosen[..., None] == jnp.arange(count)) & there[:, :, None, None]
        taken = hits.sum(axis=(1, 2, 3), dtype=jnp.float32)
        tokens = jnp.maximum(there.sum(), 1)
        shares = taken / (tokens * chosen.shape[-1])
        means = jnp.where(there[..., None], scores, 0.0).sum(axis=(1, 2)) / tokens
        uneven = count * (jax.lax.stop_gradient(shares) * means).sum(axis=-1).mean()
        weight = jnp.where(batch.mask, batch.weights, 0.0).sum()
        return self.coefficient * weight * uneven, taken

    def adjust(self, params: Any, taken: Float[Array, "L E"], *, old: Any) -> None:
        """Set the biases in `params` to the old ones plus a step towards even loads.

            bias[e] += bias_rate * sign(mean of taken - taken[e])

        DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2.  The optimizer's
        own change of the biases (weight decay) is overwritten.
        """
        if not self.bias_rate:
            return
        bias = old["layers"]["router_bias"].astype(jnp.float32)
        fewer = jnp.sign(taken.mean(axis=-1, keepdims=True) - taken)
        params["layers"]["router_bias"] = bias + self.bias_rate * fewer


def make_balance(config: Config) -> LoadBalancing | None:
    """Return the load balancing of a mixture, or None if it is off."""
    objective = config.objective
    if not (objective.expert_balance or objective.expert_bias_rate):
        return None
    return LoadBalancing(
        coefficient=objective.expert_balance, bias_rate=objective.expert_bias_rate
    )
