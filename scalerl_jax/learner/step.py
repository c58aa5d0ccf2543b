"""The train step: a loss to minimise, state and batch in, state and metrics out.

Two pure programs without a mesh, `make_accumulate` for each microbatch and
`make_update` for the whole; `TrainStep` runs them over one, and donates the state.
Over several TPU slices each slice sums its own microbatches, on its fast links; the
sums, cut like the params, go between slices once a step.

The file is above 400 lines: it goes from a token's loss to the update in one place.
`LocalLearner` is the interface to the loop.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from scalerl_jax.contract import MadeOf, Publication, Restored
from scalerl_jax.learner import fitness
from scalerl_jax.learner.forward import Forward, abstract, microbatches
from scalerl_jax.learner.optimizer import round_stochastically
from scalerl_jax.model.architecture import batch_sharding
from scalerl_jax.model.lora import join
from scalerl_jax.objective.balance import LoadBalancing
from scalerl_jax.objective.loss import Objective, Scalars, summarize
from scalerl_jax.parallel.mesh import SLICES, compiler_options, in_each_slice
from scalerl_jax.parallel.xla import return_freed_memory
from scalerl_jax.types import Group, PackedBatch, PyTree, Scores


@struct.dataclass(kw_only=True)
class TrainState:
    """The state that an optimizer step changes, and the params that none changes."""

    params: PyTree  # those that are trained
    opt_state: PyTree  # float32, whatever the dtype of the params
    policy_version: Int[Array, ""]  # optimizer steps applied
    # Of the reference policy of the KL: what its params have in place of `params`.
    reference: PyTree | None = None
    critic: "TrainState | None" = None  # of learner/critic.py; own params and moments
    frozen: PyTree | None = None  # params that are not trained; see model/lora.py

    @property
    def policy(self) -> PyTree:
        """Return all params of the policy."""
        return join(self.params, self.frozen)

    @property
    def reference_policy(self) -> PyTree:
        """Return all params of the reference policy."""
        return join(self.reference, self.frozen)


@struct.dataclass(kw_only=True)
class Accumulated:
    """Sums over the microbatches of a step."""

    loss: Float[Array, ""]
    grads: PyTree  # float32, in the tree of the params that are trained
    sums: Scalars
    maxima: Scalars
    taken: Float[Array, "L E"] | None = None  # choices of each expert of a mixture


# Params that are trained, the sums so far, a microbatch [R, S], and the frozen params,
# if there are any -> the new sums.
Accumulate = Callable[..., Accumulated]
Update = Callable[[TrainState, Accumulated], tuple[TrainState, dict[str, Array]]]
# Sums and maxima of a microbatch's tokens, and the choices of experts, if counted.
Counted = tuple[Scalars, Scalars, Array | None]
MicrobatchLoss = Callable[[PyTree, PackedBatch], tuple[Array, Counted]]


def init_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    with_reference: bool = False,
) -> TrainState:
    """Return the state at version 0; a reference is a copy of the params.

    These are the ones that are trained.
    """
    return TrainState(
        params=params,
        opt_state=optimizer.init(_float32(params)),
        policy_version=jnp.zeros((), jnp.int32),
        # The step donates the state, so no two of its leaves may share a buffer.
        reference=jax.tree.map(jnp.copy, params) if with_reference else None,
    )


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def state_layout(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    everywhere: Sharding,
    with_reference: bool = False,
) -> TrainState:
    """Return shapes, dtypes and shardings of `init_state`; moments lie as their params.

    Moments need explicit shardings: they start as zeros, which depend on no param, and
    the compiler would put all of them on every device.  `params` may be abstract; the
    rest of the state has the sharding `everywhere`.
    """
    init = functools.partial(
        init_state, optimizer=optimizer, with_reference=with_reference
    )
    state = jax.tree.map(
        lambda leaf: leaf.update(sharding=everywhere), jax.eval_shape(init, params)
    )

    def as_param(leaf: Any, param: Any) -> Any:
        return leaf.update(sharding=param.sharding)

    moments = optax.tree.map_params(optimizer, as_param, state.opt_state, params)
    copies = jax.tree.map(as_param, state.params, params)
    reference = copies if with_reference else None
    return state.replace(params=copies, opt_state=moments, reference=reference)


def make_accumulate(
    forward: Forward,
    objective: Objective,
    *,
    balance: LoadBalancing | None = None,
) -> Accumulate:
    """Make a function that adds a microbatch [R, S] to the sums of its step.

        loss = sum over all tokens of weights * objective

    The weights are those of the global batch, so the sum over microbatches is the
    loss itself, however the batch was cut.  `balance` adds a loss of a mixture's
    router, and counts the choices per expert.
    """

    def microbatch_loss(params: PyTree, batch: PackedBatch) -> tuple[Array, Counted]:
        states, said = forward.states(params, batch, with_scores=balance is not None)
        if objective.elementwise:
            weighted = objective.weighted
            loss, logprobs, entropy = forward.loss_of(states, params, batch, weighted)
        else:
            logprobs, entropy = forward.logprobs_of(states, params, batch)
            loss = objective.weighted(logprobs, entropy, batch).sum()
        sums, maxima = objective.measured(logprobs, entropy, batch)
        taken = None
        if balance is not None:
            more, taken = balance(said, batch)
            loss += more
        return loss, (sums, maxima, taken)

    return accumulating(microbatch_loss)


def accumulating(microbatch_loss: MicrobatchLoss) -> Accumulate:
    """Make a function that adds a microbatch's loss, gradient, sums and maxima."""

    def loss_of(
        params: PyTree, frozen: PyTree | None, batch: PackedBatch
    ) -> tuple[Array, Counted]:
        return microbatch_loss(join(params, frozen), batch)

    gradient = jax.value_and_grad(loss_of, has_aux=True)

    def accumulate(
        params: PyTree,
        so_far: Accumulated | None,
        batch: PackedBatch,
        frozen: PyTree | None = None,
    ) -> Accumulated:
        (loss, (sums, maxima, taken)), grads = gradient(params, frozen, batch)
        own = Accumulated(
            loss=loss, grads=_float32(grads), sums=sums, maxima=maxima, taken=taken
        )
        if so_far is None:
            return own
        maxima = jax.tree.map(jnp.maximum, so_far.maxima, maxima)
        return jax.tree.map(jnp.add, so_far, own).replace(maxima=maxima)

    return accumulate


