"""Starting points of recipes and ablations, whose files hold only differences."""

import runpy
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict


def based_on(base: str, recipe: str) -> ConfigDict:
    """Return the settings of `configs/{base}.py`; `recipe` is the caller's `__file__`.

    Raises:
        ValueError: there is no such file.
    """
    folder = Path(recipe).resolve().parents[1]
    found = {each.stem: each for each in folder.glob("*.py")}
    if base not in found:  # also refuses a path, such as "../x"
        bases = (
            name for name, each in found.items() if "scalerl train" in each.read_text()
        )
        raise ValueError(f"--config=...:{base}: choose from {sorted(bases)}")
    return runpy.run_path(str(found[base]))["get_config"]()


def ask_polaris(config: ConfigDict) -> None:
    """Set Polaris-53K, except its held-out prompts, as the prompts, as in ScaleRL."""
    config.update_from_flattened_dict(
        {
            "data.tasks": ("polaris_53k",),
            "data.train_prompts": 0,
            "data.template": "{question}\nReason step by step between <think> and "
            "</think>, then put your final answer within \\boxed{}.\n<think>\n",
        }
    )


def vanilla_grpo(
    base: str,
    recipe: str,
    *,
    num_prompts: int = 0,
    group_size: int = 0,
    warmup_steps: int = 0,
) -> ConfigDict:
    """Return GRPO without a KL, one update per batch in the synchronous loop.

    Clip 0.2 on both sides (ScaleRL's appendix, https://arxiv.org/abs/2510.13786),
    sample average, advantages by the prompt's standard deviation, no filter, no
    interruption, no float32 head, every prompt used in every epoch; learning rate 1e-6
    (DAPO, Tan et al.; for the others assumed).

    Taken from ScaleRL: AdamW's betas, eps of 1e-15 and weight decay, gradient clipping,
    prompts, lengths, rewards of +1 and -1, and, where an argument is 0, the batch and
    the warm-up.  The tiny policy keeps its own batch, learning rate and warm-up.
    """
    changes: dict[str, Any] = {
        "objective.clip_low": 0.2,
        "objective.clip_high": 0.2,
        "queue.max_staleness": 0,
        "interruption.enabled": False,
    }
    if base != "tiny":
        changes["optimizer.learning_rate"] = 1e-6
        sizes = {
            "batch.num_prompts": num_prompts,
            "batch.group_size": group_size,
            "optimizer.warmup_steps": warmup_steps,
        }
        changes |= {name: size for name, size in sizes.items() if size}
    return _grpo(base, recipe, changes)


def scalerl_baseline(base: str, recipe: str) -> ConfigDict:
    """Return the start of the forward ablations of ScaleRL's section 3.

    GRPO without a KL, with DAPO's clip, 0.2 and 0.26 (appendix), sample average and
    advantages by the prompt's standard deviation (section 2); 8 steps on rollouts that
    are generated together, in minibatches of 48 prompts (appendix A.3).  Assumed: its
    completions are interrupted as in ScaleRL.  The paper compares off-policy methods
    first, and the rest on PipelineRL-8 (assumed): `queue.mode = "pipeline"`.
    Batch, lengths and optimizer: appendix A.3, as in ScaleRL.
    https://arxiv.org/abs/2510.13786.
    """
    changes: dict[str, Any] = {
        "objective.clip_low": 0.2,
        "objective.clip_high": 0.26,
        "queue.mode": "batched",
        "queue.max_staleness": 8,
    }
    return _grpo(base, recipe, changes)


def _grpo(base: str, recipe: str, changes: dict[str, Any]) -> ConfigDict:
    """Return the base with GRPO's objective and the given changes."""
    config = based_on(base, recipe)
    model: Any = config.model
    common: dict[str, Any] = {
        "objective.loss": "clipped",
        "objective.aggregation": "sample",
        "objective.advantage_normalization": "prompt",
        "objective.zero_variance_filter": False,
        "data.no_positive_resampling": False,
        # With both dtypes float32 the head is float32 too: False would be refused.
        "model.float32_head": model.compute_dtype == model.sampler_dtype == "float32",
    }
    config.update_from_flattened_dict(common | changes)
    return config
