"""The scale of advantages over all batches so far, which few recipes ask for."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from scalerl_jax.algo.scales import RunningStatistics, normalize_by_running


class RunningNormalization:
    """Divides advantages by their spread over all batches so far.

    Each call adds its batch to the statistics, which checkpoints keep.
    """

    def __init__(self, *, eps: float) -> None:
        """Begin with no batch."""
        self._eps = eps
        self._statistics = RunningStatistics()

    def __call__(
        self, advantages: Float[Array, " B"], kept: Bool[Array, " B"]
    ) -> Float[Array, " B"]:
        """Return A / (spread of all A kept so far, this batch's included, + eps)."""
        scaled, self._statistics = normalize_by_running(
            advantages, kept, self._statistics, eps=self._eps
        )
        return scaled

    def state(self) -> dict[str, float]:
        """Return the statistics as JSON values that hold each float32 exactly."""
        return {name: float(each) for name, each in vars(self._statistics).items()}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` gave."""
        count, squares = state["count"], state["squares"]
        # Older checkpoints hold squares about a mean.
        squares += count * state.get("mean", 0.0) ** 2
        self._statistics = RunningStatistics(
            count=jnp.float32(count), squares=jnp.float32(squares)
        )
