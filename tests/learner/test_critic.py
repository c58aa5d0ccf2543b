"""The critic against values by hand and a slow critic, and what it must not depend on.

As in test_step, updates are compared after plain gradient descent at rate 1, where the
params show the gradient itself.
"""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from small_step import (
    ADAMW,
    ARCH,
    CISPO,
    LONGEST,
    PLAIN,
    RatedSequence,
    assert_trees_close,
    assert_trees_equal,
    bench,
    make_sequences,
    mesh_of,
    start_params,
)

from scalerl_jax.algo.regularizers import kl_k1
from scalerl_jax.batching.assembly import Rewards
from scalerl_jax.batching.packing import TrainSequence, abstract_microbatch, pack
from scalerl_jax.batching.stream_packing import (
    StreamShape,
    abstract_streams,
    pack_shared,
)
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.critic import (
    PairedStep,
    make_critic_accumulate,
    make_critic_update,
    minibatches,
    token_values,
)
from scalerl_jax.learner.nonfinite import Diagnosis
from scalerl_jax.learner.step import (
    Accumulated,
    TrainStep,
    init_state,
    make_accumulate,
    make_update,
    trained_names,
)
from scalerl_jax.learner.window_scores import Scorer
from scalerl_jax.model.architecture import param_shardings
from scalerl_jax.model.transformer import abstract_params, hidden_states
from scalerl_jax.objective.advantages import CriticAdvantages, KlPenalty
from scalerl_jax.wiring.annotation import abstract_critic, make_critic

CLOSE = dict(rtol=1e-5, atol=3e-6)
CLIP = 0.3
GAMMA, LAMBDA = 0.9, 0.8
QUICK = optax.adam(0.02)
RATE = 0.05  # of descent; three steps move some values past CLIP
FEW_ROWS = dict(rows=2, row_tokens=24)
TWO_DEVICES = dict(shape=(1, 2, 1, 1), **FEW_ROWS)
SHORT_ROWS = dict(rows=3, row_tokens=13)
STREAMS = StreamShape(
    rows=2, row_tokens=24, shared_tokens=16, own_tokens=32, group_size=2
)


@functools.cache
def value_head():
    return np.random.default_rng(7).normal(size=ARCH.hidden_size).astype(np.float32)


