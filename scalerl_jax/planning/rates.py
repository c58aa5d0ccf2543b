"""Closed forms for the seconds of a run's programs: decoding, training, publishing.

A lower bound takes the slowest resource at its peak, with all others overlapped; an
expected time uses the shares of the peaks and the latency in `Reached`.  No device is
touched and nothing is compiled.  A chip is a device as JAX counts (half of a tpu7x).
The shares are for dense models on TPUs in `chips.CHIPS`; GPUs are given the same.
"""

import dataclasses

from scalerl_jax.machines.chips import Chip
from scalerl_jax.model.architecture import Architecture, sampler_copies
from scalerl_jax.planning import work
from scalerl_jax.planning.work import Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reached:
    """Shares of a chip's peaks that programs reach, and the latency of collectives."""

    flops: float = 1.0  # of the matrix units, in the train step
    bandwidth: float = 1.0  # of HBM, while decoding
    collective_s: float = 0.0  # latency of a collective that is not overlapped


BOUND = Reached()
# From the estimates of libtpu 0.0.42 for 8B models; not measured on a TPU.  The train
# step's linears reach more than half of the peak, which leaves time for attention
# kernels and collectives, which libtpu does not estimate.  Decoding reaches about 0.66
# of the bandwidth, apart from 82 all-reduces of 0.7 ms in total.
EXPECTED = Reached(flops=0.5, bandwidth=0.66, collective_s=8.5e-6)
# Bytes per second from a host to its chips; measured on a TPU: 16.39 GB/s,
# https://github.com/verl-project/verl/pull/7905
_HOST_TO_DEVICE = 16e9
# All-reduces of a decode step: _A_LAYER per layer, after attention and feed-forward,
# and _OF_HEAD for embedding, head and sampling.
_A_LAYER, _OF_HEAD = 2, 18


def decode_seconds(
    arch: Architecture,
    chip: Chip,
    *,
    slots: float,
    mean_context: float,
    chips: int,
    steps: int = 1,
    itemsize: int = 2,
    matrix_bytes: int = 2,
    vector_bytes: int | None = None,
    float32_head: bool = True,
    reached: Reached = EXPECTED,
) -> float:
    """Return the seconds of a replica's decode call: one token per slot and step.

        max(flops / (chips * peak), bytes / (chips * bandwidth)) + latency

    `bytes` are the weights once per step, and all keys and values in the cache.

    Args:
        arch: the policy's architecture.
        chip: the kind of device, of `chips.CHIPS`.
        slots: sequences that are decoded together.
        mean_context: mean tokens of a sequence during the call, prompt included.
        chips: chips of the replica, over which heads and experts are sharded.
        steps: decode steps of the call (sampler.tokens_per_call).
        itemsize: bytes of a value of the head and the embeddings, and of a cached
            number without `vector_bytes`.
        matrix_bytes: bytes of a weight of a layer, but of an expert.
        vector_bytes: bytes of a head's cached key or value.
        float32_head: True if the logits are float32 products.
        reached: `EXPECTED`, or `BOUND` for a lower bound.
    """
    needed = work.decode(
        arch,
        rows=slots,
        context=mean_context,
        steps=steps,
        itemsize=itemsize,
        matrix_bytes=matrix_bytes,
        vector_bytes=vector_bytes,
        float32_head=float32_head,
        copies=sampler_copies(arch, chips),
    )
    latency = 0.0
    if chips > 1:
        collectives = _A_LAYER * arch.num_layers + _OF_HEAD
        latency = steps * collectives * reached.collective_s
    return _streamed(chip, needed, chips, reached) + latency


