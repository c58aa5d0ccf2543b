"""Prompts in, completions out: a scheduler run until nothing is left."""

from collections.abc import Callable, Iterator, Sequence

from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.requests import Completion, Listener, Request, Samples
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import Prompt, PyTree


class Abandoned(Exception):  # noqa: N818  an end, not an error
    """Whoever wanted the completions has said to stop."""


def never() -> bool:
    """Let everything be completed."""
    return False


def complete(
    engine: Engine,
    params: PyTree,
    prompts: Sequence[Prompt],
    *,
    make_samples: Callable[[Prompt], Samples],
    sampling: Sampling,
    version: int,
    stopped: Callable[[], bool] = never,
) -> list[Completion]:
    """Every sample of every prompt, as `completing` gives them."""
    calls = completing(
        engine,
        params,
        prompts,
        make_samples=make_samples,
        sampling=sampling,
        version=version,
        stopped=stopped,
    )
    return [each for finished in calls for each in finished]


def completing(
    engine: Engine,
    params: PyTree,
    prompts: Sequence[Prompt],
    *,
    make_samples: Callable[[Prompt], Samples],
    sampling: Sampling,
    version: int,
    listener: Listener | None = None,
    stopped: Callable[[], bool] = never,
) -> Iterator[list[Completion]]:
    """What each call finishes, until it is every sample of every prompt.

    They have slots of their own and one version.  `request_id` is the place of the
    prompt, which is read when there is a slot for it.

    Raises:
        Abandoned: `stopped`, asked before each call, said so.
        FloatingPointError: the logits of a sample were not finite.
    """
    scheduler = Scheduler(engine)
    waiting = enumerate(prompts)
    while True:
        while scheduler.free_slots > 0 and (entry := next(waiting, None)):
            place, prompt = entry
            scheduler.submit(
                Request(
                    request_id=place,
                    tokens=prompt.tokens,
                    samples=make_samples(prompt),
                    sampling=sampling,
                    listener=listener,
                )
            )
        if not scheduler.busy:
            return
        if stopped():
            raise Abandoned
        finished = scheduler.step(params, version=version)
        for each in finished:
            if each.failure:
                raise FloatingPointError(
                    f"sample {each.sample} of prompt {prompts[each.request_id].text!r} "
                    f"failed: {each.failure}"
                )
        yield finished
