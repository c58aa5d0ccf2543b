"""Rate at which the end of thinking is found, and the cost of the search.

    python benchmarks/end_of_thinking.py TOKENIZER...     tokenizer.json (or .gz), GGUF

For each tokenizer: the contexts, in its own tokens, in which "</think>" is found by the
text of the tokens, and by the ids of the marker encoded alone; seconds and bytes of the
table.  Then the look-up alone, beside a comparison of ids, and calls of an engine with
and without the search.
"""

import dataclasses
import gzip
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from scalerl_jax.data.detokenizer import Detokenizer, make_marker, read_detokenizer
from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler.decoding import NEVER, EngineSettings, empty_rows
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.types import PyTree

END = "</think>"
BEFORE = ("", " ", "\n", ".", "so", "12", ")")
AFTER = ("", "\n\n", "\n", " ", ".", "The", "7", "\n\n**")
SLOTS, VOCABULARY, TOKENS_PER_CALL, CALLS = 64, 151_936, 4, 9
STEPS, ROUNDS = 1024, 21


def read(path: Path) -> tokenizers.Tokenizer:
    """Return the library's tokenizer in a file."""
    if path.suffix == ".gguf":
        return load_tokenizer(path).backend
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return tokenizers.Tokenizer.from_str(data.decode())


def seen(backend: tokenizers.Tokenizer) -> tuple[int, int]:
    """Return contexts whose end is found: by the tokens' text, by the marker's ids."""
    marker = make_marker(
        END, read_detokenizer(backend), vocabulary=backend.get_vocab_size()
    )
    alone = backend.encode(END, add_special_tokens=False).ids
    by_text = by_ids = 0
    for before, after in itertools.product(BEFORE, AFTER):
        ids = backend.encode(before + END + after, add_special_tokens=False).ids
        by_text += marker.state(ids) == marker.ended
        places = range(len(ids) - len(alone) + 1)
        by_ids += any(ids[at : at + len(alone)] == alone for at in places)
    return by_text, by_ids


def table_cost(backend: tokenizers.Tokenizer) -> str:
    """Return seconds to read the detokenizer and make the table, and its bytes."""
    start = time.perf_counter()
    detokenizer = read_detokenizer(backend)
    read_s = time.perf_counter() - start
    start = time.perf_counter()
    marker = make_marker(END, detokenizer, vocabulary=len(detokenizer.later))
    made_s = time.perf_counter() - start
    size = marker.next_states.nbytes / 2**20
    return f"read in {read_s:.2f} s, table in {made_s:.2f} s, {size:.2f} MiB"


def lookup_cost() -> str:
    """Return microseconds of a step's look-up, and of comparing the last three ids."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (STEPS, SLOTS)), jnp.int32)
    next_states = jnp.asarray(rng.integers(0, 9, (9, VOCABULARY)), jnp.uint8)
    end = jnp.array([524, 27963, 29])

    @jax.jit
    def by_text(next_states, tokens):
        def step(states, new):
            return next_states[states, new].astype(jnp.int32), None

        return jax.lax.scan(step, jnp.zeros(SLOTS, jnp.int32), tokens)[0]

    @jax.jit
    def by_ids(end, tokens):
        def step(carry, new):
            recent, ended = carry
            recent = jnp.concatenate([recent[:, 1:], new[:, None]], axis=1)
            return (recent, ended | (recent == end).all(axis=1)), None

        start = jnp.zeros((SLOTS, 3), jnp.int32), jnp.zeros(SLOTS, bool)
        return jax.lax.scan(step, start, tokens)[0][1]

    found = []
    for _ in range(ROUNDS):
        for function, table in ((by_text, next_states), (by_ids, end)):
            start = time.perf_counter()
            jax.block_until_ready(function(table, tokens))
            found.append(1e6 * (time.perf_counter() - start) / STEPS)
    text, ids = np.median(np.array(found[2:]).reshape(-1, 2), axis=0)
    return (
        f"a step's look-up in {SLOTS} slots: {text:.1f} us, comparing ids {ids:.1f} us"
    )


def calls_s(engine: Engine, params: PyTree) -> Iterator[float]:
    """Yield seconds of one `generate` call after the other, every slot decoding."""
    settings = engine.settings
    rows = dataclasses.replace(
        empty_rows(settings, SLOTS),
        max_tokens=np.full(SLOTS, settings.max_completion_tokens, np.int32),
        keys=np.arange(2 * SLOTS, dtype=np.uint32).reshape(SLOTS, 2),
        active=np.ones(SLOTS, bool),
        thinking_limits=np.full(SLOTS, NEVER, np.int32),
    )
    slots = np.arange(SLOTS, dtype=np.int32)
    width = settings.pages_per_slot
    table = slots[:, None] * width + np.arange(width, dtype=np.int32)
    nowhere = np.full(SLOTS, settings.num_pages, np.int32)
    state = engine.insert(
        engine.init_decode_state(),
        slots=slots,
        rows=rows,
        copy_from=nowhere,
        copy_to=nowhere,
    )
    while True:
        start = time.perf_counter()
        state, results = engine.generate(params, state, slots=slots, table=table)
        jax.block_until_ready(results)
        yield time.perf_counter() - start


def call_ratio() -> str:
    """Return the time of a call with the search over one without it, in turns."""
    arch = Architecture(
        family="qwen3",
        vocab_size=VOCABULARY,
        hidden_size=128,
        ffn_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=1e4,
        rms_eps=1e-6,
        tied_embeddings=True,
        max_positions=4096,
        qk_norm=True,
    )
    pieces = [bytes([at % 256]) for at in range(VOCABULARY)]
    marker = make_marker(
        END, Detokenizer(later=pieces, first=pieces), vocabulary=VOCABULARY
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.02 * rng.normal(size=leaf.shape), leaf.dtype),
        abstract_params(arch, dtype=jnp.float32),
    )
    timings = []
    for end in (None, marker):
        settings = EngineSettings(
            arch=arch,
            slots=SLOTS,
            max_prompt_tokens=32,
            max_completion_tokens=TOKENS_PER_CALL * (CALLS + 4),
            tokens_per_call=TOKENS_PER_CALL,
            dtype=jnp.float32,
            eos_ids=(VOCABULARY - 1,),
            phrase=(1, 2),
            end_of_thinking=end,
        )
        engine = Engine(settings, mesh=make_mesh(jax.devices()[:1]))
        timings.append(calls_s(engine, params))
    for each in timings:  # compiles
        next(each), next(each)
    pairs = np.array([[next(each) for each in timings] for _ in range(CALLS)])
    without, with_end = np.median(pairs, axis=0)
    low, ratio, high = np.quantile(pairs[:, 1] / pairs[:, 0], (0.25, 0.5, 0.75))
    return (
        f"a call of {TOKENS_PER_CALL} tokens in {SLOTS} slots, {VOCABULARY} ids: "
        f"{1e3 * without:.1f} ms without, {1e3 * with_end:.1f} ms with; "
        f"ratio {ratio:.3f} (quartiles {low:.3f} to {high:.3f})"
    )


def main() -> None:
    """Print all figures, for the named tokenizers."""
    total = len(BEFORE) * len(AFTER)
    for name in sys.argv[1:]:
        backend = read(Path(name))
        by_text, by_ids = seen(backend)
        print(f"{name}: by text {by_text} of {total}, by ids {by_ids}")
        print(f"  {table_cost(backend)}")
    print(lookup_cost())
    print(call_ratio())


if __name__ == "__main__":
    main()
