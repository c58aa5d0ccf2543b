"""Diagnosis of a skipped step: finds the first number that was not finite.

Nothing here runs or is compiled before that.  The step leaves its state unchanged,
so that the batch can be computed again, in parts: params, inputs, the output of each
layer, log-probabilities, loss, gradient; the first part that is not finite is named.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int

from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.step import TrainStep
from scalerl_jax.model.lora import join
from scalerl_jax.model.transformer import head_weights
from scalerl_jax.objective.loss import Objective, tokens_of
from scalerl_jax.parallel import multihost
from scalerl_jax.parallel.multihost import OwnPart
from scalerl_jax.types import PackedBatch, PyTree

# Leaves of a layer, in the order in which the backward pass reaches them.
_BACKWARD: Sequence[str] = (
    "ffn_out_norm down_bias down gate_bias gate up_bias up shared_down shared_gate "
    "shared_up expert_down_bias expert_down expert_gate_up_bias expert_gate_up "
    "router_bias router_logit_bias router ffn_norm attention_out_norm output_bias "
    "output sinks value_bias value key_norm key_bias key query_norm query_bias query "
    "attention_norm"
).split()
_OTHERS_S = 600.0  # the wait for what the other processes have found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Computes a skipped batch again with the programs of `step`, and `forward`."""

    step: TrainStep
    forward: Forward
    objective: Objective

    def __call__(
        self, params: PyTree, batch: PackedBatch, frozen: PyTree | None = None
    ) -> str:
        """Return a phrase that names what is not finite; `batch` is [M, R, S]."""
        policy = join(params, frozen)
        parts = (
            self._in_params(policy),
            _in_inputs(batch),
            self._in_forward(policy, batch),
            self._in_gradient(params, batch, frozen),
        )
        for found in parts:
            for sentence in found:
                return sentence
        suspects = (
            "suspect the device, or a program that does not give the same result twice"
        )
        if "values" not in batch.scores:
            return f"computed again, all of it is finite: {suspects}"
        return (
            f"computed again, all of the policy's is finite, so that the critic's is "
            f"not: lower critic.learning_rate, or {suspects}"
        )

    def _in_params(self, params: PyTree) -> Iterator[str]:
        bad = _not_finite(params)
        if bad:
            yield f"the params are not: {bad[0]} is the first of {len(bad)} leaves"

    def _in_forward(self, params: PyTree, batch: PackedBatch) -> Iterator[str]:
        for number, microbatch in enumerate(self.step.microbatches(batch)):
            for found in self._in_microbatch(params, microbatch):
                yield f"in microbatch {number} of {len(batch.tokens)}, {found}"

    def _in_microbatch(self, params: PyTree, batch: PackedBatch) -> Iterator[str]:
        def finite(layers: int, *, normed: bool = False) -> Array:
            return self._hidden_finite(params, batch, layers, normed=normed)

        layers = self.forward.arch.num_layers
        if not finite(layers):
            # Layers add to their input: from the first bad one on all are bad.
            first = _first_bad(finite, layers)
            if first == 0:
                yield "the output of the embedding is not; all params are"
            yield (
                f"the output of layer {first - 1} is the first that is not; all params "
                f"and the layer's input are"
            )
        if not finite(layers, normed=True):
            yield "the output of the final norm is not; its input is"
        logprobs, losses, loss = self._tokens_finite(params, batch)
        if not logprobs:
            yield "the log-probabilities are not; the hidden states are"
        if not losses:
            yield (
                "the loss of a token is not; its log-probability, behavior "
                "log-probability and advantage are"
            )
        if not loss:
            yield "the weighted sum of the token losses is not; each of them is"

    def _in_gradient(
        self, params: PyTree, batch: PackedBatch, frozen: PyTree | None
    ) -> Iterator[str]:
        sums = None
        for number, sums in enumerate(self.step.accumulated(params, batch, frozen)):
            bad = _not_finite(sums.grads, order=_backward_order)
            if bad:  # never before the first microbatch, when all is zero
                yield (
                    f"in microbatch {number - 1} of {len(batch.tokens)}, only the "
                    f"gradient is not, from {bad[0]} on down; the loss is"
                )
        assert sums is not None, "zeros come first"
        if not np.isfinite(float(sums.loss)):
            yield "the sum over the microbatches is not; the loss of each of them is"
        if not np.isfinite(float(_norm(sums.grads))):
            peaks = _named_peaks(sums.grads)
            largest = max(peaks, key=lambda place: peaks[place])
            yield (
                f"the gradient's norm overflows, each of its entries is finite: the "
                f"largest, {peaks[largest]:.3g}, is of {_describe(*largest)}"
            )

    @functools.cached_property
    def _hidden_finite(self) -> Callable[..., Bool[Array, ""]]:
        """Return a program that says whether the first `count` layers are finite.

        The weights of other layers and of the head are set to zero: 0 times a number
        that is not finite is NaN, which shows in the log-probabilities.
        """

        @jax.jit
        def finite(
            params: PyTree, batch: PackedBatch, count: Int[Array, ""], *, normed: Array
        ) -> Bool[Array, ""]:
            def first(leaf: Array) -> Array:
                places = jnp.arange(len(leaf)).reshape(-1, *(1,) * (leaf.ndim - 1))
                return jnp.where(places < count, leaf, 0)

            norm = params["final_norm"]
            idle = {
                "layers": jax.tree.map(first, params["layers"]),
                "final_norm": jnp.where(normed, norm, jnp.ones_like(norm)),
                "head": jnp.zeros_like(head_weights(params)),
            }
            return jnp.isfinite(self.forward.logprobs(params | idle, batch)[0]).all()

        return finite

    @functools.cached_property
    def _tokens_finite(self) -> Callable[..., tuple[Array, Array, Array]]:
        """Return whether log-probabilities, losses and their sum are finite."""

        @jax.jit
        def finite(params: PyTree, batch: PackedBatch) -> tuple[Array, Array, Array]:
            logprobs, entropy = self.forward.logprobs(params, batch)
            losses = self.objective.token_loss(tokens_of(batch, logprobs, entropy))
            losses = jnp.where(batch.mask, losses, 0.0)
            loss = (batch.weights * losses).sum()
            found = (jnp.isfinite(each).all() for each in (logprobs, losses, loss))
            return tuple(found)  # type: ignore[return-value]

        return finite


