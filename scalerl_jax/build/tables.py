"""Names that a config may use, and the functions they stand for."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.numpy as jnp

from scalerl_jax.algo import advantages, losses, weights
from scalerl_jax.config import Config
from scalerl_jax.learner.step import TokenLoss
from scalerl_jax.rollout.assembly import Normalize, Weigh

T = TypeVar("T")
LOSSES: dict[str, Callable[[Config], TokenLoss]] = {
    "cispo": lambda config: functools.partial(
        losses.cispo_loss,
        max_importance_ratio=config.objective.max_importance_ratio,
    ),
}
AGGREGATIONS: dict[str, Callable[[Config], Weigh]] = {
    "prompt": lambda config: functools.partial(
        weights.prompt_weights, group_size=config.batch.group_size
    ),
    "sample": lambda config: weights.sample_weights,
    "token": lambda config: weights.token_weights,
}
NORMALIZATIONS: dict[str, Callable[[Config], Normalize]] = {
    "batch": lambda config: functools.partial(
        advantages.normalize_by_batch, eps=config.objective.advantage_eps
    ),
    "prompt": lambda config: functools.partial(
        advantages.normalize_by_prompt,
        group_size=config.batch.group_size,
        eps=config.objective.advantage_eps,
    ),
    "none": lambda config: advantages.unnormalized,
}
DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def choose(table: dict[str, T], name: str, *, setting: str) -> T:
    """The entry called `name`; a wrong name is answered with the right ones."""
    if name not in table:
        raise ValueError(f"{setting} = {name!r}; choose from {sorted(table)}")
    return table[name]


@contextlib.contextmanager
def naming(setting: str) -> Iterator[None]:
    """Say which setting named the file that a ValueError is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
