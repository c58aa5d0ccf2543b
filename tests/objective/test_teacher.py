"""What a teacher gives to the advantages of tokens, and which teachers are refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
import small_teacher
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_assembly import CUT, EQUAL, MIXED, assembler

import scalerl_jax
from scalerl_jax import main, wiring
from scalerl_jax.batching.answers import answered
from scalerl_jax.batching.packing import pack
from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.learner.forward import Forward
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.weights import load_params
from scalerl_jax.objective.advantages import TaughtAdvantages
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.run.progress import Progress
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


def test_a_teacher_whose_rope_changes_within_a_sequence_is_refused(tmp_path):
    changing = shutil.copytree(ASSETS / "tiny_base", tmp_path / "changing")
    fields = json.loads((changing / "config.json").read_text())
    sampler = small_run.make_config({}).sampler
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens
    fields |= {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    for room in (0, 1):
        fields["max_position_embeddings"] = longest - room
        (changing / "config.json").write_text(json.dumps(fields))
        if not room:
            check(changing)
    words = rf"= {longest} is more than the {longest - 1} positions of teacher\.check"
    with pytest.raises(ValueError, match=words):
        check(changing)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"teacher.alone": True}, "set teacher.checkpoint or teacher.endpoint"),
        ({"teacher.model": "m"}, "set teacher.endpoint given"),
        (OF_ITSELF | {"teacher.endpoint": "http://a/v1"}, "are two teachers"),
        ({"teacher.endpoint": "file:///etc"}, "must begin with http:// or https://"),
        (
            {"teacher.endpoint": "http://a/v1", "sampler.temperature": 0.5},
            "sampler.temperature = 0.5; set that to 1.0",
        ),
        (
            {"teacher.endpoint": "http://a/v1", "mesh.processes": 2},
            "mesh.processes = 2; set that to 1",
        ),
        ({"teacher.alone": True} | OF_ITSELF, "objective.zero_variance_filter = True"),
        (ALONE | {"objective.advantage": "critic"}, "set it to 'group_mean'"),
        (ALONE | small_run.OF_STATE, "objective.kl_in = 'reward'"),
        (
            ALONE | {"environment": "tools", "reward.per_turn": True},
            "rewards of turns give no advantage either",
        ),
    ],
)
def test_what_a_teacher_alone_does_not_go_with_is_refused(changes, words):
    with pytest.raises(ValueError) as error:
        small_run.make_config(changes)
    assert words in str(error.value)


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_teacher_is_refused(tmp_path, shared_parts):
    """Its path is the same, and its weights are not."""
    teacher = shutil.copytree(ASSETS / "tiny_base", tmp_path / "teacher")
    config = small_run.make_config(ALONE | {"teacher.checkpoint": str(teacher)})
    arch, mesh = make_architecture(config), make_mesh(jax.devices()[:1])

    def learner():
        return wiring.make_local_learner(
            config,
            arch,
            mesh,
            to_sampler=None,
            checkpointer=wiring.make_checkpointer(config, tmp_path),
            progress=Progress(),
        )

    made, state = learner()
    made.save(1, state, host={}, groups=())
    made.checkpointer.close()
    assert learner()[0].restore().step == 1
    file = teacher / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, file, metadata={"format": "pt"})
    words = r"beside params of a teacher of digest [0-9a-f]{16}, and .*teacher\.checkp"
    with pytest.raises(ValueError, match=words):
        learner()[0].restore()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True], ids=["checkpoint", "endpoint"])
def test_a_policy_is_taught_and_the_books_know_it(tmp_path, shared_parts, asked):
    """Its own base has nothing to teach before the first step."""
    changes = ALONE | {"queue.max_staleness": 0}
    with small_teacher.serving() as server:
        if asked:
            tokenizer = load_tokenizer(ASSETS / "tiny_base")
            server.tokenize, server.score = tokenizer.encode, of_base()
            changes |= {"teacher.checkpoint": "", "teacher.endpoint": server.url}
        main.run(small_run.make_config(changes), str(tmp_path))
    rows = small_run.rows(tmp_path)
    assert abs(rows[0]["teacher/kl"]) < 1e-5
    assert rows[0]["grad_norm"] < 1e-3  # there is nothing to learn
    flops = rows[-1]["compute/teacher_flops"]
    own = 0.0 if asked else rows[-1]["compute/train_flops"] / 3
    assert flops == pytest.approx(own)
    assert (rows[-1]["compute/asked_teacher_tokens"] > 0) == asked


def of_base():
    """Scores of a prompt by the base's weights, one sequence at a time."""
    arch = read_architecture(ASSETS / "tiny_base")
    params = load_params(ASSETS / "tiny_base", arch, dtype=jnp.float32)
    forward, size = Forward(arch=arch, dtype=jnp.float32), 128
    logprobs = jax.jit(lambda batch: forward.logprobs(params, batch)[0])

    def score(ids):
        sequence = answered(np.int32(ids), np.arange(len(ids)) > 0)
        batch = pack([sequence], row_tokens=size, rows_per_microbatch=1).batch
        found = logprobs(jax.tree.map(lambda leaf: leaf[0], batch))
        return np.asarray(found)[0, : len(ids) - 1].tolist()

    return score
