"""A sampler with JetStream's verbs on our own decoder.

    prefix = engine.prefill(params=params, padded_tokens=tokens, true_length=n)
    state = engine.bulk_insert(prefix, state, slots=slots, samples=samples)
    state, results = engine.generate(params, state)

`params` is an argument of every call: an in-flight weight update is the next call
with other params, the KV cache kept.  A difference from JetStream: `prefill` draws no
token.  The last prompt token is decoded in each slot, so that every token of a
completion comes from one code path, with the key of its own sample.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.transformer import (
    KVCache,
    decode_step,
    head_logits,
    head_weights,
    hidden_states,
    init_cache,
)
from scalerl_jax.sampler.sampling import draw_token, token_logprobs
from scalerl_jax.types import PyTree

NEVER = np.iinfo(np.int32).max  # a thinking length that is not reached


@struct.dataclass(kw_only=True)
class Prefix:
    """A prompt's keys and values, ready for any number of slots."""

    keys: Float[Array, "L kv P dim"]
    values: Float[Array, "L kv P dim"]
    last_token: Int[Array, ""]
    true_length: Int[Array, ""]


@struct.dataclass(kw_only=True)
class Samples:
    """What sets the completions of one prompt apart."""

    keys: Array  # typed PRNG keys [G]
    thinking_limits: Int[Array, " G"]  # tokens of thinking before an interruption


@struct.dataclass(kw_only=True)
class DecodeState:
    """Everything of the slots that lives on the device."""

    cache: KVCache
    tokens: Int[Array, " slots"]  # decoded next
    positions: Int[Array, " slots"]  # of that token
    prompt_lengths: Int[Array, " slots"]
    keys: Array  # typed PRNG keys [slots]
    active: Bool[Array, " slots"]
    thinking_limits: Int[Array, " slots"]  # NEVER once thinking has ended
    phrase_places: Int[Array, " slots"]  # next phrase token to force; -1: none
    recent: Int[Array, "slots recent"]  # last tokens, to see the end of thinking


@struct.dataclass(kw_only=True)
class ResultTokens:
    """The tokens of one `generate` call; rows past a slot's end are not valid."""

    tokens: Int[Array, "steps slots"]
    logprobs: Float[Array, "steps slots"]  # nats, float32; 0 on forced tokens
    valid: Bool[Array, "steps slots"]
    forced: Bool[Array, "steps slots"]
    active: Bool[Array, " slots"]  # after the call
    cut_off: Bool[Array, " slots"]  # ended by the limit, without EOS


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What the compiled programs of an engine depend on."""

    arch: Architecture
    slots: int
    max_prompt_tokens: int
    max_completion_tokens: int
    tokens_per_call: int
    dtype: Any
    eos_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    float32_head: bool = True
    phrase: tuple[int, ...] = ()  # forced at the thinking limit; empty: never
    end_of_thinking: tuple[int, ...] = ()  # once seen, nothing is forced

    @property
    def cache_length(self) -> int:
        """Tokens a slot can hold."""
        return self.max_prompt_tokens + self.max_completion_tokens


class Engine:
    """The compiled programs, and nothing that changes from call to call."""

    def __init__(self, settings: EngineSettings, *, mesh: Mesh) -> None:
        """Programs for `settings` on `mesh`; they compile when they are called."""
        self.settings = settings
        self.mesh = mesh
        replicated = NamedSharding(mesh, PartitionSpec())
        heads = NamedSharding(mesh, PartitionSpec(None, "tensor"))
        state = jax.eval_shape(functools.partial(_init_state, settings))
        self._state_sharding = jax.tree.map(lambda _: replicated, state)
        self._state_sharding = self._state_sharding.replace(
            cache=jax.tree.map(lambda _: heads, state.cache)
        )
        self._init = jax.jit(
            functools.partial(_init_state, settings),
            out_shardings=self._state_sharding,
        )
        self._prefill = jax.jit(functools.partial(_prefill, settings))
        self._insert = jax.jit(
            _insert, donate_argnums=1, out_shardings=self._state_sharding
        )
        self._generate = jax.jit(
            functools.partial(_generate, settings),
            donate_argnums=1,
            out_shardings=(self._state_sharding, replicated),
        )
        self._release = jax.jit(
            _release, donate_argnums=0, out_shardings=self._state_sharding
        )

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self.settings.slots

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt, in tokens."""
        return self.settings.max_prompt_tokens

    @property
    def samples_per_slot(self) -> int:
        """Completions in one slot."""
        return 1

    def init_decode_state(self) -> DecodeState:
        """Slots without a sequence."""
        return self._init()

    def prefill(
        self, *, params: PyTree, padded_tokens: Int[np.ndarray, " P"], true_length: int
    ) -> Prefix:
        """Keys and values of a prompt.  Compiles once for every padded length."""
        return self._prefill(params, padded_tokens, np.int32(true_length))

    def bulk_insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        *,
        slots: Int[np.ndarray, " G"],
        samples: Samples,
    ) -> DecodeState:
        """The prompt in several slots, a sample in each; donates `decode_state`.

        A slot number of `max_concurrent_decodes` inserts nothing: a group that does
        not find room for all its samples is inserted in parts.
        """
        return self._insert(prefix, decode_state, np.asarray(slots, np.int32), samples)

    def generate(
        self, params: PyTree, decode_state: DecodeState
    ) -> tuple[DecodeState, ResultTokens]:
        """Up to `tokens_per_call` tokens in every active slot; donates the state."""
        return self._generate(params, decode_state)

    def free_resource(
        self, decode_state: DecodeState, *, slots: Bool[np.ndarray, " slots"]
    ) -> DecodeState:
        """Stop the sequences of the marked slots; donates the state."""
        return self._release(decode_state, slots)


