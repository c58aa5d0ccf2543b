"""Checks of several settings together: what cannot work, or leaves one inert.

Every check raises a ValueError with setting, value, limit and way out, which
`f"{batch.epochs = }"` writes.  Which data sets there are is seen when they are opened.
Parts that few runs switch on are checked by `config.parts`, which they load.
"""

import operator

from scalerl_jax.config.sections import LOSSES, SETTINGS, Config


def validate(config: Config) -> None:
    """Refuse values and combinations that cannot work.

    Raises:
        ValueError: names the setting, its value, the limit and the way out.
    """
    values = {name: operator.attrgetter(name)(config) for name in SETTINGS}
    for name, value in values.items():
        SETTINGS[name].check(value)
    for name, value in values.items():
        default, needs = SETTINGS[name].default, SETTINGS[name].needs
        if needs and value != default and not needs.holds(values[needs.setting]):
            raise ValueError(
                f"{name} = {value!r} is not read with {needs.setting} = "
                f"{values[needs.setting]!r}; set {needs}, or leave it at {default!r}"
            )
    for check in (
        *(_model, _rows, _interruption, _groups, _prompts, _windows, _loss, _caps),
        _versions,
    ):
        check(config)
    if parts := _parts(config):
        from scalerl_jax.config.parts import CHECKS  # few runs have any

        for part in parts:
            CHECKS[part](config)


def _parts(config: Config) -> list[str]:
    """Return the parts of `config.parts` that the settings switch on."""
    batch, data, objective = config.batch, config.data, config.objective
    sampler, tracking = config.sampler, config.tracking
    loss, cap = LOSSES[objective.loss], objective.correction_cap
    on = {
        "sharing": batch.shared_tokens or batch.own_tokens,
        "stages": sampler.length_stages,
        "refills": batch.dynamic_sampling,
        "task_weights": data.task_weights,
        "order": data.order != "shuffled" or data.open_steps,
        "batched": config.queue.mode == "batched",
        "tracking": tracking.wandb_project or tracking.profile_steps,
        "cosine": config.optimizer.schedule == "cosine",
        "clips": loss.clips,
        "anchor": objective.anchor != "behavior" or loss.anchor or cap,
        "filters": sampler.filters and not objective.allow_sampling_filters,
        "regularizers": objective.kl_coefficient or objective.regularize != "all",
        "overlong": objective.overlong_cache_tokens,
        "critic": objective.advantage == "critic",
    }
    return [part for part in on if on[part]]


def _model(config: Config) -> None:
    model, optimizer = config.model, config.optimizer
    if model.architecture == "checkpoint" and not model.checkpoint:
        raise ValueError(
            f"{model.architecture = } needs model.checkpoint, a Hugging Face "
            f"directory; or name an architecture to start from random weights"
        )
    if optimizer.stochastic_rounding and model.param_dtype == "float32":
        raise ValueError(
            f"{optimizer.stochastic_rounding = } needs params that are rounded: set "
            f"model.param_dtype = 'bfloat16', or leave it off"
        )
    same = model.compute_dtype == model.sampler_dtype == "float32"
    if same and not model.float32_head:
        raise ValueError(
            f"{model.float32_head = } takes the logits in the dtype of the "
            f"activations, float32 on both sides: nothing would change; leave it on, "
            f"or set model.compute_dtype or model.sampler_dtype to 'bfloat16'"
        )


def _rows(config: Config) -> None:
    batch, mesh, sampler = config.batch, config.mesh, config.sampler
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens
    if batch.row_tokens < longest:
        raise ValueError(
            f"{batch.row_tokens = } cannot hold sampler.max_prompt_tokens + "
            f"sampler.max_completion_tokens = {longest}; raise the first or lower "
            f"the others"
        )
    shards = mesh.data * mesh.fsdp
    if shards and batch.rows_per_microbatch % shards:
        raise ValueError(
            f"{batch.rows_per_microbatch = } cannot be cut into mesh.data * mesh.fsdp "
            f"= {shards} shards; make it a multiple"
        )
    if batch.row_tokens % mesh.context:
        raise ValueError(
            f"{batch.row_tokens = } cannot be cut into {mesh.context = } shards; make "
            f"it a multiple"
        )


