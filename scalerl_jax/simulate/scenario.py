"""`Scenario`: the settings of a simulated run that determine its schedule."""

import dataclasses
from collections.abc import Callable
from typing import Any

from scalerl_jax.config import Config, Mode
from scalerl_jax.controller.queue import Pacing, RolloutQueue
from scalerl_jax.wiring import make_pacing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """Mean times between losses of machines, and delays that a loss causes; seconds."""

    replica_mtbf_s: float = 0.0  # mean time between losses of one replica; 0: never
    learner_mtbf_s: float = 0.0
    notice_s: float = 5.0  # until the controller detects a lost replica
    replica_start_s: float = 180.0  # from then until its replacement samples
    learner_start_s: float = 240.0  # until the learner has read its checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulated run; its fields have the names of settings."""

    num_prompts: int  # N
    group_size: int  # G
    max_staleness: int
    mode: Mode = "pipeline"
    max_waiting: int = 2
    epochs: int = 1
    max_refills: int = 0  # 0 without dynamic sampling
    num_steps: int = 100
    replicas: int = 1
    slots: int = 64  # per replica
    tokens_per_call: int = 16
    cache_tokens: int = 0  # per replica; 0: room for every slot at its limit
    prefill_tokens: int = 512
    prompt_tokens: int = 200  # mean
    zero_variance_share: float = 0.0  # groups without a gradient
    eval_every: int = 0  # 0: never
    eval_completions: int = 0  # per evaluation
    eval_beside: bool = False  # training continues meanwhile, except for the last one
    checkpoint_every: int = 0  # 0: never
    learner_devices: int = 1  # as JAX counts them: two are a tpu7x chip
    replica_devices: int = 1
    unused_devices: int = 0  # paid for, without a role
    devices_per_chip: int = 1
    failures: Failures = Failures()
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: a number is out of range.
        """
        counts = ("num_prompts", "group_size", "num_steps", "replicas", "slots")
        for name in (*counts, "learner_devices", "replica_devices"):
            value = getattr(self, name)
            if not 1 <= value <= 1_000_000:
                raise ValueError(f"{name} = {value:,} must be from 1 to 1,000,000")
        if not 0 <= self.zero_variance_share < 1:
            raise ValueError(
                f"zero_variance_share = {self.zero_variance_share:g} "
                f"(--zero_variance) must be 0 or more, and below 1"
            )

    @property
    def in_turn(self) -> bool:
        """True if sampling and training alternate."""
        return self.max_staleness == self.epochs - 1

    @property
    def steps_per_window(self) -> int:
        """Optimizer steps on one window of rollouts, if no step is skipped."""
        whole = self.max_staleness // self.epochs
        return self.epochs * (whole if self.mode == "batched" else 1)

    @property
    def by_ticket(self) -> bool:
        """True if a group's ticket alone determines its replica."""
        return self.in_turn and self.replicas > 1

    @property
    def devices(self) -> int:
        """Devices that are paid for."""
        generating = self.replicas * self.replica_devices
        return self.learner_devices + generating + self.unused_devices

    @property
    def chips(self) -> float:
        """Chips that are paid for."""
        return self.devices / self.devices_per_chip

    def queue(self, make: Callable[..., Any] = RolloutQueue) -> Any:
        """Return a rollout queue with the run's pacing."""
        names = [field.name for field in dataclasses.fields(Pacing)]
        pacing = Pacing(**{name: getattr(self, name) for name in names})
        return make(pacing, max_refills=self.max_refills)


def scenario_of(config: Config, **others: Any) -> Scenario:
    """Return the scenario of a config; `others` override or add fields."""
    batch, sampler = config.batch, config.sampler
    said: dict[str, Any] = dict(
        **vars(make_pacing(config)),
        group_size=batch.group_size,
        max_refills=batch.max_refills if batch.dynamic_sampling else 0,
        replicas=max(1, config.generators.count),
        slots=sampler.slots,
        tokens_per_call=sampler.tokens_per_call,
        cache_tokens=sampler.cache_tokens,
        prefill_tokens=sampler.prefill_tokens,
        prompt_tokens=sampler.max_prompt_tokens // 10,
        eval_every=config.eval.every,
        eval_completions=config.eval.num_prompts * config.eval.samples_per_prompt,
        eval_beside=config.eval.beside,
        checkpoint_every=config.checkpoint.every,
        replica_devices=max(1, config.generators.devices),
        seed=config.seed,
    )
    return Scenario(**(said | others))
