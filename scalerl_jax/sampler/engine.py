"""An engine with JetStream's verbs for this package's decoder and a paged KV cache.

    state, _ = engine.prefill(params, state, chunk)      prompt tokens into pages
    state = engine.insert(state, slots=slots, rows=rows) sequences into slots
    state, results = engine.generate(params, state, slots=slots, table=table)

`params` is an argument of every call: an in-flight weight update is the next call
with other params, with the KV cache kept.  The caller (`scheduler`) records which
sequence owns which page; callers with rows of their own share the pages (`pool`).
Unlike in JetStream, `prefill` draws no token: the last prompt token is decoded in each
slot, so that every token of a completion comes from one code path, with the key of its
own sample.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, UInt

from scalerl_jax.model.transformer import abstract_params, make_lay_out
from scalerl_jax.parallel.mesh import compiler_options
from scalerl_jax.sampler.attention import CachedAttention, Chunk, GatheredAttention
from scalerl_jax.sampler.decoding import (
    DecodedTokens,
    DecodeState,
    EngineSettings,
    SlotRows,
    empty_rows,
    generate,
    insert,
    prefill,
)
from scalerl_jax.sampler.sizes import ProgramSizes, ladder
from scalerl_jax.types import PyTree
from scalerl_jax.weights.shards import named_leaves

MAX_SEQUENCES = 32  # prompts in one prefill chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The jitted functions behind an engine's verbs, to call or to lower.

    All that take a state donate it.
    """

    init_pages: Any  # () -> pages of a state
    init_rows: Any  # () -> rows of a state
    prefill: Any  # (params, state, chunk) -> state, experts
    insert: Any  # (state, slots, rows, copy_from, copy_to) -> state
    generate: Any  # (params, state, next_states, slots, table) -> state, tokens
    release: Any  # (state, slots) -> state


