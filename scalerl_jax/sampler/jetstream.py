"""An adapter of this package's engine for JetStream's orchestrator.

    engine = JetStreamEngine(settings, mesh=mesh, tokenizer=tokenizer)
    driver = load_orchestrator().Driver(
        prefill_engines=[engine], generate_engines=[engine],
        prefill_params=[params], generate_params=[params], interleaved_mode=True)

It needs the extra `jetstream`, and nothing else in the package imports it: training
and serving use `engine` and `scheduler`.  The protocol costs more than these: one
token per call, pages for a whole sequence in every slot, and a prefill for each sample
of a prompt.  It lacks two things: no thinking length is forced, and a sequence whose
logits are not finite ends without an error.

The protocol is that of 0.2.2, in which `prefill` returns a prefix and no token; the
first token comes from the first `generate`, as in `engine`.
"""

import functools
import itertools
import logging
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler import decoding
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.pages import Prefix
from scalerl_jax.sampler.sampling import Sampling, sample_keys
from scalerl_jax.sampler.scheduler import fill_chunk
from scalerl_jax.types import PyTree

try:
    from jetstream.engine import (  # pyright: ignore[reportMissingImports]
        engine_api,
        token_utils,
        tokenizer_api,
        tokenizer_pb2,
    )
except ImportError as error:
    raise ImportError(
        "scalerl_jax.sampler.jetstream needs google-jetstream 0.2.2 (not the package "
        "that is called jetstream); it brings TensorFlow, 3 GB in all:\n"
        '    pip install "scalerl_jax[jetstream]"'
    ) from error

# The orchestrator puts `bos_id` before every prompt of ids; `prefill` removes this one,
# since a prompt has all of its tokens already.
NO_BOS = -1
# Prompt lengths to which the orchestrator can pad; any other ends its process.
PREFILL_LENGTHS = tuple(2**power for power in range(4, 16))


@struct.dataclass
class ResultTokens(engine_api.ResultTokens):
    """A token per slot, and its log-probability under the sampled distribution.

    JetStream 0.2.2 has no log-probabilities.  They are kept here, on the host too, but
    lost where JetStream makes its own objects: in `get_result_at_slot` (use
    `log_prob[slot]`), `token_utils.process_result_tokens`, and so the orchestrator.
    """

    log_prob: Float[Array, "slots 1"]  # nats, float32; 0 where not valid

    def copy_to_host_async(self) -> None:
        """Start to copy both arrays to the host."""
        for array in (self.data, self.log_prob):
            if isinstance(array, jax.Array):
                array.copy_to_host_async()

    def convert_to_numpy(self) -> "ResultTokens":
        """Return these results with NumPy arrays."""
        return replace(self, data=np.array(self.data), log_prob=np.array(self.log_prob))


@struct.dataclass(kw_only=True)
class CachedPrompt:
    """JetStream's prefix: a prompt's pages, in order, and the row to decode."""

    pages: tuple[Any, ...]  # per layer, as the attention backend keeps them
    row: decoding.SlotRows  # one row


@struct.dataclass(kw_only=True)
class SlotState:
    """JetStream's decode state: this package's, and each slot's number of tokens."""

    state: decoding.DecodeState
    lengths: Int[Array, " slots"]


