"""What values of settings, and which of them together, cannot work."""

import math
from typing import TYPE_CHECKING, Any

from scalerl_jax.config.critic import validate_critic
from scalerl_jax.config.data_validation import validate_data
from scalerl_jax.config.loop_validation import validate_loop
from scalerl_jax.config.objective_validation import (
    objective_numbers,
    validate_objective,
)

if TYPE_CHECKING:
    from scalerl_jax.config import Config

# Settings with a lower bound; those in _POSITIVE must be above 0, the others not below.
_POSITIVE = (
    "model.attention_block model.head_chunk_tokens model.head_chunk_vocab "
    "reward.timeout_s reward.memory_mib "
    "reward.code_cpu_s reward.code_memory_mib batch.num_prompts batch.epochs "
    "batch.group_size batch.row_tokens sampler.slots "
    "sampler.max_prompt_tokens sampler.max_completion_tokens sampler.tokens_per_call "
    "sampler.prefill_tokens sampler.page_size sampler.temperature "
    "queue.batch_timeout_s queue.group_timeout_s "
    "optimizer.learning_rate optimizer.eps "
    "critic.learning_rate critic.minibatches "
    "train.num_steps train.max_skipped_steps train.max_mismatch_nats eval.every "
    "eval.num_prompts eval.samples_per_prompt eval.temperature checkpoint.every "
    "scaling.patience checkpoint.keep mesh.data mesh.context mesh.tensor"
).split()
_NOT_NEGATIVE = (
    "seed data.train_prompts data.overlap_ngram "
    "reward.num_workers reward.code_float_tolerance "
    "sampler.top_k sampler.min_p sampler.cache_tokens "
    "interruption.min_tokens "
    "queue.max_staleness queue.max_waiting data.open_steps batch.max_refills "
    "optimizer.decay_steps optimizer.base_rollouts critic.warmup_steps "
    "critic.pretrain_steps critic.value_clip "
    "batch.rows_per_microbatch batch.shared_tokens batch.own_tokens mesh.fsdp "
    "optimizer.warmup_steps optimizer.weight_decay "
    "optimizer.max_grad_norm eval.logged_rollouts scaling.min_gain "
    "mesh.sampler_devices"
).split()


# More than any run has: a slip of the hand, which would be found out after hours.
_LARGEST = {
    name: largest
    for largest, names in {
        1_000: "reward.num_workers",
        10_000: "queue.max_staleness queue.max_waiting batch.epochs batch.max_refills "
        "critic.minibatches mesh.data mesh.fsdp mesh.context mesh.tensor "
        "mesh.sampler_devices",
        100_000: "sampler.slots batch.group_size eval.samples_per_prompt "
        "batch.rows_per_microbatch reward.code_cpu_s",
        1_000_000: "batch.num_prompts eval.num_prompts eval.logged_rollouts",
        10_000_000: "data.train_prompts reward.timeout_s queue.batch_timeout_s "
        "queue.group_timeout_s reward.memory_mib reward.code_memory_mib",
        2**24: "sampler.max_prompt_tokens sampler.max_completion_tokens "
        "sampler.tokens_per_call sampler.prefill_tokens sampler.page_size "
        "sampler.top_k batch.row_tokens batch.shared_tokens batch.own_tokens "
        "model.attention_block model.head_chunk_tokens model.head_chunk_vocab",
        10**9: "train.num_steps train.max_skipped_steps eval.every checkpoint.every "
        "checkpoint.keep optimizer.warmup_steps optimizer.decay_steps "
        "optimizer.base_rollouts critic.warmup_steps critic.pretrain_steps "
        "data.open_steps data.overlap_ngram scaling.patience interruption.min_tokens",
        2**32 - 1: "seed sampler.cache_tokens",
    }.items()
    for name in names.split()
}


def check_number(setting: str, value: float, *, shown: str = "") -> None:
    """Refuse a number out of its setting's range; `shown` is what the user gave.

    Raises:
        ValueError: names the setting, its value and the limit.
    """
    given = shown or f"{setting} = {value}"
    if not value >= 0 or (value == 0 and setting in _POSITIVE):
        bound = "above 0" if setting in _POSITIVE else "0 or more"
        raise ValueError(f"{given} must be {bound}")
    if value > _LARGEST.get(setting, math.inf):
        raise ValueError(f"{given} must be {_LARGEST[setting]:,} at most")


def validate(config: "Config") -> None:
    """Refuse values and combinations that cannot work.

    Raises:
        ValueError: names the setting, its value, the limit and the way out.
    """
    for setting in (*_POSITIVE, *_NOT_NEGATIVE, *objective_numbers()):
        value: Any = config
        for part in setting.split("."):
            value = getattr(value, part)
        check_number(setting, value)
    _validate_shares(config)
    _validate_head(config)
    _validate_lengths(config)
    _validate_batch(config)
    _validate_sharing(config)
    validate_data(config)
    validate_loop(config)
    validate_objective(config)
    validate_critic(config)
    if config.scaling.stop != "never" and not config.scaling.live:
        raise ValueError(
            f"scaling.stop = {config.scaling.stop!r} needs the fit beside the "
            f"training: set scaling.live = True"
        )


