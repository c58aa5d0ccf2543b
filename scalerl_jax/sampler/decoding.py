"""The pure functions behind the engine's verbs, and their state.

The file is above 400 lines: it has the functions with their settings and state.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from scalerl_jax.data.detokenizer import Marker
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.ffn_moe import to_ids
from scalerl_jax.model.transformer import (
    Said,
    cached_hidden,
    head_logits,
    head_weights,
)
from scalerl_jax.sampler.attention import CachedAttention, Chunk, Near, Rows
from scalerl_jax.sampler.sampling import Sampling, SamplingRows, draw_tokens
from scalerl_jax.types import AnyArray, PyTree

NEVER = np.iinfo(np.int32).max  # a thinking length that is never reached


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings on which an engine's compiled programs depend."""

    arch: Architecture
    slots: int
    max_prompt_tokens: int
    max_completion_tokens: int
    tokens_per_call: int
    dtype: Any
    eos_ids: tuple[int, ...]
    weights_dtype: str = "model"  # of matrices; "model": `dtype`; "int8": `Quantized`
    float32_head: bool = True
    phrase: tuple[int, ...] = ()  # forced at the thinking limit; empty: never
    end_of_thinking: Marker | None = None  # after this text nothing is forced
    page_size: int = 32  # tokens
    cache_tokens: int = 0  # in all pages; 0: room for every slot at its full length
    prefill_tokens: int = 256  # size of the largest chunk
    kv_dtype: str = "model"  # of the cache; "model": `dtype`; "int8": see `stored`
    attention: str = "auto"  # see `kernels.ATTENTION`
    top_logprobs: int = 0  # number of likeliest tokens to report
    report_experts: bool = False  # of every token and layer; mixtures only
    # Pad calls while that costs less than a compilation.  Logits then depend, by their
    # rounding, on earlier calls.
    few_programs: bool = False
    rings: bool = True  # layers that see a part of a sequence keep only that

    @property
    def max_tokens(self) -> int:
        """Return the longest sequence, prompt and completion, in tokens."""
        return self.max_prompt_tokens + self.max_completion_tokens

    @property
    def cache_dtype(self) -> Any:
        """Return the dtype of cached keys and values."""
        return self.dtype if self.kv_dtype == "model" else jnp.int8

    def near_of(self, layer: int) -> Near | None:
        """Return the part of a sequence that a layer sees; None: it sees all tokens."""
        local, windows = self.arch.local, self.arch.windows
        near = None
        if windows and windows[layer]:
            near = Near(windows[layer], sliding=True, ring=self.ring_pages)
        elif local is not None and local.with_positions[layer]:
            near = Near(local.chunk, ring=self.ring_pages)
        return near if near and self.max_tokens > near.tokens else None

    @property
    def nears(self) -> tuple[Near | None, ...]:
        """Return the part of a sequence that each layer sees; None: all tokens."""
        return tuple(map(self.near_of, range(self.arch.num_layers)))

    @property
    def near(self) -> tuple[Near, ...]:
        """Return the parts seen by those layers that do not see all tokens."""
        return tuple(near for near in self.nears if near)

    @property
    def ring_pages(self) -> int:
        """Number of a sequence's pages in layers that see a part; 0: all its pages.

        They hold the longest part before a chunk or a call, and its own tokens.
        """
        local = self.arch.local
        parts = [*self.arch.windows, local.chunk if local else 0]
        widest = max((part for part in parts if part < self.max_tokens), default=0)
        ahead = max(self.prefill_tokens, self.tokens_per_call)
        count = self.pages_for(widest + ahead) + 1
        least = self.pages_per_slot + count + 1
        held = self.cache_tokens // self.page_size if self.cache_tokens else least
        fits = self.rings and widest > 0 and count < self.pages_per_slot
        return count if fits and held >= least else 0

    @property
    def pages_in_rings(self) -> int:
        """Number of pages in layers that see a part, the first ones; 0: all pages.

        Each slot has a ring, and prompts that are being cached have the spare ones.
        """
        ring, slots = self.ring_pages, self.slots
        if not ring or not self.cache_tokens:
            return ring * (slots + self._spare_rings)
        wanted, all_pages = ring * (slots + self._spare_rings), self.num_pages
        share = all_pages * wanted // (slots * self.pages_per_slot)
        most = all_pages - (self.pages_per_slot - ring + 1)
        return min(wanted, max(2 * ring, share), most)

    @property
    def _spare_rings(self) -> int:
        return max(1, self.slots // 8)

    @property
    def copied_pages(self) -> int:
        """Number of pages that are copied for a sequence when it begins, at most."""
        return self.ring_pages + 1

    @property
    def pages_per_slot(self) -> int:
        """Number of pages of a sequence at its full length."""
        return self.pages_for(self.max_tokens)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.page_size)

    def tokens_of(self, slots: int) -> int:
        """Return the tokens of a cache with room for the longest sequence in each slot.

        One more page: a prompt's partly filled last page is kept beside its copy.
        """
        return (slots * self.pages_per_slot + 1) * self.page_size

    @property
    def num_pages(self) -> int:
        """Number of pages in the whole cache."""
        if self.cache_tokens:
            return self.cache_tokens // self.page_size
        # Spare rings are beside the slots' pages.
        spare = self.ring_pages * self._spare_rings
        return self.tokens_of(self.slots) // self.page_size + spare


