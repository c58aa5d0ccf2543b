"""Closed-form estimates of the bytes that a run needs on a device.

A run uses them to choose settings that fit; the preflight compiles the chosen programs
and reports their real size.  A config in this module has no open settings.
"""

import functools

from scalerl_jax.config import Config
from scalerl_jax.config.sections import LOSSES
from scalerl_jax.machines.chips import Chip
from scalerl_jax.model.architecture import (
    Architecture,
    layered_table,
    sampler_copies,
)
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.lora import sizes
from scalerl_jax.model.quantized import MATRICES
from scalerl_jax.objective.terms import needs_of
from scalerl_jax.parallel.mesh import largest_divisor
from scalerl_jax.sampler.decoding import EngineSettings

# Usable share of a device's bytes: a program gets 0.98, closed forms are inexact.
_USABLE = 0.92
_GIB = 2**30


def value_bytes(dtype: str) -> int:
    """Return the bytes of a value in one of the settings' number formats."""
    return 4 if dtype == "float32" else 2


def read_bytes(config: Config, arch: Architecture) -> dict[str, int]:
    """Return what the sampler reads, as arguments of `work` and of `rates`."""
    return dict(
        itemsize=value_bytes(config.model.sampler_dtype),
        # Closed forms count 2 for float32, too.
        matrix_bytes=1 if config.sampler.weights_dtype == "int8" else 2,
        vector_bytes=vector_bytes(config, arch),
    )


def weight_bytes(config: Config, arch: Architecture) -> float:
    """Return the mean bytes of a weight of the sampler."""
    whole = value_bytes(config.model.sampler_dtype)
    if config.sampler.weights_dtype == "model":
        return whole
    layer = layered_table(arch, "int8")["layers"][0]
    matrices = arch.num_layers * sum(layer[name].values.size for name in MATRICES)
    # The scales of the outputs are left out: one for some thousand integers.
    return whole - (whole - 1) * matrices / arch.num_params


def head_bytes(config: Config) -> int:
    """Return the bytes of a weight of the learner's head, as its products read it."""
    model = config.model
    return min(map(value_bytes, (model.param_dtype, model.head_weights_dtype)))


def tokens_per_device(config: Config) -> int:
    """Return the tokens of a microbatch on one device."""
    mesh, batch = config.mesh, config.batch
    rows = batch.rows_per_microbatch // (mesh.data * mesh.fsdp)
    return rows * batch.row_tokens // mesh.context


def saved_activations(config: Config, arch: Architecture) -> int:
    """Return the bytes that a microbatch's forward pass keeps for the backward pass.

    They are counted per token and layer, in the compute dtype.  Every `model.remat`
    keeps the layer's input.  "attention" also keeps attention's result and its float32
    normalisers; "dots" also the results of all matmuls except the last, which is only
    in the next layer's input; "none" also the values between the matmuls.  In a mixture
    of experts each expert of a token counts, and its experts' ids are always kept.
    """
    tensor, remat = config.mesh.tensor, config.model.remat
    heads, width = arch.num_heads // tensor, arch.hidden_size
    queries, keys = heads * arch.head_dim, arch.num_kv_heads // tensor * arch.head_dim
    products, between = _feed_forward_values(arch, tensor)
    matmuls = queries + 2 * keys + width + products
    matmuls += width if arch.norms != "before" else 0  # a norm reads the last one
    values = {
        "full": 0,
        "attention": queries,
        "dots": queries + matmuls,
        "none": queries + matmuls + queries + keys + 3 * width + between,
    }[remat]
    itemsize = value_bytes(config.model.compute_dtype)
    normalisers = 0 if remat == "full" else 4 * heads
    if arch.experts is not None:
        normalisers += 4 * arch.experts.top_k
        normalisers += 4 * arch.experts.count * (remat in ("dots", "none"))  # logits
    per_token = (width + values) * itemsize + normalisers
    return arch.num_layers * tokens_per_device(config) * per_token


def _feed_forward_values(arch: Architecture, tensor: int) -> tuple[int, int]:
    """Return a token's kept values: results of matmuls, and values between them.

    The last matmul of a dense feed-forward is not kept; that of an expert is, for the
    gradient of its gate.
    """
    ffn, experts = arch.ffn_size // tensor, arch.experts
    if experts is None:
        return 2 * ffn, ffn
    products = experts.top_k * (2 * ffn + arch.hidden_size)
    between = experts.top_k * (ffn + arch.hidden_size)
    return products + 2 * ffn * experts.shared, between + ffn * experts.shared


