"""Bytes on the fullest device while a compiled program runs, by what they hold.

Params, state and caches are computed from shapes and shardings; a program's temporaries
are the compiler's.
"""

import math

import jax
import jax.numpy as jnp

from scalerl_jax.config import Config
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.planning.memory import (
    logits_tile,
    publishes_part,
    sampler_versions,
    saved_activations,
)
from scalerl_jax.preflight.hlo import Compiled
from scalerl_jax.preflight.programs import Parts
from scalerl_jax.sampler.lowering import decode_state, sampler_params
from scalerl_jax.types import PyTree
from scalerl_jax.wiring.devices import is_shared, why_not_one_process
from scalerl_jax.wiring.learning import abstract_state

SAMPLING = ("prefill", "decode")  # programs on the sampler's devices


def device_bytes(tree: PyTree) -> int:
    """Return the bytes on one device of arrays, or of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _gradient_bytes(params: PyTree) -> int:
    return device_bytes(jax.tree.map(lambda x: x.update(dtype=jnp.float32), params))


def learner_parts(
    config: Config, arch: Architecture, state: PyTree, temporaries: int
) -> dict[str, int]:
    """Return the learner's bytes on a device, by part, during a microbatch."""
    params, gradients = device_bytes(state.params), _gradient_bytes(state.params)
    frozen = device_bytes(state.frozen)
    held = {"frozen params": frozen} if frozen else {}
    lasting = held | {
        "params": params,
        "optimizer": device_bytes(state) - params - frozen,
        "gradients so far": gradients,
    }
    passing = {
        "gradients of the microbatch": gradients,
        "saved activations": saved_activations(config, arch),
    } | logits_tile(config, arch)
    others = max(0, temporaries - sum(passing.values()))
    return lasting | passing | {"other temporaries": others}


def _sampler_parts(parts: Parts) -> dict[str, int]:
    """Return the sampler's bytes on a device, by part, apart from its temporaries."""
    params = device_bytes(sampler_params(parts.engine))
    cache = device_bytes(decode_state(parts.engine))
    versions = ["sampler's params"]
    if parts.config.generators.versions > 1:
        versions.append("params of the next version")
    if sampler_versions(parts.config) > len(versions):
        versions.append("params of an evaluation")
    held = dict.fromkeys(versions, params) | {"KV cache": cache}
    if base := _base_bytes(parts):
        held["frozen params"] = base
    return held


def _base_bytes(parts: Parts) -> int:
    """Return the bytes of frozen params beside the sampler's, in its own process."""
    config = parts.config
    own_process = parts.fitted.seats is not None or why_not_one_process(config)
    if not own_process or not publishes_part(config):
        return 0
    state = abstract_state(config, parts.arch, parts.sampler_mesh)
    return device_bytes(state.frozen)


def _beside_learner(parts: Parts) -> dict[str, int]:
    """Return the sampler's bytes on a device of the learner, by part."""
    return _sampler_parts(parts) if is_shared(parts.config) else {}


def _teacher_bytes(parts: Parts) -> dict[str, int]:
    """Return the bytes of the teacher's params on a device of the learner, by part."""
    return {} if parts.teacher is None else {"teacher": device_bytes(parts.teacher)}


def program_memory(name: str, compiled: Compiled, parts: Parts) -> dict[str, int]:
    """Return the bytes on a device, by part, while a program runs.

    They include data that other programs keep on the device.
    """
    state, engine, code = parts.state, parts.engine, compiled.code
    whole, params = device_bytes(state), device_bytes(state.params)
    frozen = device_bytes(state.frozen)
    if name in SAMPLING:
        shared = is_shared(parts.config)
        sizes = len(engine.chunk_sizes) + len(engine.decode_sizes)
        own = {"learner's state": whole} | _teacher_bytes(parts) if shared else {}
        return own | {
            **_sampler_parts(parts),
            "temporaries": compiled.temporaries,
            "code of all programs": code * sizes,
        }
    others = _beside_learner(parts) | _teacher_bytes(parts)
    if name == "accumulate":
        own = learner_parts(parts.config, parts.arch, state, compiled.temporaries)
        return others | own | parts.reserved | {"code": code}
    if frozen:  # no other program takes them as an argument
        others |= {"frozen params": frozen}
    if name in ("start", "combine"):
        others |= {"params": params, "optimizer": whole - params - frozen}
    elif state.critic is not None:
        critic = device_bytes(state.critic)
        if name == "update":
            gradients = _gradient_bytes(state.critic.params)
            others |= {"critic": critic, "critic's gradients": gradients}
        else:
            own = {"critic_update": critic, "critic_start": 0, "critic_combine": 0}
            read = own.get(name, device_bytes(state.critic.params))
            others |= {
                "policy's state": whole - critic - frozen,
                "policy's gradients": _gradient_bytes(state.params),
                "rest of the critic": critic - read,
            }
    return others | {
        "arguments and results": compiled.kept,
        "temporaries": compiled.temporaries,
        "code": code,
    }


def publish_memory(parts: Parts) -> dict[str, int]:
    """Return bytes while params are published: state, and a copy in sampler shards."""
    shards, devices = parts.engine.mesh.size, parts.learner_mesh.size
    copy = device_bytes(sampler_params(parts.engine)) * shards
    return {
        "learner's state": device_bytes(parts.state),
        "copy to publish": copy // math.gcd(shards, devices),
    } | (_beside_learner(parts) | _teacher_bytes(parts))