def padded_length(length: int, *, longest: int) -> int:
    """The prefill bucket of a prompt: a power of two, 16 at least, or the limit."""
    return min(max(16, 1 << (length - 1).bit_length()), longest)


def _init_state(settings: EngineSettings) -> DecodeState:
    slots = settings.slots
    zeros = jnp.zeros(slots, jnp.int32)
    return DecodeState(
        cache=init_cache(
            settings.arch,
            slots=slots,
            length=settings.cache_length,
            dtype=settings.dtype,
        ),
        tokens=zeros,
        positions=zeros,
        prompt_lengths=zeros,
        keys=jax.random.split(jax.random.key(0), slots),
        active=jnp.zeros(slots, bool),
        thinking_limits=zeros,
        phrase_places=zeros - 1,
        recent=jnp.full((slots, max(1, len(settings.end_of_thinking))), -1, jnp.int32),
    )


def _prefill(
    settings: EngineSettings, params: PyTree, tokens: Array, true_length: Array
) -> Prefix:
    places = jnp.arange(tokens.shape[0])
    _, kv = hidden_states(
        params,
        settings.arch,
        tokens[None],
        positions=places[None],
        segment_ids=(places < true_length).astype(jnp.int32)[None],
        dtype=settings.dtype,
        keep_kv=True,
    )
    assert kv is not None, "keep_kv was asked for"
    keys, values = (part[:, 0].swapaxes(1, 2) for part in kv)
    return Prefix(
        keys=keys,
        values=values,
        last_token=tokens[true_length - 1],
        true_length=true_length,
    )


def _insert(
    prefix: Prefix, state: DecodeState, slots: Array, samples: Samples
) -> DecodeState:
    length = prefix.keys.shape[2]

    def put(slot_values: Array, new: Array) -> Array:
        return slot_values.at[slots].set(new, mode="drop")

    def put_layers(cached: tuple[Array, ...], new: Array) -> tuple[Array, ...]:
        return tuple(
            layer.at[slots, :, :length].set(new[index].astype(layer.dtype), mode="drop")
            for index, layer in enumerate(cached)
        )

    return DecodeState(
        cache=KVCache(
            keys=put_layers(state.cache.keys, prefix.keys),
            values=put_layers(state.cache.values, prefix.values),
        ),
        tokens=put(state.tokens, prefix.last_token),
        positions=put(state.positions, prefix.true_length - 1),
        prompt_lengths=put(state.prompt_lengths, prefix.true_length),
        keys=put(state.keys, samples.keys),
        active=put(state.active, jnp.array(True)),
        thinking_limits=put(state.thinking_limits, samples.thinking_limits),
        phrase_places=put(state.phrase_places, jnp.array(-1)),
        recent=put(state.recent, jnp.array([-1])),
    )