def has_head_once(config: Config, arch: Architecture) -> bool:
    """Return whether a step's logits are computed once, not also for their gradient.

    A tile then has all of a device's vocabulary, and a token's loss depends on that
    token alone; see `learner.logprobs.pointwise_loss`.
    """
    vocabulary = arch.vocab_size // config.mesh.tensor
    all_at_once = config.model.head_chunk_vocab >= vocabulary
    return all_at_once and not LOSSES[config.objective.loss].of_sequences


def logits_tile(config: Config, arch: Architecture) -> dict[str, int]:
    """Return the bytes of the head's logits tile and of the weights gathered for it."""
    vocabulary = arch.vocab_size // config.mesh.tensor
    slab = largest_divisor(vocabulary, config.model.head_chunk_vocab)
    chunk = largest_divisor(tokens_per_device(config), config.model.head_chunk_tokens)
    itemsize = head_bytes(config) if config.model.float32_head else 2
    return {
        "logits tile": chunk * slab * 4,
        "slab of the head": slab * arch.hidden_size * itemsize,
    }


def usable_bytes(chip: Chip) -> float:
    """Return the bytes of a device that `choose` may fill."""
    return _USABLE * chip.program_bytes


def cudnn_bytes(config: Config, arch: Architecture) -> int:
    """Return the bytes that cuDNN's attention reserves in the learner's backward pass.

    On an H100 rows of 8,192 tokens took 8 bytes for each segment that a row may have,
    token, head and dimension of a head (docs/learner.md); the compiler, which has no
    GPU to ask, does not count them.
    """
    heads = arch.num_heads // config.mesh.tensor * arch.head_dim
    return 8 * tokens_per_device(config) * config.batch.row_segments * heads


def terms_bytes(config: Config, arch: Architecture) -> float:
    """Return the bytes of the terms of the head's operands on a GPU.

    They are three of a slab, two of its transpose, and two of the gradient of a tile's
    logits, each of half the bytes of a float32 number (`model/products.py`).
    """
    tile = logits_tile(config, arch)
    slab = 0.0 if head_bytes(config) == 2 else 2.5 * tile["slab of the head"]
    return slab + tile["logits tile"]


def learner_bytes(config: Config, arch: Architecture) -> float:
    """Return the learner's bytes on a device during a microbatch.

    They are the weights; for trained weights two float32 moments, the accumulated
    gradients and those of the microbatch; saved activations; a logits tile; the
    gathered weights of two layers; and the temporaries of a layer's backward pass.
    """
    mesh, itemsize = config.mesh, value_bytes(config.model.compute_dtype)
    shards = mesh.fsdp * mesh.tensor
    master = value_bytes(config.model.param_dtype)
    needs = needs_of(config)
    trained, frozen = sizes(config.model, arch)
    each = 4 if config.model.lora.rank else master  # factors are float32
    state = (trained * (each + 8 + 4 + 4) + frozen * master) / shards
    if needs.critic:
        state += arch.num_params * (master + 8 + 4 + 4) / shards
    if needs.reference:
        state += trained * each / shards  # the reference
    if config.teacher.checkpoint:
        teacher = teacher_architecture(config.teacher.checkpoint)
        state += teacher.num_params * itemsize / shards
    outer = (1 if arch.tied_embeddings else 2) * arch.vocab_size * arch.hidden_size
    layer = (arch.num_params - outer) / arch.num_layers / mesh.tensor
    width, ffn = arch.hidden_size, arch.ffn_size // mesh.tensor
    taken = 1 if arch.experts is None else arch.experts.top_k + arch.experts.shared
    passing = tokens_per_device(config) * taken * (4 * ffn + 6 * width) + 2 * layer
    if arch.experts is not None:
        state += 4 * layer  # gradients of the gathered experts, before they are summed
    return (
        state
        + saved_activations(config, arch)
        + sum(logits_tile(config, arch).values())
        + passing * itemsize
    )


@functools.lru_cache(maxsize=1)
def teacher_architecture(checkpoint: str) -> Architecture:
    """Return the teacher's architecture; cached, since each mesh tried needs it."""
    return read_architecture(checkpoint)


def publishes_part(config: Config) -> bool:
    """Return whether only trained params are published, to replicas with the others.

    Replicas of several processes get all params: joining the parts is a program, which
    their processes would have to run in the same order among the engine's programs.
    """
    partly = bool(config.model.lora.rank or config.model.frozen)
    return partly and config.generators.processes <= 1


def base_bytes(config: Config, arch: Architecture, *, chips: int) -> float:
    """Return a device's bytes of the frozen params of a replica in its own process.

    Such a replica has them beside its params, if only the trained ones are published.
    """
    if not publishes_part(config):
        return 0.0
    share = sizes(config.model, arch).frozen / arch.num_params
    master = value_bytes(config.model.param_dtype)
    return share * _held_params(arch, chips) * master


