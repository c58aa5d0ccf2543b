"""Names that a config may use, and the functions they stand for."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from scalerl_jax.algo import advantages, gspo, losses, regularizers, weights

T = TypeVar("T")
# By objective.loss; what else is known of them: `config.losses`.
LOSSES: dict[str, Callable[..., Array]] = {
    "cispo": losses.cispo_loss,
    "clipped": losses.clipped_loss,
    "decoupled": losses.decoupled_loss,
    "dppo": losses.dppo_loss,
    "dual_clip": losses.dual_clip_loss,
    "gspo": gspo.gspo_loss,
    "gspo_token": gspo.gspo_token_loss,
    "reinforce": losses.reinforce_loss,
    "sequence_truncated_is": gspo.sequence_truncated_is_loss,
    "truncated_is": losses.truncated_is_loss,
}
AGGREGATIONS: dict[str, Callable[..., Array]] = {
    "constant": weights.constant_weights,
    "prompt": weights.prompt_weights,
    "sample": weights.sample_weights,
    "token": weights.token_weights,
}
BASELINES: dict[str, Callable[..., Array]] = {
    "group_mean": advantages.group_advantages,
    "leave_one_out": advantages.leave_one_out,
}
NORMALIZATIONS: dict[str, Callable[..., Any]] = {
    "batch": advantages.normalize_by_batch,
    "none": advantages.unnormalized,
    "prompt": advantages.normalize_by_prompt,
    "reward_std": advantages.normalize_by_reward_std,
    "running": advantages.normalize_by_running,
}
KL_ESTIMATORS: dict[str, regularizers.KlEstimator] = {
    "k1": regularizers.kl_k1,
    "k2": regularizers.kl_k2,
    "k3": regularizers.kl_k3,
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
