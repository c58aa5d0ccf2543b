"""Checks of combinations of settings that cannot work or leave a setting inert.

Every check raises a ValueError with the setting, its value, the limit and the way out;
`f"{batch.epochs = }"` prints name and value.  A missing data set is found when it is
opened.  `CHECKS` has the checks of optional parts, which run if a setting switches the
part on.  The file is above 400 lines so that all combinations are in one place.
"""

import importlib.util
import itertools
import operator
from collections.abc import Callable

from scalerl_jax.config.sections import LOSSES, PACKAGES, SETTINGS, Config


def validate(config: Config, *, trained: bool = True) -> None:
    """Refuse values and combinations that cannot work.

    What sampling filters do to an objective matters only if a policy is `trained`.

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
        *(
            _model,
            _rows,
            _cache,
            _slices,
            _interruption,
            _groups,
            _prompts,
            _windows,
            _loss,
            _caps,
        ),
    ):
        check(config)
    for part in _parts(config):
        if trained or part not in _OF_TRAINING:
            CHECKS[part](config)


def _parts(config: Config) -> list[str]:
    """Return the parts in `CHECKS` that the settings switch on."""
    batch, data, objective = config.batch, config.data, config.objective
    sampler, tracking = config.sampler, config.tracking
    loss, cap = LOSSES[objective.loss], objective.correction_cap
    on = {
        "sharing": batch.shared_tokens or batch.own_tokens,
        "short_rows": config.short_rows,
        "stages": sampler.length_stages,
        "refills": batch.dynamic_sampling,
        "task_weights": data.task_weights,
        "levels": data.next_task_at,
        "order": data.order != "shuffled" or data.open_steps,
        "batched": config.queue.mode == "batched",
        "tracking": tracking.wandb_project or tracking.profile_steps,
        "cosine": config.optimizer.schedule == "cosine",
        "clips": loss.clips,
        "anchor": objective.anchor != "behavior" or loss.anchor or cap,
        "filtered_kl": sampler.filters,
        "filters": sampler.filters and not objective.allow_sampling_filters,
        "regularizers": objective.kl_coefficient or objective.regularize != "all",
        "overlong": objective.overlong_cache_tokens,
        "critic": objective.advantage == "critic",
        "teacher": config.teacher != type(config.teacher)(),
        "alone": config.teacher.alone,
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
    if model.lora.rank:
        _lora(config)
    same = model.compute_dtype == model.sampler_dtype == "float32"
    if same and not model.float32_head:
        raise ValueError(
            f"{model.float32_head = } takes the logits in the dtype of the "
            f"activations, float32 on both sides: nothing would change; leave it on, "
            f"or set model.compute_dtype or model.sampler_dtype to 'bfloat16'"
        )
    if model.head_weights_dtype == "bfloat16" == model.param_dtype:
        raise ValueError(
            f"{model.head_weights_dtype = } rounds weights that {model.param_dtype = } "
            f"has rounded already; leave it at 'float32'"
        )
    if model.head_weights_dtype == "bfloat16" and not model.float32_head:
        raise ValueError(
            f"{model.head_weights_dtype = } is for the products of a float32 head, and "
            f"{model.float32_head = } reads the weights in model.compute_dtype; leave "
            f"one of them out"
        )


def _lora(config: Config) -> None:
    """Refuse settings that have no effect if a policy's low-rank factors are trained.

    A critic beside it is trained in full.
    """
    rank, objective = config.model.lora.rank, config.objective
    if config.model.frozen:
        raise ValueError(
            f"model.frozen = {config.model.frozen!r} excludes weights from training, "
            f"and with model.lora.rank = {rank} all the model's own are frozen; leave "
            f"out model.frozen, and choose with model.lora.targets what changes"
        )
    critic = objective.advantage == "critic"
    rounded, dtype = config.optimizer.stochastic_rounding, config.model.param_dtype
    if rounded and not critic:
        raise ValueError(
            f"optimizer.stochastic_rounding = True rounds trained params of bfloat16, "
            f"and with model.lora.rank = {rank} these are float32 factors; leave it off"
        )
    if critic and dtype != "float32" and not rounded:
        # This dtype is chosen for weights that are frozen, and a critic's are not.
        raise ValueError(
            f"model.param_dtype = {dtype!r} with model.lora.rank = {rank} and "
            f"objective.advantage = 'critic': the critic's weights are trained, and in "
            f"this dtype they ignore updates below 1/256 of them; set "
            f"optimizer.stochastic_rounding = True, or model.param_dtype = 'float32'"
        )
    if objective.expert_bias_rate:
        raise ValueError(
            f"objective.expert_bias_rate = {objective.expert_bias_rate} moves the "
            f"router's biases, and with model.lora.rank = {rank} the router is frozen; "
            f"set it to 0"
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


def _cache(config: Config) -> None:
    sampler = config.sampler
    if 0 < sampler.cache_tokens < sampler.tokens_of(1):
        raise ValueError(
            f"{sampler.cache_tokens = } cannot hold a sequence of "
            f"sampler.max_prompt_tokens + sampler.max_completion_tokens and a page of "
            f"{sampler.page_size = }: set it to {sampler.tokens_of(1)} or more, or to 0"
        )


def _slices(config: Config) -> None:
    mesh = config.mesh
    if mesh.data % mesh.slices:
        raise ValueError(
            f"{mesh.slices = } does not divide {mesh.data = }, the replicas of the "
            f"state, of which each slice has equally many; make that a multiple, or 0"
        )
    if mesh.processes > 1 and mesh.processes % mesh.slices:
        raise ValueError(
            f"{mesh.slices = } does not divide {mesh.processes = }, of which each "
            f"slice has equally many; make that a multiple"
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
    episode = config.episode
    alone = objective.advantage == "critic" or config.teacher.alone
    if batch.group_size < 2 and not alone:
        raise ValueError(
            f"{batch.group_size = } leaves every group without variance and hence "
            f"without a gradient; use 2 or more, or objective.advantage = 'critic', or "
            f"teacher.alone = True"
        )
    for name in ("weights", "variables", "per_turn"):
        if (value := getattr(reward, name)) and not config.environment:
            raise ValueError(
                f"reward.{name} = {value!r} is for functions of your own; set "
                f"environment = 'FILE.py:FUNCTION', or leave it out"
            )
    if reward.weights and config.environment.startswith(PACKAGES):
        raise ValueError(
            f"{reward.weights = } with {config.environment = !s}: a package weighs its "
            f"rewards itself; leave it out"
        )
    if reward.per_turn and objective.advantage == "critic":
        raise ValueError(
            f"{reward.per_turn = } with {objective.advantage = }: a critic gives each "
            f"token its own advantage, to which a turn's cannot be added; choose "
            f"another baseline"
        )
    if "{observation}" not in episode.between:
        raise ValueError(
            f"{episode.between = } must hold '{{observation}}', which is replaced by "
            f"the environment's text"
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
    package = config.environment.startswith(PACKAGES)
    for setting, names in (("data.tasks", data.tasks), ("eval.sets", sets)):
        for name in names:
            if name.startswith(PACKAGES) != package:
                raise ValueError(
                    f"{setting} holds {name!r} with {config.environment = !s}; the "
                    f"prompts of a package, env:PACKAGE, are judged only by its own "
                    f"environment, and it judges no other prompts"
                )


def _windows(config: Config) -> None:
    batch, queue = config.batch, config.queue
    lag, waiting = f"{queue.max_staleness = }", f"{queue.max_waiting = }"
    if queue.mode == "batched":
        return  # `_batched` checks these windows
    if queue.max_staleness < batch.epochs - 1:
        raise ValueError(
            f"{lag} is below batch.epochs - 1 = {batch.epochs - 1}, the steps by which "
            f"the policy is ahead of the sampler in the last pass over a batch; raise "
            f"the first (to that, for the synchronous loop) or lower batch.epochs"
        )
    most = (queue.max_staleness + 1) // batch.epochs
    if queue.max_waiting > max(most, 2):
        raise ValueError(
            f"{waiting} can never be reached: with {lag} and {batch.epochs = } at most "
            f"{most} batches are started before one is used up; lower it, or set 0 for "
            f"no bound but queue.max_staleness"
        )


def _loss(config: Config) -> None:
    """Refuse bounds that this loss does not read, and missing ones that it needs."""
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
                f"1: for a paper's epsilon, set 1 + epsilon"
            )
    if objective.min_importance_ratio > 1:
        raise ValueError(
            f"{objective.min_importance_ratio = } is an absolute floor, and would lift "
            f"ratios of 1; use 1 or less"
        )


_SEQUENCE_CLIP = 0.05  # clips of length-normalised ratios are far below


def _batched(config: Config) -> None:
    batch, queue = config.batch, config.queue
    lag = f"{queue.max_staleness = }"
    if queue.max_staleness < 1:
        raise ValueError(
            f"{lag} with {queue.mode = } (PPO-off-policy-k) would generate k * N = "
            f"0 groups; use k >= 1, or 'pipeline' for the synchronous loop"
        )
    if queue.max_staleness % batch.epochs:
        raise ValueError(
            f"{lag} with {queue.mode = }, the optimizer steps per window, cannot be "
            f"cut into {batch.epochs = } passes; make it a multiple"
        )
    if queue.max_waiting > 2:
        raise ValueError(
            f"{queue.max_waiting = } is not read with {queue.mode = }, in which a "
            f"window is used once all its groups are finished; leave it at 2"
        )


def _cosine(config: Config) -> None:
    optimizer, train = config.optimizer, config.train
    end, where = optimizer.decay_steps, f"{optimizer.decay_steps = }"
    if not end:
        end, where = train.num_steps, f"{train.num_steps = }"
        if held := config.held_steps:
            end, where = end - held, f"{where} less critic.pretrain_steps = {held}"
    if end <= optimizer.warmup_steps:
        raise ValueError(
            f"{where}, where the cosine ends, must be above {optimizer.warmup_steps = }"
            f"; raise the first or lower the second"
        )


def _clips(config: Config) -> None:
    """Refuse clips that no ratio or every ratio would reach."""
    objective = config.objective
    low, high = f"{objective.clip_low = }", f"{objective.clip_high = }"
    if objective.clip_low > 1:
        raise ValueError(f"{low} leaves a ratio no lower bound; use 1 or less")
    widest = max(objective.clip_low, objective.clip_high)
    if LOSSES[objective.loss].ratio == "sequence_mean" and widest >= _SEQUENCE_CLIP:
        raise ValueError(
            f"{low}, {high} are clips of a token's ratio: the ratio of "
            f"{objective.loss = }, a mean over the sequence, stays within some 1e-3 of "
            f"1; use 3e-4 and 4e-4 (GSPO) or 4e-3 (ScaleRL), below {_SEQUENCE_CLIP}"
        )
    if objective.loss == "dual_clip" and objective.dual_clip <= 1 + objective.clip_high:
        raise ValueError(
            f"{objective.dual_clip = } must be above 1 + objective.clip_high = "
            f"{1 + objective.clip_high}: it bounds the ratio of punished tokens, not "
            f"its distance to 1; 3 in the paper"
        )
    for name in ("mask_low", "mask_high"):
        if (value := getattr(objective, name)) >= 1:
            raise ValueError(
                f"objective.{name} = {value} is a difference of probabilities: 1 or "
                f"more would drop nothing; prime-rl has 0.2"
            )


def _anchor(config: Config) -> None:
    """Refuse an anchor that does not fit the loss, or counts the mismatch twice."""
    objective, own = config.objective, LOSSES[config.objective.loss]
    loss, anchor = f"{objective.loss = }", f"{objective.anchor = }"
    cap, correction = objective.correction_cap, f"{objective.correction_cap = }"
    if own.anchor == "behavior" and objective.anchor != "behavior":
        raise ValueError(
            f"{loss} corrects for the sampler, and {anchor} takes the sampler out of "
            f"its ratio; set anchor = 'behavior', or loss = 'reinforce' with "
            f"objective.correction_cap"
        )
    if own.anchor == "recomputed" and objective.anchor != "recomputed":
        raise ValueError(
            f"{loss} clips around recomputed log-probabilities; set objective.anchor = "
            f"'recomputed'"
        )
    if cap and objective.anchor == "behavior":
        raise ValueError(
            f"{correction} with {anchor} would count the mismatch twice: the ratio "
            f"over the sampler holds it already; set it to 0, or anchor = 'recomputed'"
        )
    if cap and own.anchor == "recomputed":
        raise ValueError(
            f"{correction} would count the mismatch twice: {loss} is weighted by the "
            f"same ratio, up to objective.max_importance_ratio; set it to 0"
        )
    if objective.anchor == "behavior" or own.anchor or cap:
        return
    if own.ratio == "none":
        raise ValueError(
            f"{anchor} is not read with {loss}, which has no ratio; set anchor = "
            f"'behavior', or an objective.correction_cap above 0"
        )
    if config.steps_per_window <= 1:
        raise ValueError(
            f"{anchor} with one optimizer step per window makes {loss} inert: its "
            f"ratio is always 1, and nothing corrects for the sampler; set anchor = "
            f"'behavior', or objective.correction_cap, or take more steps "
            f"(batch.epochs, or 'batched' with queue.max_staleness above 1)"
        )


def _critic(config: Config) -> None:
    batch, critic, objective = config.batch, config.critic, config.objective
    if objective.zero_variance_filter:
        raise ValueError(
            f"{objective.zero_variance_filter = } drops groups of equal rewards, and "
            f"with {objective.advantage = } no advantage is relative to a group: their "
            f"tokens have a gradient like any others; set it to False"
        )
    if objective.advantage_normalization not in ("batch", "none"):
        raise ValueError(
            f"{objective.advantage_normalization = } is over rewards of groups; with "
            f"{objective.advantage = } use 'batch', over its sampled tokens, or 'none'"
        )
    rollouts = batch.num_prompts * batch.group_size
    if critic.minibatches > rollouts:
        raise ValueError(
            f"{critic.minibatches = } cannot be cut from the batch.num_prompts * "
            f"batch.group_size = {rollouts} rollouts; lower it or raise the others"
        )
    if critic.value_clip and config.steps_per_window * critic.minibatches == 1:
        raise ValueError(
            f"{critic.value_clip = } with one step of the critic per window clips "
            f"nothing: it begins at the values that the clip is about; set it to 0, or "
            f"take more steps (critic.minibatches, batch.epochs, or queue.mode = "
            f"'batched' with queue.max_staleness above 1)"
        )
    if critic.pretrain_steps >= config.train.num_steps:
        raise ValueError(
            f"{critic.pretrain_steps = } leave the policy no step within "
            f"train.num_steps = {config.train.num_steps}; lower the first or raise the "
            f"second"
        )


def _teacher(config: Config) -> None:
    teacher, temperature = config.teacher, config.sampler.temperature
    if not teacher.on:
        raise ValueError(
            f"{teacher.coefficient = } and {teacher.alone = } are not read without a "
            f"teacher; set teacher.checkpoint or teacher.endpoint, or leave them out"
        )
    if not teacher.endpoint:
        return
    if teacher.checkpoint:
        raise ValueError(
            f"{teacher.checkpoint = } and {teacher.endpoint = } are two teachers; "
            f"leave one of them out"
        )
    if "@" in teacher.endpoint.partition("://")[2].partition("/")[0]:
        raise ValueError(  # which shows no password
            "teacher.endpoint has a name or password before its host, and settings are "
            "stored and shown; leave them out, and name the variable of a key in "
            "teacher.key_variable"
        )
    if not teacher.endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"{teacher.endpoint = } must begin with http:// or https://, and end with "
            f"/v1"
        )
    if temperature != 1.0:
        raise ValueError(
            f"{teacher.endpoint = } gives log-probabilities at temperature 1, and "
            f"sampler.temperature = {temperature}; set that to 1.0, or name a "
            f"teacher.checkpoint"
        )
    if config.mesh.processes > 1:
        raise ValueError(
            f"{teacher.endpoint = } is asked by a learner of one process, and "
            f"mesh.processes = {config.mesh.processes}; set that to 1, or name a "
            f"teacher.checkpoint"
        )


def _alone(config: Config) -> None:
    objective, reward, teacher = config.objective, config.reward, config.teacher
    if objective.zero_variance_filter:
        raise ValueError(
            f"{objective.zero_variance_filter = } drops groups of equal rewards, and "
            f"with {teacher.alone = } all tokens are taught alike; set it to "
            f"False"
        )
    if objective.advantage == "critic":
        raise ValueError(
            f"{objective.advantage = } with {teacher.alone = }: a critic predicts "
            f"rewards, which give no advantage here; set it to 'group_mean', or "
            f"teacher.alone = False"
        )
    if objective.kl_in == "reward":
        raise ValueError(
            f"{objective.kl_in = } with {teacher.alone = }: rewards give no advantage; "
            f"set it to 'loss', or teacher.alone = False"
        )
    if reward.per_turn:
        raise ValueError(
            f"{reward.per_turn = } with {teacher.alone = }: rewards of turns give no "
            f"advantage either; set it to False, or teacher.alone = False"
        )


def _filtered_kl(config: Config) -> None:
    """Refuse a KL to the filtered distribution in an advantage.

    The log-probability ratio of another model over the sampler is then, at equal
    params, the log of the probability of the kept tokens, not 0: a policy that is equal
    to its teacher or reference would be moved away from it.
    """
    objective, teacher = config.objective, config.teacher
    if teacher.on:
        source = "checkpoint" if teacher.checkpoint else "endpoint"
        what = f"teacher.{source} = {getattr(teacher, source)!r}"
        out = "or leave the teacher out"
    elif objective.kl_coefficient and objective.kl_in == "reward":
        what, out = f"{objective.kl_in = }", "or set objective.kl_in = 'loss'"
    else:
        return
    raise ValueError(
        f"{_named_filters(config)} with {what}: its KL is estimated over the log-"
        f"probabilities of the filtered distribution, so that a policy would be moved "
        f"away from a model that it is equal to; turn the filter off, {out}"
    )


def _named_filters(config: Config) -> str:
    sampler = config.sampler
    filters = (f"sampler.{name} = {getattr(sampler, name)}" for name in sampler.filters)
    return ", ".join(filters)


def _filters(config: Config) -> None:
    """Refuse a ratio of the whole distribution over the filtered one.

    With a filter the sampler's log-probabilities are normalised over the tokens that it
    keeps, and the learner's over all.  At equal params their ratio is the probability
    of the kept tokens: below 1, and smallest where the policy is least certain.
    """
    objective = config.objective
    loss = LOSSES[objective.loss]
    if loss.anchor == "recomputed" or objective.correction_cap:
        effect = "the correction for the sampler weakens the tokens it is least sure of"
    elif objective.anchor == "recomputed" or loss.ratio == "none":
        return  # no ratio is over the sampler's log-probabilities
    elif loss.clips:
        effect = "its clip takes the gradient of tokens that have not moved"
    elif loss.of_sequences:
        effect = "its product over a completion takes the gradient of long ones"
    else:
        effect = "it weakens the tokens that the policy is least sure of"
    raise ValueError(
        f"{_named_filters(config)} with {objective.loss = }: its ratio is over the "
        f"log-probabilities of the filtered distribution and hence below 1 at equal "
        f"params, so that {effect}; turn the filter off, set objective.anchor = "
        f"'recomputed' without a correction, or objective.allow_sampling_filters = True"
    )


def _levels(config: Config) -> None:
    data = config.data
    if len(data.tasks) < 2:
        raise ValueError(
            f"{data.next_task_at = } opens one of data.tasks after the other, and "
            f"{data.tasks = } has one; name its levels, as in "
            f"('gym:chain_sum@0', 'gym:chain_sum@1')"
        )


def _order(config: Config) -> None:
    batch, data = config.batch, config.data
    progressive = data.order == "progressive"
    if progressive != bool(data.open_steps):
        raise ValueError(
            f"{data.open_steps = } with {data.order = }: the steps until every prompt "
            f"is open must be above 0 with 'progressive', and 0 without"
        )
    if data.order != "shuffled" and not data.difficulty:
        raise ValueError(
            f"{data.order = } needs data.difficulty, a file of pass rates: scalerl "
            f"data difficulty --config=CONFIG --samples=8 "
            f"--out=difficulty.jsonl makes one; or set it to 'measured': the first "
            f"epoch is shuffled, the later ones use the run's own pass rates"
        )
    opened = round(data.open_share * data.train_prompts)
    if progressive and data.train_prompts and opened < batch.num_prompts:
        raise ValueError(
            f"data.open_share * data.train_prompts = {opened} prompts at the start are "
            f"fewer than {batch.num_prompts = }; raise one of the first two or lower "
            f"the third"
        )


def _overlong(config: Config) -> None:
    objective, sampler = config.objective, config.sampler
    cache = objective.overlong_cache_tokens
    most = objective.overlong_max_tokens or sampler.max_completion_tokens
    if cache > most:
        raise ValueError(
            f"{objective.overlong_cache_tokens = } is more than "
            f"objective.overlong_max_tokens = {most}, and would punish every "
            f"completion; lower it"
        )
    if most - cache >= sampler.max_completion_tokens:
        raise ValueError(
            f"objective.overlong_max_tokens - objective.overlong_cache_tokens = "
            f"{most - cache}, where the punishment begins, must be below "
            f"{sampler.max_completion_tokens = }; lower the first"
        )


def _refills(config: Config) -> None:
    batch, objective = config.batch, config.objective
    where = f"{batch.dynamic_sampling = }"
    if not batch.max_refills:
        raise ValueError(
            f"{where} with {batch.max_refills = } would generate nothing in place of "
            f"groups without reward variance; use 1 or more, or leave it off"
        )
    if not objective.zero_variance_filter:
        raise ValueError(
            f"{where} generates other groups in place of those without reward "
            f"variance, and {objective.zero_variance_filter = } keeps them; choose one"
        )


def _regularizers(config: Config) -> None:
    objective = config.objective
    where = f"{objective.kl_in = }"
    if objective.kl_coefficient and objective.kl_estimator == "none":
        raise ValueError(
            f"{objective.kl_coefficient = } needs objective.kl_estimator: k2 or k3 in "
            f"the loss, k1, k2 or k3 in the reward"
        )
    if objective.kl_in == "loss" and objective.kl_estimator == "k1":
        raise ValueError(
            f"{objective.kl_estimator = } with {where} regularises nothing: its "
            f"gradient is 0 in expectation; use 'k2' (the gradient of the KL) or 'k3' "
            f"(GRPO's), or kl_in = 'reward'"
        )
    if objective.kl_in == "reward" and objective.cut_off_completions == "mask":
        raise ValueError(
            f"{objective.cut_off_completions = } with {where}: the mean of a group "
            f"needs the KL of all its completions, and masked ones have none; use "
            f"'keep' or 'wrong', or kl_in = 'loss'"
        )
    if objective.regularize == "all":
        return
    if not (objective.kl_coefficient or objective.entropy_coefficient):
        raise ValueError(
            f"{objective.regularize = } has nothing to switch off on hard prompts: set "
            f"objective.kl_coefficient or objective.entropy_coefficient, or 'all'"
        )
    if not objective.regularize_from_pass_rate > 0:
        raise ValueError(
            f"{objective.regularize_from_pass_rate = } must be above 0 with "
            f"{objective.regularize = }; IsoCompute's easy prompts begin at 0.3"
        )


def _sharing(config: Config) -> None:
    batch, mesh, sampler = config.batch, config.mesh, config.sampler
    if not batch.packing or mesh.context > 1:
        raise ValueError(
            f"{batch.shared_tokens = } needs batch.packing = True and mesh.context = "
            f"1; set it to 0 to compute every prompt again"
        )
    if batch.group_size == 1:
        raise ValueError(
            f"{batch.shared_tokens = } with {batch.group_size = }: no two completions "
            f"share a prompt; set batch.shared_tokens and batch.own_tokens to 0"
        )
    for where, room, needed in (
        (f"{batch.shared_tokens = }", batch.shared_tokens, sampler.max_prompt_tokens),
        (f"{batch.own_tokens = }", batch.own_tokens, sampler.max_completion_tokens),
    ):
        if room < needed:
            raise ValueError(
                f"{where} cannot hold one sequence's {needed} tokens; raise it, or set "
                f"batch.shared_tokens and batch.own_tokens to 0"
            )


def _short_rows(config: Config) -> None:
    batch = config.batch
    if batch.row_tokens % (4 * 128):
        raise ValueError(
            f"{batch.short_rows = } needs quarters of batch.row_tokens = "
            f"{batch.row_tokens} that are multiples of 128 tokens, as kernels do; make "
            f"it a multiple of 512, or set batch.short_rows to False"
        )


def _stages(config: Config) -> None:
    sampler, most = config.sampler, config.sampler.max_completion_tokens
    where = f"{sampler.length_stages = }"
    if any(len(stage) != 2 for stage in sampler.length_stages):
        raise ValueError(
            f"{where} must be pairs (first optimizer step, completion tokens)"
        )
    starts, lengths = zip(*sampler.length_stages, strict=True)
    if starts[0] != 0:
        raise ValueError(f"{where} must begin at step 0, not {starts[0]}")
    for name, values in (("steps", starts), ("completion tokens", lengths)):
        if any(later <= earlier for earlier, later in itertools.pairwise(values)):
            raise ValueError(f"{where} must have growing {name}, not {values}")
    if lengths[0] < 1 or lengths[-1] > most:
        raise ValueError(
            f"{where} must stay between 1 and {sampler.max_completion_tokens = }; "
            f"raise that or lower the stages"
        )


def _task_weights(config: Config) -> None:
    data, weights, tasks = config.data, config.data.task_weights, config.data.tasks
    if len(weights) != len(tasks):
        raise ValueError(
            f"{data.task_weights = } are {len(weights)} shares of the {len(tasks)} "
            f"tasks in {data.tasks = }; give one for each, or none"
        )
    if min(weights) <= 0:
        raise ValueError(
            f"{data.task_weights = } must be above 0; remove a task that shall not be "
            f"drawn from data.tasks"
        )


def _tracking(config: Config) -> None:
    tracking, steps = config.tracking, config.tracking.profile_steps
    package = importlib.util.find_spec("wandb") if tracking.wandb_project else None
    # W&B makes a folder `wandb`; imported as a namespace package, it has no origin.
    if tracking.wandb_project and (package is None or package.origin is None):
        raise ValueError(
            f"{tracking.wandb_project = } needs a package that is not installed: pip "
            f"install 'scalerl_jax[wandb]'; or leave it empty"
        )
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        raise ValueError(
            f"{tracking.profile_steps = } must be the first and the last optimizer "
            f"step of a trace, such as (10, 12), or () for none"
        )


# Checks of what a filter, harmless by itself, does to what is trained.
_OF_TRAINING = ("filtered_kl", "filters")

CHECKS: dict[str, Callable[[Config], None]] = {
    "sharing": _sharing,
    "short_rows": _short_rows,
    "stages": _stages,
    "refills": _refills,
    "task_weights": _task_weights,
    "levels": _levels,
    "order": _order,
    "batched": _batched,
    "tracking": _tracking,
    "cosine": _cosine,
    "clips": _clips,
    "anchor": _anchor,
    "filtered_kl": _filtered_kl,
    "filters": _filters,
    "regularizers": _regularizers,
    "overlong": _overlong,
    "critic": _critic,
    "teacher": _teacher,
    "alone": _alone,
}
