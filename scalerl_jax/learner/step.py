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

from scalerl_jax.algo import diagnostics
from scalerl_jax.learner.logprobs import Head, token_logprobs
from scalerl_jax.learner.rounding import round_stochastically
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.attention import SegmentAttention
from scalerl_jax.model.shardings import batch_sharding
from scalerl_jax.model.transformer import head_weights, hidden_states
from scalerl_jax.parallel.multihost import put_global
from scalerl_jax.types import PackedBatch, PyTree, Sharing

# logprobs, behavior logprobs, advantages -> loss of each token
TokenLoss = Callable[[Array, Array, Array], Array]


@struct.dataclass(kw_only=True)
class TrainState:
    """What an optimizer step changes."""

    params: PyTree
    opt_state: PyTree  # float32, whatever the dtype of the params
    policy_version: Int[Array, ""]  # optimizer steps applied


@struct.dataclass(kw_only=True)
class Accumulated:
    """What the microbatches of a step add up to."""

    loss: Float[Array, ""]
    grads: PyTree  # float32, in the tree of the params
    sums: dict[str, Float[Array, ""]]  # of `diagnostics.token_sums`
    maxima: dict[str, Float[Array, ""]]


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

    def logprobs(
        self,
        params: PyTree,
        tokens: Int[Array, "R S"],
        *,
        positions: Int[Array, "R S"],
        segment_ids: Int[Array, "R S"],
        targets: Int[Array, "R S"],
        sharing: Sharing | None = None,
    ) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
        """Log-probability of every target and the entropies, in nats."""
        hidden = hidden_states(
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
        hidden = hidden[:, hidden.shape[1] - targets.shape[1] :]
        return token_logprobs(hidden, head_weights(params), targets, self.head)

    def of_batch(self, params: PyTree, batch: PackedBatch) -> tuple[Array, Array]:
        """Log-probabilities and entropies of a microbatch's targets."""
        return self.logprobs(
            params,
            batch.tokens,
            positions=batch.positions,
            segment_ids=batch.segment_ids,
            targets=batch.targets,
            sharing=batch.sharing,
        )


def init_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """The state at version 0."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(_float32(params)),
        policy_version=jnp.zeros((), jnp.int32),
    )


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def state_shardings(
    params: PyTree, optimizer: optax.GradientTransformation, *, everywhere: Sharding
) -> TrainState:
    """A sharding per leaf of the state: moments as their params, counters everywhere.

    It has to be said.  Moments start as zeros, which depend on no param: left to
    itself, the compiler puts the whole of them on every device.
    """
    state = jax.eval_shape(functools.partial(init_state, optimizer=optimizer), params)
    moments = optax.tree.map_params(
        optimizer,
        lambda _, param: param.sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return jax.tree.map(lambda _: everywhere, state).replace(
        params=jax.tree.map(lambda param: param.sharding, params), opt_state=moments
    )


def make_accumulate(
    forward: Forward, token_loss: TokenLoss, *, max_importance_ratio: float
) -> Callable[[PyTree, Accumulated | None, PackedBatch], Accumulated]:
    """Adds a microbatch [R, S] to what its step has accumulated.

        loss = sum over all tokens of weights * token_loss

    The weights are those of the global batch, so the sum over microbatches is the
    loss itself, however the batch was cut.
    """
    gradient = jax.value_and_grad(
        functools.partial(
            _microbatch_loss,
            forward=forward,
            token_loss=token_loss,
            max_importance_ratio=max_importance_ratio,
        ),
        has_aux=True,
    )

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
    optimizer: optax.GradientTransformation, *, stochastic_rounding: bool = False
) -> Callable[[TrainState, Accumulated], tuple[TrainState, dict[str, Array]]]:
    """The optimizer's part: a new state and the metrics of the step.

    A step whose loss or gradient is not finite leaves the state as it was; the metric
    "skipped" is then 1.  The update itself is float32; params of a narrower dtype are
    rounded to nearest, or up and down at random with the right mean.
    """

    def update(
        state: TrainState, accumulated: Accumulated
    ) -> tuple[TrainState, dict[str, Array]]:
        grad_norm = optax.tree.norm(accumulated.grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(accumulated.loss)
        params = _float32(state.params)
        updates, opt_state = optimizer.update(
            accumulated.grads, state.opt_state, params
        )
        params = optax.apply_updates(params, updates)
        if stochastic_rounding:
            params = round_stochastically(
                params, like=state.params, seed=state.policy_version
            )
        updated = TrainState(
            params=jax.tree.map(
                lambda x, old: x.astype(old.dtype), params, state.params
            ),
            opt_state=opt_state,
            policy_version=state.policy_version + 1,
        )
        state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), updated, state
        )
        metrics = diagnostics.token_summary(accumulated.sums, accumulated.maxima)
        metrics |= {
            "loss": accumulated.loss,
            "grad_norm": grad_norm,
            "skipped": ~finite,
        }
        return state, metrics

    return update


def _microbatch_loss(
    params: PyTree,
    batch: PackedBatch,
    *,
    forward: Forward,
    token_loss: TokenLoss,
    max_importance_ratio: float,
) -> tuple[Array, tuple[dict[str, Array], dict[str, Array]]]:
    """Loss of a microbatch [R, S]; sums and maxima of its tokens."""
    logprobs, entropy = forward.of_batch(params, batch)
    # Before exp: a masked token has ratio 1, and can never make a NaN.
    behavior = jnp.where(batch.mask, batch.behavior_logprobs, logprobs)
    losses = token_loss(logprobs, behavior, batch.advantages)
    loss = (batch.weights * jnp.where(batch.mask, losses, 0.0)).sum()
    seen = (jax.lax.stop_gradient(logprobs), jax.lax.stop_gradient(behavior))
    sums = diagnostics.token_sums(
        *seen,
        jax.lax.stop_gradient(entropy),
        batch.staleness,
        batch.mask,
        max_importance_ratio=max_importance_ratio,
    )
    maxima = diagnostics.token_maxima(*seen, batch.staleness, batch.mask)
    return loss, (sums, maxima)


class TrainStep:
    """One optimizer step over a mesh, a microbatch at a time.

    Every program has one shape.  A microbatch is sent to the devices while the one
    before it is computed; only those that are filled exist.
    """

    def __init__(
        self,
        accumulate: Callable[[PyTree, Accumulated | None, PackedBatch], Accumulated],
        update: Callable[[TrainState, Accumulated], tuple[TrainState, dict[str, Any]]],
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

    def compile(self) -> None:
        """Compile everything that a step runs."""
        self._programs = {
            name: lowered.compile(self._options)
            for name, lowered in self.lower().items()
        }

    def __call__(
        self, state: TrainState, batch: PackedBatch
    ) -> tuple[TrainState, dict[str, Array]]:
        """The state after a batch [M, R, S], and the metrics; `state` is donated."""
        sums = collections.deque(self.accumulated(state.params, batch), maxlen=1)
        return self._programs["update"](state, sums.pop())

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
