"""A number that is not finite, put into one place: the diagnosis must name it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_model import small_architecture

from scalerl_jax.algo.losses import cispo_loss
from scalerl_jax.batching.packing import TrainSequence, abstract_microbatch, pack
from scalerl_jax.config import LoraConfig
from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.head import Head
from scalerl_jax.learner.nonfinite import Diagnosis, _backward_order, _not_finite
from scalerl_jax.learner.step import (
    TrainStep,
    init_state,
    make_accumulate,
    make_update,
    state_layout,
)
from scalerl_jax.model.architecture import Experts, param_shardings, parameter_table
from scalerl_jax.model.lora import factor_table
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.objective.loss import Objective
from scalerl_jax.parallel.mesh import make_mesh

ROWS = dict(row_tokens=8, rows_per_microbatch=2)
ARCH = small_architecture(num_layers=3)
TIED = small_architecture(num_layers=1, tied_embeddings=True)


def make_params(arch=ARCH):
    """Norms at 1 and small weights, so that hidden states are of size 1."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32),
        abstract_params(arch, dtype=jnp.float32),
    )


def make_batch():
    """Two microbatches of two rows of seven predictions, four of them trained on."""
    rng = np.random.default_rng(1)
    sequence = TrainSequence(
        tokens=rng.integers(0, 16, 8).astype(np.int32),
        prompt_length=4,
        weights=np.full(4, 1 / 16, np.float32),
        mask=np.array([True, False, True, True]),
        behavior_logprobs=np.full(4, -2.0, np.float32),
        staleness=np.zeros(4, np.int32),
    )
    batch = pack([sequence] * 4, **ROWS).batch
    return batch.replace(advantages=np.ones_like(batch.advantages))


def masked(batch):
    """A prediction that is not trained on; its behavior log-probability is not read."""
    return batch.replace(behavior_logprobs=put(batch, "behavior_logprobs", 4, np.nan))


def put(batch, name, position, value):
    """A field of the batch with a value in the second microbatch, first row."""
    changed = getattr(batch, name).copy()
    changed[1, 0, position] = value
    return changed


@functools.cache
def make_diagnosis(arch=ARCH, token_loss=None, **axes):
    mesh = make_mesh(jax.devices()[: int(np.prod([*axes.values(), 1]))], **axes)
    objective = Objective(
        token_loss=token_loss or functools.partial(cispo_loss, max_importance_ratio=5.0)
    )
    forward = Forward(
        arch=arch, dtype=jnp.float32, mesh=mesh, head=Head(mesh=mesh, chunk_vocab=8)
    )
    optimizer = optax.sgd(1.0)
    params = jax.device_put(make_params(arch), param_shardings(arch, mesh))
    everywhere = NamedSharding(mesh, PartitionSpec())
    layout = state_layout(params, optimizer, everywhere=everywhere)
    state = jax.device_put(
        init_state(params, optimizer), jax.tree.map(lambda leaf: leaf.sharding, layout)
    )
    step = TrainStep(
        make_accumulate(forward, objective),
        make_update(optimizer),
        state=state,
        batch=abstract_microbatch(**ROWS),
        mesh=mesh,
    )
    return Diagnosis(step=step, forward=forward, objective=objective), state


def diagnose(change, batch, diagnosis):
    """After a step that was skipped, on the state that it returned."""
    diagnosis, state = diagnosis
    state = jax.tree.map(jnp.copy, state)  # the step donates it
    params = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding),
        change(make_params(diagnosis.forward.arch)),
        state.params,
    )
    state, metrics = diagnosis.step(state.replace(params=params), batch)
    return diagnosis(state.params, batch), bool(metrics["skipped"])


def same(params):
    return params


def with_layer(name, layer, value, *, place=(0, 0)):
    def change(params):
        params["layers"][name][(layer, *place)] = value
        return params

    return change


def scaled(name, factor):
    def change(params):
        params[name] = params[name] * np.float32(factor)
        return params

    return change


def huge_layer(params):
    """Finite weights whose products are not: the output of layer 1."""
    for name in ("gate", "up", "down"):
        params["layers"][name][1] *= 1e18
    return params


PARAMS = [
    (
        with_layer("up", 1, np.inf),
        "the params are not: up of layer 1 is the first of 1",
    ),
    (with_layer("query", 2, np.nan), "query of layer 2"),
    (scaled("head", np.nan), "the params are not: head"),
]
# 1e38 * 16 entries of a row that the norm brought to 1: not finite.
FORWARD = [
    (
        huge_layer,
        "in microbatch 0 of 2, the output of layer 1 is the first that is not",
    ),
    (scaled("final_norm", 3e38), "the output of the final norm is not"),
    (scaled("head", 2e38), "the log-probabilities are not"),
]
BATCH = [
    (dict(weights=np.nan), "the batch's weights are not: nan in microbatch 1, row 0"),
    (dict(advantages=np.inf), "advantages are not: inf in microbatch 1, row 0"),
    (dict(behavior_logprobs=np.nan), "behavior_logprobs are not: nan in microbatch 1"),
    # The ratio, past exp(200), is capped at 5.
    (
        dict(advantages=3e38, behavior_logprobs=-300.0),
        "in microbatch 1 of 2, the loss of a token is not",
    ),
    (
        dict(weights=3e38, behavior_logprobs=-300.0),
        "in microbatch 1 of 2, the weighted sum of the token losses is not",
    ),
]


