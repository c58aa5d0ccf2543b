"""`Rates`: seconds that each part of a run takes on its machines.

They come from closed forms for a TPU topology (`planning.rates`), from a file, or from
measurements of a run.  Scheduling is in `simulate.run`.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.formats.reading import Fields, read_json
from scalerl_jax.machines.chips import Chip
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.planning.forecast import (
    gradients_seconds,
    optimizer_step_seconds,
    pause_seconds,
)
from scalerl_jax.planning.lengths import Lengths, attention_share
from scalerl_jax.planning.memory import read_bytes, weight_bytes
from scalerl_jax.planning.rates import (
    EXPECTED,
    Reached,
    decode_seconds,
    prefill_seconds,
    publish_seconds,
)
from scalerl_jax.simulate.lengths import SimulatedLengths
from scalerl_jax.simulate.scenario import Scenario

# Seconds without a closed form, as seen in runs.
HOSTS_S = {
    "publish_s": 0.1,  # of the learner's programs that cast and offer the params
    "verify_s": 0.5,
    "exchange_s": 0.05,
    "group_s": 0.0041,  # of the controller's CPU: benchmarks/control_path.py
    "assemble_s": 0.3,
    "checkpoint_s": 2.0,  # to copy the state to the host; writing is in the background
}
# In one process groups are not sent.
_ONE_PROCESS_S = {"exchange_s": 0.0, "group_s": 0.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of each part of a run.

    A decode call samples `sampler.tokens_per_call` tokens for each of n sequences.  If
    their contexts have c tokens together, it takes

        seconds = decode_s(n) + decode_context_s * c

    where `decode_s` are pairs (n, seconds), with linear interpolation between them.
    """

    decode_s: tuple[tuple[float, float], ...]
    decode_context_s: float = 0.0  # per token of context and call
    prefill_s: float = 0.0  # per chunk of sampler.prefill_tokens
    train_s: float = 0.0  # per optimizer step, independent of its tokens
    train_token_s: float = 0.0  # per token of prompt or completion
    assemble_s: float = 0.0  # the loop's own work between two steps
    publish_s: float = 0.0  # the learner is busy with a publication
    transfer_s: float = 0.0  # after publish_s, until a replica has the params
    place_s: float = 0.0  # pause of a replica that swaps in new params
    verify_s: float = 0.0  # from the last token of a group to its verdicts
    exchange_s: float = 0.0  # for a message between controller and replica
    group_s: float = 0.0  # the controller's work for a group, one after the other
    checkpoint_s: float = 0.0  # the learner is busy with a checkpoint

    def __post_init__(self) -> None:
        """Check `decode_s`.

        Raises:
            ValueError: `decode_s` is empty, unordered, or 0 for a sequence or more.
        """
        pairs = self.decode_s
        ordered = all(a[0] < b[0] for a, b in zip(pairs, pairs[1:], strict=False))
        if not pairs or pairs[0][0] < 0 or not ordered:
            raise ValueError(
                f"decode_s = {pairs} must be pairs [sequences, seconds] in the order "
                f"of the sequences, such as [[1, 0.1], [256, 0.2]]"
            )
        if not all(seconds for sequences, seconds in pairs if sequences):
            raise ValueError(
                f"decode_s = {pairs} must have seconds above 0, but for 0 sequences"
            )

    def call_seconds(self, slots: int) -> list[float]:
        """Return the seconds of a call with 0 to `slots` sequences, without context."""
        known = np.array(self.decode_s)
        counts = np.arange(slots + 1)
        return np.interp(counts, known[:, 0], known[:, 1]).tolist()