def sampler_versions(config: Config) -> int:
    """Return the most versions of the params that a replica's devices hold.

    They are the current one; the next one, unless generators.versions = 1; and the
    evaluated one, with eval.concurrent.
    """
    return (config.generators.versions or 2) + config.eval.beside


def sampler_bytes(
    config: Config, arch: Architecture, *, own_process: bool = False
) -> float:
    """Return a replica's bytes on a device.

    They are the versions of the params, the frozen ones of a replica in its own
    process, and the cache, which evaluations share; programs and their temporaries add
    a few percent.
    """
    chips = config.generators.devices
    params = _held_params(arch, chips) * weight_bytes(config, arch)
    cache = cache_bytes(config, arch) / _cut(arch, chips)
    base = base_bytes(config, arch, chips=chips) if own_process else 0.0
    return 1.04 * (sampler_versions(config) * params + base + cache) + 0.6 * _GIB


def kv_bytes(config: Config, arch: Architecture) -> int:
    """Return the bytes of a token in the cache: its keys and values in all layers."""
    return 2 * arch.num_kv_heads * arch.num_layers * vector_bytes(config, arch)


def cache_bytes(config: Config, arch: Architecture) -> float:
    """Return the bytes of a replica's cache; layers with a part have rings alone."""
    tokens, each = cache_tokens(config), kv_bytes(config, arch)
    settings = _cache_settings(config, arch)
    if not settings.ring_pages:
        return tokens * each
    near = len(settings.near) / arch.num_layers
    in_rings = settings.pages_in_rings * settings.page_size
    whole = settings.num_pages * settings.page_size
    return each * (near * in_rings + (1 - near) * whole)


def _cache_settings(
    config: Config, arch: Architecture, *, tokens: int = 0
) -> EngineSettings:
    """Return the sampler's settings, with a cache of `tokens` if given."""
    sampler = config.sampler
    return EngineSettings(
        arch=arch,
        slots=sampler.slots or 1,
        max_prompt_tokens=sampler.max_prompt_tokens,
        max_completion_tokens=sampler.max_completion_tokens,
        tokens_per_call=sampler.tokens_per_call,
        prefill_tokens=sampler.prefill_tokens,
        page_size=sampler.page_size,
        cache_tokens=tokens or sampler.cache_tokens,
        dtype=config.model.sampler_dtype,
        eos_ids=(),
    )


def vector_bytes(config: Config, arch: Architecture) -> int:
    """Return the bytes of a head's key or value in the cache, with its scale."""
    if config.sampler.kv_dtype == "int8":
        return arch.head_dim + 4
    return arch.head_dim * value_bytes(config.model.sampler_dtype)


def cache_tokens(config: Config) -> int:
    """Return the tokens that a replica's cache holds."""
    sampler = config.sampler
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens
    return sampler.cache_tokens or sampler.slots * longest


def largest_cache(
    config: Config,
    arch: Architecture,
    *,
    chips: int,
    usable: float,
    own_process: bool = False,
) -> int:
    """Return the most tokens that a replica's cache can hold; 0: it does not fit.

    Args:
        config: gives dtypes, versions and page size.
        arch: the policy's architecture.
        chips: chips of the replica.
        usable: bytes of a device that the replica may fill.
        own_process: whether the replica is another process than the learner.
    """
    params = _held_params(arch, chips) * weight_bytes(config, arch)
    left = (usable - 0.6 * _GIB) / 1.04 - sampler_versions(config) * params
    left -= base_bytes(config, arch, chips=chips) if own_process else 0.0
    most = left / (kv_bytes(config, arch) / _cut(arch, chips))
    page = config.sampler.page_size
    tokens = max(0, int(most) // page * page)
    settings = _cache_settings(config, arch, tokens=max(tokens, page))
    if not settings.ring_pages:
        return tokens
    # Rings have a ninth more than their share of the pages, for slots' spare ones.
    near = len(settings.near) / arch.num_layers
    ring = min(1.0, 1.13 * settings.ring_pages / settings.pages_per_slot)
    return int(most / (1 - near + near * ring)) // page * page


def slots_limit(config: Config) -> int:
    """Return the most slots whose page table the TPU's attention kernel can take."""
    from scalerl_jax.sampler.kernels import most_slots  # Pallas

    sampler = config.sampler
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens
    return most_slots(-(-longest // sampler.page_size))


def _held_params(arch: Architecture, chips: int) -> float:
    """Return the number of params on a device of a replica."""
    of_experts = arch.num_expert_params
    common = (arch.num_params - of_experts) / _cut(arch, chips)
    return common + of_experts / chips


def _cut(arch: Architecture, chips: int) -> float:
    """Return the number of shards of a replica's cache and non-expert weights."""
    return chips / sampler_copies(arch, chips)
