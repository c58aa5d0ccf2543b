"""A small policy, its rollouts and its train step, over any mesh and in any layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from small_mesh import mesh_of
from small_model import SMALL

from scalerl_jax.algo.advantages import prompt_weights, sample_weights, token_weights
from scalerl_jax.algo.losses import cispo_loss
from scalerl_jax.batching.packing import (
    ROW_SEGMENTS,
    TrainSequence,
    abstract_microbatch,
    laid_out,
    pack,
)
from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.head import Head
from scalerl_jax.learner.optimizer import make_optimizer, make_schedule
from scalerl_jax.learner.step import (
    TrainStep,
    init_state,
    make_accumulate,
    make_update,
    state_layout,
)
from scalerl_jax.model.architecture import param_shardings
from scalerl_jax.model.attention import BlockwiseAttention
from scalerl_jax.model.transformer import (
    abstract_params,
    head_logits,
    head_weights,
    hidden_states,
)
from scalerl_jax.objective.loss import Objective

ARCH = SMALL
CAP = 1.5
TEMPERATURE = 0.8
GROUP = 2
LENGTHS = ((1, 1), (3, 2), (2, 9), (5, 8), (1, 6), (4, 4), (2, 5), (3, 7))
LONGEST = 12  # positions of the longest sequence
WEIGHTINGS = {
    "prompt": functools.partial(prompt_weights, group_size=GROUP),
    "sample": sample_weights,
    "token": token_weights,
}

CISPO = Objective(
    token_loss=functools.partial(cispo_loss, max_importance_ratio=CAP),
    max_importance_ratio=CAP,
)
PLAIN = optax.sgd(1.0)  # the params then show the gradient itself
ADAMW = make_optimizer(
    make_schedule(learning_rate=0.1, warmup_steps=4),
    beta1=0.9,
    beta2=0.95,
    eps=1e-2,  # far above the gradients' rounding: a step then moves no more than it
    weight_decay=0.1,
    max_grad_norm=1.0,
)


@functools.cache
def start_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32),
        abstract_params(ARCH, dtype=jnp.float32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatedSequence(TrainSequence):
    """A sequence whose advantage, or reward, a test knows before it is packed."""

    advantage: float


def rated(packed, sequences):
    """The packed batch of these sequences, with their advantages."""
    known = np.array([each.advantage for each in sequences])
    return packed.batch.replace(advantages=laid_out(known, packed.sequence))


@functools.cache
def make_sequences(aggregation="prompt"):
    """Four groups of two rollouts, of uneven lengths; some tokens forced or stale."""
    rng = np.random.default_rng(1)
    longest = max(completion for _, completion in LENGTHS)
    masks = np.zeros((len(LENGTHS), longest), bool)
    sequences = []
    for mask, (prompt, completion) in zip(masks, LENGTHS, strict=True):
        mask[:completion] = rng.random(completion) > 0.2
        mask[completion - 1] = True
        sequences.append(
            RatedSequence(
                tokens=rng.integers(0, 16, prompt + completion).astype(np.int32),
                prompt_length=prompt,
                weights=np.zeros(completion),
                mask=mask[:completion],
                behavior_logprobs=rng.uniform(-4.0, -2.0, completion),
                staleness=rng.integers(0, 2, completion),
                advantage=float(rng.normal()),
            )
        )
    with jax.ensure_compile_time_eval():
        token_weights = np.asarray(WEIGHTINGS[aggregation](jnp.asarray(masks)))
    return tuple(
        dataclasses.replace(each, weights=row[: len(each.mask)])
        for each, row in zip(sequences, token_weights, strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A train step of the small policy, and states and batches for it."""

    optimizer: optax.GradientTransformation = PLAIN
    shape: tuple[int, ...] = (1, 1, 1, 1)
    rows: int = 2
    row_tokens: int = 24
    short_rows: tuple[int, ...] = ()
    remat: str = "none"
    block: int = 512
    chunk_tokens: int = 1024
    chunk_vocab: int = 16384
    compute_dtype: str = "float32"
    param_dtype: str = "float32"
    stochastic_rounding: bool = False

    def state(self):
        """A fresh state at version 0, on its mesh."""
        params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, self.param_dtype), start_params()
        )
        return jax.device_put(init_state(params, self.optimizer), self.shardings())

    def shardings(self):
        mesh = mesh_of(self.shape)
        params = jax.device_put(start_params(), param_shardings(ARCH, mesh))
        everywhere = jax.NamedSharding(mesh, jax.P())
        layout = state_layout(params, self.optimizer, everywhere=everywhere)
        return jax.tree.map(lambda leaf: leaf.sharding, layout)

    def batch(self, aggregation="prompt", *, packing=True, sequences=None):
        """The rollouts in this layout."""
        sequences = sequences or make_sequences(aggregation)
        return rated(self.pack(sequences, packing=packing), sequences)

    def pack(self, sequences, *, packing=True):
        """Any sequences in this layout."""
        return pack(
            sequences,
            row_tokens=self.row_tokens,
            rows_per_microbatch=self.rows,
            row_segments=ROW_SEGMENTS if packing else 1,
            short_rows=self.short_rows,
        )

    @functools.cached_property
    def forward(self):
        mesh = mesh_of(self.shape)
        return Forward(
            arch=ARCH,
            dtype=jnp.dtype(self.compute_dtype),
            head=Head(
                mesh=mesh,
                temperature=TEMPERATURE,
                chunk_tokens=self.chunk_tokens,
                chunk_vocab=self.chunk_vocab,
            ),
            attention=BlockwiseAttention(mesh, block=self.block),
            remat=self.remat,
            mesh=mesh,
        )

    @functools.cached_property
    def step(self):
        return TrainStep(
            make_accumulate(
                self.forward,
                CISPO,
            ),
            make_update(self.optimizer, stochastic_rounding=self.stochastic_rounding),
            state=self.state(),
            batch=abstract_microbatch(
                row_tokens=self.row_tokens, rows_per_microbatch=self.rows
            ),
            mesh=mesh_of(self.shape),
            short_rows=self.short_rows,
        )

    def run(self, batch=None, **options):
        """State and metrics after one step from the start."""
        batch = self.batch(**options) if batch is None else batch
        return self.step(self.state(), batch)