def _validate_shares(config: "Config") -> None:
    for setting, value in {
        "sampler.top_p": config.sampler.top_p,
        "data.max_history_pass_rate": config.data.max_history_pass_rate,
        "train.cut_off_warning_share": config.train.cut_off_warning_share,
        "reward.max_unjudged_share": config.reward.max_unjudged_share,
    }.items():
        if not 0.0 < value <= 1.0:
            raise ValueError(f"{setting} = {value} must be above 0 and at most 1")
    for setting, value in {
        "optimizer.beta1": config.optimizer.beta1,
        "optimizer.beta2": config.optimizer.beta2,
    }.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{setting} = {value} must be in [0, 1)")


def _validate_head(config: "Config") -> None:
    model = config.model
    if not model.float32_head and model.compute_dtype == model.sampler_dtype:
        if model.compute_dtype == "float32":
            raise ValueError(
                "model.float32_head = False takes the logits in the dtype of the "
                "activations, and that is float32 on both sides: nothing would "
                "change; leave it on, or set model.compute_dtype or "
                "model.sampler_dtype to 'bfloat16'"
            )


def _validate_lengths(config: "Config") -> None:
    longest = config.sampler.max_prompt_tokens + config.sampler.max_completion_tokens
    if config.batch.row_tokens < longest:
        raise ValueError(
            f"batch.row_tokens = {config.batch.row_tokens} cannot hold "
            f"sampler.max_prompt_tokens + sampler.max_completion_tokens = {longest}; "
            f"raise the first or lower the others"
        )
    interruption = config.interruption
    if interruption.enabled:
        if interruption.max_tokens < interruption.min_tokens:
            raise ValueError(
                f"interruption.max_tokens = {interruption.max_tokens} is below "
                f"interruption.min_tokens = {interruption.min_tokens}; raise the first "
                f"or lower the second"
            )
        if interruption.max_tokens >= config.sampler.max_completion_tokens:
            raise ValueError(
                f"interruption.max_tokens = {interruption.max_tokens} leaves no room "
                f"for an answer within sampler.max_completion_tokens = "
                f"{config.sampler.max_completion_tokens}; lower the first or raise the "
                f"second"
            )
        if not interruption.phrase.endswith(interruption.end_of_thinking):
            raise ValueError(
                f"interruption.phrase = {interruption.phrase!r} must end with "
                f"interruption.end_of_thinking = {interruption.end_of_thinking!r}"
            )


def _validate_sharing(config: "Config") -> None:
    batch, sampler = config.batch, config.sampler
    if not batch.shared_tokens and not batch.own_tokens:
        return
    if not batch.packing or config.mesh.context > 1:
        raise ValueError(
            f"batch.shared_tokens = {batch.shared_tokens} needs batch.packing = True "
            f"and mesh.context = 1; set it to 0 to compute every prompt again"
        )
    for setting, room, needed in (
        ("batch.shared_tokens", batch.shared_tokens, sampler.max_prompt_tokens),
        ("batch.own_tokens", batch.own_tokens, sampler.max_completion_tokens),
    ):
        if room < needed:
            raise ValueError(
                f"{setting} = {room} cannot hold one sequence's {needed} tokens; raise "
                f"it, or set batch.shared_tokens and batch.own_tokens to 0"
            )


def _validate_batch(config: "Config") -> None:
    batch, mesh = config.batch, config.mesh
    shards = mesh.data * mesh.fsdp
    if shards and batch.rows_per_microbatch % shards:
        raise ValueError(
            f"batch.rows_per_microbatch = {batch.rows_per_microbatch} cannot be cut "
            f"into mesh.data * mesh.fsdp = {shards} shards; make it a multiple"
        )
    if batch.row_tokens % mesh.context:
        raise ValueError(
            f"batch.row_tokens = {batch.row_tokens} cannot be cut into mesh.context = "
            f"{mesh.context} shards; make it a multiple"
        )
    if config.optimizer.stochastic_rounding and config.model.param_dtype == "float32":
        raise ValueError(
            "optimizer.stochastic_rounding = True needs params that are rounded: set "
            "model.param_dtype = 'bfloat16', or leave it off"
        )
    if batch.group_size < 2 and config.objective.advantage != "critic":
        raise ValueError(
            f"batch.group_size = {batch.group_size} leaves every group without "
            f"variance and hence without a gradient; use 2 or more, or "
            f"objective.advantage = 'critic'"
        )
    if config.reward.correct <= config.reward.wrong:
        raise ValueError(
            f"reward.correct = {config.reward.correct} must be above reward.wrong = "
            f"{config.reward.wrong}; nothing else tells the policy what is right"
        )
    if config.model.architecture == "checkpoint" and not config.model.checkpoint:
        raise ValueError(
            "model.architecture = 'checkpoint' needs model.checkpoint, a Hugging Face "
            "directory; or name an architecture to start from random weights"
        )
