"""Rates of a TPU topology, from the closed forms of `balance.rates`."""

from scalerl_jax.balance.chips import Chip
from scalerl_jax.balance.forecast import pause_seconds
from scalerl_jax.balance.rates import (
    EXPECTED,
    Reached,
    decode_seconds,
    prefill_seconds,
    publish_seconds,
    train_seconds,
)
from scalerl_jax.config import Config
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.simulate.rates import Rates
from scalerl_jax.simulate.scenario import Scenario

_SWAP_S = 0.1  # of the learner's programs that cast and offer the params
_VERIFY_S, _EXCHANGE_S, _ASSEMBLE_S = 0.5, 0.05, 0.3  # of hosts
_CHECKPOINT_S = 2.0  # to copy the state to the host; it is written beside the loop


def closed_rates(
    config: Config,
    arch: Architecture,
    chip: Chip,
    scenario: Scenario,
    *,
    reached: Reached = EXPECTED,
) -> Rates:
    """Return the rates of a policy on `scenario`'s chips of this kind.

    Rows are taken to be full: a token of a batch costs its part of a row.
    """
    itemsize = 2 if config.model.sampler_dtype == "bfloat16" else 4

    def decode(slots: int, context: float) -> float:
        return decode_seconds(
            arch,
            chip,
            slots=slots,
            mean_context=context,
            chips=scenario.replica_chips,
            steps=scenario.tokens_per_call,
            itemsize=itemsize,
            float32_head=config.model.float32_head,
            reached=reached,
        )

    counts = sorted({1, *range(8, scenario.slots, 8), scenario.slots})
    most = config.sampler.max_prompt_tokens + config.sampler.max_completion_tokens
    slope = decode(scenario.slots, most) - decode(scenario.slots, most / 2)
    train_s, train_token_s = _training(config, arch, chip, scenario, reached)
    return Rates(
        decode_s=tuple((count, decode(count, 0.0)) for count in counts),
        decode_context_s=slope / (scenario.slots * most / 2),
        prefill_s=prefill_seconds(
            arch,
            chip,
            tokens=config.sampler.prefill_tokens,
            context=config.sampler.prefill_tokens,
            chips=scenario.replica_chips,
            itemsize=itemsize,
            reached=reached,
        ),
        train_s=train_s,
        train_token_s=train_token_s,
        assemble_s=_ASSEMBLE_S,
        publish_s=_SWAP_S,
        transfer_s=publish_seconds(
            arch,
            chip,
            learner_chips=scenario.learner_chips,
            replicas=scenario.replicas,
            replica_chips=scenario.replica_chips,
            itemsize=itemsize,
        ),
        place_s=pause_seconds(config, arch, replica_chips=scenario.replica_chips),
        verify_s=_VERIFY_S,
        exchange_s=_EXCHANGE_S if scenario.replicas > 1 else 0.0,
        checkpoint_s=_CHECKPOINT_S,
    )


def _training(
    config: Config, arch: Architecture, chip: Chip, scenario: Scenario, reached: Reached
) -> tuple[float, float]:
    """Return the seconds of a step beside its tokens, and those of a token."""
    row = config.batch.row_tokens
    step = {
        rows: train_seconds(
            arch,
            chip,
            microbatches=1,
            rows=rows,
            row_tokens=row,
            chips=scenario.learner_chips,
            remat=config.model.remat,
            float32_head=config.model.float32_head,
            param_bytes=4 if config.model.param_dtype == "float32" else 2,
            compute_bytes=2 if config.model.compute_dtype == "bfloat16" else 4,
            reached=reached,
        )
        for rows in (scenario.learner_chips, 2 * scenario.learner_chips)
    }
    one, two = (step[rows] for rows in sorted(step))
    tokens = scenario.learner_chips * row
    return max(0.0, 2 * one - two), (two - one) / tokens