def _first_bad(finite: Callable[[int], object], most: int) -> int:
    """Return the smallest count for which `finite` fails; it fails for `most`."""
    least = 0
    while least < most:
        middle = (least + most) // 2
        if finite(middle):
            least = middle + 1
        else:
            most = middle
    return most


def _in_inputs(batch: PackedBatch) -> Iterator[str]:
    """Yield fields of the batch that are not finite; masked logprobs are ignored.

    Processes that have rows of their own each look at these, and all say the same.
    """
    mine = next(_in_own_inputs(batch), "")
    said = multihost.exchange(mine, name="what was skipped", timeout_s=_OTHERS_S)
    yield from filter(None, said)


def _in_own_inputs(batch: PackedBatch) -> Iterator[str]:
    rows = batch.weights
    first, size = (0, 0, 0), np.shape(rows)
    if isinstance(rows, OwnPart):
        first, size = rows.starts, rows.part.shape
    here = tuple(slice(at, at + many) for at, many in zip(first, size, strict=True))
    checked = {
        "weights": rows,
        "advantages": batch.advantages,
        "behavior_logprobs": batch.behavior_logprobs,
    }
    # Checked first: advantages that are not finite come from these.
    of_critic = {"values", "returns"} & batch.scores.keys()
    checked = {name: batch.scores[name] for name in sorted(of_critic)} | checked
    for name, array in checked.items():
        values = np.asarray(array[here])
        if name == "behavior_logprobs":
            values = np.where(batch.mask[here], values, 0.0)
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            microbatch, row, position = (bad[0] + first).tolist()
            yield (
                f"the batch's {name} are not: {values[tuple(bad[0])]} in microbatch "
                f"{microbatch}, row {row}, position {position} is the first of "
                f"{len(bad)}"
            )


@jax.jit
def _peaks(tree: PyTree) -> PyTree:
    """The largest absolute value of every leaf, layer by layer; NaN: not finite."""

    def peak(path: tuple, leaf: Array) -> Array:
        stacked = path[0] == jax.tree_util.DictKey("layers")
        axes = tuple(range(int(stacked), leaf.ndim))
        # A maximum alone is not enough: between devices some backends skip a NaN.
        finite = jnp.isfinite(leaf).all(axis=axes)
        return jnp.where(finite, jnp.abs(leaf).max(axis=axes), jnp.nan)

    return jax.tree_util.tree_map_with_path(peak, tree)


def _named_peaks(tree: PyTree) -> dict[tuple[str, int], float]:
    """Largest absolute values by leaf and layer, which is -1 outside of the layers."""
    peaks, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(_peaks(tree)))
    return {
        (_named(path), layer if np.ndim(values) else -1): float(value)
        for path, values in peaks
        for layer, value in enumerate(np.atleast_1d(values))
    }


def _named(path: tuple) -> str:
    """Return the name of a leaf within its layer: "query", "query.factors.up"."""
    within = path[1:] if path[0] == jax.tree_util.DictKey("layers") else path
    return jax.tree_util.keystr(within, simple=True, separator=".")


def _describe(leaf: str, layer: int) -> str:
    return leaf if layer < 0 else f"{leaf} of layer {layer}"


def _forward_order(place: tuple[str, int]) -> tuple[int, ...]:
    """Embedding, the layers from the first to the last, what follows them."""
    leaf, layer = place
    return {"embedding": 0}.get(leaf, 1 if layer >= 0 else 2), layer


def _backward_order(place: tuple[str, int]) -> tuple[int, ...]:
    """Head, final norm, the layers from the last to the first, embedding.

    A leaf whose place in its layer is not known comes after the layer's others.
    """
    leaf, layer = place
    name = leaf.partition(".")[0]
    within = _BACKWARD.index(name) if name in _BACKWARD else len(_BACKWARD)
    return {"head": 0, "final_norm": 1, "embedding": 3}.get(leaf, 2), -layer, within


def _not_finite(
    tree: PyTree,
    *,
    order: Callable[[tuple[str, int]], tuple[int, ...]] = _forward_order,
) -> list[str]:
    """Return the leaves, by layer and in `order`, that hold a non-finite number."""
    peaks = _named_peaks(tree)
    bad = sorted((each for each in peaks if not np.isfinite(peaks[each])), key=order)
    return [_describe(*each) for each in bad]


_norm = jax.jit(optax.tree.norm)
