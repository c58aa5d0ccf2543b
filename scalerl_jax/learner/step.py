"""The train step: state and batch in, state and metrics out; and its compilation.

Two pure programs without a mesh, `make_accumulate` for each microbatch and
`make_update` for the whole; `TrainStep` runs them over one, and donates the state.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from scalerl_jax.learner.freezing import is_absent
from scalerl_jax.learner.logprobs import (
    Head,
    Pointwise,
    pointwise_loss,
    token_logprobs,
)
from scalerl_jax.learner.objective import Objective, Scalars, summarize
from scalerl_jax.learner.rounding import round_stochastically
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.attention import SegmentAttention
from scalerl_jax.model.shardings import batch_sharding
from scalerl_jax.model.transformer import head_weights, hidden_states
from scalerl_jax.parallel.multihost import put_global
from scalerl_jax.types import PackedBatch, PyTree, Sharing


@struct.dataclass(kw_only=True)
class TrainState:
    """What an optimizer step changes."""

    params: PyTree
    opt_state: PyTree  # float32, whatever the dtype of the params
    policy_version: Int[Array, ""]  # optimizer steps applied
    reference: PyTree | None = None  # params that a KL is taken to, in their dtype
    critic: "TrainState | None" = None  # of learner/critic.py; its own params, moments


@struct.dataclass(kw_only=True)
class Accumulated:
    """What the microbatches of a step add up to."""

    loss: Float[Array, ""]
    grads: PyTree  # float32, in the tree of the params
    sums: Scalars
    maxima: Scalars


# Params, what has been accumulated, a microbatch [R, S] -> the same with it.
Accumulate = Callable[[PyTree, Accumulated | None, PackedBatch], Accumulated]
Update = Callable[[TrainState, Accumulated], tuple[TrainState, dict[str, Array]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """How hidden states and log-probabilities are computed; static.

    `mesh` None: on one device; `attention` None: in plain XLA.
    """

    arch: Architecture
    dtype: Any  # of activations and matmuls, the head apart
    head: Head = Head()
    attention: SegmentAttention | None = None
    remat: str = "none"
    mesh: Mesh | None = None
    scan_layers: bool = True

    def hidden(
        self,
        params: PyTree,
        tokens: Int[Array, "R U"],
        *,
        positions: Int[Array, "R U"],
        segment_ids: Int[Array, "R S"],
        targets: Int[Array, "R S"],
        sharing: Sharing | None = None,
    ) -> Float[Array, "R S D"]:
        """Final hidden states, where the targets are predicted."""
        hidden, _ = hidden_states(
            params,
            self.arch,
            tokens,
            positions=positions,
            segment_ids=segment_ids,
            dtype=self.dtype,
            attention=self.attention,
            remat=self.remat,
            mesh=self.mesh,
            sharing=sharing,
            scan_layers=self.scan_layers,
        )
        return hidden[:, hidden.shape[1] - targets.shape[1] :]

    def logprobs(
        self, params: PyTree, tokens: Int[Array, "R U"], **where: Any
    ) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
        """Log-probability of every target and the entropies, in nats.

        As `hidden`.
        """
        hidden = self.hidden(params, tokens, **where)
        return token_logprobs(hidden, head_weights(params), where["targets"], self.head)

    def of_batch(self, params: PyTree, batch: PackedBatch) -> tuple[Array, Array]:
        """Log-probabilities and entropies of a microbatch's targets."""
        return self.logprobs(params, batch.tokens, **_places(batch))

    def loss_of_batch(
        self, params: PyTree, batch: PackedBatch, pointwise: Pointwise
    ) -> tuple[Array, Array, Array]:
        """Sum of a loss that each token has for itself, and as `of_batch`."""
        hidden = self.hidden(params, batch.tokens, **_places(batch))
        return pointwise_loss(
            hidden,
            head_weights(params),
            batch.targets,
            # All that there is one of for each target.
            dataclasses.replace(
                batch, tokens=None, positions=None, segment_ids=None, sharing=None
            ),
            pointwise,
            self.head,
        )


