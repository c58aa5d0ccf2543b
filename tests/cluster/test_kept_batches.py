"""Batches that are kept for ranks that start again: the same bits, and few of them."""

import dataclasses

import jax
import numpy as np
import pytest
import small_run

from scalerl_jax import wiring
from scalerl_jax.cluster.batch_parts import arrays_of
from scalerl_jax.cluster.kept_batches import KeptBatch, KeptBatches, Values
from scalerl_jax.objective.assembly import make_assembler
from scalerl_jax.objective.terms import needs_of
from scalerl_jax.types import Group, Prompt, Rollout

N, G = 6, 4
OBJECTIVES = {
    "ScaleRL's": {},
    "a KL in the reward, a scale over all batches": small_run.OF_STATE,
    "a critic": {
        "objective.advantage": "critic",
        "objective.zero_variance_filter": False,
    },
    "regularisers by verdict": {
        "objective.kl_coefficient": 0.1,
        "objective.kl_estimator": "k3",
        "objective.regularize": "easy",
        "objective.regularize_from_pass_rate": 0.3,
        "objective.cut_off_completions": "mask",
    },
    "prompts shared": {
        "batch.shared_tokens": 64,
        "batch.own_tokens": 512,
        "batch.rows_per_microbatch": 4,
    },
}


def make_rollout(random, length):
    passed = bool(random.integers(2))
    return Rollout(
        completion_tokens=random.integers(3, 30, length).astype(np.int32),
        completion_mask=random.random(length) > 0.1,
        behavior_logprobs=-random.random(length).astype(np.float32),
        policy_versions=random.integers(5, 8, length).astype(np.int32),
        cut_off=bool(random.random() < 0.2),
        interrupted=False,
        reward=1.0 if passed else -1.0,
        passed=passed,
        judged=bool(random.random() > 0.1),
        status="correct" if passed else "wrong",
    )


def make_groups(seed=0, first=0):
    random = np.random.default_rng(seed)
    return [
        Group(
            ticket=first + number,
            prompt=Prompt(
                prompt_id=number,
                epoch=0,
                task="chain_sum",
                text="1 + 1 =",
                tokens=random.integers(3, 30, random.integers(2, 8)).astype(np.int32),
                reference={"answer": "2"},
            ),
            rollouts=tuple(
                make_rollout(random, int(random.integers(2, 30))) for _ in range(G)
            ),
            finished_version=7,
        )
        for number in range(N)
    ]


def make_batch(changes, groups, *, version=7):
    """A batch with random scores, complete, and an assembler that never saw it."""
    config = small_run.make_config(
        {"batch.num_prompts": N, "batch.group_size": G, "mesh.data": 1, "mesh.fsdp": 1}
        | changes
    )
    arch = wiring.make_architecture(config)
    assemble = make_assembler(config, arch)
    batch = assemble(groups, learner_version=version)
    random = np.random.default_rng(1)
    mask = batch.packed.mask
    scores = {
        name: np.where(mask, -random.random(mask.shape), 0.0).astype(np.float32)
        for name in needs_of(config).of_params
    }
    return assemble.complete(batch, scores), make_assembler(config, arch)


def assert_same(found, expected):
    """Two batches of the same arrays, bit for bit."""
    found, expected = arrays_of(found), arrays_of(expected)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == np.asarray(array).tobytes(), name


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_batch_is_made_again_bit_for_bit(objective):
    batch, other = make_batch(OBJECTIVES[objective], make_groups())
    assert np.abs(batch.packed.advantages).max() > 0
    kept = KeptBatch.of(batch.packed, batch)
    assert_same(kept.packed(other), batch.packed)


def test_it_takes_thirteen_bytes_a_token_and_its_books():
    groups = make_groups()
    long = [
        dataclasses.replace(
            group,
            rollouts=tuple(
                make_rollout(np.random.default_rng(place), 120) for place in range(G)
            ),
        )
        for group in groups
    ]
    changes = {"sampler.max_completion_tokens": 120, "batch.row_tokens": 1024}
    batch, _ = make_batch(changes, long)
    kept = KeptBatch.of(batch.packed, batch)
    tokens = N * G * 120
    prompts = sum(4 * len(group.prompt.tokens) for group in long)
    offsets = 8 * (N + 1 + N * G + 1)
    advantages = 4 * N * G
    books = kept.num_bytes - len(kept.rows)
    assert books <= 13 * tokens + prompts + offsets + advantages
    assert books >= 13 * tokens + prompts + offsets
    leaves = jax.tree.leaves(batch.packed)
    assert books < 0.4 * sum(each.nbytes for each in leaves)


@pytest.mark.parametrize(
    "values, each",
    [
        pytest.param([0.5, 0.5, 0.0, 2.0], "rollout", id="one for each"),
        pytest.param([0.5, 0.6, 0.0, 2.0], "prediction", id="of tokens"),
        pytest.param([0.5, 0.5, 1.0, 2.0], "position", id="where nothing is predicted"),
        pytest.param([0.0, -0.0, 0.0, 2.0], "prediction", id="signs of zero"),
    ],
)
def test_as_few_values_are_kept_as_give_all_again(values, each):
    rollout = np.array([[[0, 0, -1, 3]]])
    values = np.array([[values]], np.float32)
    kept = Values.of(values, rollout)
    assert kept.each == each
    assert kept.on(rollout).tobytes() == values.tobytes()


def test_steps_since_a_checkpoint_come_again_in_their_order():
    batches, assembler = [], None
    for number, version in enumerate((7, 7, 10)):
        groups = make_groups(seed=number, first=10 * number)
        batch, assembler = make_batch({}, groups, version=version)
        batches.append(batch)
    kept = KeptBatches(assembler, limit_bytes=2**30)
    kept.saved(7)
    trained = {}
    # A window of two batches, the first of them twice, and one of a single batch.
    steps = (*batches[:2], *batches[::2])
    for version, batch in enumerate(steps, start=7):
        age = version - batch.version
        packed = batch.packed.replace(staleness=batch.packed.staleness + age)
        before = kept.num_bytes
        kept.add(packed, batch, version=version)
        assert (kept.num_bytes == before) == (version == 9)
        trained[version] = packed
        if version == 8:
            kept.saved(9)
    assert kept.has_all_since(7) and kept.has_all_since(9)
    assert not kept.has_all_since(8)

    def assert_all(since):
        expected = [packed for version, packed in trained.items() if version >= since]
        for found, packed in zip(kept.since(since), expected, strict=True):
            assert_same(found, packed)

    assert_all(7)
    kept.forget([7])
    assert_all(7)
    kept.forget([7, 9])
    assert not kept.has_all_since(7)
    assert_all(9)
    kept.saved(11)
    kept.forget([9, 11])
    assert kept.num_bytes == 0 and not list(kept.since(11))


def test_half_of_the_limit_since_the_newest_checkpoint_asks_for_one():
    batch, assembler = make_batch({}, make_groups())
    size = KeptBatch.of(batch.packed, batch).num_bytes
    kept = KeptBatches(assembler, limit_bytes=4.5 * size)
    most = 0
    for version in range(20):
        made_of = dataclasses.replace(batch, version=version)
        kept.add(batch.packed, made_of, version=version)
        assert kept.num_bytes <= 4.5 * size
        most = max(most, kept.num_bytes)
        # With a third batch half of the limit would be passed.
        assert kept.full == (version % 2 == 1)
        if kept.full:
            kept.saved(version + 1)
            # The checkpoint before is complete by now.
            kept.forget([version - 1])
    assert most > 3.9 * size