def make_update(
    optimizer: optax.GradientTransformation,
    *,
    stochastic_rounding: bool = False,
    reference_every: int = 0,
    hold_steps: int = 0,
    balance: LoadBalancing | None = None,
    summarize: Callable[[Scalars, Scalars], Scalars] = summarize,
) -> Update:
    """Make the optimizer's part: (state, sums) -> (new state, metrics of the step).

    A step whose loss or gradient is not finite, or that would make a param or moment so
    (an overflow, an old state that is damaged), leaves the state unchanged; the metric
    "skipped" is then 1, and in the second case "unfit" the place of that leaf among
    `fitness.names`, else -1.  The update itself is float32; params of a narrower dtype
    are rounded to nearest, or up and down at random with the right mean.  Every
    `reference_every` steps (0: never) the reference becomes a copy of the params.  The
    first `hold_steps` steps only advance the version.  `balance` is the one given to
    `make_accumulate`.  `summarize` turns sums and maxima into metrics.
    """

    updated = _make_updated(
        optimizer,
        stochastic_rounding=stochastic_rounding,
        reference_every=reference_every,
        balance=balance,
    )

    def skip(state: TrainState, _: Accumulated) -> TrainState:
        return state

    def advance(state: TrainState, _: Accumulated) -> TrainState:
        return dataclasses.replace(state, policy_version=state.policy_version + 1)

    def update(
        state: TrainState, accumulated: Accumulated
    ) -> tuple[TrainState, dict[str, Array]]:
        metrics = _measured(accumulated, summarize, state.opt_state)
        if balance is not None and accumulated.taken is not None:
            metrics |= balance.metrics(accumulated.taken)
        finite = jnp.isfinite(metrics["grad_norm"]) & jnp.isfinite(accumulated.loss)
        # Computed twice: here only to be looked at, which needs no memory, and in its
        # branch in place.  A choice between the two states would hold both at once.
        new = updated(state, accumulated)
        unfit = fitness.first_unfit(new.params, new.opt_state)
        fit = finite & (unfit < 0)
        held = state.policy_version < hold_steps
        branches = (skip, updated, advance) if hold_steps else (skip, updated)
        state = jax.lax.switch(fit * (1 + held), branches, state, accumulated)
        unfit = jnp.where(finite, unfit, -1)
        return state, metrics | {"skipped": ~fit, "unfit": unfit}

    return update