def read_rates(path: str) -> Rates:
    """Read rates from a JSON file, an object with the fields of `Rates`.

    Raises:
        ValueError: the file holds something else.
        OSError: the file cannot be read.
    """
    file = f"--rates={path}"
    try:
        fields = Fields(file, read_json(Path(path)))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    fields.known([field.name for field in dataclasses.fields(Rates)], what="rate")
    decode_s = fields.pairs("decode_s", "[sequences, seconds]")
    seconds = {
        name: fields.number(name, zero=True)
        for name in fields.values
        if name != "decode_s"
    }
    try:
        return Rates(decode_s=decode_s, **seconds)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def closed_rates(
    config: Config,
    arch: Architecture,
    chip: Chip,
    scenario: Scenario,
    lengths: SimulatedLengths,
    *,
    reached: Reached = EXPECTED,
) -> Rates:
    """Return the rates of a policy on the scenario's chips, by closed forms.

    Rows of a batch are assumed full: a token costs its share of a row.
    """
    common: Any = dict(
        chips=scenario.replica_devices,
        **read_bytes(config, arch),
        reached=reached,
    )

    def decode(slots: int, context: float) -> float:
        return decode_seconds(
            *(arch, chip),
            slots=slots,
            mean_context=context,
            steps=scenario.tokens_per_call,
            float32_head=config.model.float32_head,
            **common,
        )

    counts = sorted({1, *range(8, scenario.slots, 8), scenario.slots})
    drawn = _drawn(scenario, lengths)
    # The seconds of layers with windows or chunks rise fast and then level off: a line
    # through those without context and those at the mean of all decode steps.
    mean = drawn.mean_context
    slope = (decode(scenario.slots, mean) - decode(scenario.slots, 0.0)) / mean
    share = _share(config, scenario, drawn)
    training = _training(config, arch, chip, scenario, share=share, reached=reached)
    return Rates(
        decode_s=tuple((count, decode(count, 0.0)) for count in counts),
        decode_context_s=slope / scenario.slots,
        prefill_s=prefill_seconds(
            *(arch, chip),
            tokens=config.sampler.prefill_tokens,
            context=config.sampler.prefill_tokens,
            **common,
        ),
        train_s=training[0],
        train_token_s=training[1],
        transfer_s=publish_seconds(
            arch,
            chip,
            learner_chips=scenario.learner_devices,
            replicas=scenario.replicas,
            replica_chips=scenario.replica_devices,
            itemsize=weight_bytes(config, arch),
        ),
        place_s=pause_seconds(config, arch, replica_chips=scenario.replica_devices),
        **HOSTS_S | ({} if scenario.replicas > 1 else _ONE_PROCESS_S),
    )


def _drawn(scenario: Scenario, lengths: SimulatedLengths) -> Lengths:
    """Return the lengths of the first groups."""
    drawn = lengths.of_block(0, scenario.group_size)
    return Lengths(
        prompt=scenario.prompt_tokens,
        completions=tuple(drawn.ravel().tolist()),
        source="drawn",
    )


def _share(config: Config, scenario: Scenario, drawn: Lengths) -> float:
    """Return the share of full rows that attention computes; one row a learner chip."""
    return attention_share(
        drawn,
        rollouts=scenario.num_prompts * scenario.group_size,
        row_tokens=config.batch.row_tokens,
        row_segments=config.batch.packed_segments,
        rows=scenario.learner_devices,
        shards=scenario.learner_devices,
    )


def _shards(config: Config, scenario: Scenario) -> int:
    """Return the shards of the learner's state.

    They are those of its mesh; if a sweep gives it other devices, all of a slice.
    """
    mesh = config.mesh
    if scenario.learner_devices == mesh.num_devices:
        return mesh.fsdp * mesh.tensor
    return max(1, scenario.learner_devices // (mesh.slices * mesh.context))


def _training(
    config: Config,
    arch: Architecture,
    chip: Chip,
    scenario: Scenario,
    *,
    share: float,
    reached: Reached,
) -> tuple[float, float]:
    """Return seconds per step independent of its tokens, and seconds per token."""
    step = {
        rows: optimizer_step_seconds(
            *(config, arch, chip),
            microbatches=1,
            rows=rows,
            chips=scenario.learner_devices,
            tensor=math.gcd(config.mesh.tensor, scenario.learner_devices),
            attention_share=share,
            reached=reached,
        )
        for rows in (scenario.learner_devices, 2 * scenario.learner_devices)
    }
    one, two = (step[rows] for rows in sorted(step))
    tokens = scenario.learner_devices * config.batch.row_tokens
    shards = _shards(config, scenario)
    between = gradients_seconds(config, arch, chip, shards=shards)
    return max(0.0, 2 * one - two) + between, (two - one) / tokens
