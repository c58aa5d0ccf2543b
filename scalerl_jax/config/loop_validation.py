"""What of the loop's settings cannot work together: windows, lengths, schedules."""

import importlib.util
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalerl_jax.config import Config


def validate_loop(config: "Config") -> None:
    """Refuse combinations that cannot work, or of which a part would do nothing.

    Raises:
        ValueError: names the setting, its value, the limit and the way out.
    """
    _validate_windows(config)
    _validate_waiting(config)
    _validate_refills(config)
    _validate_stages(config)
    _validate_schedule(config)
    _validate_tracking(config)


def _validate_tracking(config: "Config") -> None:
    project, steps = config.tracking.wandb_project, config.tracking.profile_steps
    package = importlib.util.find_spec("wandb") if project else None
    # A folder of that name, which W&B itself makes, has no origin.
    if project and (package is None or package.origin is None):
        raise ValueError(
            f"tracking.wandb_project = {project!r} needs a package that is not "
            f"installed: pip install 'scalerl_jax[wandb]'; or leave it empty"
        )
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        raise ValueError(
            f"tracking.profile_steps = {steps} must be the first and the last "
            f"optimizer step of a trace, such as (10, 12), or () for none"
        )


def _validate_windows(config: "Config") -> None:
    epochs, staleness = config.batch.epochs, config.queue.max_staleness
    if config.queue.mode == "batched":
        if staleness < 1:
            raise ValueError(
                f"queue.max_staleness = {staleness} with queue.mode = 'batched' "
                f"(PPO-off-policy-k) would generate k * N = 0 groups; use k >= 1, or "
                f"queue.mode = 'pipeline' for the synchronous loop"
            )
        if staleness % epochs:
            raise ValueError(
                f"queue.max_staleness = {staleness} with queue.mode = 'batched' is the "
                f"number of optimizer steps on what is generated together; it cannot "
                f"be cut into batch.epochs = {epochs} passes; make it a multiple"
            )
    elif staleness < epochs - 1:
        raise ValueError(
            f"queue.max_staleness = {staleness} is below batch.epochs - 1 = "
            f"{epochs - 1}: at the last pass over a batch the policy is that many "
            f"optimizer steps past the one that sampled it; raise the first (to that, "
            f"for the synchronous loop) or lower batch.epochs"
        )


def _validate_waiting(config: "Config") -> None:
    queue, epochs = config.queue, config.batch.epochs
    if queue.max_waiting <= 1:
        return
    if queue.mode == "batched":
        raise ValueError(
            f"queue.max_waiting = {queue.max_waiting} is not read with queue.mode = "
            f"'batched', where the groups of a whole window wait for each other; "
            f"leave it at 1"
        )
    most = (queue.max_staleness + 1) // epochs
    if queue.max_waiting > most:
        raise ValueError(
            f"queue.max_waiting = {queue.max_waiting} can never be reached: with "
            f"queue.max_staleness = {queue.max_staleness} and batch.epochs = {epochs} "
            f"at most {most} batches are started before one is used up; lower it, or "
            f"set 0 for no bound but queue.max_staleness"
        )


def _validate_refills(config: "Config") -> None:
    batch = config.batch
    if not batch.dynamic_sampling:
        return
    if not batch.max_refills:
        raise ValueError(
            "batch.dynamic_sampling = True with batch.max_refills = 0 would generate "
            "nothing in place of groups without reward variance; use 1 or more, or "
            "leave it off"
        )
    if not config.objective.zero_variance_filter:
        raise ValueError(
            "batch.dynamic_sampling = True generates other groups in place of those "
            "without reward variance, and objective.zero_variance_filter = False keeps "
            "them; choose one"
        )


def _validate_stages(config: "Config") -> None:
    stages, most = config.sampler.length_stages, config.sampler.max_completion_tokens
    if not stages:
        return
    where = f"sampler.length_stages = {stages}"
    if any(len(stage) != 2 for stage in stages):
        raise ValueError(
            f"{where} must be pairs (first optimizer step, completion tokens)"
        )
    starts, lengths = zip(*stages, strict=True)
    if starts[0] != 0:
        raise ValueError(f"{where} must begin at step 0, not {starts[0]}")
    for name, values in (("steps", starts), ("completion tokens", lengths)):
        if any(later <= earlier for earlier, later in itertools.pairwise(values)):
            raise ValueError(f"{where} must have growing {name}, not {values}")
    if lengths[0] < 1 or lengths[-1] > most:
        raise ValueError(
            f"{where} must stay between 1 and sampler.max_completion_tokens = {most}; "
            f"raise that or lower the stages"
        )


def _validate_schedule(config: "Config") -> None:
    optimizer = config.optimizer
    if not 0.0 <= optimizer.final_share <= 1.0:
        raise ValueError(
            f"optimizer.final_share = {optimizer.final_share} must be in [0, 1]"
        )
    if optimizer.schedule == "constant":
        for setting, value in {
            "decay_steps": optimizer.decay_steps,
            "final_share": optimizer.final_share,
        }.items():
            if value:
                raise ValueError(
                    f"optimizer.{setting} = {value} is not read with "
                    f"optimizer.schedule = 'constant'; set 'cosine', or leave it 0"
                )
        return
    horizon = optimizer.decay_steps or config.train.num_steps
    if horizon <= optimizer.warmup_steps:
        name = "optimizer.decay_steps" if optimizer.decay_steps else "train.num_steps"
        raise ValueError(
            f"{name} = {horizon}, where the cosine ends, must be above "
            f"optimizer.warmup_steps = {optimizer.warmup_steps}; raise the first or "
            f"lower the second"
        )
