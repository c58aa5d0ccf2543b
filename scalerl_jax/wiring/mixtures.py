"""Build a mixture's router from a Config: check its settings, add its biases."""

import dataclasses

import jax
import jax.numpy as jnp

from scalerl_jax.config import Config
from scalerl_jax.model.architecture import Architecture, parameter_table
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.weights import load_params
from scalerl_jax.types import PyTree


def with_router(config: Config, arch: Architecture) -> Architecture:
    """Return a mixture's architecture with the router that the settings ask for.

    If objective.expert_bias_rate is set, the router has a bias.

    Raises:
        ValueError: the model has no experts, or the batch shares prompts.
    """
    _check_experts(config, arch)
    rate = config.objective.expert_bias_rate
    return _with_bias(arch, bias=True) if rate else arch


def _check_experts(config: Config, arch: Architecture) -> None:
    """Refuse settings of experts with a model that has none, or with shared prompts."""
    objective = config.objective
    lacking = f"experts, and a model of the family {arch.family} has none; set it to"
    replayed = objective.routing_replay == "on"
    if replayed and arch.experts is None:
        raise ValueError(f"objective.routing_replay = 'on' replays {lacking} 'off'")
    for name in ("expert_balance", "expert_bias_rate"):
        value = getattr(objective, name)
        if value and arch.experts is None:
            raise ValueError(f"objective.{name} = {value} balances {lacking} 0")
        if value and config.batch.shared_tokens:
            raise ValueError(
                f"objective.{name} = {value} counts every token of a row, and with "
                f"batch.shared_tokens = {config.batch.shared_tokens} a prompt is in a "
                f"row once for several rollouts; set one of them to 0"
            )


def load_with_biases(
    source: str, arch: Architecture, *, dtype: jnp.dtype, shardings: PyTree
) -> PyTree:
    """Return a checkpoint's params as `load_params`, with 0 for missing biases."""
    experts = read_architecture(source).experts
    if experts is not None and experts.bias:
        return load_params(source, arch, dtype=dtype, shardings=shardings)
    layers = dict(shardings["layers"])
    cut = layers.pop("router_bias")
    params = load_params(
        source,
        _with_bias(arch, bias=False),
        dtype=dtype,
        shardings=shardings | {"layers": layers},
    )
    bias = jnp.zeros(parameter_table(arch)["layers"]["router_bias"].shape, dtype)
    params["layers"]["router_bias"] = jax.device_put(bias, cut)
    return params


def _with_bias(arch: Architecture, *, bias: bool) -> Architecture:
    assert arch.experts is not None, "only a mixture's router has a bias"
    experts = dataclasses.replace(arch.experts, bias=bias)
    return dataclasses.replace(arch, experts=experts)
