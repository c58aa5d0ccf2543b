"""Forecast the seconds and cost of an optimizer step, from prompts to published params.

Learner and generators work at the same time, unless the config makes them alternate or
gives them the same devices.  If they overlap, the longer of the two is the step, and
the other one is idle for the difference.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.machines.chips import Chip
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.lora import sizes
from scalerl_jax.objective.terms import needs_of
from scalerl_jax.planning import rates, work
from scalerl_jax.planning.lengths import Lengths, attention_share, count_microbatches
from scalerl_jax.planning.memory import (
    cache_tokens,
    has_head_once,
    head_bytes,
    read_bytes,
    teacher_architecture,
    value_bytes,
    weight_bytes,
)
from scalerl_jax.planning.rates import EXPECTED, Reached, between_slices_seconds

# Share of the cache that slots at their mean length may fill.  Lengths vary, and a
# sequence that finds no free page is suspended and prefilled again later.
_FILLED = 0.85


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepForecast:
    """Seconds of a step by role; devices as JAX counts them, chips as they are paid."""

    generate_seconds: float  # all replicas at work on the rollouts of a step
    train_seconds: float
    dcn_seconds: float  # of these, to sum gradients between slices
    # Until all replicas have a version, while others work; on shared devices, of the
    # copy within their memory.
    publish_seconds: float
    step_seconds: float
    evaluation_seconds: float  # of one that the run waits for
    beside_seconds: float  # of generation, which one beside the run takes; or 0
    devices: int  # all that are paid for
    chips: float
    learner_devices: int
    generator_devices: int
    shared: bool

    @property
    def busy_share(self) -> float:
        """Share of the device-seconds with work, in (0, 1]."""
        learner = self.train_seconds * self.learner_devices
        generators = self.generate_seconds * self.generator_devices
        return (learner + generators) / (self.step_seconds * self.devices)

    @property
    def learner_idle(self) -> float:
        """Share of a step that the learner's devices wait, in [0, 1)."""
        busy = self.train_seconds + self.generate_seconds * self.shared
        return 1 - busy / self.step_seconds

    @property
    def generator_idle(self) -> float:
        """Share of a step that the generators' devices wait, in [0, 1)."""
        busy = self.generate_seconds + self.train_seconds * self.shared
        return 1 - busy / self.step_seconds

    @property
    def devices_at_work(self) -> int:
        """Number of devices with a role."""
        return self.learner_devices + self.generator_devices * (not self.shared)

    @property
    def chip_hours_per_step(self) -> float:
        """Chip-hours that a step costs, whether chips work or wait."""
        return self.step_seconds * self.chips / 3600

    def evaluation_hours(self, config: Config) -> float:
        """Return the hours by which its evaluations lengthen a run.

        The learner waits while one is made in the loop: its batches come from the
        replicas.  With eval.concurrent all but the last are beside the run, and take
        the time that generation has to spare first.
        """
        every = config.eval.every
        before = -(-config.train.num_steps // every)  # one of them before any step
        added = self.evaluation_seconds
        if config.eval.beside:
            spare = every * (self.step_seconds - self.generate_seconds)
            added = max(0.0, self.beside_seconds - spare * (not self.shared))
        return (before * added + self.evaluation_seconds) / 3600

    def evaluation_seconds_per_step(self, config: Config) -> float:
        """Return the seconds by which evaluations lengthen a step on average."""
        return 3600 * self.evaluation_hours(config) / config.train.num_steps

    def chip_hours(self, config: Config) -> float:
        """Return the chip-hours of train.num_steps steps and their evaluations."""
        steps = config.train.num_steps * self.chip_hours_per_step
        return steps + self.evaluation_hours(config) * self.chips


def _publish_seconds(config: Config, arch: Architecture, chip: Chip) -> float:
    """Return the seconds until all generators have a version."""
    mesh, generators = config.mesh, config.generators
    learner = mesh.data * mesh.fsdp * mesh.context * mesh.tensor
    written = weight_bytes(config, arch)
    if generators.placement == "shared":
        read = value_bytes(config.model.param_dtype)
        return rates.copy_seconds(arch, chip, learner, read, written)
    return rates.publish_seconds(
        arch,
        chip,
        learner_chips=learner,
        replicas=generators.count,
        replica_chips=generators.devices,
        itemsize=written,
    )


def forecast(
    config: Config,
    arch: Architecture,
    chip: Chip,
    lengths: Lengths,
    *,
    devices: int,
    reached: Reached = EXPECTED,
) -> StepForecast:
    """Return the forecast of a step.

    Args:
        config: a config without open settings.
        arch: the policy's architecture.
        chip: the kind of TPU.
        lengths: token counts of rollouts.
        devices: all devices that are paid for, used or not.
        reached: `EXPECTED`, or `BOUND` for a lower bound.
    """
    mesh, generators = config.mesh, config.generators
    shared = generators.placement == "shared"
    learner = mesh.data * mesh.fsdp * mesh.context * mesh.tensor
    replicas, each = generators.count, generators.devices
    batch = config.batch
    in_turn = shared or takes_turns(config)
    rate = functools.partial(_Decoding.of, config, arch, chip, lengths, reached=reached)
    decoding = rate(sequences=_under_way(config))
    evaluated = config.eval.num_prompts * config.eval.samples_per_prompt
    evaluating = functools.partial(rate, sequences=evaluated)
    in_loop = evaluating(cache=1.0)
    batches, rollouts = _batches_together(config), batch.num_prompts * batch.group_size
    generate = decoding.seconds(
        rollouts, prompts=batch.num_prompts, tail=in_turn, batches=batches
    )
    # Replicas that share their devices take turns.
    turns = max(1.0, replicas * each / learner) if shared else 1.0
    pause = pause_seconds(config, arch, replica_chips=each) / batches
    generate = generate * turns + pause
    dcn = gradients_seconds(config, arch, chip, shards=mesh.fsdp * mesh.tensor)
    train = batch.epochs * (dcn + _train_seconds(config, arch, chip, lengths, reached))
    publish = _publish_seconds(config, arch, chip)
    if in_turn:
        # Generators wait for a window's last version; only a copy delays each step.
        step = generate + train + publish / (1 if shared else batches)
    else:
        step = max(generate, train, publish, _longest_seconds(config, decoding))
    return StepForecast(
        generate_seconds=generate / batch.epochs,
        train_seconds=train / batch.epochs,
        dcn_seconds=dcn,
        publish_seconds=publish,
        step_seconds=step / batch.epochs,
        evaluation_seconds=turns * in_loop.evaluation_seconds(config),
        beside_seconds=turns * _beside_seconds(config, in_loop, evaluating),
        devices=devices,
        chips=devices / chip.devices_per_chip,
        learner_devices=learner,
        generator_devices=min(replicas * each, learner) if shared else replicas * each,
        shared=shared,
    )


def gradients_seconds(
    config: Config, arch: Architecture, chip: Chip, *, shards: int
) -> float:
    """Return the seconds of a step in which gradients, in shards, go between slices."""
    trained, slices = sizes(config.model, arch).trained, config.mesh.slices
    if needs_of(config).critic:
        trained += arch.num_params
    return between_slices_seconds(trained, chip, slices=slices, shards=shards)


def _longest_seconds(config: Config, decoding: "_Decoding") -> float:
    """Return the least seconds of a step with which the longest rollout is in time.

    It must end before max_staleness steps have passed, less one for which its group may
    wait.
    """
    steps = max(config.queue.max_staleness - 1, 1)
    return decoding.longest * config.batch.epochs / steps


def _beside_seconds(
    config: Config, whole: "_Decoding", evaluating: "Callable[..., _Decoding]"
) -> float:
    """Return the seconds of generation that an evaluation beside the run takes, or 0.

    Its calls alternate with those of training, each of which has half of the cache:
    twice those with this half, less the time in which training alone would sample as
    many tokens with the whole.
    """
    if not config.eval.beside:
        return 0.0
    seconds = 2 * evaluating(cache=0.5).evaluation_seconds(config, tail=False)
    return seconds - whole.evaluation_seconds(config, tail=False)


def _under_way(config: Config) -> int:
    """Return the most rollouts in flight: staleness and the queue bound them."""
    batch = config.batch
    prompts = max(config.queue.max_staleness, 1) * batch.num_prompts
    if takes_turns(config):
        prompts = batch.num_prompts * _batches_together(config)
    return prompts * batch.group_size


def _batches_together(config: Config) -> int:
    """Return the batches of a window, which are sampled at one version."""
    return config.steps_per_window // config.batch.epochs


def takes_turns(config: Config) -> bool:
    """Return True if learner and generators never work at the same time."""
    queue = config.queue
    return queue.mode == "batched" or queue.max_staleness < config.batch.epochs


def slots_that_fit(cache: int, lengths: Lengths) -> int:
    """Return the mean number of sequences that a cache of `cache` tokens holds."""
    return int(_FILLED * cache / lengths.mean_context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decoding:
    """Decoding rates with all replicas at work."""

    tokens_per_second: float  # of all replicas together
    longest: float  # seconds of the longest rollout
    prompt_seconds: float  # of one prompt, on one replica
    replicas: int
    mean: float  # tokens of a completion

    @classmethod
    def of(
        cls,
        config: Config,
        arch: Architecture,
        chip: Chip,
        lengths: Lengths,
        *,
        sequences: int,
        cache: float = 1.0,
        reached: Reached,
    ) -> "_Decoding":
        """Predict rates for these sequences, with a share of each replica's cache."""
        generators, model, sampler = config.generators, config.model, config.sampler
        most = math.ceil(sequences / generators.count)
        held = slots_that_fit(int(cache * cache_tokens(config)), lengths)
        slots = max(1, min(sampler.slots, most, held))
        common: Any = dict(
            chips=generators.devices,
            **read_bytes(config, arch),
            reached=reached,
        )
        step = rates.decode_seconds(
            *(arch, chip),
            slots=slots,
            mean_context=lengths.mean_context,
            float32_head=model.float32_head,
            **common,
        )
        chunk = max(1.0, min(lengths.prompt, sampler.prefill_tokens))
        prompt = math.ceil(lengths.prompt / chunk) * rates.prefill_seconds(
            arch, chip, tokens=chunk, context=lengths.prompt, **common
        )
        return cls(
            tokens_per_second=generators.count * slots / step,
            longest=lengths.longest * step,
            prompt_seconds=prompt,
            replicas=generators.count,
            mean=lengths.mean,
        )

    def seconds(
        self, rollouts: int, *, prompts: int, tail: bool, batches: int = 1
    ) -> float:
        """Return the seconds of `rollouts` rollouts.

        With `tail` the last one must end, that of as many `batches` together; without
        it, others are in flight while the longest ones end.
        """
        prefill = prompts / self.replicas * self.prompt_seconds
        decode = rollouts * self.mean / self.tokens_per_second
        return prefill + (max(decode, self.longest / batches) if tail else decode)

    def evaluation_seconds(self, config: Config, *, tail: bool = True) -> float:
        """Return the seconds of an evaluation, if nothing else is sampled meanwhile."""
        asked = config.eval
        rollouts = asked.num_prompts * asked.samples_per_prompt
        return self.seconds(rollouts, prompts=asked.num_prompts, tail=tail)


def _train_seconds(
    config: Config, arch: Architecture, chip: Chip, lengths: Lengths, reached: Reached
) -> float:
    """Return the seconds of one optimizer step on the rollouts of these lengths."""
    batch, mesh = config.batch, config.mesh
    packed: Any = dict(
        rollouts=batch.num_prompts * batch.group_size,
        row_tokens=batch.row_tokens,
        row_segments=batch.packed_segments,
    )
    together = batch.rows_per_microbatch
    shards = mesh.data * mesh.fsdp
    return optimizer_step_seconds(
        *(config, arch, chip),
        microbatches=count_microbatches(
            lengths, **packed, rows=together, short_rows=config.short_rows
        ),
        rows=together,
        chips=mesh.num_devices,
        tensor=mesh.tensor,
        attention_share=attention_share(
            lengths, **packed, rows=together, shards=shards
        ),
        reached=reached,
    )


def optimizer_step_seconds(
    config: Config,
    arch: Architecture,
    chip: Chip,
    *,
    microbatches: float,
    rows: int,
    chips: int,
    reached: Reached,
    tensor: int = 1,
    attention_share: float = 1.0,
) -> float:
    """Return the seconds of an optimizer step, with its part of the window's scores.

    Its microbatches have `rows` rows over all chips, charged with their padding.
    Before its first step the learner scores a window with the policy, the reference,
    the teacher and the critic, as far as the objective reads them: a forward pass each,
    which all epochs share.  A critic takes as long as the policy.
    """
    model, needs = config.model, needs_of(config)
    of_params: Any = dict(param_bytes=value_bytes(model.param_dtype))
    common: Any = dict(
        rows=rows,
        row_tokens=config.batch.row_tokens,
        devices=chips,
        tensor=tensor,
        float32_head=model.float32_head,
        compute_bytes=value_bytes(model.compute_dtype),
        head_bytes=head_bytes(config),
        attention_share=attention_share,
    )
    trained: Any = dict(remat=model.remat, head_once=has_head_once(config, arch))
    one = work.microbatch(arch, **trained, **common, **of_params)
    take = functools.partial(rates.learner_seconds, chip, chips=chips, reached=reached)
    step = microbatches * take(one) + take(work.optimizer_update(arch, **of_params))
    scoring = [arch] * (needs.passes + needs.critic)
    if config.teacher.checkpoint:
        scoring.append(teacher_architecture(config.teacher.checkpoint))
    scores = sum(take(work.scoring(each, **common)) for each in scoring)
    scores *= math.ceil(microbatches)  # of whole rows
    return step * (1 + needs.critic) + scores / config.batch.epochs


def pause_seconds(config: Config, arch: Architecture, *, replica_chips: int) -> float:
    """Return the seconds in which sampling pauses while params are replaced."""
    if config.generators.versions != 1:
        return 0.0
    return rates.placing_seconds(
        arch,
        replica_chips=replica_chips,
        hosts=config.generators.processes,
        itemsize=weight_bytes(config, arch),
    )