def _make_updated(
    optimizer: optax.GradientTransformation,
    *,
    stochastic_rounding: bool,
    reference_every: int,
    balance: LoadBalancing | None,
) -> Callable[[TrainState, Accumulated], TrainState]:
    """Make the function from state and sums to the next state, finite or not."""

    def updated(state: TrainState, accumulated: Accumulated) -> TrainState:
        params = _float32(state.params)
        updates, opt_state = optimizer.update(
            accumulated.grads, state.opt_state, params
        )
        params: Any = optax.apply_updates(params, updates)
        if balance is not None and accumulated.taken is not None:
            balance.adjust(params, accumulated.taken, old=state.params)
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
        return dataclasses.replace(
            state,
            params=params,
            opt_state=opt_state,
            policy_version=version,
            reference=reference,
        )

    return updated


def _measured(
    total: Accumulated, summarize: Callable[[Scalars, Scalars], Scalars], moments: Any
) -> Scalars:
    """Return the metrics of a whole batch; its gradient is that before clipping.

    `moments` is the state of the optimizer before the step.
    """
    grad_norm = optax.tree.norm(total.grads)
    own: Scalars = {"loss": total.loss, "grad_norm": grad_norm}
    mean = optax.tree.get(moments, "mu")
    if mean is not None:  # an optimizer with momentum
        mean = _float32(mean)
        products = jax.tree.map(lambda a, b: jnp.sum(a * b), total.grads, mean)
        product = jnp.asarray(optax.tree.sum(products))
        norms = grad_norm * optax.tree.norm(mean)
        own["grad_cosine"] = product / jnp.where(norms > 0.0, norms, 1.0)
    return summarize(total.sums, total.maxima) | own


def unfit_update(state: TrainState, place: int) -> str:
    """Return the message for a step that was undone, since a leaf would not be finite.

    `place` is that of the leaf among `trained_names`.
    """
    if damaged := fitness.unfit_leaf(state):
        return (
            f"{damaged} of the train state was not finite before the step: start again "
            f"with the same --workdir, from its last checkpoint"
        )
    return (
        f"the gradient is finite, but {trained_names(state)[place]} would hold numbers "
        f"that are NaN, infinite or past the range of bfloat16"
    )


def trained_names(state: TrainState) -> list[str]:
    """Return the names of the leaves that a step's "unfit" counts: policy, critic."""
    own = fitness.names(state.params, state.opt_state)
    if state.critic is None:
        return own
    return own + [f"critic.{name}" for name in trained_names(state.critic)]


def _in_each_slice(accumulate: Accumulate, mesh: Mesh) -> Accumulate:
    """Make a function that adds each slice's rows of a microbatch to its own sums."""
    run = in_each_slice(
        mesh,
        lambda params, so_far, batch: accumulate(params[0], so_far, batch, params[1]),
    )

    def accumulate_apart(
        params: PyTree,
        so_far: Accumulated | None,
        batch: PackedBatch,
        frozen: PyTree | None = None,
    ) -> Accumulated:
        return run((params, frozen), so_far, batch)

    return accumulate_apart


