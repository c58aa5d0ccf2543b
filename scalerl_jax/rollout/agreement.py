"""Do the sampler and the learner agree, at equal version, before a run is paid for?

Most broken RL runs are a sampler that is not the policy being trained: other pads, an
ignored temperature, a head that was not loaded.  It shows in the log-probabilities.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from scalerl_jax.learner.step import Forward
from scalerl_jax.rollout.batching import TrainSequence, pack
from scalerl_jax.sampler.engine import Engine, Samples
from scalerl_jax.sampler.scheduler import Completion, Request, Scheduler
from scalerl_jax.types import Prompt, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """|behavior - trainer| over sampled tokens, in nats."""

    mean_abs: float
    max_abs: float
    tokens: int


def measure_agreement(
    engine: Engine,
    sampler_params: PyTree,
    forward: Forward,
    learner_params: PyTree,
    *,
    prompts: Sequence[Prompt],
    make_samples: Callable[[Prompt], Samples],
    row_tokens: int,
    rows_per_microbatch: int,
) -> Agreement:
    """Complete the prompts and compare log-probabilities token by token."""
    scheduler = Scheduler(engine)
    for place, prompt in enumerate(prompts):
        scheduler.submit(
            Request(
                request_id=place, tokens=prompt.tokens, samples=make_samples(prompt)
            )
        )
    completions: list[Completion] = []
    while scheduler.busy:
        completions += scheduler.step(sampler_params, version=0)
    batch = pack(
        [_sequence(prompts[each.request_id], each) for each in completions],
        row_tokens=row_tokens,
        rows_per_microbatch=rows_per_microbatch,
        num_microbatches=-(-len(completions) // rows_per_microbatch),
    )
    logprobs = jax.jit(forward.logprobs)
    differences = []
    for index in range(int(batch.num_microbatches)):
        found, _ = logprobs(
            learner_params,
            batch.tokens[index],
            positions=batch.positions[index],
            segment_ids=batch.segment_ids[index],
            targets=batch.targets[index],
        )
        difference = np.abs(np.asarray(found) - batch.behavior_logprobs[index])
        differences.append(difference[np.asarray(batch.mask[index])])
    every = np.concatenate(differences)
    return Agreement(
        mean_abs=float(every.mean()), max_abs=float(every.max()), tokens=len(every)
    )


def _sequence(prompt: Prompt, completion: Completion) -> TrainSequence:
    length = len(completion.tokens)
    return TrainSequence(
        tokens=np.concatenate([prompt.tokens, completion.tokens]),
        prompt_length=len(prompt.tokens),
        weights=completion.mask.astype(np.float32),
        mask=completion.mask,
        behavior_logprobs=completion.logprobs,
        staleness=np.zeros(length, np.int32),
        advantage=0.0,
    )