def prefill_seconds(
    arch: Architecture,
    chip: Chip,
    *,
    tokens: float,
    context: float,
    chips: int,
    itemsize: int = 2,
    matrix_bytes: int = 2,
    vector_bytes: int | None = None,
    reached: Reached = EXPECTED,
) -> float:
    """Return the seconds of a replica's prefill call of `tokens` tokens.

    Args:
        arch: the policy's architecture.
        chip: the kind of device.
        tokens: tokens of the chunk, all of one prompt.
        context: the most tokens to which one of them attends.
        chips: chips of the replica.
        itemsize: bytes of a value of the head and the embeddings, and of a cached
            number without `vector_bytes`.
        matrix_bytes: bytes of a weight of a layer, but of an expert.
        vector_bytes: bytes of a head's cached key or value.
        reached: `EXPECTED`, or `BOUND` for a lower bound.
    """
    needed = work.prefill(
        arch,
        tokens=tokens,
        context=context,
        itemsize=itemsize,
        matrix_bytes=matrix_bytes,
        vector_bytes=vector_bytes,
        copies=sampler_copies(arch, chips),
    )
    return _streamed(chip, needed, chips, reached)


def learner_seconds(chip: Chip, needed: Work, *, chips: int, reached: Reached) -> float:
    """Return the seconds of a learner program on its chips, without its collectives."""
    return max(
        needed.passes / chips / (chip.flops * reached.flops),
        needed.bytes / chips / chip.hbm_bandwidth,
    )


def between_slices_seconds(
    trained: float, chip: Chip, *, slices: int, shards: int
) -> float:
    """Return the seconds to sum the gradients of all slices over the hosts' network.

        2 * (slices - 1) / slices * 4 * trained / shards / network bandwidth of a chip

    A chip sends its shards, float32, once to have them summed and once summed; nothing
    is overlapped with it.

    Args:
        trained: number of weights that are trained.
        chip: the kind of device, which sets the network bandwidth per chip.
        slices: mesh.slices.
        shards: shards of the state, mesh.fsdp * mesh.tensor.
    """
    sent = 2 * (slices - 1) / slices * 4 * trained / shards
    return sent / chip.host_bandwidth


def publish_seconds(
    arch: Architecture,
    chip: Chip,
    *,
    learner_chips: int,
    replicas: int,
    replica_chips: int,
    itemsize: float = 2,
) -> float:
    """Return the seconds until all replicas have a version, over the hosts' network.

    Each host of the learner sends its shards to every replica, and a replica receives
    all shards; the longer of the two counts.  Only the swap to the new version waits
    for it.

    Args:
        arch: the policy's architecture.
        chip: the kind of device, which sets the network bandwidth per chip.
        learner_chips: chips that send.
        replicas: replicas that each receive a whole version.
        replica_chips: chips of a replica.
        itemsize: bytes of a weight as it is sent.
    """
    version = arch.num_params * itemsize
    sent = version * replicas / learner_chips
    return max(sent, version / replica_chips) / chip.host_bandwidth


def copy_seconds(
    arch: Architecture, chip: Chip, devices: int, read: float, written: float
) -> float:
    """Return the seconds to copy the params within the memory of their devices.

    Args:
        arch: the policy's architecture.
        chip: the kind of device, at its peak memory bandwidth.
        devices: devices over which the params are sharded.
        read: bytes of a weight.
        written: bytes of a weight in the copy.
    """
    return arch.num_params * (read + written) / devices / chip.hbm_bandwidth


def placing_seconds(
    arch: Architecture, *, replica_chips: int, hosts: int = 1, itemsize: float = 2
) -> float:
    """Return the seconds to move a version from host memory to a replica's chips.

    All chips of a host are assumed to share `_HOST_TO_DEVICE`.

    Args:
        arch: the policy's architecture.
        replica_chips: chips of the replica.
        hosts: hosts of the replica; each moves its part.
        itemsize: bytes of a weight.
    """
    copies = sampler_copies(arch, replica_chips)
    common = arch.num_params - arch.num_expert_params
    brought = (copies * common + arch.num_expert_params) * itemsize
    return brought / hosts / _HOST_TO_DEVICE


def _streamed(chip: Chip, needed: Work, chips: int, reached: Reached) -> float:
    """Return the seconds of a sampler program, without its collectives."""
    return max(
        needed.passes / chips / chip.flops,
        needed.bytes / chips / (chip.hbm_bandwidth * reached.bandwidth),
    )