@struct.dataclass(kw_only=True)
class SlotRows:
    """State of the sequences on the device, one per row."""

    tokens: Int[AnyArray, " rows"]  # the token to decode next
    positions: Int[AnyArray, " rows"]  # its position, the number of cached tokens
    prompt_lengths: Int[AnyArray, " rows"]
    max_tokens: Int[AnyArray, " rows"]  # limit of the completion
    keys: UInt32[AnyArray, "rows 2"]
    active: Bool[AnyArray, " rows"]
    thinking_limits: Int[AnyArray, " rows"]  # completion tokens; NEVER: no limit
    thinking_states: Int[AnyArray, " rows"]  # automaton of `settings.end_of_thinking`
    phrase_places: Int[AnyArray, " rows"]  # next phrase token to force; -1: none
    sampling: SamplingRows


@struct.dataclass(kw_only=True)
class DecodeState:
    """The sampler's state on the device between calls."""

    pages: tuple[Any, ...]  # per layer, as the attention backend keeps them
    rows: SlotRows  # one per slot


@struct.dataclass(kw_only=True)
class DecodedTokens:
    """The tokens of one `generate` call; steps after a sequence's end are not valid."""

    tokens: Int[Array, "steps rows"]
    logprobs: Float[Array, "steps rows"]  # nats, float32; 0 on forced tokens
    full_logprobs: Float[Array, "steps rows"]  # without filters
    top_tokens: Int[Array, "steps rows top"]  # the likeliest, without filters
    top_logprobs: Float[Array, "steps rows top"]
    valid: Bool[Array, "steps rows"]
    forced: Bool[Array, "steps rows"]
    active: Bool[Array, " rows"]  # after the call
    cut_off: Bool[Array, " rows"]  # ended at the limit, without EOS
    failed: Bool[Array, " rows"]  # ended by logits that are not finite
    # Experts of the preceding tokens, if reported; in the format of `ffn_moe.to_ids`.
    experts: UInt[Array, "steps rows layers k"] | None = None


def empty_rows(settings: EngineSettings, count: int) -> SlotRows:
    """Return `count` rows without a sequence, as NumPy arrays."""
    zeros = np.zeros(count, np.int32)
    marker = settings.end_of_thinking
    return SlotRows(
        tokens=zeros,
        positions=zeros,
        prompt_lengths=zeros + 1,
        max_tokens=zeros,
        keys=np.zeros((count, 2), np.uint32),
        active=np.zeros(count, bool),
        thinking_limits=zeros,
        thinking_states=zeros + (marker.start if marker else 0),
        phrase_places=zeros - 1,
        sampling=SamplingRows.of(Sampling(), count),
    )


def first_row(
    settings: EngineSettings,
    tokens: Int[np.ndarray, " n"],
    *,
    written: int = 0,
    max_tokens: int,
    key: UInt32[np.ndarray, "2"],
    thinking_limit: int = NEVER,
    sampling: Sampling,
) -> SlotRows:
    """Return the row of a sequence of which all tokens but the last are cached.

    The last `written` tokens belong to its completion, the others to its prompt.
    """
    rows = empty_rows(settings, 1)
    length, states = np.array([len(tokens)], np.int32), rows.thinking_states
    if written and settings.end_of_thinking is not None:
        said = tokens[len(tokens) - written :].tolist()
        states = np.array([settings.end_of_thinking.state(said)], np.int32)
    return dataclasses.replace(
        rows,
        tokens=tokens[-1:].astype(np.int32),
        positions=length - 1,
        prompt_lengths=length - written,
        thinking_states=states,
        max_tokens=np.array([max_tokens], np.int32),
        keys=np.asarray(key, np.uint32)[None],
        active=np.ones(1, bool),
        thinking_limits=np.array([thinking_limit], np.int32),
        sampling=SamplingRows.of(sampling, 1),
    )


