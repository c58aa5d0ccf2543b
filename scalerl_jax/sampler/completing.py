"""Prompts in, completions out: a scheduler run until nothing is left."""

from collections.abc import Callable, Sequence

from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.requests import Completion, Request, Samples
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import Prompt, PyTree


def complete(
    engine: Engine,
    params: PyTree,
    prompts: Sequence[Prompt],
    *,
    make_samples: Callable[[Prompt], Samples],
    sampling: Sampling,
    version: int,
) -> list[Completion]:
    """Every sample of every prompt, in slots of their own, at one version.

    `request_id` is the place of the prompt; completions come as they finish.

    Raises:
        FloatingPointError: the logits of a sample were not finite.
    """
    scheduler = Scheduler(engine)
    for place, prompt in enumerate(prompts):
        scheduler.submit(
            Request(
                request_id=place,
                tokens=prompt.tokens,
                samples=make_samples(prompt),
                sampling=sampling,
            )
        )
    completions: list[Completion] = []
    while scheduler.busy:
        for each in scheduler.step(params, version=version):
            completions.append(each)
            if each.failure:
                raise FloatingPointError(
                    f"sample {each.sample} of prompt {prompts[each.request_id].text!r} "
                    f"failed: {each.failure}"
                )
    return completions