class EngineTokenizer(tokenizer_api.Tokenizer):
    """This package's tokenizer behind the orchestrator's interface.

    The orchestrator decodes tokens one by one: a character that is split over several
    tokens becomes U+FFFD.  A client that sends ids gets ids, to decode together.
    """

    bos_id = NO_BOS
    pad_id = 0  # follows the true length, and is never read

    def __init__(self, tokenizer: Tokenizer, *, eos_ids: tuple[int, ...]) -> None:
        """Make an adapter that ends a sequence at `eos_ids`, as the engine does."""
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """Return padded ids of a text without a BOS, and the number before padding."""
        return token_utils.pad_tokens(
            np.array(self._tokenizer.encode(s), np.int32),
            bos_id=self.bos_id,
            pad_id=self.pad_id,
            **kwargs | {"is_bos": False},
        )

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Return the text of ids, without special tokens."""
        del kwargs
        return self._tokenizer.decode(token_ids)

    @property
    def stop_tokens(self) -> set[int]:
        """Ids that end a sequence; not the padding, since 0 is also a real token."""
        return set(self._eos_ids)

    @property
    def eos_id(self) -> int:
        """The first id that ends a sequence."""
        return self._eos_ids[0]


class JetStreamEngine(engine_api.Engine):
    """This package's engine behind JetStream's abstract class.

    Slot i owns the pages from i * `pages_per_slot` on.  A prompt is prefilled in the
    only slot of a second engine, and its pages are copied into the slot's.  Threads may
    share it: its only state is a count of prompts.
    """

    samples_per_slot = 1
    colocated_cpus = None  # nothing is kept on the host

    def __init__(
        self,
        settings: decoding.EngineSettings,
        *,
        mesh: Mesh,
        tokenizer: Tokenizer,
        seed: int = 0,
        sampling: Sampling | None = None,
    ) -> None:
        """Make an engine on `mesh`; `tokens_per_call` and `cache_tokens` are set here.

        `seed` and `sampling` are for prompts that are prefilled without their own key
        or distribution: prompt n of these, counted from 0, gets
        `sample_keys(seed, "serve", prompt_id=n, epoch=0, num_samples=1)`.

        Raises:
            ValueError: the orchestrator cannot pad to `max_prompt_tokens`.
        """
        if settings.max_prompt_tokens not in PREFILL_LENGTHS:
            raise ValueError(
                f"sampler.max_prompt_tokens = {settings.max_prompt_tokens}; JetStream "
                f"pads prompts to a power of two, so make it one of {PREFILL_LENGTHS}"
            )
        self._settings = _fixed_pages(settings)
        self._engine = Engine(self._settings, mesh=mesh)
        # Pages for a prompt, and for the one token that an engine must allow.
        one_slot = _fixed_pages(replace(settings, slots=1, max_completion_tokens=1))
        self._prompts = Engine(one_slot, mesh=mesh)
        self._tokenizer, self._seed = tokenizer, seed
        self._sampling = sampling or Sampling()
        self._numbers = itertools.count()
        self._slots = np.arange(settings.slots, dtype=np.int32)
        width = self._settings.pages_per_slot
        self._table = self._slots[:, None] * width + np.arange(width, dtype=np.int32)
        self._shardings = jax.tree.map(
            lambda leaf: leaf.sharding, self._prompts.init_decode_state()
        )
        put = functools.partial(
            _put,
            prompt_pages=one_slot.pages_per_slot,
            slot_pages=self._settings.pages_per_slot,
        )
        lengths = self._shardings.rows.tokens
        self._put = jax.jit(
            put,
            donate_argnums=0,
            out_shardings=SlotState(state=self._shardings, lengths=lengths),
        )

    def load_params(self, params: PyTree) -> PyTree:
        """Return the params in both engines' layout; see `Engine.load_params`."""
        return self._engine.load_params(params)

    def init_decode_state(self) -> SlotState:
        """Return a state of slots without a sequence."""
        lengths = jax.device_put(
            np.zeros(self._settings.slots, np.int32), self._shardings.rows.tokens
        )
        return SlotState(state=self._engine.init_decode_state(), lengths=lengths)

    def prefill(
        self,
        *,
        params: PyTree,
        existing_prefix: CachedPrompt | None = None,
        padded_tokens: Int[Array | np.ndarray, " padded"],
        true_length: int,
        key: UInt32[np.ndarray, "2"] | None = None,
        sampling: Sampling | None = None,
    ) -> CachedPrompt:
        """Return keys and values of a prompt, or of more tokens after a cached one.

        `key` and `sampling` are for the completion, and not in JetStream's protocol.
        An existing prefix is not changed, and must be of the same params.

        Raises:
            ValueError: there are no tokens, or more than `max_prefill_length`.
        """
        tokens = np.asarray(padded_tokens, np.int32)[: int(true_length)]
        tokens = tokens[tokens != NO_BOS]
        state, cached = self._prompts.init_decode_state(), 0
        if existing_prefix is not None:
            row = jax.device_get(existing_prefix.row)
            cached = int(row.positions[0])
            # The last token is decoded first, and is not in the pages yet.
            known = np.zeros(cached, np.int32), row.tokens
            tokens = np.concatenate([*known, tokens])
            state = replace(state, pages=jax.tree.map(jnp.copy, existing_prefix.pages))
        if not 0 < len(tokens) <= self.max_prefill_length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens; sampler.max_prompt_tokens = "
                f"{self.max_prefill_length} is the limit, and 1 the least"
            )
        width = self._prompts.settings.pages_per_slot
        prefix = Prefix(
            tokens=tokens[:-1], pages=list(range(width)), version=0, done=cached
        )
        while (chunk := fill_chunk(self._prompts, [prefix])) is not None:
            state, _ = self._prompts.prefill(self.load_params(params), state, chunk)
        if key is None:
            key = self._next_key()
        row = decoding.first_row(
            self._settings,
            tokens,
            max_tokens=self._settings.max_completion_tokens,
            key=key,
            sampling=sampling or self._sampling,
        )
        return CachedPrompt(pages=state.pages, row=row)

    def _next_key(self) -> UInt32[np.ndarray, "2"]:
        number = next(self._numbers)
        return sample_keys(
            self._seed, "serve", prompt_id=number, epoch=0, num_samples=1
        )[0]

    def insert(
        self, prefix: CachedPrompt, decode_state: SlotState, slot: int
    ) -> SlotState:
        """Put a prompt into a slot, also a used one; donates only `decode_state`."""
        return self._put(decode_state, prefix, np.int32(slot))

    def generate(
        self, params: PyTree, decode_state: SlotState
    ) -> tuple[SlotState, ResultTokens]:
        """Return the next token of every slot; donates `decode_state`.

        The token of a slot without a sequence, or after the end of its sequence, is not
        valid.  EOS is valid, and counted in the length.
        """
        state, results = self._engine.generate(
            params, decode_state.state, slots=self._slots, table=self._table
        )
        lengths, data, log_prob = _report(decode_state.lengths, results)
        return SlotState(state=state, lengths=lengths), ResultTokens(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=self.samples_per_slot,
            log_prob=log_prob,
        )

    def get_prefix_destination_sharding(self) -> CachedPrompt:
        """Return the shardings that a prefix must have for `insert`, by leaf."""
        return CachedPrompt(pages=self._shardings.pages, row=self._shardings.rows)

    def get_tokenizer(self) -> Any:
        """Return empty parameters, which `build_tokenizer` ignores."""
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> EngineTokenizer:
        """Return the engine's own tokenizer."""
        del metadata
        return EngineTokenizer(self._tokenizer, eos_ids=self._settings.eos_ids)

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self._settings.slots

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt, in tokens."""
        return self._settings.max_prompt_tokens

    @property
    def mesh(self) -> Mesh:
        """Devices of the engine."""
        return self._engine.mesh


def _fixed_pages(settings: decoding.EngineSettings) -> decoding.EngineSettings:
    """Return settings of one token per call and a whole sequence's pages per slot."""
    held = settings.tokens_of(settings.slots)
    return replace(settings, tokens_per_call=1, cache_tokens=held, rings=False)