def _for_each_slice(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return an array's description with a first axis, an entry for each slice."""
    spec: Any = leaf.sharding
    return jax.ShapeDtypeStruct(
        (mesh.shape[SLICES], *leaf.shape),
        leaf.dtype,
        sharding=NamedSharding(mesh, PartitionSpec(SLICES, *spec.spec)),
    )


def _sum_of_slices(apart: Accumulated) -> Accumulated:
    """Return the sums over slices, the first axis; in between each device has its own.

    A device exchanges only its shards of the gradients with those of other slices.
    """
    maxima = jax.tree.map(lambda leaf: leaf.max(axis=0), apart.maxima)
    return jax.tree.map(lambda leaf: leaf.sum(axis=0), apart).replace(maxima=maxima)


def _wait_for_memory(sums: Accumulated) -> None:
    """Return when the temporary memory of the microbatch before is free again.

    XLA's CPU client allocates a program's memory when the program is called, even if it
    has to wait for another one: two microbatches would hold theirs at once.  The memory
    is freed shortly after the results exist, and no event tells when; a hundredth of
    the time that they took is mostly enough.
    """
    start = time.perf_counter()
    jax.block_until_ready(sums)
    time.sleep((time.perf_counter() - start) / 100)


def _by_rows(batch: PackedBatch, short_rows: Sequence[int]) -> dict[str, PackedBatch]:
    """Return the shapes of microbatches of whole and of short rows, by program."""
    found = {"accumulate": batch}
    for tokens in short_rows:
        found[f"accumulate_{tokens}"] = jax.tree.map(
            lambda leaf, S=tokens: leaf.update(
                shape=(leaf.shape[0], S, *leaf.shape[2:])
            ),
            batch,
        )
    return found


class TrainStep:
    """One optimizer step over a mesh, a microbatch at a time.

    Every program has one shape, with one more for each of `short_rows`.  Except on
    CPUs, a microbatch is sent to the devices while the one before it is computed; empty
    microbatches do not exist.  Over several slices the sums have a first axis with an
    entry for each, until `combine` adds them.
    """

    def __init__(
        self,
        accumulate: Accumulate,
        update: Update,
        *,
        state: TrainState,
        batch: PackedBatch,
        mesh: Mesh,
        short_rows: Sequence[int] = (),
    ) -> None:
        """Make programs for `state` and microbatches [R, S] like `batch`.

        Both may be abstract; the leaves of `state` must have shardings.  Rows of a
        microbatch may also have the tokens of one of `short_rows`.
        """
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._put_to = batch_sharding(mesh)
        self._on_cpus = mesh.devices.flat[0].platform == "cpu"
        state = jax.tree.map(abstract, state)
        state, frozen = dataclasses.replace(state, frozen=None), state.frozen
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        batch = jax.tree.map(lambda leaf: abstract(leaf, self._put_to), batch)
        rows = _by_rows(batch, short_rows)
        # Tokens of a microbatch's rows -> the name of its program.
        self._name_of = {each.segment_ids.shape[1]: name for name, each in rows.items()}
        given = (batch, frozen)
        sums = jax.eval_shape(
            lambda params, *rest: accumulate(params, None, *rest), state.params, *given
        )
        layout = jax.tree.map(lambda _: everywhere, sums)
        layout = layout.replace(grads=shardings.params)
        sums = jax.tree.map(abstract, sums, layout)
        apart, num_slices = sums, mesh.shape[SLICES]
        if num_slices > 1:
            accumulate = _in_each_slice(accumulate, mesh)
            apart = jax.tree.map(lambda leaf: _for_each_slice(leaf, mesh), sums)
        layout_apart = jax.tree.map(lambda leaf: leaf.sharding, apart)

        def start() -> Accumulated:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), apart)

        jit = functools.partial(
            jax.jit, compiler_options=compiler_options("learner", mesh)
        )
        of_rows = jit(accumulate, out_shardings=layout_apart, donate_argnums=1)
        combine = (jit(_sum_of_slices, out_shardings=layout), (apart,))
        self._jitted = {
            "start": (jit(start, out_shardings=layout_apart), ()),
            **{
                name: (of_rows, (state.params, apart, each, frozen))
                for name, each in rows.items()
            },
            **({"combine": combine} if num_slices > 1 else {}),
            "update": (
                jit(update, out_shardings=(shardings, everywhere), donate_argnums=0),
                (state, sums),
            ),
        }
        self._programs: dict[str, Any] = {}

    def lower(self) -> dict[str, Any]:
        """Return the lowered programs by name, in their order in a step."""
        return {
            name: jit.lower(*shapes) for name, (jit, shapes) in self._jitted.items()
        }

    def lower_accumulate(self) -> Any:
        """Return the lowered program of a microbatch of whole rows."""
        jit, shapes = self._jitted["accumulate"]
        return jit.lower(*shapes)

    def compile(self, notice: Callable[[int, int], None] = lambda *_: None) -> None:
        """Compile everything that a step runs; `notice` hears which of how many."""
        for number, (name, (jit, shapes)) in enumerate(self._jitted.items(), start=1):
            notice(number, len(self._jitted))
            self._programs[name] = jit.lower(*shapes).compile()
        return_freed_memory()

    def __call__(
        self, state: TrainState, batch: PackedBatch
    ) -> tuple[TrainState, dict[str, Array]]:
        """Return the state after a batch [M, R, S], and metrics; `state` is donated."""
        return self.apply(state, self.total(state.params, batch, state.frozen))

    def total(
        self, params: PyTree, batch: PackedBatch, frozen: PyTree | None = None
    ) -> Accumulated:
        """Return the sums over the microbatches of a batch [M, R, S]."""
        all_sums = self._accumulated(params, batch, frozen)
        return self._combined(collections.deque(all_sums, maxlen=1).pop())

    def apply(
        self, state: TrainState, sums: Accumulated
    ) -> tuple[TrainState, dict[str, Array]]:
        """Return the state after the optimizer's part, and metrics; donates `state`."""
        # What is not trained is neither donated nor copied: the program has it not.
        bare = dataclasses.replace(state, frozen=None)
        new, metrics = self._programs["update"](bare, sums)
        return dataclasses.replace(new, frozen=state.frozen), metrics

    def accumulated(
        self, params: PyTree, batch: PackedBatch, frozen: PyTree | None = None
    ) -> Iterator[Accumulated]:
        """Yield zeros, then the sums after each microbatch; each donates the last."""
        yield from map(self._combined, self._accumulated(params, batch, frozen))

    def _combined(self, sums: Accumulated) -> Accumulated:
        """Return the sums over slices; with one slice these are the sums."""
        combine = self._programs.get("combine")
        return combine(sums) if combine else sums

    def _accumulated(
        self, params: PyTree, batch: PackedBatch, frozen: PyTree | None
    ) -> Iterator[Accumulated]:
        if not self._programs:
            self.compile()
        so_far = self._programs["start"]()
        yield so_far
        for microbatch in self.microbatches(batch):
            name = self._name_of[microbatch.segment_ids.shape[1]]
            program = self._programs[name]
            so_far = program(params, so_far, microbatch, frozen)
            yield so_far
            if self._on_cpus:
                _wait_for_memory(so_far)

    def microbatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """Yield the microbatches of a batch [M, R, S], each put on the devices."""
        return microbatches(batch, self._put_to, short=True)


