"""The base checkpoint's making: its tokenizer, its texts, and that it can be loaded."""

import json
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
import small_run
import task_splits

from scalerl_jax import demonstrations
from scalerl_jax.data import tasks
from scalerl_jax.data.questions import extract_answer
from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.demonstrations import END_OF_THINKING, Styles, demonstrate
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.weights import load_params

ROOT = Path(demonstrations.__file__).parents[1]
BASE, MIXTURE = (
    ROOT / "scalerl_jax" / "assets" / name for name in ("tiny_base", "tiny_moe_base")
)
# Questions of two lines are not for this tokenizer.
TASKS = sorted({*tasks.TASKS} - {"needle_haystack"})
CAREFUL = Styles(careful=1.0, careless=0.0, slip=0.0, hesitation=0.3)
CARELESS = Styles(careful=0.0, careless=1.0, slip=1.0, hesitation=0.0)
GUESSING = Styles(careful=0.0, careless=0.0, slip=0.0, hesitation=0.0)


@pytest.fixture(scope="module")
def questions():
    """200 questions of every task."""
    return {
        task: tasks.make_questions(task, count=200, seed=11, exclude=set())
        for task in TASKS
    }


def solve(question, styles, rng):
    return demonstrate(
        question.task,
        question.text,
        question.reference,
        styles=styles,
        interruption=lambda rng: "hm time is up.</think>",
        rng=rng,
    )


@pytest.mark.parametrize("task", TASKS)
def test_every_question_and_solution_is_read_back(questions, task):
    backend = demonstrations.make_tokenizer()
    unknown = backend.token_to_id(demonstrations.UNKNOWN)
    rng = np.random.default_rng(0)
    for question in questions[task]:
        for text in (f"{question.text}<think>", solve(question, CAREFUL, rng)):
            ids = backend.encode(text).ids
            assert unknown not in ids, text
            assert backend.decode(ids) == text


def test_every_character_and_phrase_is_one_token():
    backend = demonstrations.make_tokenizer()
    for text in (
        *demonstrations.CHARACTERS,
        *demonstrations.PHRASES,
        "<think>",
        "</think>",
    ):
        assert len(backend.encode(text).ids) == 1, text
    ids = backend.encode("time is up.</think>12<eos>").ids
    assert backend.decode(ids, skip_special_tokens=True) == "time is up.</think>12"
    assert backend.get_vocab_size(with_added_tokens=True) == len(
        {
            demonstrations.PAD,
            demonstrations.EOS,
            demonstrations.UNKNOWN,
            "<think>",
            "</think>",
        }
        | {*demonstrations.PHRASES, *demonstrations.CHARACTERS}
    )


def passes(question, styles, rng):
    answer = extract_answer(solve(question, styles, rng), answer_after=END_OF_THINKING)
    assert answer is not None
    return tasks.score(question.task, answer, question.reference) >= 1.0


@pytest.mark.parametrize("task", TASKS)
def test_careful_work_is_always_right_and_the_rest_is_not(questions, task):
    rng = np.random.default_rng(0)
    assert all(passes(question, CAREFUL, rng) for question in questions[task])
    for styles in (CARELESS, GUESSING):
        assert not all(passes(question, styles, rng) for question in questions[task])


def test_questions_of_evaluations_are_never_shown():
    config = demonstrations.DemonstrationsConfig(questions_per_task=800)
    shown = {question.text for question in demonstrations.make_questions(config)}
    assert len(shown) == 3 * 800
    for count in (9, 300):  # of a test's run, of configs/tiny.py
        for seed in (0, 1):
            _, held_out = task_splits.make_splits(
                config.tasks, train_prompts=3, eval_prompts=count, seed=seed
            )
            assert len(held_out) == count
            assert not shown & {question.text for question in held_out}


def test_an_interruption_is_as_long_as_in_a_run():
    config = demonstrations.DemonstrationsConfig(
        questions_per_task=50, careful=0.0, careless=0.0, hesitation=0.0, skill_steps=0
    )
    backend = demonstrations.make_tokenizer()
    stream = demonstrations.demonstration_stream(
        config, demonstrations.make_questions(config), backend
    )
    phrase = backend.encode(config.phrase).ids
    hesitation = backend.token_to_id("hm ")
    thinking = []
    for sequence in (next(stream) for _ in range(400)):
        tokens = sequence.tokens[sequence.prompt_length :].tolist()
        assert tokens[-1] == backend.token_to_id(demonstrations.EOS)
        thought = tokens.count(hesitation)
        if thought:
            thinking.append(thought)
            assert tokens[:thought] == [hesitation] * thought
            assert tokens[thought : thought + len(phrase)] == phrase
        else:  # a guess without any thinking
            assert tokens[0] == backend.token_to_id("</think>")
    assert (min(thinking), max(thinking)) == (32, 40)
    assert 40 < len(thinking) < 120  # a fifth of 400