def _places(batch: PackedBatch) -> dict[str, Any]:
    names = ("positions", "segment_ids", "targets", "sharing")
    return {name: getattr(batch, name) for name in names}


def init_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    with_reference: bool = False,
) -> TrainState:
    """The state at version 0; the reference, if there is one, is a copy of its own."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(_float32(params)),
        policy_version=jnp.zeros((), jnp.int32),
        # The step donates the state, so no two of its leaves may share a buffer.
        reference=jax.tree.map(jnp.copy, params) if with_reference else None,
    )


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def state_shardings(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    everywhere: Sharding,
    with_reference: bool = False,
) -> TrainState:
    """A sharding per leaf of the state: moments as their params, counters everywhere.

    It has to be said.  Moments start as zeros, which depend on no param: left to
    itself, the compiler puts the whole of them on every device.
    """
    state = jax.eval_shape(functools.partial(init_state, optimizer=optimizer), params)
    moments = optax.tree.map_params(
        optimizer,
        lambda moment, param: moment if is_absent(moment) else param.sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: everywhere,
        is_leaf=is_absent,
    )
    of_params = jax.tree.map(lambda param: param.sharding, params)
    return jax.tree.map(lambda _: everywhere, state).replace(
        params=of_params,
        opt_state=moments,
        reference=of_params if with_reference else None,
    )


def make_accumulate(forward: Forward, objective: Objective) -> Accumulate:
    """Adds a microbatch [R, S] to what its step has accumulated.

        loss = sum over all tokens of weights * objective

    The weights are those of the global batch, so the sum over microbatches is the
    loss itself, however the batch was cut.
    """

    def microbatch_loss(
        params: PyTree, batch: PackedBatch
    ) -> tuple[Array, tuple[Scalars, Scalars]]:
        if objective.elementwise:
            loss, logprobs, entropy = forward.loss_of_batch(
                params, batch, objective.weighted
            )
        else:
            logprobs, entropy = forward.of_batch(params, batch)
            loss = objective.weighted(logprobs, entropy, batch).sum()
        return loss, objective.measured(logprobs, entropy, batch)

    return accumulating(microbatch_loss)


def accumulating(
    microbatch_loss: Callable[
        [PyTree, PackedBatch], tuple[Array, tuple[Scalars, Scalars]]
    ],
) -> Accumulate:
    """Adds a microbatch's loss and its gradient, sums and maxima to those before."""
    gradient = jax.value_and_grad(microbatch_loss, has_aux=True)

    def accumulate(
        params: PyTree, so_far: Accumulated | None, batch: PackedBatch
    ) -> Accumulated:
        (loss, (sums, maxima)), grads = gradient(params, batch)
        new = Accumulated(loss=loss, grads=_float32(grads), sums=sums, maxima=maxima)
        if so_far is None:
            return new
        return Accumulated(
            loss=so_far.loss + new.loss,
            grads=jax.tree.map(jnp.add, so_far.grads, new.grads),
            sums=jax.tree.map(jnp.add, so_far.sums, new.sums),
            maxima=jax.tree.map(jnp.maximum, so_far.maxima, new.maxima),
        )

    return accumulate


def make_update(
    optimizer: optax.GradientTransformation,
    *,
    stochastic_rounding: bool = False,
    reference_every: int = 0,
    summarize: Callable[[Scalars, Scalars], Scalars] = summarize,
) -> Update:
    """The optimizer's part: a new state and the metrics of the step.

    A step whose loss or gradient is not finite leaves the state as it was; the metric
    "skipped" is then 1.  The update itself is float32; params of a narrower dtype are
    rounded to nearest, or up and down at random with the right mean.  Every
    `reference_every` steps (0: never) the reference becomes the params.  `summarize`
    turns the sums and maxima into metrics.
    """

    def update(
        state: TrainState, accumulated: Accumulated
    ) -> tuple[TrainState, dict[str, Array]]:
        grads = accumulated.grads
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(accumulated.loss)
        params = _float32(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        if stochastic_rounding:
            params = round_stochastically(
                params, like=state.params, seed=state.policy_version
            )
        params = jax.tree.map(lambda x, old: x.astype(old.dtype), params, state.params)
        version = state.policy_version + 1
        reference = state.reference
        if reference_every:
            due = version % reference_every == 0
            reference = jax.tree.map(
                lambda new, old: jnp.where(due, new, old), params, reference
            )
        updated = dataclasses.replace(
            state,
            params=params,
            opt_state=opt_state,
            policy_version=version,
            reference=reference,
        )
        state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), updated, state
        )
        metrics = summarize(accumulated.sums, accumulated.maxima)
        metrics |= {
            "loss": accumulated.loss,
            "grad_norm": grad_norm,
            "skipped": ~finite,
        }
        return state, metrics

    return update


