"""Qwen3-0.6B on GSM8K, on one GPU.  Not yet run beyond its start, on an H100.

    scalerl data prepare --dataset=gsm8k --split=train
    scalerl data prepare --dataset=gsm8k --split=test
    scalerl train --config=configs/gsm8k_1gpu.py:Qwen3-0.6B --workdir=runs/gsm8k

Qwen3-0.6B is a directory with https://huggingface.co/Qwen/Qwen3-0.6B, Apache-2.0.
Compiled for an H100 (docs/preflight.md#gpus) it takes 25.6 GiB at most, of which the
learner's state is 6.7, in float32, and a cache for 64 slots 10.5.  JAX gives programs
three quarters of a GPU: with --config.sampler.slots=16 it fits 24 GiB, too.
"""

import ml_collections

from scalerl_jax import config as config_lib


def get_config(checkpoint: str = "Qwen3-0.6B") -> ml_collections.ConfigDict:
    """Return only what differs from `scalerl_jax/config`."""
    config = config_lib.defaults()
    config.model.checkpoint = checkpoint
    config.model.compute_dtype = "bfloat16"
    config.model.sampler_dtype = "bfloat16"
    config.model.remat = "attention"
    config.data.tasks = ("gsm8k",)
    config.data.template = "chat"
    config.data.answer_after = "auto"
    config.data.train_prompts = 0  # all of them
    config.interruption.enabled = False
    config.sampler.max_prompt_tokens = 512
    config.sampler.max_completion_tokens = 1024
    config.sampler.slots = 64
    config.batch.num_prompts = 32
    config.batch.group_size = 8
    config.batch.row_tokens = 2048
    config.batch.row_segments = 16
    config.batch.rows_per_microbatch = 2
    config.optimizer.learning_rate = 1e-6
    config.train.num_steps = 200
    config.eval.every = 20
    config.eval.num_prompts = 300
    config.eval.samples_per_prompt = 1
    return config
