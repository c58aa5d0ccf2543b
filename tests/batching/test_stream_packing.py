"""Streams in which a prompt stands once: what is packed, and what the step makes of it.

The step on streams is compared with the step on rows in which every sequence has a
prompt of its own: the same loss and gradient, whatever the cut and the mesh.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from small_model import SMALL
from small_step import RatedSequence, rated

from scalerl_jax.algo.losses import cispo_loss
from scalerl_jax.batching import stream_packing
from scalerl_jax.batching.packing import pack
from scalerl_jax.batching.rooms import Rooms
from scalerl_jax.batching.stream_packing import StreamShape, pack_shared
from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.head import Head
from scalerl_jax.learner.step import TrainStep, init_state, make_accumulate, make_update
from scalerl_jax.model.architecture import batch_sharding, param_shardings
from scalerl_jax.model.prompt_sharing import collect, spread
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.objective.loss import Objective
from scalerl_jax.parallel.mesh import make_mesh

SHAPE = StreamShape(
    rows=2, row_tokens=20, shared_tokens=12, own_tokens=24, group_size=3
)


def make_sequences(groups, *, seed=0):
    """Sequences of each (prompt length, completion lengths); weights sum to 1."""
    rng = np.random.default_rng(seed)
    total = sum(sum(lengths) for _, lengths in groups)
    sequences = []
    for prompt_length, lengths in groups:
        prompt = rng.integers(0, 16, prompt_length)
        for length in lengths:
            tokens = [*prompt, *rng.integers(0, 16, length)]
            mask = rng.random(length) > 0.2
            sequences.append(
                RatedSequence(
                    tokens=np.array(tokens, np.int32),
                    prompt_length=prompt_length,
                    weights=np.where(mask, 1.0 / total, 0.0).astype(np.float32),
                    mask=mask,
                    behavior_logprobs=rng.uniform(-4, -2, length).astype(np.float32),
                    staleness=rng.integers(0, 2, length).astype(np.int32),
                    advantage=float(rng.normal()),
                )
            )
    return sequences


GROUPS = [(5, (3, 8, 1)), (1, (4, 6)), (7, (9, 2, 5)), (3, (11,))]


def fields_of_predictions(packed):
    """What every prediction of a batch has, in an order of its own."""
    batch, sequence = packed
    mask = batch.mask
    columns = [
        batch.targets, batch.weights, sequence, batch.behavior_logprobs,
        batch.staleness,
    ]  # fmt: skip
    return sorted(zip(*(np.asarray(x)[mask].tolist() for x in columns), strict=True))


def test_each_prompt_stands_once_in_a_stream_and_whole_in_every_row():
    batch = pack_shared(make_sequences([(5, (3, 8, 1))]), SHAPE, streams=1).batch
    sharing = jax.tree.map(lambda x: x[0], batch.sharing)
    assert batch.tokens.shape == (1, 1, 36)
    # 4 shared tokens; 8 + 3 + 1 own ones, each from the prompt's last token on.
    assert (sharing.place[0] >= 0).sum() == 4 + 12
    first, *others = make_sequences([(5, (3, 8, 1))])
    rows = batch.tokens[0, 0][sharing.source]
    segments = batch.segment_ids[0]
    found = [
        rows[row][segments[row] == number].tolist()
        for row in range(2)
        for number in range(1, segments[row].max() + 1)
    ]
    expected = [each.tokens[:-1].tolist() for each in (first, *others)]
    assert sorted(found) == sorted(expected)
    # Every other place of the shared tokens is among the copies.
    assert (sharing.copies >= 0).sum() == 4 * 2


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 8), st.lists(st.integers(1, 11), min_size=1, max_size=5)
        ),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([1, 2]),
)
def test_no_prediction_is_lost_or_doubled(groups, streams):
    sequences = make_sequences(groups)
    shared = pack_shared(sequences, SHAPE, streams=streams)
    plain = pack(sequences, row_tokens=20, rows_per_microbatch=2)
    assert fields_of_predictions(shared) == fields_of_predictions(plain)
    assert shared.batch.tokens.shape[1] == streams


class EveryPlace(Rooms):
    """Leaves out no stream, whatever room it has."""

    def first(self, room, *, since=0):
        return since if since < self._count else None


def test_no_stream_is_passed_over_that_has_room(monkeypatch):
    random = np.random.default_rng(0)
    groups = [
        (int(random.integers(2, 5)), random.integers(1, 9, 3).tolist())
        for _ in range(40)
    ]
    sequences = make_sequences(groups)
    found = pack_shared(sequences, SHAPE, streams=2)
    monkeypatch.setattr(stream_packing, "Rooms", EveryPlace)
    expected = pack_shared(sequences, SHAPE, streams=2)
    assert len(found.batch.targets) > 3
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_rollout_that_no_stream_has_room_for_is_refused():
    with pytest.raises(ValueError, match=r"rollout of 5 \+ 30 tokens .* raise them"):
        pack_shared(make_sequences([(5, (30,))]), SHAPE, streams=1)


def test_spread_and_collect_are_each_others_transposes():
    """<spread(x), y> = <x, its gradient>, and the same for collect."""
    batch = pack_shared(make_sequences(GROUPS), SHAPE, streams=1).batch
    sharing = jax.tree.map(lambda x: jnp.asarray(x[0]), batch.sharing)
    rng = np.random.default_rng(3)
    x, more_x = rng.normal(size=(2, 1, 36, 3)).astype(np.float32)
    there = (np.asarray(sharing.place) >= 0)[..., None]
    rows, more_rows = rng.normal(size=(2, 2, 20, 3)).astype(np.float32)
    used = (batch.segment_ids[0] > 0)[..., None]
    rows, more_rows = jnp.asarray(rows * used), jnp.asarray(more_rows * used)
    x, more_x = jnp.asarray(x * there), jnp.asarray(more_x * there)
    for function, inputs, tangent, cotangent in (
        (spread, x, more_x, rows),
        (collect, rows, more_rows, x),
    ):
        out, pull = jax.vjp(lambda value, f=function: f(value, sharing), inputs)
        assert out.shape == cotangent.shape
        (gradient,) = pull(cotangent)
        moved = function(tangent, sharing)
        np.testing.assert_allclose(
            (moved * cotangent).sum(), (gradient * tangent).sum(), rtol=1e-5
        )
        # They are linear, so the tangent's image is a difference of images.
        np.testing.assert_allclose(
            function(inputs + tangent, sharing) - out, moved, atol=1e-5
        )


@functools.cache
def start_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32),
        abstract_params(SMALL, dtype=jnp.float32),
    )


def step_on(batch, axes, *, remat="none", scan_layers=True):
    """Params after plain gradient descent at rate 1 on a batch, and the metrics."""
    size = int(np.prod(list(axes.values()), initial=1))
    mesh = make_mesh(jax.devices()[:size], **axes)
    forward = Forward(
        arch=SMALL,
        dtype=jnp.float32,
        mesh=mesh,
        head=Head(mesh=mesh),
        remat=remat,
        scan_layers=scan_layers,
    )
    params = jax.device_put(start_params(), param_shardings(SMALL, mesh))
    optimizer = optax.sgd(1.0)
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = init_state(params, optimizer)
    state = state.replace(
        policy_version=jax.device_put(state.policy_version, everywhere)
    )
    step = TrainStep(
        make_accumulate(
            forward,
            Objective(
                token_loss=functools.partial(cispo_loss, max_importance_ratio=1.5)
            ),
        ),
        make_update(optimizer),
        state=state,
        batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch),
        mesh=mesh,
    )
    state, metrics = step(state, batch)
    assert batch_sharding(mesh).mesh == mesh
    return jax.tree.map(np.asarray, (state.params, metrics))


@functools.cache
def expected():
    sequences = make_sequences(GROUPS)
    packed = pack(sequences, row_tokens=20, rows_per_microbatch=2)
    return step_on(rated(packed, sequences), {})


@pytest.mark.parametrize(
    "axes, options",
    [
        pytest.param({}, {}, id="one device"),
        pytest.param(
            {}, dict(scan_layers=False), id="layers unrolled", marks=pytest.mark.slow
        ),
        pytest.param({}, dict(remat="full"), id="remat", marks=pytest.mark.slow),
        pytest.param(dict(data=2, fsdp=2, tensor=2), {}, id="eight devices"),
    ],
)
def test_a_shared_prompt_changes_no_gradient(axes, options):
    streams = axes.get("data", 1) * axes.get("fsdp", 1)
    sequences = make_sequences(GROUPS)
    packed = pack_shared(sequences, SHAPE, streams=streams)
    found = step_on(rated(packed, sequences), axes, **options)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(
            ours, theirs, rtol=1e-5, atol=3e-6
        ),
        found,
        expected(),
    )