@pytest.mark.parametrize("change, words", PARAMS + FORWARD)
def test_a_bad_number_of_the_model_is_named(change, words):
    said, skipped = diagnose(change, make_batch(), make_diagnosis())
    assert skipped and words in said, said


@pytest.mark.parametrize("values, words", BATCH)
def test_a_bad_number_of_the_batch_is_named(values, words):
    batch = make_batch()
    batch = batch.replace(
        **{name: put(batch, name, 3, value) for name, value in values.items()}
    )
    said, skipped = diagnose(same, batch, make_diagnosis())
    assert skipped and words in said, said


@pytest.mark.slow
def test_it_is_named_over_a_mesh_too():
    diagnosis = make_diagnosis(fsdp=2, tensor=2)
    for change, words in (*PARAMS, *FORWARD[:2]):
        said, skipped = diagnose(change, make_batch(), diagnosis)
        assert skipped and words in said, said


def test_the_embeddings_output_is_named():
    # No finite table has an output that is not: in bfloat16 the largest ones do.
    diagnosis, _ = make_diagnosis()
    bfloat16 = Diagnosis(
        step=diagnosis.step,
        forward=Forward(arch=ARCH, dtype=jnp.bfloat16),
        objective=diagnosis.objective,
    )
    params = make_params()
    params["embedding"][:] = np.finfo(np.float32).max
    said = bfloat16(params, make_batch())
    assert "in microbatch 0 of 2, the output of the embedding is not" in said


@jax.custom_jvp
def steep(x):
    return x


@steep.defjvp
def _steep(primals, tangents):
    return primals[0], tangents[0] * np.inf


def test_a_gradient_alone_is_named():
    # d/dx of a loss that is finite where its derivative is not.
    def token_loss(tokens):
        return steep(tokens.logprobs)

    said, skipped = diagnose(same, make_batch(), make_diagnosis(TIED, token_loss))
    assert skipped
    assert "in microbatch 0 of 2, only the gradient is not, from final_norm on" in said


def test_a_gradient_of_one_layer_on_down_is_named():
    # silu(0) * up = 0, and the gradients of `up` and `down` are 0; that of the gate is
    # h * up / 2 * down, of size 1e41.
    def change(params):
        params["layers"]["gate"][1] = 0
        params["layers"]["up"][1] *= 1e21
        params["layers"]["down"][1] *= 1e21
        return params

    said, skipped = diagnose(change, make_batch(), make_diagnosis())
    assert skipped
    assert "only the gradient is not, from gate of layer 1 on down" in said, said


def with_all(kind, **changes):
    """Fields of an instance, with every part that can be switched on."""
    on = {each.name: True for each in dataclasses.fields(kind) if each.type is bool}
    return on | changes


MIXTURE = Experts(**with_all(Experts, count=4, top_k=2, gate="softmax"))
DENSE = dataclasses.replace(
    ARCH, **with_all(type(ARCH), norms="both", whole_qk_norm=False)
)


@pytest.mark.parametrize("lora", [False, True], ids=["weights", "factors"])
@pytest.mark.parametrize("experts", [None, MIXTURE], ids=["dense", "mixture"])
def test_every_leaf_of_every_family_has_its_place(experts, lora):
    """An unknown leaf is the last of its layer, and no leaf of a family is unknown."""
    arch = dataclasses.replace(DENSE, experts=experts)
    made = factor_table(arch, LoraConfig(rank=2)) if lora else parameter_table(arch)
    layers = jax.tree.map(lambda _: np.full(2, np.nan), made["layers"])
    found = _not_finite(
        {"layers": {"a new one": np.full(2, np.nan)} | layers}, order=_backward_order
    )
    count = len(jax.tree.leaves(layers))
    assert len(found) == 2 * (count + 1)
    assert found[count] == "a new one of layer 1"
    assert found[-1] == "a new one of layer 0"
    names = [each.partition(" ")[0].partition(".")[0] for each in found[:count]]
    output = "shared_down" if experts else "down"
    assert names.index(output) < names.index("output") < names.index("query")


def test_a_norm_that_overflows_is_told_from_its_entries():
    # The square of 1e25 is past 3.4e38, 1e25 is not.
    batch = make_batch()
    batch = batch.replace(advantages=batch.advantages * np.float32(1e25))
    said, skipped = diagnose(same, batch, make_diagnosis())
    assert skipped
    assert "norm overflows, each of its entries is finite: the largest" in said


def test_a_batch_that_is_in_order_is_said_to_be():
    said, skipped = diagnose(same, masked(make_batch()), make_diagnosis())
    assert not skipped
    assert "all of it is finite" in said