class Engine:
    """The compiled programs, without any state of a sequence."""

    # Called with (number, total) when a program is compiled.
    notice: Callable[[int, int], None] = staticmethod(lambda *_: None)

    def __init__(self, settings: EngineSettings, *, mesh: Mesh) -> None:
        """Make programs for `settings` on `mesh`; each compiles at its first call.

        Raises:
            ValueError: the cache has no room for one sequence at its full length.
        """
        if 0 < settings.cache_tokens < settings.tokens_of(1):
            raise ValueError(
                f"sampler.cache_tokens = {settings.cache_tokens} makes "
                f"{settings.num_pages} pages of sampler.page_size = "
                f"{settings.page_size}; one sequence of sampler.max_prompt_tokens + "
                f"sampler.max_completion_tokens = {settings.max_tokens} tokens needs "
                f"{settings.pages_per_slot + 1}: raise sampler.cache_tokens to "
                f"{settings.tokens_of(1)} or more"
            )
        self.settings = settings
        self.mesh = mesh
        attention = _attention(settings, mesh)
        slots, steps = settings.slots, attention.width_steps
        first, last = settings.pages_for(64), settings.pages_per_slot
        worth = _compilation_tokens(settings, mesh) if settings.few_programs else 0.0
        self.chunk_sizes = ProgramSizes(  # tokens
            ladder(64, settings.prefill_tokens), worth=worth
        )
        self.decode_sizes = ProgramSizes(  # (slots, pages of each)
            ladder(max(8, slots // 16), slots),
            ladder(first, last, steps=steps) if steps else (last,),
            worth=worth / settings.tokens_per_call,
        )
        # Sequences.  They compile soon, and copy pages: one is never padded to another.
        counts = ladder(min(8, slots), slots)[::2]
        self.insert_sizes = ProgramSizes(tuple(sorted({*counts, slots})))
        self._lay_out = _lay_out(settings)
        self._loaded: tuple[PyTree, PyTree] | None = None  # (as given, as used)
        self.traces = 0  # of programs; constant after everything is compiled

        self.programs = self._make_programs(attention)

    def _make_programs(self, attention: CachedAttention) -> Programs:
        settings, mesh, program = self.settings, self.mesh, self._program
        replicated = NamedSharding(mesh, PartitionSpec())
        init_pages = functools.partial(_init_pages, settings, attention)
        init_rows = functools.partial(_init_rows, settings)
        shardings = DecodeState(
            pages=jax.tree.map(
                functools.partial(NamedSharding, mesh),
                tuple(map(attention.page_specs, jax.eval_shape(init_pages))),
            ),
            rows=jax.tree.map(lambda _: replicated, jax.eval_shape(init_rows)),
        )
        return Programs(
            init_pages=jax.jit(init_pages, out_shardings=shardings.pages),
            init_rows=jax.jit(init_rows, out_shardings=shardings.rows),
            prefill=program(
                functools.partial(prefill, settings, attention, mesh=mesh),
                1,
                out=(shardings, replicated),
            ),
            insert=program(insert, 0, out=shardings),
            generate=program(
                functools.partial(generate, settings, attention, mesh=mesh),
                1,
                out=(shardings, replicated),
            ),
            release=program(_release, 0, out=shardings),
        )

    def _program(self, function: Any, state_at: int, *, out: Any) -> Any:
        """Return a jitted program that donates the state and counts its traces."""

        def counted(*args: Any) -> Any:
            self.traces += 1  # runs only during tracing
            self.notice(self.traces, self.num_programs)
            return function(*args)

        return jax.jit(
            counted,
            donate_argnums=state_at,
            out_shardings=out,
            compiler_options=compiler_options("sampler", self.mesh),
        )

    @functools.cached_property
    def _next_states(self) -> jax.Array | None:
        """Return `settings.end_of_thinking`'s transition table, on the devices."""
        marker = self.settings.end_of_thinking
        if marker is None:
            return None
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        table = marker.next_states
        return jax.make_array_from_callback(table.shape, everywhere, table.__getitem__)

    @property
    def num_programs(self) -> int:
        """Number of programs; a run may not need all of them."""
        sizes = (self.decode_sizes, self.chunk_sizes, self.insert_sizes)
        return sum(map(len, sizes)) + 1

    def load_params(self, params: PyTree) -> PyTree:
        """Return the params in the programs' layout: an array per layer.

        Stacked params are copied layer by layer, once; params that `learner.publish` or
        this function has laid out are returned unchanged.

        Raises:
            ValueError: a parameter is missing, of another shape or of another dtype.
        """
        if self._loaded is not None and any(params is each for each in self._loaded):
            return self._loaded[1]
        stacked = check_params(params, self.settings)
        self._loaded = (params, self._lay_out(params) if stacked else params)
        return self._loaded[1]

    def init_decode_state(self) -> DecodeState:
        """Return a state with empty slots and pages."""
        return DecodeState(pages=self.init_pages(), rows=self.init_rows())

    def init_pages(self) -> tuple[Any, ...]:
        """Return the empty pages of a state: the whole KV cache."""
        return self.programs.init_pages()

    def init_rows(self) -> SlotRows:
        """Return the rows of a state's empty slots."""
        return self.programs.init_rows()

    def prefill(
        self, params: PyTree, state: DecodeState, chunk: Chunk
    ) -> tuple[DecodeState, UInt[Array, "T layers k"] | None]:
        """Write a chunk's keys and values into its pages; donates `state`.

        The second result is the experts of the chunk's tokens, if they are reported.
        """
        return self.programs.prefill(self.load_params(params), state, chunk)

    def insert(
        self,
        state: DecodeState,
        *,
        slots: Int[np.ndarray, " n"],
        rows: SlotRows,
        copy_from: Int[np.ndarray, " copies"],
        copy_to: Int[np.ndarray, " copies"],
    ) -> DecodeState:
        """Put sequences into slots, with copies of pages; donates `state`.

        A slot number above the last inserts nothing; a page number above the last
        copies nothing.
        """
        return self.programs.insert(state, slots, rows, copy_from, copy_to)

    def generate(
        self,
        params: PyTree,
        state: DecodeState,
        *,
        slots: Int[np.ndarray, " rows"],
        table: Int[np.ndarray, "rows pages"],
    ) -> tuple[DecodeState, DecodedTokens]:
        """Decode up to `tokens_per_call` tokens in each of `slots`; donates `state`.

        `table` has the pages of each slot, enough for the tokens of the call.
        """
        return self.programs.generate(
            self.load_params(params), state, self._next_states, slots, table
        )

    def free_resource(
        self, state: DecodeState, *, slots: Bool[np.ndarray, " slots"]
    ) -> DecodeState:
        """Stop the sequences of the marked slots; donates `state`."""
        return self.programs.release(state, slots)


def check_params(params: PyTree, settings: EngineSettings) -> bool:
    """Check that params are of the model; return whether their layers are stacked.

    Raises:
        ValueError: a parameter is missing, of another shape or of another dtype.
    """
    stacked = isinstance(params.get("layers"), dict)
    found, wanted = _table_of(params), _expected_table(settings, stacked)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"parameter {name} is {found.get(name, 'missing')}; the sampler's "
                f"model has {wanted.get(name, 'no parameter of that name')}: publish "
                f"params of the same architecture, cast to model.sampler_dtype"
            )
    return stacked


def _table_of(params: PyTree) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every parameter, by its path."""
    return {
        name: (tuple(leaf.shape), str(leaf.dtype))
        for name, leaf in named_leaves(params).items()
    }


@functools.cache
def _expected_table(
    settings: EngineSettings, stacked: bool
) -> dict[str, tuple[tuple[int, ...], str]]:
    expected = abstract_params(settings.arch, dtype=settings.dtype)
    if not stacked:
        expected = jax.eval_shape(_lay_out(settings), expected)
    return _table_of(expected)


def _lay_out(settings: EngineSettings) -> Callable[[PyTree], PyTree]:
    """Return the function from stacked params to those of the programs."""
    return make_lay_out(
        settings.arch, dtype=settings.dtype, weights_dtype=settings.weights_dtype
    )


def _compilation_tokens(settings: EngineSettings, mesh: Mesh) -> float:
    """Return how many tokens cost as much as the compilation of a program.

    An accelerator makes some 1e16 useful operations in the minute that it may take.  On
    a CPU it takes a core 2 s for 4 layers and 4 s for 30; in a second that core makes
    1e10 to 2e10 useful operations with rows of 128 numbers, and 7e10 to 1e11 of 576
    (`benchmarks/README.md`).
    """
    arch = settings.arch
    operations = 1e16
    if mesh.devices.flat[0].platform == "cpu":
        seconds = 1.7 + 0.08 * arch.num_layers
        operations = seconds * min(1.5e8 * arch.hidden_size, 1e11)
    return operations / (2.0 * arch.num_active_params)


def _attention(settings: EngineSettings, mesh: Mesh) -> CachedAttention:
    """Return the attention backend; on a CPU no kernel module is imported."""
    if settings.attention == "auto" and mesh.devices.flat[0].platform == "cpu":
        return GatheredAttention(cap=settings.arch.attention_cap)
    from scalerl_jax.sampler.kernels import choose_attention  # Pallas

    return choose_attention(settings, mesh)


def _init_pages(
    settings: EngineSettings, attention: CachedAttention
) -> tuple[Any, ...]:
    arch = settings.arch
    return tuple(
        attention.init_pages(
            settings.pages_in_rings if near and near.ring else settings.num_pages,
            settings.page_size,
            heads=arch.num_kv_heads,
            dim=arch.head_dim,
            dtype=settings.cache_dtype,
        )
        for near in settings.nears
    )


def _init_rows(settings: EngineSettings) -> SlotRows:
    return jax.tree.map(jnp.asarray, empty_rows(settings, settings.slots))


def empty_chunk(settings: EngineSettings, size: int) -> Chunk:
    """Return a prefill chunk of `size` tokens, all of them padding."""
    return Chunk(
        tokens=np.zeros(size, np.int32),
        positions=np.zeros(size, np.int32),
        segments=np.zeros(size, np.int32),
        table=np.zeros((MAX_SEQUENCES, settings.pages_per_slot), np.int32),
        query_starts=np.zeros(MAX_SEQUENCES + 1, np.int32),
        lengths=np.zeros(MAX_SEQUENCES, np.int32),
        num_sequences=np.zeros(1, np.int32),
    )


def _release(state: DecodeState, slots: Any) -> DecodeState:
    rows = dataclasses.replace(state.rows, active=state.rows.active & ~slots)
    return dataclasses.replace(state, rows=rows)