class TrainStep:
    """One optimizer step over a mesh, a microbatch at a time.

    Every program has one shape.  A microbatch is sent to the devices while the one
    before it is computed; only those that are filled exist.
    """

    def __init__(
        self,
        accumulate: Accumulate,
        update: Update,
        *,
        state: TrainState,
        batch: PackedBatch,
        mesh: Mesh,
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        """Programs for `state` and microbatches [R, S] like `batch`.

        Both may be abstract; the leaves of `state` have their shardings.
        """
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._put_to = batch_sharding(mesh)
        state = jax.tree.map(_abstract, state)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        batch = jax.tree.map(lambda leaf: _abstract(leaf, self._put_to), batch)
        sums = jax.eval_shape(
            lambda params, batch: accumulate(params, None, batch), state.params, batch
        )
        layout = jax.tree.map(lambda _: everywhere, sums)
        layout = layout.replace(grads=shardings.params)
        sums = jax.tree.map(_abstract, sums, layout)

        def start() -> Accumulated:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums)

        self._options = compiler_options
        self._jitted = {
            "start": (jax.jit(start, out_shardings=layout), ()),
            "accumulate": (
                jax.jit(accumulate, out_shardings=layout, donate_argnums=1),
                (state.params, sums, batch),
            ),
            "update": (
                jax.jit(
                    update,
                    out_shardings=(shardings, everywhere),
                    donate_argnums=0,
                ),
                (state, sums),
            ),
        }
        self._programs: dict[str, Any] = {}

    def lower(self) -> dict[str, Any]:
        """The programs by name, not compiled: start, accumulate, update."""
        return {
            name: jit.lower(*shapes) for name, (jit, shapes) in self._jitted.items()
        }

    def compile(self, notice: Callable[[int, int], None] = lambda *_: None) -> None:
        """Compile everything that a step runs; `notice` hears which of how many."""
        lowered = self.lower()
        for number, (name, program) in enumerate(lowered.items(), start=1):
            notice(number, len(lowered))
            self._programs[name] = program.compile(self._options)

    def __call__(
        self, state: TrainState, batch: PackedBatch
    ) -> tuple[TrainState, dict[str, Array]]:
        """The state after a batch [M, R, S], and the metrics; `state` is donated."""
        return self.apply(state, self.total(state.params, batch))

    def total(self, params: PyTree, batch: PackedBatch) -> Accumulated:
        """What the microbatches of a batch [M, R, S] add up to."""
        return collections.deque(self.accumulated(params, batch), maxlen=1).pop()

    def apply(
        self, state: TrainState, sums: Accumulated
    ) -> tuple[TrainState, dict[str, Array]]:
        """The state after the optimizer's part, and the metrics; donates `state`."""
        return self._programs["update"](state, sums)

    def accumulated(self, params: PyTree, batch: PackedBatch) -> Iterator[Accumulated]:
        """Zeros, and the sums after each microbatch; asking for more donates them."""
        if not self._programs:
            self.compile()
        so_far = self._programs["start"]()
        yield so_far
        for microbatch in self.microbatches(batch):
            so_far = self._programs["accumulate"](params, so_far, microbatch)
            yield so_far

    def microbatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """The parts of a batch [M, R, S], each on the devices."""
        for index in range(len(batch.tokens)):
            microbatch = jax.tree.map(lambda leaf, at=index: leaf[at], batch)
            yield put_global(microbatch, self._put_to)


def _abstract(leaf: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding
    )