@pytest.mark.slow
def test_a_short_making_writes_a_checkpoint_that_loads(tmp_path):
    settings = demonstrations.defaults()
    settings.update(
        dict(
            questions_per_task=20,
            num_steps=3,
            skill_steps=1,
            warmup_steps=1,
            demonstrations_per_step=16,
            hidden_size=32,
            ffn_size=64,
            num_layers=2,
            head_dim=16,
        )
    )
    demonstrations.main(settings, tmp_path)
    arch = read_architecture(tmp_path)
    assert (arch.family, arch.hidden_size, arch.num_layers) == ("qwen3", 32, 2)
    params = load_params(tmp_path, arch, dtype=np.float32, shardings=None)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size <= arch.vocab_size
    assert tokenizer.decode_all(list(tokenizer.eos_ids)) == "<eos>"
    record = json.loads((tmp_path / "warmstart.json").read_text())
    assert [row["step"] for row in record["log"]] == [3]
    assert record["num_params"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert record["config"]["num_steps"] == 3


def test_a_training_that_is_not_finite_writes_nothing(tmp_path):
    """The weights decay by 1 - 0.01 * rate: at 1e6 they grow 1e4-fold at a step."""
    settings = demonstrations.defaults()
    settings.update(
        dict(
            questions_per_task=4,
            held_out_prompts=3,
            hidden_size=16,
            ffn_size=16,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=16,
            skill_steps=20,
            num_steps=20,
            demonstrations_per_step=2,
            warmup_steps=0,
            learning_rate=1e6,
        )
    )
    with pytest.raises(RuntimeError, match="first 20 steps .* learning_rate = 1e"):
        demonstrations.main(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def endless():
    """Settings of a training that no test sees the end of."""
    settings = demonstrations.defaults()
    settings.update(dict(num_steps=1_000_000))
    return settings


def test_a_checkpoint_that_is_not_ours_is_not_replaced(tmp_path, endless):
    foreign, link = tmp_path / "model", tmp_path / "link"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    link.symlink_to(foreign)
    for out, words in ((foreign, "without a warmstart.json"), (link, "is a link")):
        with pytest.raises(ValueError, match=f"^--out={out}: {out} .*{words}"):
            demonstrations.main(endless, out)
    assert [file.name for file in foreign.iterdir()] == ["config.json"]
    assert link.is_symlink()


def test_too_little_room_is_told_before_the_training(tmp_path, endless):
    with small_run.mounted(tmp_path / "disk", "size=64k") as disk:
        with pytest.raises(
            RuntimeError, match=r"it needs [\d,]+ bytes, and 65,536 are"
        ):
            demonstrations.main(endless, disk / "new" / "model")
        assert not list(disk.iterdir())


def experts_settings(**changes):
    return demonstrations.DemonstrationsConfig(
        init_from=str(BASE), num_experts=8, ffn_size=192, **changes
    )


def test_a_mixture_begins_as_the_dense_decoder_that_it_is_made_from():
    config = experts_settings()
    arch = demonstrations.make_architecture(config, vocab_size=72)
    params = demonstrations.make_params(config, arch)
    dense = load_params(BASE, read_architecture(BASE), dtype=np.float32)
    np.testing.assert_array_equal(params["embedding"], dense["embedding"])
    half = params["layers"]["expert_down"][:, :2].reshape(4, 384, 128) / 2
    for expected, found in zip(dense["layers"]["down"], half, strict=True):
        rows = {row.tobytes() for row in np.asarray(expected)}
        assert rows == {row.tobytes() for row in np.asarray(found)}


def test_a_mixture_of_another_width_than_the_decoder_it_is_made_from_is_refused():
    config = experts_settings(hidden_size=64)
    arch = demonstrations.make_architecture(config, vocab_size=72)
    with pytest.raises(ValueError, match="init_from = .*hidden_size = 64 .*128"):
        demonstrations.make_params(config, arch)


def test_the_small_mixture_is_of_its_settings_and_fits_the_package():
    record = json.loads((MIXTURE / "warmstart.json").read_text())
    made = runpy.run_path(str(ROOT / "configs" / "tiny_moe_base.py"))["get_config"]()
    known = {"tool_calls": 0.0} | record["config"]  # a setting since it was made
    assert known == made.to_dict() | {"tasks": list(made.tasks)}
    arch = read_architecture(MIXTURE)
    assert (arch.family, arch.ffn_size, arch.experts.top_k) == ("qwen3_moe", 192, 2)
    dense = read_architecture(BASE)
    router = arch.num_layers * arch.hidden_size * arch.experts.count
    assert arch.num_active_params == dense.num_params + router
    assert sum(file.stat().st_size for file in MIXTURE.iterdir()) < 5 * 2**20