def _interruption(config: Config) -> None:
    interruption, sampler = config.interruption, config.sampler
    if not interruption.enabled:
        return
    if interruption.max_tokens < interruption.min_tokens:
        raise ValueError(
            f"{interruption.max_tokens = } is below {interruption.min_tokens = }; "
            f"raise the first or lower the second"
        )
    if interruption.max_tokens >= sampler.max_completion_tokens:
        raise ValueError(
            f"{interruption.max_tokens = } leaves no room for an answer within "
            f"{sampler.max_completion_tokens = }; lower the first or raise the second"
        )
    if not interruption.phrase.endswith(interruption.end_of_thinking):
        raise ValueError(
            f"{interruption.phrase = } must end with {interruption.end_of_thinking = }"
        )


def _groups(config: Config) -> None:
    batch, objective, reward = config.batch, config.objective, config.reward
    if batch.group_size < 2 and objective.advantage != "critic":
        raise ValueError(
            f"{batch.group_size = } leaves every group without variance and hence "
            f"without a gradient; use 2 or more, or objective.advantage = 'critic'"
        )
    if reward.correct <= reward.wrong:
        raise ValueError(
            f"{reward.correct = } must be above {reward.wrong = }; nothing else tells "
            f"the policy what is right"
        )


def _prompts(config: Config) -> None:
    batch, data, sets = config.batch, config.data, config.eval.sets
    if data.train_prompts and batch.num_prompts > data.train_prompts:
        raise ValueError(
            f"{batch.num_prompts = } is more than {data.train_prompts = }; lower the "
            f"first or raise the second"
        )
    if len(set(sets)) < len(sets):
        raise ValueError(f"eval.sets = {sets} must hold each set once")


def _windows(config: Config) -> None:
    batch, queue = config.batch, config.queue
    lag, waiting = f"{queue.max_staleness = }", f"{queue.max_waiting = }"
    if queue.mode == "batched":
        return  # whose windows `config.parts` checks
    if queue.max_staleness < batch.epochs - 1:
        raise ValueError(
            f"{lag} is below batch.epochs - 1 = {batch.epochs - 1}, by which the "
            f"policy is past its sampler in the last pass over a batch; raise the "
            f"first (to that, for the synchronous loop) or lower batch.epochs"
        )
    most = (queue.max_staleness + 1) // batch.epochs
    if queue.max_waiting > max(most, 1):
        raise ValueError(
            f"{waiting} can never be reached: with {lag} and {batch.epochs = } at most "
            f"{most} batches are started before one is used up; lower it, or set 0 for "
            f"no bound but queue.max_staleness"
        )


def _loss(config: Config) -> None:
    """Refuse bounds of another loss, and those without which this one has none."""
    objective, read = config.objective, LOSSES[config.objective.loss].settings
    for name in sorted({each for loss in LOSSES.values() for each in loss.settings}):
        value, default = getattr(objective, name), getattr(type(objective), name)
        if name not in read and value != default:
            readers = [loss for loss in LOSSES if name in LOSSES[loss].settings]
            raise ValueError(
                f"objective.{name} = {value} is not read with {objective.loss = }; "
                f"{readers} read it: choose one of them, or leave it at {default}"
            )
        if name in read and name != "min_importance_ratio" and not value > 0:
            raise ValueError(
                f"objective.{name} = {value} must be above 0 with {objective.loss = }, "
                f"which reads {list(read)}"
            )


def _caps(config: Config) -> None:
    """Refuse caps and floors that would move a ratio of 1."""
    objective = config.objective
    for name in ("max_importance_ratio", "correction_cap"):
        if 0 < (cap := getattr(objective, name)) < 1:
            raise ValueError(
                f"objective.{name} = {cap} is an absolute cap, and would cut ratios of "
                f"1: where a paper gives epsilon, set 1 + epsilon"
            )
    if objective.min_importance_ratio > 1:
        raise ValueError(
            f"{objective.min_importance_ratio = } is an absolute floor, and would lift "
            f"ratios of 1; use 1 or less"
        )


def _versions(config: Config) -> None:
    if config.generators.versions == 1 and config.eval.concurrent:
        raise ValueError(
            "generators.versions = 1 and eval.concurrent = True contradict "
            "each other: an evaluation beside the run needs a version of its own; set "
            "generators.versions = 2, or eval.concurrent = False"
        )
