"""Advantages divided by a spread that is kept from batch to batch."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from scalerl_jax.algo.advantages import RunningStatistics, normalize_by_running


class RunningNormalization:
    """Counts every batch that it scales; what it holds survives a checkpoint."""

    def __init__(self, *, eps: float) -> None:
        """Before the first batch."""
        self._eps = eps
        self._statistics = RunningStatistics.empty()

    def __call__(
        self, advantages: Float[Array, " B"], kept: Bool[Array, " B"]
    ) -> Float[Array, " B"]:
        """A / (spread of all A kept so far, in this batch too, + eps)."""
        scaled, self._statistics = normalize_by_running(
            advantages, kept, self._statistics, eps=self._eps
        )
        return scaled

    def state(self) -> dict[str, float]:
        """The statistics as JSON values, float32 exactly."""
        fields = dataclasses.fields(self._statistics)
        return {
            field.name: float(getattr(self._statistics, field.name)) for field in fields
        }

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` gave."""
        count, squares = state["count"], state["squares"]
        # A checkpoint whose squares are about a mean.
        squares += count * state.get("mean", 0.0) ** 2
        self._statistics = RunningStatistics(
            count=jnp.float32(count), squares=jnp.float32(squares)
        )
