"""Bytes of a device, in closed form, before anything is compiled.

A run uses them to choose what fits; the preflight compiles what was chosen and says
what it really takes.  A config here has numbers for all that concerns the devices.
"""

import functools

from scalerl_jax.config import Config
from scalerl_jax.machines.chips import Chip
from scalerl_jax.model.architecture import Architecture, sampler_copies
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.lora import sizes
from scalerl_jax.objective.terms import needs_of
from scalerl_jax.parallel.mesh import largest_divisor
from scalerl_jax.sampler.kernels import most_slots

# Of a data sheet's bytes: a program gets about 0.98, and closed forms are not exact.
_USABLE = 0.92
_GIB = 2**30


def value_bytes(dtype: str) -> int:
    """Return the bytes of a value in one of the settings' number formats."""
    return 4 if dtype == "float32" else 2


def tokens_per_device(config: Config) -> int:
    """Return the tokens of a microbatch on one device."""
    mesh, batch = config.mesh, config.batch
    rows = batch.rows_per_microbatch // (mesh.data * mesh.fsdp)
    return rows * batch.row_tokens // mesh.context


def saved_activations(config: Config, arch: Architecture) -> int:
    """Return the bytes that a microbatch's forward pass keeps for the backward one.

    Per token and layer, in the compute dtype, by `model.remat`: the layer's input;
    with "attention" what attention found and its float32 normalisers; with "dots"
    the results of all matmuls too, but for the last, which only the next layer's input
    has; with "none" also what lies between them.  Of a mixture each expert that a token
    takes counts, and who they are is kept in any case.
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
    """Return a token's values: results of products that are kept, and what is between.

    A dense feed-forward's last product is not among them; those of experts are, for
    their gates.
    """
    ffn, experts = arch.ffn_size // tensor, arch.experts
    if experts is None:
        return 2 * ffn, ffn
    products = experts.top_k * (2 * ffn + arch.hidden_size)
    between = experts.top_k * (ffn + arch.hidden_size)
    return products + 2 * ffn * experts.shared, between + ffn * experts.shared


def logits_tile(config: Config, arch: Architecture) -> dict[str, int]:
    """Return the bytes of the head's tile of logits and of the slab gathered for it."""
    vocabulary = arch.vocab_size // config.mesh.tensor
    slab = largest_divisor(vocabulary, config.model.head_chunk_vocab)
    chunk = largest_divisor(tokens_per_device(config), config.model.head_chunk_tokens)
    itemsize = 4 if config.model.float32_head else 2
    return {
        "logits tile": chunk * slab * 4,
        "slab of the head": slab * arch.hidden_size * itemsize,
    }


def usable_bytes(chip: Chip) -> float:
    """Return the bytes of a device that a choice may fill."""
    return _USABLE * chip.hbm_bytes


def learner_bytes(config: Config, arch: Architecture) -> float:
    """Return the bytes of a device of the learner, while a microbatch is computed.

    Weights, and of those that are trained two float32 moments, the gradients so far and
    of the microbatch; what the forward pass keeps; a tile of the head; the weights of
    two layers, which are gathered; and what a layer's backward pass has at a time.
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
        state += _teacher_params(config.teacher.checkpoint) * itemsize / shards
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
def _teacher_params(checkpoint: str) -> int:
    """Read once: a choice of the mesh asks for every mesh that it tries."""
    return read_architecture(checkpoint).num_params


def sampler_versions(config: Config) -> int:
    """Return the most versions of the params that a replica's devices hold.

    That in use and, unless generators.versions = 1, the next one; beside them, where
    evaluations are made beside the run, the evaluated one.
    """
    return (config.generators.versions or 2) + config.eval.concurrent


def sampler_bytes(config: Config, arch: Architecture) -> float:
    """Return the bytes of a device of a replica.

    Versions of the params and two caches, one of them an evaluation's; programs and
    what they hold for themselves come to some hundredths more.
    """
    chips = config.generators.devices
    params = _held_params(arch, chips) * value_bytes(config.model.sampler_dtype)
    cache = cache_tokens(config) * kv_bytes(config, arch) / _cut(arch, chips)
    return 1.04 * (sampler_versions(config) * params + 2 * cache) + 0.6 * _GIB


def kv_bytes(config: Config, arch: Architecture) -> int:
    """Return the bytes of a cached token, its keys and values in all layers."""
    values = 2 * arch.num_kv_heads * arch.head_dim * arch.num_layers
    return values * value_bytes(config.model.sampler_dtype)


def cache_tokens(config: Config) -> int:
    """Return the tokens that a replica's cache holds."""
    sampler = config.sampler
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens
    return sampler.cache_tokens or sampler.slots * longest


def largest_cache(
    config: Config, arch: Architecture, *, chips: int, usable: float
) -> int:
    """Return the most tokens that a replica's cache can hold, 0 for none.

    Args:
        config: for its number formats and page size.
        usable: bytes of a device that it may fill.
    """
    params = _held_params(arch, chips) * value_bytes(config.model.sampler_dtype)
    left = (usable - 0.6 * _GIB) / 1.04 - sampler_versions(config) * params
    tokens = int(left / 2 / (kv_bytes(config, arch) / _cut(arch, chips)))
    page = config.sampler.page_size
    return max(0, tokens // page * page)


def slots_limit(config: Config) -> int:
    """Return the most slots whose pages the TPU's attention kernel can be told of."""
    sampler = config.sampler
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens
    return most_slots(-(-longest // sampler.page_size))


def _held_params(arch: Architecture, chips: int) -> float:
    """Return the params that a device of a replica has."""
    of_experts = arch.num_expert_params
    common = (arch.num_params - of_experts) / _cut(arch, chips)
    return common + of_experts / chips


def _cut(arch: Architecture, chips: int) -> float:
    """Return the number of parts of a replica's cache and of its non-expert weights."""
    return chips / sampler_copies(arch, chips)