@functools.cache
def bench(**options):
    """The bench with these settings, its step compiled once."""
    return Bench(**options)


def sampled_logprobs(params):
    """Of each rollout's trained tokens, in order, read from whole rows of logits."""
    sequences = make_sequences()
    tokens = np.zeros((len(sequences), LONGEST + 1), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence.tokens)] = sequence.tokens
    hidden, _ = hidden_states(
        params,
        ARCH,
        jnp.asarray(tokens),
        positions=jnp.broadcast_to(jnp.arange(LONGEST + 1), tokens.shape),
        segment_ids=jnp.ones_like(tokens),
        dtype=jnp.float32,
    )
    logits = head_logits(hidden, head_weights(params), float32_head=True)
    every = jax.nn.log_softmax(logits / TEMPERATURE)
    found = []
    for row, sequence in enumerate(sequences):
        seen = sequence.prompt_length + np.flatnonzero(sequence.mask)
        found.append(every[row, seen - 1, sequence.tokens[seen]])
    return found


def of_trained_tokens(name):
    """Values of one field, per rollout, in the order of `sampled_logprobs`."""
    return [getattr(each, name)[each.mask] for each in make_sequences()]


def slow_loss(params, aggregation):
    """CISPO rollout by rollout; the averages are written out, without weights."""
    losses = []
    for logprobs, behavior, sequence in zip(
        sampled_logprobs(params),
        of_trained_tokens("behavior_logprobs"),
        make_sequences(),
        strict=True,
    ):
        capped = jax.lax.stop_gradient(jnp.minimum(jnp.exp(logprobs - behavior), CAP))
        losses.append(-capped * sequence.advantage * logprobs)
    if aggregation == "token":
        return jnp.concatenate(losses).mean()
    size = {"prompt": GROUP, "sample": 1}[aggregation]
    parts = [
        jnp.concatenate(losses[first : first + size]).mean()
        for first in range(0, len(losses), size)
    ]
    return jnp.stack(parts).mean()


@functools.cache
def slow_result(aggregation="prompt"):
    """Loss, gradient, and params after plain gradient descent at rate 1."""
    function = jax.jit(
        jax.value_and_grad(functools.partial(slow_loss, aggregation=aggregation)),
    )
    loss, gradient = function(start_params())
    after = jax.tree.map(lambda param, part: param - part, start_params(), gradient)
    return loss, gradient, after


def assert_trees_close(found, expected, **tolerance):
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, **tolerance),
        found,
        expected,
    )


def assert_trees_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
