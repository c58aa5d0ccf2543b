"""What a teacher gives to the advantages of tokens, and which teachers are refused."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_assembly import CUT, EQUAL, MIXED, assembler

import scalerl_jax
from scalerl_jax import main
from scalerl_jax.objective.advantages import TaughtAdvantages
from scalerl_jax.wiring.learning import make_architecture
from scalerl_jax.wiring.sampling import make_tokenizer
from scalerl_jax.wiring.teacher import check_teacher

ASSETS = Path(scalerl_jax.__file__).parent / "assets"
OF_ITSELF = {"teacher.checkpoint": str(ASSETS / "tiny_base")}
ALONE = OF_ITSELF | {"teacher.alone": True, "objective.zero_variance_filter": False}


def taught(groups, *, alone, coefficient=0.5):
    """Advantages where the teacher's log-probability is that of the sampler + 0.2."""
    assemble = assembler(zero_variance_filter=False)
    taught = TaughtAdvantages(
        of_rewards=None if alone else assemble.advantages, coefficient=coefficient
    )
    assemble = dataclasses.replace(assemble, advantages=taught)
    batch = assemble(groups, learner_version=5)
    scores = {"teacher": batch.packed.behavior_logprobs + np.float32(0.2)}
    plain = assembler(zero_variance_filter=False)
    return (
        assemble.complete(batch, scores).packed,
        plain.complete(batch, {}).packed,
    )


def test_a_token_gets_the_difference_times_the_coefficient():
    found, plain = taught([MIXED, CUT], alone=False)
    mask = found.mask
    expected = plain.advantages[mask] + 0.1
    np.testing.assert_allclose(found.advantages[mask], expected, rtol=1e-6)
    assert np.ptp(plain.advantages[mask]) > 0
    np.testing.assert_array_equal(found.advantages[~mask], plain.advantages[~mask])


def test_alone_it_teaches_groups_of_equal_rewards_too():
    found, _ = taught([EQUAL, MIXED], alone=True)
    np.testing.assert_allclose(found.advantages[found.mask], 0.1, rtol=1e-6)
    assert not found.advantages[~found.mask].any()


LOGITS = st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4).map(np.float32)


@settings(max_examples=30)
@given(policy=LOGITS, teacher=LOGITS)
def test_on_average_the_gradient_is_that_of_the_reverse_kl(policy, teacher):
    """Over all tokens, each as often as the policy samples it."""
    theirs = jax.nn.log_softmax(teacher)

    def kl(logits):
        own = jax.nn.log_softmax(logits)
        return (jnp.exp(own) * (own - theirs)).sum()

    behavior = jax.nn.log_softmax(policy)
    advantages = theirs - behavior

    def loss(logits):  # of a policy gradient, at a ratio of 1
        own = jax.nn.log_softmax(logits)
        return -(jnp.exp(behavior) * advantages * own).sum()

    np.testing.assert_allclose(
        jax.grad(loss)(policy), jax.grad(kl)(policy), rtol=1e-3, atol=1e-5
    )


def check(source):
    """Check a teacher of the tiny policy."""
    config = small_run.make_config({"teacher.checkpoint": str(source)})
    arch = make_architecture(config)
    check_teacher(config, arch, make_tokenizer(config, arch))


def test_a_teacher_that_reads_other_tokens_is_refused(tmp_path):
    check(ASSETS / "tiny_base")
    with pytest.raises(ValueError, match=r"teacher\.checkpoint: .* does not exist"):
        check(tmp_path / "nothing")
    with pytest.raises(ValueError, match="another tokenizer than the policy .72 ids"):
        check(ASSETS / "tools_base")
    fewer = shutil.copytree(ASSETS / "tiny_base", tmp_path / "fewer")
    config = fewer / "config.json"
    config.write_text(config.read_text().replace('_size": 72', '_size": 71'))
    with pytest.raises(ValueError, match="71 embeddings and the policy 72"):
        check(fewer)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"teacher.alone": True}, "set teacher.checkpoint given"),
        ({"teacher.alone": True} | OF_ITSELF, "objective.zero_variance_filter = True"),
        (ALONE | {"objective.advantage": "critic"}, "set it to 'group_mean'"),
        (ALONE | small_run.OF_STATE, "objective.kl_in = 'reward'"),
    ],
)
def test_what_a_teacher_alone_does_not_go_with_is_refused(changes, words):
    with pytest.raises(ValueError) as error:
        small_run.make_config(changes)
    assert words in str(error.value)


@pytest.mark.slow
def test_a_policy_is_taught_and_the_books_know_it(tmp_path, shared_parts):
    """Its own base has nothing to teach before the first step."""
    main.run(small_run.make_config(ALONE | {"queue.max_staleness": 0}), str(tmp_path))
    rows = small_run.rows(tmp_path)
    assert abs(rows[0]["teacher/kl"]) < 1e-5
    assert rows[0]["grad_norm"] < 1e-3  # there is nothing to learn
    flops = rows[-1]["compute/teacher_flops"]
    assert flops == pytest.approx(rows[-1]["compute/train_flops"] / 3)