def _put(
    state: SlotState,
    prompt: CachedPrompt,
    slot: Array,
    *,
    prompt_pages: int,
    slot_pages: int,
) -> SlotState:
    def copy(held: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(
            held, new[:prompt_pages], slot * slot_pages, axis=0
        )

    rows = jax.tree.map(
        lambda held, new: held.at[slot].set(new[0]), state.state.rows, prompt.row
    )
    pages = jax.tree.map(copy, state.state.pages, prompt.pages)
    return SlotState(
        state=decoding.DecodeState(pages=pages, rows=rows),
        lengths=state.lengths.at[slot].set(0),
    )


@jax.jit
def _report(
    lengths: Array, results: decoding.DecodedTokens
) -> tuple[Array, Int[Array, "slots 3"], Float[Array, "slots 1"]]:
    """Return lengths after a call; each slot's token, validity, length; logprobs."""
    valid = results.valid[0]
    lengths = lengths + valid
    tokens = jnp.where(valid, results.tokens[0], 0)
    data = jnp.stack([tokens, valid.astype(jnp.int32), lengths], axis=1)
    return lengths, data, jnp.where(valid, results.logprobs[0], 0.0)[:, None]


def load_orchestrator() -> ModuleType:
    """Import `jetstream.core.orchestrator` of 0.2.2, patched to run on today's JAX.

    JetStream has been archived since February 2026, and 0.2.2 of May 2024 is the last
    release.  Its `Driver` calls `jax.tree_map`, which JAX has removed: the one function
    that does so is replaced, in the orchestrator's module only.  The import also sets
    the root logger to DEBUG and adds a handler; both are undone.

    Three limits remain: an exception in one of its threads kills the process (SIGKILL),
    its params cannot be changed, and it returns no log-probabilities.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        from jetstream.core import (  # pyright: ignore[reportMissingImports]
            orchestrator,
        )
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
    orchestrator.delete_pytree = _delete_arrays
    return orchestrator


def _delete_arrays(tree: PyTree) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()
