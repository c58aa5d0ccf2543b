"""Seconds of a run's programs, in closed form: decoding, training, publishing.

Each is a bound, the slowest resource at its peak with all else overlapped, or what is
expected, at the shares of the peaks and with the latency that `Reached` has.  No
device is touched and nothing is compiled.  A chip is a device as JAX counts, half of a
tpu7x; the shares are of dense models on TPUs in `chips.CHIPS`.
"""

import dataclasses

from scalerl_jax.machines.chips import Chip
from scalerl_jax.model.architecture import Architecture, sampler_copies
from scalerl_jax.planning import work
from scalerl_jax.planning.work import Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reached:
    """Parts of a chip's peaks that programs get, and what a collective waits."""

    flops: float = 1.0  # of the matrix units, in the train step
    bandwidth: float = 1.0  # of HBM, while decoding
    collective_s: float = 0.0  # latency of one that is not overlapped


BOUND = Reached()
# From the estimates of libtpu 0.0.42 for 8B models; not measured on a TPU.  The train
# step's linears are at more than half of the peak, which leaves room for attention's
# kernels and for collectives, of which it estimates nothing; decoding is at about 0.66
# of the bandwidth, beside 82 all-reduces of 0.7 ms together.
EXPECTED = Reached(flops=0.5, bandwidth=0.66, collective_s=8.5e-6)
# Bytes per second of a host to its chips, as measured on a TPU: 16.39 GB/s,
# https://github.com/verl-project/verl/pull/7905
_HOST_TO_DEVICE = 16e9
# All-reduces of a decode step: after attention and after the feed-forward of each
# layer, and those of embedding, head and sampling.
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
    float32_head: bool = True,
    reached: Reached = EXPECTED,
) -> float:
    """Return the seconds of one decode call of a replica: a token a slot and step.

        max(flops / (chips * peak), bytes / (chips * bandwidth)) + latency

    `bytes` are the weights, once a step, and keys and values of all that is held.

    Args:
        chip: the kind of TPU, of `chips.CHIPS`.
        slots: sequences that are decoded together.
        mean_context: tokens that a sequence holds meanwhile, prompt included.
        chips: of the replica; heads and experts are cut over them.
        steps: decode steps of the call (sampler.tokens_per_call).
        itemsize: bytes of a weight or a cached value.
        float32_head: whether the logits are float32 products.
        reached: `EXPECTED`, or `BOUND` for a bound from below.
    """
    needed = work.decode(
        arch,
        rows=slots,
        context=mean_context,
        steps=steps,
        itemsize=itemsize,
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
    reached: Reached = EXPECTED,
) -> float:
    """Return the seconds of one prefill call of `tokens` tokens, on a replica.

    Args:
        tokens: of the chunk, all of one prompt.
        context: tokens that each attends to, at most.
        itemsize: bytes of a weight or a cached value.
    """
    needed = work.prefill(
        arch,
        tokens=tokens,
        context=context,
        itemsize=itemsize,
        copies=sampler_copies(arch, chips),
    )
    return _streamed(chip, needed, chips, reached)


def train_seconds(
    arch: Architecture,
    chip: Chip,
    *,
    microbatches: int,
    rows: int,
    row_tokens: int,
    chips: int,
    tensor: int = 1,
    remat: str = "full",
    float32_head: bool = True,
    param_bytes: int = 4,
    compute_bytes: int = 2,
    reached: Reached = EXPECTED,
) -> float:
    """Return the seconds of an optimizer step on the learner's chips.

    A row is charged whole: the TPU's attention kernel masks what other sequences of a
    row hold, and computes it.

    Args:
        rows: of a microbatch, over all chips (batch.rows_per_microbatch).
        chips: of the learner; the state is cut over all but `tensor` of them.
        tensor: mesh.tensor.
        remat: model.remat, not "auto".
        float32_head: whether the head's products are float32.
        param_bytes: of a master weight.
        compute_bytes: of an activation.
    """
    one = work.microbatch(
        arch,
        rows=rows,
        row_tokens=row_tokens,
        devices=chips,
        tensor=tensor,
        remat=remat,
        attention="splash",
        float32_head=float32_head,
        param_bytes=param_bytes,
        compute_bytes=compute_bytes,
    )
    update = work.optimizer_update(arch, param_bytes=param_bytes)
    return sum(
        times
        * max(
            needed.passes / chips / (chip.flops * reached.flops),
            needed.bytes / chips / chip.hbm_bandwidth,
        )
        for times, needed in ((microbatches, one), (1, update))
    )


def publish_seconds(
    arch: Architecture,
    chip: Chip,
    *,
    learner_chips: int,
    replicas: int,
    replica_chips: int,
    itemsize: int = 2,
) -> float:
    """Return the seconds until all replicas have a version, over the hosts' network.

    Each of the learner's hosts sends its shards to every replica, and a replica takes
    all of them: what takes longer.  Nobody waits for it but the swap of two versions.

    Args:
        chip: the kind of TPU, whose hosts have so much network a chip.
        learner_chips: that send.
        replicas: that each take a whole version.
        replica_chips: of one of them.
        itemsize: bytes of a weight that is sent, in full.
    """
    version = arch.num_params * itemsize
    sent = version * replicas / learner_chips
    return max(sent, version / replica_chips) / chip.host_bandwidth


def copy_seconds(
    arch: Architecture, chip: Chip, devices: int, read: int, written: int
) -> float:
    """Return the seconds of a copy of the params in the memory of their own devices.

    Args:
        chip: the kind of TPU, at the peak of its memory.
        devices: that the params are cut over.
        read: bytes of a weight.
        written: bytes of a weight in the copy.
    """
    return arch.num_params * (read + written) / devices / chip.hbm_bandwidth


def placing_seconds(
    arch: Architecture, *, replica_chips: int, hosts: int = 1, itemsize: int = 2
) -> float:
    """Return the seconds in which a version gets from a host's memory to its chips.

    As if all chips of a host shared `_HOST_TO_DEVICE`.

    Args:
        replica_chips: of a replica.
        hosts: that they are on, each of which brings its part.
        itemsize: bytes of a weight.
    """
    copies = sampler_copies(arch, replica_chips)
    common = arch.num_params - arch.num_expert_params
    brought = (copies * common + arch.num_expert_params) * itemsize
    return brought / hosts / _HOST_TO_DEVICE


def _streamed(chip: Chip, needed: Work, chips: int, reached: Reached) -> float:
    """Return the seconds of a program of the sampler, without its collectives."""
    return max(
        needed.passes / chips / chip.flops,
        needed.bytes / chips / (chip.hbm_bandwidth * reached.bandwidth),
    )