def prefill(
    settings: EngineSettings,
    attention: CachedAttention,
    params: PyTree,
    state: DecodeState,
    chunk: Chunk,
    *,
    mesh: Mesh | None = None,
) -> tuple[DecodeState, UInt[Array, "T layers k"] | None]:
    """Write the keys and values of a chunk's tokens into their pages.

    Return the state, and the tokens' experts if they are reported.  In the last layer
    they have no experts, since its output for these tokens is never read.
    """
    # Code after the last layer's keys and values is dead: XLA removes it.
    _, pages, said = _forward(
        settings,
        params,
        chunk.tokens,
        chunk.positions,
        state.pages,
        functools.partial(attention.chunk, chunk=chunk),
        mesh=mesh,
    )
    experts = None
    if settings.report_experts:
        chosen = said["experts"]
        nobody = jnp.full_like(chosen[:1], -1)
        experts = _ids(settings, jnp.concatenate([chosen[:-1], nobody]))
    return dataclasses.replace(state, pages=pages), experts


def _forward(
    settings: EngineSettings,
    params: PyTree,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    caches: tuple[Any, ...],
    attend: Callable[..., tuple[Array, Any]],
    *,
    mesh: Mesh | None,
) -> tuple[Float[Array, "T D"], tuple[Any, ...], Said]:
    """Return the tokens' hidden states, the layers' new caches, and further outputs.

    `attend(cache, q, k, v, near=..., sinks=...)` is a method of `CachedAttention` for
    one layer.
    """
    after = list(caches)

    def attend_layer(layer: int, q: Array, k: Array, v: Array) -> Array:
        options: dict[str, Any] = {"near": settings.near_of(layer)}
        if settings.arch.sinks:
            options["sinks"] = params["layers"][layer]["sinks"]
        mixed, after[layer] = attend(caches[layer], q, k, v, **options)
        return mixed

    hidden, said = cached_hidden(
        params,
        settings.arch,
        tokens,
        positions=positions,
        attend=attend_layer,
        dtype=settings.dtype,
        mesh=mesh,
    )
    return hidden, tuple(after), said


def _ids(settings: EngineSettings, experts: Array) -> Array:
    """Return the experts of tokens in the format of `ffn_moe.to_ids`."""
    assert settings.arch.experts is not None, "only a mixture reports experts"
    return to_ids(experts, settings.arch.experts)


def insert(
    state: DecodeState,
    slots: Int[Array, " n"],
    rows: SlotRows,
    copy_from: Int[Array, " copies"],
    copy_to: Int[Array, " copies"],
) -> DecodeState:
    """Put n rows into slots, and copy pages `copy_from` to `copy_to`.

    Layers with rings have only the first pages, and copy no others.
    """
    return DecodeState(
        pages=jax.tree.map(
            lambda pages: pages.at[copy_to].set(pages[copy_from], mode="drop"),
            state.pages,
        ),
        rows=_put(state.rows, slots, rows),
    )


def _put(all_rows: SlotRows, slots: Array, rows: SlotRows) -> SlotRows:
    return jax.tree.map(
        lambda held, new: held.at[slots].set(new, mode="drop"), all_rows, rows
    )


def generate(
    settings: EngineSettings,
    attention: CachedAttention,
    params: PyTree,
    state: DecodeState,
    next_states: UInt[Array, "states V"] | None,
    slots: Int[Array, " rows"],
    table: Int[Array, "rows pages"],
    *,
    mesh: Mesh | None = None,
) -> tuple[DecodeState, DecodedTokens]:
    """Decode until the call has all its steps or no row is active.

    `next_states` is the transition table of `settings.end_of_thinking`, or None.
    """
    steps = settings.tokens_per_call
    rows = jax.tree.map(lambda held: held[slots], state.rows)
    # A slot number above the last reads the last slot's row, which must not run.
    rows = dataclasses.replace(rows, active=rows.active & (slots < settings.slots))
    places = Rows(table=table, starts=rows.positions)
    nears = settings.nears
    views = attention.open(state.pages, places, steps, nears)

    def unfinished(carry: tuple) -> Array:
        step, rows, _, _ = carry
        return (step < steps) & rows.active.any()

    def advance(carry: tuple) -> tuple:
        step, rows, views, results = carry
        attend = functools.partial(
            attention.decode,
            rows=places,
            step=step,
            positions=rows.positions,
            active=rows.active,
        )
        hidden, views, said = _forward(
            settings, params, rows.tokens, rows.positions, views, attend, mesh=mesh
        )
        rows, new = _next_tokens(settings, params, rows, hidden, next_states)
        if settings.report_experts:
            new["experts"] = _ids(settings, said["experts"])
        return step + 1, rows, views, _record(results, step, rows, new)

    start = (jnp.int32(0), rows, views, _no_results(settings, rows.active))
    _, rows, views, results = jax.lax.while_loop(unfinished, advance, start)
    pages = attention.close(
        state.pages, views, rows=places, positions=rows.positions, nears=nears
    )
    return DecodeState(pages=pages, rows=_put(state.rows, slots, rows)), results