# State at the start of a window, its batches -> the batches with the scores that the
# objective reads.
Annotate = Callable[[TrainState, list[PackedBatch]], list[Scores]]


@dataclasses.dataclass(kw_only=True)
class LocalLearner:
    """The learner in the loop's process: programs over the train state."""

    layout: PyTree  # of the train state: shapes, dtypes and shardings
    train_step: TrainStep
    diagnose: Callable[..., str]  # of a skipped step: params, batch, frozen params
    annotate_window: Annotate
    to_sampler: Callable[[PyTree, Array], Publication] | None
    score_batch: Callable[[PyTree, PackedBatch], Float[np.ndarray, "M R S"]]
    checkpointer: Any  # a `learner.checkpoint.Checkpointer`
    # Params that are not trained, which checkpoints name by this digest.
    frozen: PyTree | None = None
    base: str = ""
    teacher: str = ""  # digest of the params that teach; "": there are none
    metrics: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # of several processes

    def step(
        self,
        state: TrainState,
        batch: PackedBatch,
        made_of: MadeOf | None = None,
    ) -> tuple[TrainState, dict[str, float], str]:
        """Make an optimizer step, which donates the state.

        Return the next state, the metrics, and why the step was skipped ("": it was
        not).  It is never made again, so nothing is kept of `made_of`.
        """
        state, arrays = self.train_step(state, batch)
        metrics = {name: float(value) for name, value in arrays.items()}
        skipped, unfit = metrics.pop("skipped"), int(metrics.pop("unfit"))
        if not skipped:
            return state, metrics, ""
        if unfit >= 0:
            return state, metrics, unfit_update(state, unfit)
        fault = (
            f"loss {metrics['loss']} or gradient norm {metrics['grad_norm']} is not "
            f"finite; {self.diagnose(state.params, batch, state.frozen)}"
        )
        return state, metrics, fault

    def annotate(self, state: TrainState, batches: list[PackedBatch]) -> list[Scores]:
        """Return the scores of a window's batches that the objective reads."""
        return self.annotate_window(state, batches)

    def publish(self, state: TrainState, *, pinned: bool = False) -> Publication:
        """Return a copy of the params on the devices of every generator replica.

        The copy lives as long as it is referenced; `pinned` makes no difference here.

        Raises:
            RuntimeError: the copy could not be sent.
        """
        assert self.to_sampler is not None, "made without generators to publish to"
        return self.to_sampler(state.policy, state.policy_version)

    def score(
        self, state: TrainState, batch: PackedBatch
    ) -> Float[np.ndarray, "M R S"]:
        """Return the log-probability of every target of a batch, in nats."""
        return self.score_batch(state.policy, batch)

    def examine(self, state: TrainState, batch: PackedBatch) -> dict[str, float]:
        """Return a batch's metrics, those of its gradient too; no step is made."""
        total = self.train_step.total(state.params, batch, state.frozen)
        found = _measured(total, summarize, state.opt_state)
        return {name: float(value) for name, value in found.items()}

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        host: dict[str, Any],
        groups: Sequence[Group],
    ) -> None:
        """Save the state and what the controller adds; on return both are copied.

        Raises:
            UnsavedError: this checkpoint or the one before it cannot be written; the
                checkpoints on disk are untouched.
        """
        bare = dataclasses.replace(state, frozen=None)
        self.checkpointer.save(
            step, state=bare, host=host, groups=groups, beside=self._beside
        )

    @property
    def _beside(self) -> dict[str, str]:
        return {"base": self.base, "teacher": self.teacher}

    def restore(self) -> Restored | None:
        """Return the newest good checkpoint, if there is any.

        Raises:
            RuntimeError: all checkpoints are damaged.
            ValueError: it is of another model, base, teacher or optimizer.
        """
        layout = dataclasses.replace(self.layout, frozen=None)
        restored = self.checkpointer.restore(layout, beside=self._beside)
        if restored is None:
            return None
        state = dataclasses.replace(restored.state, frozen=self.frozen)
        return dataclasses.replace(restored, state=state)