def _release(state: DecodeState, slots: Array) -> DecodeState:
    return dataclasses.replace(state, active=state.active & ~slots)


def _decode_one(
    settings: EngineSettings, params: PyTree, state: DecodeState
) -> tuple[DecodeState, ResultTokens]:
    """One token in every active slot; the arrays of the result are [slots]."""
    hidden, cache = decode_step(
        params,
        settings.arch,
        state.tokens,
        state.cache,
        positions=state.positions,
        active=state.active,
        dtype=settings.dtype,
    )
    logits = head_logits(
        hidden, head_weights(params), float32_head=settings.float32_head
    )
    logprobs = token_logprobs(
        logits,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
    )
    index = state.positions + 1 - state.prompt_lengths  # place in the completion
    tokens = jax.vmap(draw_token)(logprobs, state.keys, index)
    tokens, forced, places = _force_phrase(settings, state, tokens, index)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]

    recent = jnp.concatenate([state.recent[:, 1:], tokens[:, None]], axis=1)
    limits = state.thinking_limits
    if settings.end_of_thinking:
        ended = (recent == jnp.array(settings.end_of_thinking)).all(axis=1)
        limits = jnp.where(ended, NEVER, limits)
    eos = jnp.isin(tokens, jnp.array(settings.eos_ids)) & ~forced
    full = ~eos & (index + 1 >= settings.max_completion_tokens)
    active = state.active & ~eos & ~full
    following = dataclasses.replace(
        state,
        cache=cache,
        tokens=jnp.where(state.active, tokens, state.tokens),
        positions=state.positions + active,
        active=active,
        thinking_limits=jnp.where(state.active, limits, state.thinking_limits),
        phrase_places=jnp.where(state.active, places, state.phrase_places),
        recent=jnp.where(state.active[:, None], recent, state.recent),
    )
    return following, ResultTokens(
        tokens=tokens,
        logprobs=jnp.where(forced, 0.0, chosen),
        valid=state.active,
        forced=forced,
        active=active,
        cut_off=state.active & full,
    )


def _force_phrase(
    settings: EngineSettings, state: DecodeState, tokens: Array, index: Array
) -> tuple[Array, Array, Array]:
    """Tokens with the phrase in place of draws; which are forced; places after."""
    if not settings.phrase:
        return tokens, jnp.zeros_like(state.active), state.phrase_places
    phrase = jnp.array(settings.phrase, jnp.int32)
    starts = (state.phrase_places < 0) & (index == state.thinking_limits)
    places = jnp.where(starts, 0, state.phrase_places)
    forced = places >= 0
    tokens = jnp.where(forced, phrase[jnp.maximum(places, 0)], tokens)
    following = jnp.where(forced, places + 1, -1)
    return tokens, forced, jnp.where(following >= len(settings.phrase), -1, following)


def _generate(
    settings: EngineSettings, params: PyTree, state: DecodeState
) -> tuple[DecodeState, ResultTokens]:
    """Steps until the call is full or no slot is active."""
    steps, slots = settings.tokens_per_call, settings.slots
    shape = (steps, slots)
    empty = ResultTokens(
        tokens=jnp.zeros(shape, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        valid=jnp.zeros(shape, bool),
        forced=jnp.zeros(shape, bool),
        active=state.active,
        cut_off=jnp.zeros(slots, bool),
    )

    def unfinished(carry: tuple[Array, DecodeState, ResultTokens]) -> Array:
        step, state, _ = carry
        return (step < steps) & state.active.any()

    def advance(
        carry: tuple[Array, DecodeState, ResultTokens],
    ) -> tuple[Array, DecodeState, ResultTokens]:
        step, state, results = carry
        state, new = _decode_one(settings, params, state)
        rows = {
            name: getattr(results, name).at[step].set(getattr(new, name))
            for name in ("tokens", "logprobs", "valid", "forced")
        }
        cut_off = results.cut_off | new.cut_off
        results = ResultTokens(**rows, active=new.active, cut_off=cut_off)
        return step + 1, state, results

    _, state, results = jax.lax.while_loop(
        unfinished, advance, (jnp.int32(0), state, empty)
    )
    return state, results
