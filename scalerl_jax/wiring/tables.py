"""Names that a config may use, and the functions they stand for."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from scalerl_jax.algo import advantages, losses, regularizers, weights
from scalerl_jax.config import Config
from scalerl_jax.config import losses as config_losses
from scalerl_jax.model.architecture import Architecture

T = TypeVar("T")
# By objective.loss.
LOSSES: dict[str, Callable[..., Array]] = {
    name: getattr(losses, f"{name}_loss") for name in config_losses.LOSSES
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


def with_keywords(
    function: Callable[..., T], values: Mapping[str, Any]
) -> Callable[..., T]:
    """Return the function with those of the values that it has keywords for."""
    asked = inspect.signature(function).parameters.values()
    names = [each.name for each in asked if each.kind is each.KEYWORD_ONLY]
    found = {name: values[name] for name in names if name in values}
    return functools.partial(function, **found)


def choose(table: dict[str, T], name: str, *, setting: str) -> T:
    """Return the entry called `name`; a wrong name is answered with the right ones."""
    if name not in table:
        raise ValueError(f"{setting} = {name!r}; choose from {sorted(table)}")
    return table[name]


def replayed(config: Config, arch: Architecture) -> Architecture | None:
    """Return the mixture whose experts the learner replays; None: it does not.

    Raises:
        ValueError: the model that is asked for it has none.
    """
    if config.objective.routing_replay == "off":
        return None
    if arch.experts is None:
        raise ValueError(
            f"objective.routing_replay = 'on' replays experts, of which a model of "
            f"the family {arch.family} has none; set it to 'off'"
        )
    return arch


def check_experts(config: Config, arch: Architecture) -> None:
    """Refuse settings of experts with a model that has none, or with shared prompts."""
    replayed(config, arch)
    objective = config.objective
    for name in ("expert_balance", "expert_bias_rate"):
        value = getattr(objective, name)
        if value and arch.experts is None:
            raise ValueError(
                f"objective.{name} = {value} balances experts, of which a model of the "
                f"family {arch.family} has none; set it to 0"
            )
        if value and config.batch.shared_tokens:
            raise ValueError(
                f"objective.{name} = {value} counts every token of a row, and with "
                f"batch.shared_tokens = {config.batch.shared_tokens} a prompt stands "
                f"there once for several rows; set one of them to 0"
            )


@contextlib.contextmanager
def naming(setting: str) -> Iterator[None]:
    """Say which setting named the file that a ValueError is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
