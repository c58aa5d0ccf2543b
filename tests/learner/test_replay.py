"""Routing replay, from what the sampler reports to the learner's loss and gradient.

The reference is a whole forward pass over a sequence alone, given experts by hand.
With equal weights in float32 it chooses what the sampler chose, so replay changes
nothing; given other experts it says what the learner must compute from them.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_run
from small_model import small_architecture
from small_step import RatedSequence, rated

from scalerl_jax import wiring
from scalerl_jax.algo.losses import cispo_loss
from scalerl_jax.batching.packing import TrainSequence, pack
from scalerl_jax.batching.replay import expert_load, replayed_experts
from scalerl_jax.batching.stream_packing import StreamShape, pack_shared
from scalerl_jax.controller.mismatch import MismatchCheck
from scalerl_jax.learner import contents
from scalerl_jax.learner.forward import Forward, plain_scorer, read_forward
from scalerl_jax.learner.head import Head
from scalerl_jax.learner.step import TrainStep, init_state, make_accumulate, make_update
from scalerl_jax.model.architecture import Experts
from scalerl_jax.model.ffn_moe import from_ids, to_ids
from scalerl_jax.model.transformer import (
    abstract_params,
    head_logits,
    head_weights,
    hidden_states,
)
from scalerl_jax.objective.loss import Objective
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.run.progress import Progress
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.types import Group, Prompt, Rollout

ARCH = small_architecture(
    family="qwen3_moe", experts=Experts(count=5, top_k=2, gate="normalized")
)
L, K, NONE = ARCH.num_layers, 2, 255
# Prompt and completions of each group; rows of 16, streams of 24.
GROUPS = [(4, (5, 2)), (1, (6, 3)), (6, (1, 4))]
SHAPE = StreamShape(
    rows=2, row_tokens=16, shared_tokens=10, own_tokens=21, group_size=2
)


@functools.cache
def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype),
        abstract_params(ARCH, dtype=jnp.float32),
    )


def random_ids(rng, length):
    """Two experts of five for every token and layer; some tokens have none."""
    ids = np.argsort(rng.random((length, L, 5)))[..., :K].astype(np.uint8)
    ids[rng.random((length, L)) < 0.2] = NONE
    return ids


def make_sequences(groups=GROUPS, *, replay=True):
    rng = np.random.default_rng(3)
    total = sum(sum(lengths) for _, lengths in groups)
    sequences = []
    for prompt_length, lengths in groups:
        prompt = rng.integers(0, 16, prompt_length)
        of_prompt = random_ids(rng, prompt_length - 1)  # one for all: as if shared
        for length in lengths:
            ids = np.concatenate([of_prompt, random_ids(rng, length)])
            sequences.append(
                RatedSequence(
                    tokens=np.array([*prompt, *rng.integers(0, 16, length)], np.int32),
                    prompt_length=prompt_length,
                    weights=np.full(length, 1 / total, np.float32),
                    mask=np.ones(length, bool),
                    behavior_logprobs=rng.uniform(-4, -2, length).astype(np.float32),
                    staleness=np.zeros(length, np.int32),
                    advantage=float(rng.normal()),
                    experts=ids if replay else None,
                )
            )
    return sequences


def alone(params, sequences):
    """Log-probabilities [B, S] of what follows each token: each sequence in a row.

    What is given for each token and layer is written out, -1 where nothing is.
    """
    shape = (len(sequences), max(each.row_length for each in sequences))
    tokens, targets, there = (np.zeros(shape, np.int32) for _ in range(3))
    given = np.full((L, *shape, K), -1, np.int32)
    for row, each in enumerate(sequences):
        length = each.row_length
        tokens[row, :length] = each.tokens[:-1]
        targets[row, :length] = each.tokens[1:]
        there[row, :length] = 1
        for place, layer, k in np.ndindex(each.experts.shape):
            if each.experts[place, layer, k] != NONE:
                given[layer, row, place, k] = each.experts[place, layer, k]
    hidden, _ = hidden_states(
        params,
        ARCH,
        jnp.asarray(tokens),
        positions=jnp.broadcast_to(jnp.arange(shape[1]), shape),
        segment_ids=jnp.asarray(there),
        dtype=jnp.float32,
        experts=jnp.asarray(given),
    )
    logits = head_logits(hidden, head_weights(params), float32_head=True)
    found = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(found, jnp.asarray(targets)[..., None], 2)[..., 0]


def completions(sequences):
    """Where each completion is predicted, in the rows of `alone`."""
    return [slice(each.prompt_length - 1, each.row_length) for each in sequences]


def loss_alone(params, sequences):
    """CISPO, sequence by sequence; the ratio is capped at 5."""
    total, rows = 0.0, alone(params, sequences)
    for row, (each, where) in enumerate(
        zip(sequences, completions(sequences), strict=True)
    ):
        logprobs = rows[row, where]
        ratio = jnp.exp(logprobs - each.behavior_logprobs)
        kept = jax.lax.stop_gradient(jnp.minimum(ratio, 5.0))
        total -= (kept * logprobs * each.weights).sum() * each.advantage
    return total


LAYOUTS = ("packed", "padded", "shared")


def packed(layout, sequences):
    """The batch of these sequences in one of the layouts."""
    pack_in = {
        "packed": functools.partial(pack, row_tokens=16, rows_per_microbatch=2),
        "padded": functools.partial(
            pack, row_tokens=16, rows_per_microbatch=3, row_segments=1
        ),
        "shared": functools.partial(pack_shared, shape=SHAPE, streams=1),
    }[layout]
    return rated(pack_in(sequences), sequences)


def forward(mesh, **changes):
    fields = dict(arch=ARCH, dtype=jnp.float32, head=Head(mesh=mesh), mesh=mesh)
    return Forward(**(fields | changes))


def accumulated(batch, **changes):
    """Loss and gradient of a batch, as the train step sums them."""
    mesh = make_mesh(jax.devices()[:1])
    everywhere = jax.NamedSharding(mesh, jax.P())
    state = jax.device_put(init_state(params(), optax.sgd(1.0)), everywhere)
    loss = functools.partial(_cispo, cap=5.0)
    step = TrainStep(
        make_accumulate(forward(mesh, **changes), Objective(token_loss=loss)),
        make_update(optax.sgd(1.0)),
        state=state,
        batch=jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch
        ),
        mesh=mesh,
    )
    sums = step.total(state.params, batch)
    return float(sums.loss), sums.grads


def _cispo(tokens, cap):
    return cispo_loss(tokens, max_importance_ratio=cap, min_importance_ratio=0.0)


@pytest.fixture(scope="module")
def expected():
    sequences = make_sequences()
    return jax.jit(jax.value_and_grad(lambda p: loss_alone(p, sequences)))(params())


@pytest.mark.parametrize(
    "layout", ["packed", pytest.param("shared", marks=pytest.mark.slow)]
)
def test_loss_and_gradient_are_those_of_the_given_experts(expected, layout):
    batch = packed(layout, make_sequences())
    remat = "full" if layout == "packed" else "none"
    loss, grads = accumulated(batch, remat=remat)
    assert loss == pytest.approx(float(expected[0]), abs=2e-6)
    for path, wanted in jax.tree_util.tree_leaves_with_path(expected[1]):
        ours = functools.reduce(lambda tree, key: tree[key.key], path, grads)
        np.testing.assert_allclose(ours, wanted, atol=3e-6, err_msg=str(path))
    # The router learns, and from other experts there is another loss.
    assert float(jnp.abs(grads["layers"]["router"]).max()) > 1e-5
    apart = packed(layout, make_sequences(replay=False))
    assert apart.experts is None
    assert abs(accumulated(apart, remat=remat)[0] - loss) > 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_has_nothing_to_replay(layout):
    batch = packed(layout, make_sequences())
    there = batch.segment_ids > 0
    if batch.sharing is not None:
        there = batch.sharing.place >= 0
    assert (batch.experts[~there] == NONE).all()
    held = np.sort(batch.experts[there].reshape(-1, L * K), axis=0)
    sequences = make_sequences()
    known = [each.experts for each in sequences]
    if layout == "shared":  # the second of a group adds its completion alone
        known[1::2] = [x.experts[x.prompt_length - 1 :] for x in sequences[1::2]]
    given = np.concatenate(known)
    np.testing.assert_array_equal(held, np.sort(given.reshape(-1, L * K), axis=0))


def test_scores_of_a_window_replay_too():
    sequences = make_sequences()
    batch = packed("packed", sequences)
    mesh = make_mesh(jax.devices()[:1])
    on_mesh = jax.device_put(params(), jax.NamedSharding(mesh, jax.P()))
    found = plain_scorer(forward(mesh))(on_mesh, batch)
    assert read_forward(batch).experts is batch.experts
    rows = np.asarray(jax.jit(lambda params: alone(params, sequences))(params()))
    wanted = np.concatenate(
        [row[where] for row, where in zip(rows, completions(sequences), strict=True)]
    )
    np.testing.assert_allclose(np.sort(found[batch.mask]), np.sort(wanted), atol=1e-5)


def test_the_check_at_the_start_tells_what_replay_leaves_of_the_difference():
    """Experts at random: the learner's own choice is another policy's."""
    (prompt_length, length), rng = (4, 6), np.random.default_rng(5)
    tokens = rng.integers(0, 16, prompt_length + length).astype(np.int32)
    prompt = make_group([None, None]).prompt.replace(tokens=tokens[:prompt_length])
    sequence = TrainSequence(
        tokens=tokens,
        prompt_length=prompt_length,
        weights=np.ones(length, np.float32),
        mask=np.ones(length, bool),
        behavior_logprobs=np.zeros(length, np.float32),
        staleness=np.zeros(length, np.int32),
        experts=random_ids(rng, prompt_length - 1 + length),
    )
    rows = jax.jit(lambda params: alone(params, [sequence]))(params())
    sampled = np.asarray(rows)[0, completions([sequence])[0]]
    completion = Completion(
        request_id=0,
        sample=0,
        tokens=tokens[prompt_length:],
        mask=sequence.mask,
        logprobs=sampled,
        full_logprobs=sampled,
        top_tokens=np.zeros((length, 0), np.int32),
        top_logprobs=np.zeros((length, 0), np.float32),
        versions=np.zeros(length, np.int32),
        cut_off=True,
        interrupted=False,
        experts=sequence.experts,
    )
    mesh = make_mesh(jax.devices()[:1])
    check = MismatchCheck(
        score=plain_scorer(forward(mesh)),
        pack=functools.partial(
            pack, row_tokens=16, rows_per_microbatch=1, row_segments=1
        ),
        max_mismatch_nats=1e-4,
    )
    state = jax.device_put(params(), jax.NamedSharding(mesh, jax.P()))
    found = check.require(state, [(prompt, completion)])
    assert found.mean_abs < 1e-5
    assert found.unreplayed is not None and found.unreplayed.mean_abs > 1e-2
    assert "; without routing replay by " in str(found)
    assert found.metrics().keys() == {
        f"mismatch/{name}" for name in ("mean_abs", "max_abs", "kl", "tokens")
    }
    # Whoever has no experts to replay is told of one difference, and refused by it.
    free = dataclasses.replace(completion, experts=None)
    with pytest.raises(RuntimeError, match="max_mismatch_nats = 0.0001"):
        check.require(state, [(prompt, free)])


@pytest.mark.parametrize("count, dtype", [(255, "uint8"), (256, "uint16")])
def test_experts_travel_in_the_narrowest_dtype_that_can_say_none(count, dtype):
    experts = Experts(count=count, top_k=2, gate="softmax")
    chosen = jnp.array([[[0, count - 1], [-1, -1]], [[3, 4], [-1, 5]]])
    ids = to_ids(chosen, experts)
    assert ids.dtype == dtype == experts.id_dtype
    assert ids.tolist()[1][0] == [np.iinfo(dtype).max] * 2
    back = from_ids(ids[None])
    np.testing.assert_array_equal(back[:, 0], chosen)


def make_group(experts, *, ticket=0, prompt=4, lengths=(5, 2)):
    rollouts = tuple(
        Rollout(
            completion_tokens=np.zeros(length, np.int32),
            completion_mask=np.ones(length, bool),
            behavior_logprobs=np.zeros(length, np.float32),
            policy_versions=np.zeros(length, np.int32),
            cut_off=False,
            interrupted=False,
            experts=ids,
        )
        for length, ids in zip(lengths, experts, strict=True)
    )
    question = Prompt(
        prompt_id=0,
        epoch=0,
        task="",
        text="",
        tokens=np.zeros(prompt, np.int32),
        reference={},
    )
    return Group(ticket=ticket, prompt=question, rollouts=rollouts, finished_version=0)


def test_groups_keep_their_experts_in_a_checkpoint():
    rng = np.random.default_rng(0)
    groups = [
        make_group([random_ids(rng, 8), random_ids(rng, 5)]),
        make_group([None, None], ticket=1),  # queued before replay was turned on
        make_group([random_ids(rng, 8), None], ticket=2),
    ]
    arrays, rows = contents.flatten(groups)
    read = contents.unflatten(arrays, json.loads(json.dumps(rows)))
    for group, again in zip(groups, read, strict=True):
        for ours, theirs in zip(group.rollouts, again.rollouts, strict=True):
            assert (ours.experts is None) == (theirs.experts is None)
            if ours.experts is not None:
                assert theirs.experts.dtype == np.uint8
                np.testing.assert_array_equal(ours.experts, theirs.experts)
    assert "experts" not in contents.flatten(groups[1:2])[0]
    with pytest.raises(ValueError, match=r"experts is uint8\[4, 2, 2\].*uint8\[5"):
        contents.flatten([make_group([random_ids(rng, 8), random_ids(rng, 4)])])


def test_a_batch_takes_each_rollouts_own_experts():
    rng = np.random.default_rng(0)
    given = [random_ids(rng, 8), random_ids(rng, 5)]
    assert replayed_experts([make_group(given)], ARCH) == given


@pytest.mark.parametrize(
    "spoil, message",
    [
        pytest.param(lambda x: None, "'on', but the group of ticket 7 ", id="none"),
        pytest.param(lambda x: x[1:], r"uint8\[7, 2, 2\].* uint8\[8", id="short"),
        pytest.param(lambda x: x[:, :1], r"uint8\[8, 1, 2\]", id="other layers"),
        pytest.param(lambda x: x.astype(np.uint16), "uint16", id="other dtype"),
        pytest.param(
            lambda x: np.where(x == 4, 9, x).astype(np.uint8), "among 5", id="unknown"
        ),
    ],
)
def test_groups_without_fitting_experts_are_refused_in_a_line(spoil, message):
    rng = np.random.default_rng(0)
    given = [spoil(random_ids(rng, 8)), random_ids(rng, 5)]
    with pytest.raises(ValueError, match=message) as refused:
        replayed_experts([make_group(given, ticket=7)], ARCH)
    assert "\n" not in str(refused.value)


def test_a_model_without_experts_is_refused_in_a_line(tmp_path):
    config = small_run.make_config({"objective.routing_replay": "on"})
    with pytest.raises(ValueError, match="'on' replays .* family qwen3 has none"):
        wiring.make_books(config, tmp_path, Progress())


def of(count):
    return small_architecture(
        family="qwen3_moe", experts=Experts(count=count, top_k=2, gate="softmax")
    )


def test_the_load_of_experts_by_hand():
    none = 255
    # Two layers of three experts, two of them for each token.
    one = np.array([[[0, 1], [2, 0]], [[0, 1], [0, 2]]], np.uint8)
    two = np.array([[[2, 0], [none, none]], [[0, 1], [0, 2]]], np.uint8)
    found = expert_load([one, None, two], of(3))
    # Choices: 4, 3, 1 of 8 in the first layer, and 3, 0, 3 of 6 in the second.
    assert found == {
        "experts/max_load": 4 * 3 / 8,
        "experts/mean_max_load": 1.5,
        "experts/dead": 1,
    }
    nobody = np.full((2, 2, 2), none, np.uint8)
    assert expert_load([nobody], of(3)) == {}


def test_a_layer_of_which_a_share_is_known_is_not_dead():
    """A prompt has no experts in the last layer."""
    prompt = np.array([[[0, 1], [255, 255]]], np.uint8)
    found = expert_load([prompt], of(2))
    assert found["experts/max_load"] == 1.0
    assert found["experts/dead"] == 0