def _record(
    results: DecodedTokens, step: Array, rows: SlotRows, new: dict[str, Array]
) -> DecodedTokens:
    """Return the results with one step's added; `rows` is the state after the step."""
    written = {
        name: getattr(results, name).at[step].set(value)
        for name, value in new.items()
        if name not in ("cut_off", "failed")
    }
    return dataclasses.replace(
        results,
        **written,
        active=rows.active,
        cut_off=results.cut_off | new["cut_off"],
        failed=results.failed | new["failed"],
    )


def _no_results(settings: EngineSettings, active: Array) -> DecodedTokens:
    shape = (settings.tokens_per_call, *active.shape)
    top = (*shape, settings.top_logprobs)
    experts, arch = None, settings.arch
    if settings.report_experts and arch.experts is not None:
        of_token = (arch.num_layers, arch.experts.top_k)
        experts = jnp.zeros((*shape, *of_token), arch.experts.id_dtype)
    return DecodedTokens(
        tokens=jnp.zeros(shape, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        full_logprobs=jnp.zeros(shape, jnp.float32),
        top_tokens=jnp.zeros(top, jnp.int32),
        top_logprobs=jnp.zeros(top, jnp.float32),
        valid=jnp.zeros(shape, bool),
        forced=jnp.zeros(shape, bool),
        active=active,
        cut_off=jnp.zeros(active.shape, bool),
        failed=jnp.zeros(active.shape, bool),
        experts=experts,
    )


def _next_tokens(
    settings: EngineSettings,
    params: PyTree,
    rows: SlotRows,
    hidden: Array,
    next_states: Array | None,
) -> tuple[SlotRows, dict[str, Array]]:
    """Draw one token in every active row; return rows and fields of `DecodedTokens`."""
    logits = head_logits(
        hidden,
        head_weights(params),
        float32_head=settings.float32_head,
        cap=settings.arch.logit_cap,
    )
    index = rows.positions + 1 - rows.prompt_lengths  # index in the completion
    draw = draw_tokens(logits, rows.sampling, keys=rows.keys, index=index)
    tokens, forced, places = _force_phrase(settings, rows, draw.tokens, index)

    states = rows.thinking_states
    if next_states is not None:
        states = next_states[states, tokens].astype(states.dtype)
    eos = jnp.isin(tokens, jnp.array(settings.eos_ids, jnp.int32)) & ~forced
    full = ~eos & (index + 1 >= rows.max_tokens)
    failed = draw.failed & ~forced
    active = rows.active & ~eos & ~full & ~failed
    following = dataclasses.replace(
        rows,
        tokens=jnp.where(rows.active, tokens, rows.tokens),
        positions=rows.positions + active,
        active=active,
        thinking_states=jnp.where(rows.active, states, rows.thinking_states),
        phrase_places=jnp.where(rows.active, places, rows.phrase_places),
    )
    top_tokens, top_logprobs = likeliest(settings, logits, rows.sampling)
    return following, dict(
        tokens=tokens,
        logprobs=jnp.where(forced, 0.0, draw.logprobs),
        full_logprobs=jnp.where(forced, 0.0, draw.full_logprobs),
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        valid=rows.active & ~failed,
        forced=forced,
        cut_off=rows.active & full & ~failed,
        failed=rows.active & failed,
    )


def likeliest(
    settings: EngineSettings, logits: Array, sampling: SamplingRows
) -> tuple[Array, Array]:
    """Return the likeliest tokens and their log-probabilities before the filters."""
    if not settings.top_logprobs:
        empty = (logits.shape[0], 0)
        return jnp.zeros(empty, jnp.int32), jnp.zeros(empty, jnp.float32)
    temperature = jnp.where(sampling.temperature == 0, 1.0, sampling.temperature)
    logprobs = jax.nn.log_softmax(logits / temperature[:, None], axis=-1)
    values, tokens = jax.lax.top_k(logprobs, settings.top_logprobs)
    return tokens.astype(jnp.int32), values


def _force_phrase(
    settings: EngineSettings, rows: SlotRows, tokens: Array, index: Array
) -> tuple[Array, Array, Array]:
    """Return tokens with the phrase forced in, their mask, and next phrase places."""
    if not settings.phrase:
        return tokens, jnp.zeros_like(rows.active), rows.phrase_places
    phrase = jnp.array(settings.phrase, jnp.int32)
    starts = (rows.phrase_places < 0) & (index == rows.thinking_limits)
    if settings.end_of_thinking is not None:
        starts &= rows.thinking_states != settings.end_of_thinking.ended
    places = jnp.where(starts, 0, rows.phrase_places)
    forced = places >= 0
    tokens = jnp.where(forced, phrase[jnp.maximum(places, 0)], tokens)
    following = jnp.where(forced, places + 1, -1)
    return tokens, forced, jnp.where(following >= len(settings.phrase), -1, following)