def annotated(microbatch):
    """The abstract microbatch that the steps take."""
    numbers = microbatch.advantages
    return dataclasses.replace(
        microbatch, scores={"values": numbers, "returns": numbers}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewarded:
    """A packed batch, and the rewards of its sequences."""

    batch: object
    rewards: Rewards

    @property
    def by_token(self):
        return self.rewards.on_tokens(self.rewards.rewards)


def rewarded(packed, sequences):
    """The sequences' advantages are their rewards."""
    all_of_them = np.ones(len(sequences), bool)
    rewards = np.array([each.advantage for each in sequences], np.float32)
    verdicts = dict.fromkeys(("passed", "judged", "kept"), all_of_them)
    return Rewarded(
        batch=packed.batch,
        rewards=Rewards(rewards=rewards, rollout=packed.sequence, **verdicts),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """The scores of a critic, then advantages and returns."""

    values: object  # params, batch -> values of its tokens
    make: CriticAdvantages

    def __call__(self, params, given, others=None):
        values = self.values(params, given.batch)
        scores = {**(others or {}), "values": values}
        batch = dataclasses.replace(given.batch, scores=scores)
        return self.make(batch, given.rewards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critics:
    """A step of policy and critic of the small policy, and what belongs to it."""

    of: object  # a `small_step.Bench`: the policy's
    optimizer: optax.GradientTransformation = PLAIN
    shared: bool = False

    def state(self, *, head=None):
        """A fresh policy, and its critic with a head that says something."""
        state = self.of.state()
        critic = make_critic(state.params, self.optimizer, self.mesh)
        head = value_head() if head is None else head
        head = jax.device_put(head, critic.params["value_head"].sharding)
        critic = dataclasses.replace(
            critic, params=critic.params | {"value_head": head}
        )
        return dataclasses.replace(state, critic=critic)

    @property
    def mesh(self):
        return mesh_of(self.of.shape)

    @property
    def microbatch(self):
        if self.shared:
            return abstract_streams(STREAMS, streams=1)
        return abstract_microbatch(
            row_tokens=self.of.row_tokens, rows_per_microbatch=self.of.rows
        )

    @functools.cached_property
    def advantages(self):
        """Rewards into advantages, not whitened."""
        scorer = Scorer(
            functools.partial(token_values, forward=self.of.forward),
            params=self.state().critic.params,
            batch=self.microbatch,
            mesh=self.mesh,
        )
        make = CriticAdvantages(gamma=GAMMA, gae_lambda=LAMBDA, eps=None)
        return Scored(values=scorer, make=make)

    @property
    def programs(self):
        return dict(
            batch=annotated(self.microbatch),
            mesh=self.mesh,
            short_rows=self.of.short_rows,
        )

    @functools.cached_property
    def alone(self):
        """The step of the critic."""
        return TrainStep(
            make_critic_accumulate(self.of.forward, value_clip=CLIP),
            make_critic_update(self.optimizer),
            state=self.state().critic,
            **self.programs,
        )

    @functools.cached_property
    def paired(self):
        """The step of both."""
        return self.paired_with(self.alone)

    def paired_with(self, critic, *, num_minibatches=1):
        return PairedStep(
            make_accumulate(self.of.forward, CISPO),
            make_update(self.of.optimizer),
            critic=critic,
            num_minibatches=num_minibatches,
            state=self.of.state(),
            **self.programs,
        )

    def batch(self, sequences=None, **options):
        sequences = sequences or make_sequences()
        if self.shared:
            packed = pack_shared(sequences, shape=STREAMS, streams=1)
        else:
            packed = self.of.pack(sequences, **options)
        return rewarded(packed, sequences)


@functools.cache
def critics(*, optimizer=PLAIN, shared=False, **options):
    """The critics of this bench, their programs compiled once."""
    return Critics(of=bench(**options), optimizer=optimizer, shared=shared)


def slow_values(params):
    """Of each rollout's sampled tokens, in order, one rollout to a row."""
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
    values = (hidden * params["value_head"]).sum(axis=-1)
    return [
        row[sequence.prompt_length + np.flatnonzero(sequence.mask) - 1]
        for row, sequence in zip(values, sequences, strict=True)
    ]


def torch_gae(reward, values):
    """Advantages of one rollout as sums over all later tokens, equation 16."""
    torch = pytest.importorskip("torch")
    values = torch.cat([torch.tensor(np.asarray(values)), torch.zeros(1)])
    rewards = torch.zeros(len(values) - 1)
    rewards[-1] = reward
    deltas = rewards + GAMMA * values[1:] - values[:-1]
    return torch.stack(
        [
            sum((GAMMA * LAMBDA) ** k * delta for k, delta in enumerate(deltas[t:]))
            for t in range(len(deltas))
        ]
    ).numpy()


@functools.cache
def slow_targets():
    """Old values, advantages and returns of the sampled tokens, by rollout."""
    params = jax.tree.map(jnp.asarray, start_critic_params())
    old = [np.asarray(values) for values in jax.jit(slow_values)(params)]
    advantages = [
        torch_gae(sequence.advantage, values)
        for sequence, values in zip(make_sequences(), old, strict=True)
    ]
    returns = [a + v for a, v in zip(advantages, old, strict=True)]
    return old, advantages, returns


def start_critic_params():
    trunk = {name: leaf for name, leaf in start_params().items() if name != "head"}
    return trunk | {"value_head": value_head()}


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def slow_gradient(params, old, returns, chosen):
    """Of the clipped loss, averaged over the chosen sampled tokens.

    With that loss, and all values.
    """
    values = jnp.concatenate(slow_values(params))
    near = old + jnp.clip(values - old, -CLIP, CLIP)
    losses = jnp.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
    return (losses * chosen).sum() / chosen.sum(), values


def of_rollouts(batch, field):
    """A field of the sampled tokens, by rollout, in the order of `make_sequences`."""
    found = {}
    for tokens, ids, mask, values in zip(
        *(
            np.asarray(x).reshape(-1, x.shape[-1])
            for x in (batch.targets, batch.sequence_ids, batch.mask, field)
        ),
        strict=True,
    ):
        for sequence in range(1, ids.max() + 1):
            here = ids == sequence
            if here.any():
                found[tuple(tokens[here])] = values[here & mask]
    return [
        found[tuple(each.tokens[each.prompt_length :])] for each in make_sequences()
    ]


def tokens_of_part(part):
    """1 on the sampled tokens, in the order of `of_rollouts`, that are in the part."""
    rows = [
        np.asarray(x).reshape(-1, x.shape[-1])
        for x in (part.targets, part.sequence_ids, part.mask)
    ]
    inside = {
        tuple(tokens[ids == number])
        for tokens, ids, mask in zip(*rows, strict=True)
        for number in np.unique(ids[mask])
    }
    return np.concatenate(
        [
            np.full(
                each.mask.sum(),
                tuple(each.tokens[each.prompt_length :]) in inside,
                np.float32,
            )
            for each in make_sequences()
        ]
    )


def moved(batch):
    """The batch as if the critic had moved since it said its values, some of it far."""
    steps = np.random.default_rng(3).choice([-0.5, -0.1, 0.1, 0.5], batch.mask.shape)
    values = (batch.scores["values"] + steps).astype(np.float32)
    return dataclasses.replace(batch, scores={**batch.scores, "values": values})


LAYOUTS = [
    pytest.param(
        SHORT_ROWS,
        False,
        id="not packed, three microbatches",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        SHORT_ROWS, True, id="packed, two microbatches", marks=pytest.mark.slow
    ),
    pytest.param(dict(shared=True, rows=2, row_tokens=24), True, id="shared prompts"),
    pytest.param(
        dict(shape=(2, 1, 2, 2), rows=2, row_tokens=24, block=3),
        True,
        id="8 devices",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("layout, packing", LAYOUTS)
def test_advantages_and_step_are_those_of_the_slow_critic(layout, packing):
    these = critics(**layout)
    state = these.state()
    options = {} if these.shared else dict(packing=packing)
    batch = these.advantages(state.critic.params, these.batch(**options))
    by_name = {"advantages": batch.advantages, **batch.scores}
    for name, expected in zip(
        ("values", "advantages", "returns"), slow_targets(), strict=True
    ):
        found = of_rollouts(batch, by_name[name])
        for ours, slow in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, slow, rtol=1e-4, atol=1e-5, err_msg=name)
        assert not np.asarray(by_name[name])[~batch.mask].any()

    batch = moved(batch)
    old = np.concatenate(of_rollouts(batch, batch.scores["values"]))
    returns = np.concatenate(of_rollouts(batch, batch.scores["returns"]))

    everything = np.ones(len(old), np.float32)
    (loss, _), gradient = slow_gradient(start_critic_params(), old, returns, everything)
    critic, metrics = these.alone(state.critic, batch)
    assert_trees_close(
        critic.params,
        jax.tree.map(lambda x, part: x - part, start_critic_params(), gradient),
        **CLOSE,
    )
    values = np.concatenate([np.asarray(x) for x in slow_targets()[0]])
    clipped = (np.abs(values - old) > CLIP) & (
        np.abs(values - returns)
        < np.abs(old + np.clip(values - old, -CLIP, CLIP) - returns)
    )
    assert 0 < clipped.sum() < len(clipped)
    expected = {
        "loss": loss,
        "grad_norm": optax.tree.norm(gradient),
        "mean": values.mean(),
        "clipped_share": clipped.mean(),
        "explained_variance": 1.0 - (returns - old).var() / returns.var(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(
            metrics[f"value/{name}"], value, rtol=1e-4, atol=1e-5, err_msg=name
        )
    assert critic.policy_version == 1


def hand_batch(values):
    """Two rollouts in a row: one with a forced token in its middle, one of a token."""
    sequences = [
        RatedSequence(
            tokens=np.arange(1, 1 + len(mask) + 2, dtype=np.int32),
            prompt_length=2,
            weights=np.where(mask, 0.25, 0.0),
            mask=np.array(mask),
            behavior_logprobs=np.full(len(mask), -1.0),
            staleness=np.zeros(len(mask), np.int32),
            advantage=reward,
        )
        for mask, reward in (([True, False, True], 1.0), ([True], -1.0))
    ]
    given = rewarded(bench(rows=1, row_tokens=8).pack(sequences), sequences)
    of_tokens = np.zeros(given.batch.mask.shape, np.float32)
    of_tokens[given.batch.sequence_ids > 0] = values
    return given, of_tokens


@pytest.mark.parametrize(
    "gamma, gae_lambda, penalty, expected",
    [
        # 1 - 0.5 and 1 - 0.25: the reward less the value, whatever lies between.
        pytest.param(1.0, 1.0, 0.0, (0.5, 0.75, -1.5), id="reward less value"),
        # 0.25 - 0.5: the value of the next sampled token, not of the forced one.
        pytest.param(1.0, 0.0, 0.0, (-0.25, 0.75, -1.5), id="one step"),
        # 0.5 * 0.25 - 0.5 = -0.375, and 0.25 of the 0.75 that follows.
        pytest.param(0.5, 0.5, 0.0, (-0.1875, 0.75, -1.5), id="between"),
        # Each sampled token pays 0.1; the first one also for the second.
        pytest.param(1.0, 1.0, 0.1, (0.3, 0.65, -1.6), id="a penalty per token"),
    ],
)
def test_advantages_by_hand(gamma, gae_lambda, penalty, expected):
    given, values = hand_batch([0.5, 9.0, 0.25, 0.5])
    advantages = Scored(
        values=lambda params, batch: np.where(batch.mask, values, 0.0),
        make=CriticAdvantages(
            gamma=gamma,
            gae_lambda=gae_lambda,
            eps=None,
            penalty=KlPenalty(estimator=kl_k1, coefficient=penalty),
        ),
    )
    # k1 of -1 and -2 is 1: a sampled token pays the coefficient.
    batch = given.batch
    scores = {"reference": np.full(batch.mask.shape, -2.0, np.float32)}
    found = advantages(None, given, scores)
    np.testing.assert_allclose(found.advantages[batch.mask], expected, atol=1e-6)
    returns = np.array(expected) + [0.5, 0.25, 0.5]
    np.testing.assert_allclose(found.scores["returns"][batch.mask], returns, atol=1e-6)
    for forced in (found.advantages, found.scores["returns"], found.scores["values"]):
        assert not forced[~batch.mask].any()


def test_whitening_is_over_the_sampled_tokens_of_the_whole_batch():
    these = critics(**SHORT_ROWS)
    given = these.batch()
    assert len(given.batch.tokens) == 2
    params = these.state().critic.params
    plain = these.advantages(params, given)
    whiten = dataclasses.replace(these.advantages.make, eps=1e-8)
    whitened = dataclasses.replace(these.advantages, make=whiten)(params, given)
    raw = plain.advantages[plain.mask]
    np.testing.assert_allclose(
        whitened.advantages[plain.mask], (raw - raw.mean()) / raw.std(), rtol=1e-4
    )
    np.testing.assert_array_equal(whitened.scores["returns"], plain.scores["returns"])


def test_a_critic_starts_as_the_policy_with_values_of_zero():
    these = critics(optimizer=QUICK, **TWO_DEVICES)
    state = these.of.state()
    critic = make_critic(state.params, ADAMW, these.mesh)
    trunk = {x: leaf for x, leaf in state.params.items() if x != "head"}
    head = critic.params["value_head"]
    assert_trees_equal(critic.params, trunk | {"value_head": np.zeros(head.shape)})
    assert head.dtype == jnp.float32
    values = these.advantages.values(critic.params, these.batch().batch)
    assert not values.any()
    theirs, ours = (
        {
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
        }
        for tree in (trunk, critic.params)
    )
    assert not ours & theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_critic_is_cut_as_the_policy_is(dtype):
    mesh = mesh_of((1, 8, 1, 1))
    params = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        abstract_params(ARCH, dtype=dtype),
        param_shardings(ARCH, mesh),
    )
    critic = abstract_critic(params, ADAMW, mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(critic.params):
        name = path[0].key
        if name == "value_head":
            assert leaf.sharding.is_fully_replicated and leaf.dtype == jnp.float32
            continue
        like = functools.reduce(lambda tree, key: tree[key.key], path, params)
        assert (leaf.sharding, leaf.dtype) == (like.sharding, like.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "field, value",
    [
        pytest.param("returns", np.nan, id="the critic's"),
        pytest.param("behavior_logprobs", np.nan, id="the policy's"),
    ],
)
def test_a_fault_of_one_leaves_both_as_they_were(field, value):
    these = critics(optimizer=QUICK, **TWO_DEVICES)
    state = these.state()
    batch = these.advantages(state.critic.params, these.batch())
    state, _ = these.paired(state, batch)
    before = jax.device_get(state)
    assert before.policy_version == before.critic.policy_version == 1
    in_scores = field in batch.scores
    spoiled = np.copy(batch.scores[field] if in_scores else getattr(batch, field))
    spoiled[tuple(np.argwhere(batch.mask)[0])] = value
    scores = {**batch.scores, field: spoiled}
    changes = {"scores": scores} if in_scores else {field: spoiled}
    batch = dataclasses.replace(batch, **changes)
    state, metrics = these.paired(state, batch)
    assert metrics["skipped"]
    assert_trees_equal(state, before)
    diagnose = Diagnosis(step=these.paired, forward=these.of.forward, objective=CISPO)
    found = diagnose(state.params, batch)
    assert f"the batch's {field} are not: nan" in found


@pytest.mark.slow
def test_a_fault_of_a_later_minibatch_ends_the_critics_steps():
    """The first of three is applied, the others and the policy's are not."""
    these = critics(optimizer=QUICK, **TWO_DEVICES)
    paired = these.paired_with(these.alone, num_minibatches=3)
    batch = these.advantages(these.state().critic.params, these.batch())
    first, second, _ = minibatches(batch, 3)
    expected, _ = these.alone(these.state().critic, first)
    of_second = np.isin(batch.scores["returns"], second.scores["returns"][second.mask])
    returns = np.where(of_second, np.nan, 0.0)
    state, metrics = paired(
        these.state(),
        dataclasses.replace(
            batch,
            scores={**batch.scores, "returns": batch.scores["returns"] + returns},
        ),
    )
    assert metrics["skipped"]
    assert_trees_equal(state.critic, expected)
    assert_trees_equal(state.params, these.of.state().params)


@pytest.mark.slow
def test_an_update_of_the_critic_that_is_not_finite_leaves_both_as_they_were():
    """Its gradient is finite, its rate is not."""
    these = critics(optimizer=optax.sgd(np.inf), **TWO_DEVICES)
    state = these.state()
    batch = these.advantages(state.critic.params, these.batch())
    before = jax.device_get(state)
    state, metrics = these.paired(state, batch)
    assert metrics["skipped"] and np.isfinite(metrics["value/grad_norm"])
    assert_trees_equal(state, before)
    name = trained_names(state)[int(metrics["unfit"])]
    assert name.startswith("critic.params.")


@pytest.mark.slow
def test_the_two_steps_of_a_pair_are_those_of_each_alone():
    these = critics(optimizer=QUICK, **TWO_DEVICES)
    batch = these.advantages(these.state().critic.params, these.batch())
    together, metrics = these.paired(these.state(), batch)
    alone, of_policy = TrainStep.__call__(these.paired, these.of.state(), batch)
    critic, of_critic = these.alone(these.state().critic, batch)
    assert_trees_equal(together, dataclasses.replace(alone, critic=critic))
    assert_trees_equal(metrics, of_policy | of_critic)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=20),
    rows=st.integers(1, 4),
    count=st.integers(1, 12),
)
def test_minibatches_hold_every_rollout_once_and_equally_many(lengths, rows, count):
    sequences = [
        TrainSequence(
            tokens=np.full(1 + length, number, np.int32),
            prompt_length=1,
            weights=np.ones(length),
            mask=np.arange(length) != 1,  # the second token is forced
            behavior_logprobs=np.zeros(length),
            staleness=np.zeros(length, np.int32),
        )
        for number, length in enumerate(lengths)
    ]
    batch = pack(sequences, row_tokens=12, rows_per_microbatch=rows).batch
    parts = list(minibatches(batch, count))
    assert len(parts) == min(count, len(lengths))
    found = [np.unique(part.targets[part.mask]) for part in parts]
    assert sorted(np.concatenate(found)) == list(range(len(lengths)))
    sizes = {len(each) for each in found}
    assert max(sizes) - min(sizes) <= 1
    assert sum(part.mask.sum() for part in parts) == batch.mask.sum()
    assert all(part.mask.any(axis=(1, 2)).all() for part in parts)


def torch_steps(parts, old, returns):
    """The critic after a step of torch's descent on each part; and values before it."""
    leaves, tree = jax.tree.flatten(start_critic_params())
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(np.array(leaf)) for leaf in leaves]
    sgd = torch.optim.SGD(leaves, lr=RATE, momentum=0.9)
    values = []
    for chosen in parts:
        params = jax.tree.unflatten(tree, [leaf.numpy() for leaf in leaves])
        (_, found), gradient = slow_gradient(params, old, returns, chosen)
        values.append(np.array(found))
        for leaf, part in zip(leaves, jax.tree.leaves(gradient), strict=True):
            leaf.grad = torch.tensor(np.array(part))
        sgd.step()
    return jax.tree.unflatten(tree, [leaf.numpy() for leaf in leaves]), values


@pytest.mark.parametrize(
    "short_rows",
    [
        pytest.param((), id="whole"),
        pytest.param((6, 12, 18), id="short", marks=pytest.mark.slow),
    ],
)
def test_steps_on_minibatches_are_so_many_explicit_ones(short_rows):
    """One paired step with three minibatches, against torch's descent."""
    layout = dict(**TWO_DEVICES, short_rows=short_rows)
    these = critics(optimizer=optax.sgd(RATE, momentum=0.9), **layout)
    quick = critics(optimizer=QUICK, **layout)
    paired = quick.paired_with(these.alone, num_minibatches=3)
    state = these.state()
    batch = these.advantages(state.critic.params, these.batch())
    assert not short_rows or batch.row_ends.tolist() == [24, 6]
    old, returns = (
        np.concatenate(of_rollouts(batch, batch.scores[name]))
        for name in ("values", "returns")
    )
    parts = [tokens_of_part(part) for part in minibatches(batch, 3)]
    expected, values = torch_steps(parts, old, returns)
    moved = [np.abs(each - old) for each in values]
    assert moved[0].max() < 1e-5 and moved[1].max() > CLIP

    state, metrics = paired(state, batch)
    assert_trees_close(state.critic.params, expected, rtol=1e-4, atol=1e-4)
    assert (state.policy_version, state.critic.policy_version) == (1, 3)
    shares = []
    for part, each in zip(parts, values, strict=True):
        near = old + np.clip(each - old, -CLIP, CLIP)
        clipped = (each - returns) ** 2 < (near - returns) ** 2
        shares.append((clipped * part).sum() / part.sum())
    assert shares[0] == 0.0 < max(shares)
    np.testing.assert_allclose(
        metrics["value/clipped_share"], np.mean(shares), rtol=1e-4
    )


def test_the_first_steps_leave_the_policy_as_it_was():
    optimizer = optax.adamw(0.1)
    update = jax.jit(
        make_update(optimizer, hold_steps=2, summarize=lambda sums, maxima: {})
    )
    start = init_state({"weight": jnp.ones(3)}, optimizer)
    sums = Accumulated(
        loss=jnp.ones(()), grads={"weight": jnp.ones(3)}, sums={}, maxima={}
    )
    state = start
    for version in (1, 2):
        state, _ = update(state, sums)
        assert state.policy_version == version
        assert_trees_equal(state.params, start.params)
        assert_trees_equal(state.opt_state, start.opt_state)
    state, _ = update(state, sums)
    # The first step that counts: Adam's goes the whole rate, and decays by 1e-5.
    np.testing.assert_allclose(state.params["weight"], 0.9 - 1e-5, rtol=1e-5)


def test_the_critic_learns_which_prompts_are_rewarded():
    rng = np.random.default_rng(5)
    sequences = [
        RatedSequence(
            tokens=np.array([place % 4, *rng.integers(4, 16, 4)], np.int32),
            prompt_length=1,
            weights=np.full(4, 1 / 64),
            mask=np.ones(4, bool),
            behavior_logprobs=np.full(4, -2.0),
            staleness=np.zeros(4, np.int32),
            advantage=float(place % 4) / 3,  # the reward: 0, 1/3, 2/3 or 1
        )
        for place in range(16)
    ]
    these = critics(optimizer=QUICK, **TWO_DEVICES)
    critic = these.state(head=np.zeros(ARCH.hidden_size, np.float32)).critic
    given = these.batch(sequences)
    mask = given.batch.mask
    shares = []
    for _ in range(60):
        batch = these.advantages(critic.params, given)
        critic, metrics = these.alone(critic, batch)
        shares.append(float(metrics["value/explained_variance"]))
    assert shares[0] == 0.0  # all values are 0
    rewards = given.by_token[mask]
    values = these.advantages.values(critic.params, given.batch)[mask]
    assert 1.0 - (rewards - values).var() / rewards.var() > 0.9
    assert np.abs(values - rewards).max() < 0.3


def test_a_checkpoint_holds_the_critic(tmp_path):
    these = critics(optimizer=ADAMW, **TWO_DEVICES)
    rng = np.random.default_rng(9)
    state = jax.tree.map(
        lambda leaf: jax.device_put(
            (9 * rng.normal(size=leaf.shape)).astype(leaf.dtype), leaf.sharding
        ),
        these.state(),
    )
    checkpointer = Checkpointer(tmp_path, every=1, keep=1)
    checkpointer.save(1, state=state, host={}, groups=())
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        state,
    )
    restored = checkpointer.restore(abstract)
    checkpointer.close()
    assert_trees_equal(restored.state, state)
    jax.tree.map(
        lambda ours, theirs: ours.sharding == theirs.sharding or pytest.fail(),
        restored.state,
        state,
    )
