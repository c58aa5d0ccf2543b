"""The settings of a critic, read with objective.advantage = "critic" alone."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalerl_jax.config import Config


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """PPO's learned value function; what is not here is as the policy's.

    "ORZ" is Open-Reasoner-Zero, https://arxiv.org/abs/2503.24290, section 2.
    """

    learning_rate: float = 5e-6  # ORZ; its schedule is that of the policy's
    warmup_steps: int = 50  # of its own; ORZ
    # Parts of a batch, an optimizer step of the critic on each, for one of the policy;
    # ORZ: 12.
    minibatches: int = 1
    # The first so many optimizer steps change the critic alone; VAPO: 50.
    # https://arxiv.org/abs/2504.05118, section 4.1
    pretrain_steps: int = 0
    # Most that a value may move from what it was at the start of its window, in the
    # unit of the reward; 0: no limit.  ORZ's code: 0.2
    value_clip: float = 0.0
    gamma: float = 1.0  # discount per token; ORZ
    gae_lambda: float = 1.0  # ORZ; PPO: 0.95, which forgets over long completions


def validate_critic(config: "Config") -> None:
    """Refuse a critic beside what needs groups, and its settings without one.

    Raises:
        ValueError: names the setting, its value and the way out.
    """
    critic, objective = config.critic, config.objective
    if objective.advantage != "critic":
        for field in dataclasses.fields(critic):
            value = getattr(critic, field.name)
            if value != field.default:
                raise ValueError(
                    f"critic.{field.name} = {value} is read with objective.advantage "
                    f"= 'critic' alone, and that is {objective.advantage!r}; set it, "
                    f"or leave critic.{field.name} at {field.default}"
                )
        return
    for name in ("gamma", "gae_lambda"):
        value = getattr(critic, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"critic.{name} = {value} must be in [0, 1]")
    if objective.zero_variance_filter:
        raise ValueError(
            "objective.zero_variance_filter = True drops groups of equal rewards, and "
            "with objective.advantage = 'critic' no advantage is relative to a group: "
            "their tokens have a gradient like any others; set it to False"
        )
    if objective.advantage_normalization not in ("batch", "none"):
        raise ValueError(
            f"objective.advantage_normalization = "
            f"{objective.advantage_normalization!r} is over rewards of groups; with "
            f"objective.advantage = 'critic' use 'batch', over the sampled tokens of "
            f"the batch, or 'none'"
        )
    _validate_minibatches(config)
    if critic.pretrain_steps >= config.train.num_steps:
        raise ValueError(
            f"critic.pretrain_steps = {critic.pretrain_steps} leave no step to the "
            f"policy within train.num_steps = {config.train.num_steps}; lower the "
            f"first or raise the second"
        )


def _validate_minibatches(config: "Config") -> None:
    critic, batch, queue = config.critic, config.batch, config.queue
    rollouts = batch.num_prompts * batch.group_size
    if critic.minibatches > rollouts:
        raise ValueError(
            f"critic.minibatches = {critic.minibatches} cannot be cut from the "
            f"batch.num_prompts * batch.group_size = {rollouts} rollouts of a batch; "
            f"lower the first or raise the others"
        )
    steps = queue.max_staleness if queue.mode == "batched" else batch.epochs
    if critic.value_clip and steps * critic.minibatches == 1:
        raise ValueError(
            f"critic.value_clip = {critic.value_clip} with one step of the critic per "
            f"window clips nothing: the step begins at the values that the clip is "
            f"about; set it to 0, or take more steps (critic.minibatches, "
            f"batch.epochs, or queue.mode = 'batched' with queue.max_staleness above 1)"
        )
