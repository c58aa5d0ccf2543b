"""Completions at one policy version, for evaluations and for the mismatch.

They are sampled in their own slots, so that all tokens are of one version, and with
pages of training's KV cache.  An evaluation judges all held-out prompts.  A probe
always completes the same few of them, for comparing the learner's log-probabilities
with the sampler's.

The file is above 400 lines: an evaluation's metrics are defined beside its sampling.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.verdict import (
    Status,
    Verdict,
    figures_of_parts,
    lacks_verdict,
)
from scalerl_jax.generation.episodes import Episode, Episodes
from scalerl_jax.generation.judging import JudgedSample, Judging
from scalerl_jax.generation.turns import Turns
from scalerl_jax.run.progress import Progress
from scalerl_jax.sampler.protocol import Driver, Sampler
from scalerl_jax.sampler.requests import Completion, Listener, Request, Samples
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.types import Prompt, PyTree, Turn, count_turns

_POLL_S = 1.0  # between two checks of `stopped`


class Abandoned(Exception):  # an end, not an error
    """The caller's `stopped` has ended the sampling."""


def never() -> bool:
    """Return False: the default `stopped`, which never ends the sampling."""
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completing:
    """A fixed set of prompts that is completed repeatedly, each time at one version."""

    make_sampler: Callable[[], Sampler]  # each with its own slots
    prompts: Sequence[Prompt]
    sampling: Sampling
    make_samples: Callable[[Prompt], Samples]

    def completed(
        self,
        params: PyTree,
        *,
        version: int,
        places: Sequence[int] | None = None,
        listener: Listener | None = None,
        stopped: Callable[[], bool] = never,
    ) -> Iterator[list[Completion]]:
        """Complete every sample of the prompts; yield the completions of each step.

        `places` are indices of the prompts to complete; None: all.  A completion's
        `request_id` is the index of its prompt, which is read when a slot is free.

        Raises:
            Abandoned: `stopped`, called before each step, returned True.
            FloatingPointError: the logits of a sample were not finite.
        """
        requests = self.requests(places, listener)
        with self.driver(params, version=version) as driver:
            while True:
                driver.fill(lambda: next(requests, None))
                if not driver.sampler.busy:
                    return
                if stopped():
                    raise Abandoned
                yield self.step(driver)

    @contextlib.contextmanager
    def driver(self, params: PyTree, *, version: int) -> Iterator[Driver]:
        """Drive a new sampler with these params, which is closed in the end."""
        driver = Driver(self.make_sampler())
        try:
            driver.sampler.load(params, version)
            yield driver
        finally:
            driver.sampler.close()

    def requests(
        self, places: Sequence[int] | None, listener: Listener | None
    ) -> Iterator[Request]:
        """Yield the request of each prompt, or of the prompts `places`."""
        for place in range(len(self.prompts)) if places is None else places:
            yield self._request(place, listener)

    def step(self, driver: Driver) -> list[Completion]:
        """Make a step; return the completions that it has finished.

        Raises:
            FloatingPointError: the logits of a sample were not finite.
        """
        ended = driver.step()
        for each in ended:
            if each.failure:
                raise FloatingPointError(
                    f"sample {each.sample} of prompt "
                    f"{self.prompts[each.request_id].text!r} failed: {each.failure}"
                )
        return ended

    def _request(self, place: int, listener: Listener | None) -> Request:
        prompt = self.prompts[place]
        return Request(
            request_id=place,
            tokens=prompt.tokens,
            samples=self.make_samples(prompt),
            sampling=self.sampling,
            listener=listener,
        )


Probed = tuple[Prompt, Completion]


class Probe(Completing):
    """A few prompts with whose completions learner and sampler are compared."""

    def __call__(
        self, params: PyTree, *, stopped: Callable[[], bool] = never
    ) -> list[Probed]:
        """Return every completion with its prompt, in the order in which they end.

        Raises:
            Abandoned: `stopped` returned True.
        """
        steps = self.completed(params, version=0, stopped=stopped)
        return [
            (self.prompts[each.request_id], each) for ended in steps for each in ended
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of one evaluation, and a few of its rollouts to read.

    A sample without a verdict is unjudged and counts in no pass rate: a prompt's pass
    rate is over its judged samples, and means are over prompts with such samples.
    """

    pass_rate: float  # NaN if nothing was judged
    pass_rate_se: float  # standard error over prompts; NaN for fewer than two
    reward_mean: float  # over prompts, of the mean over each one's judged samples
    num_prompts: int  # with a judged sample
    samples_per_prompt: int
    prompt_pass_rates: list[float]  # in the prompts' fixed order; NaN: unjudged
    cut_off_share: float
    interrupted_share: float
    no_answer_share: float  # share of all samples
    unjudged_share: float  # share of all samples: those without a verdict
    too_costly_share: float  # share of all samples, unjudged or wrong
    unjudged_prompts: int  # without a judged sample
    mean_completion_tokens: float
    pass_rate_by_task: dict[str, float]
    rewards: dict[str, float]  # metrics of the reward's parts, by name
    mean_turns: float | None  # None: each completion is one turn
    rollouts: tuple[dict[str, Any], ...]
    details: tuple[str, ...]  # why verifiers failed, prompt by prompt

    def figures(self) -> dict[str, Any]:
        """Return the metrics by their names in evals.jsonl."""
        found = dict(vars(self))
        by_task = found.pop("pass_rate_by_task")
        parts = found.pop("rewards")
        del found["rollouts"], found["details"]
        if self.mean_turns is None:
            del found["mean_turns"]
        return (
            found
            | parts
            | {f"pass_rate/{task}": rate for task, rate in by_task.items()}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedPrompt:
    """A prompt with its completions and their verdicts, sample by sample."""

    place: int  # index among the evaluator's prompts
    prompt: Prompt
    completions: tuple[Completion, ...]
    turns: tuple[tuple[Turn, ...], ...]  # of each completion, as in `types.Rollout`
    answers: tuple[str | None, ...]  # as the verifier got them
    verdicts: tuple[Verdict, ...]
    detail: str  # why some have no verdict; empty if all have one
    outcomes: Sequence[JudgedSample]  # as training counts the same completions

    @property
    def statuses(self) -> tuple[Status, ...]:
        """Return the status of each verdict."""
        return tuple(verdict.status for verdict in self.verdicts)

    @property
    def passed(self) -> list[bool]:
        """Return for each sample whether it has passed."""
        return [each.passed for each in self.outcomes]

    @property
    def judged(self) -> list[bool]:
        """Return for each sample whether it counts in the pass rate."""
        return [each.judged for each in self.outcomes]

    @property
    def pass_rate(self) -> float:
        """Return the share of the judged samples that have passed; NaN for none."""
        judged = sum(self.judged)
        return sum(self.passed) / judged if judged else math.nan


def standard_error(values: Float[np.ndarray, " N"]) -> float:
    """Return the standard error of the mean over prompts; NaN for fewer than two.

        std(values, ddof = 1) / sqrt(N)

    `values` has one pass rate per prompt.  The error covers both the choice of prompts,
    seen as drawn from many, and the randomness of their samples.
    """
    if len(values) < 2:
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator(Completing):
    """The fixed prompts, and everything needed to sample and judge them."""

    samples_per_prompt: int
    verifier: VerifierPool
    judging: Judging
    logged_rollouts: int
    turns: Turns | None = None  # None without an environment
    progress: Progress = dataclasses.field(default_factory=Progress)

    def __call__(
        self,
        params: PyTree,
        *,
        policy_version: int,
        stopped: Callable[[], bool] = never,
    ) -> Evaluation:
        """Sample every prompt with these params, judge, and return the evaluation.

        Raises:
            Abandoned: `stopped` returned True.
        """
        text, total = f"evaluation at step {policy_version}: prompt", len(self.prompts)
        groups: list[JudgedPrompt] = []
        with self.progress.bar(text, total=total) as bar:
            for judged in self.steps(
                params, policy_version=policy_version, stopped=stopped
            ):
                for group in judged:
                    groups.append(group)
                    self.progress.advance(bar)
        return self.summary(groups, policy_version=policy_version)

    def summary(
        self, groups: Iterable[JudgedPrompt], *, policy_version: int
    ) -> Evaluation:
        """Return the evaluation of judged prompts."""
        return summarize(
            groups,
            policy_version=policy_version,
            judging=self.judging,
            samples_per_prompt=self.samples_per_prompt,
            logged_rollouts=self.logged_rollouts,
        )

    def steps(
        self,
        params: PyTree,
        *,
        policy_version: int,
        places: Sequence[int] | None = None,
        listener: Listener | None = None,
        stopped: Callable[[], bool] = never,
        wait_s: Callable[[], float] = lambda: _POLL_S,
    ) -> Iterator[list[JudgedPrompt]]:
        """Yield the newly judged prompts after each sampler step, then each wait.

        Prompts are completed with these params, and judged while the sampler works, in
        the order of their verdicts.  `places` are indices of the prompts to sample;
        None: all.  `listener` gets tokens when they are sampled.  `wait_s` gives
        the longest wait for a verdict while there is nothing to sample.
        """
        episodes = Episodes(self.verifier, self.judging.answer, self.turns)

        def begun() -> Iterator[Episode]:
            for request in self.requests(places, listener):
                place = request.request_id
                prompt, count = self.prompts[place], self.samples_per_prompt
                episode = episodes.begin(place, prompt, count)
                episode.request = request
                yield episode

        prompts = begun()
        with self.driver(params, version=policy_version) as driver:
            while True:
                episodes.fill(driver.sampler, lambda: next(prompts, None))
                if not (driver.sampler.busy or episodes.open):
                    return
                if stopped():
                    for episode in list(episodes.open.values()):
                        episodes.drop(episode)
                    raise Abandoned
                if driver.sampler.busy:
                    for each in self.step(driver):
                        episodes.add(each, policy_version)
                else:
                    episodes.wait(wait_s())
                yield list(map(self._judged, episodes.judged(driver.sampler)))

    def _judged(self, episode: Episode) -> JudgedPrompt:
        return JudgedPrompt(
            place=episode.key,
            prompt=episode.given,
            completions=episode.in_order,
            turns=episode.turns or ((),) * episode.num_samples,
            answers=episode.answers,
            verdicts=episode.verdicts,
            detail=episode.detail,
            outcomes=self.judging.outcomes(episode.in_order, episode.verdicts),
        )


def summarize(
    groups: Iterable[JudgedPrompt],
    *,
    policy_version: int,
    judging: Judging,
    samples_per_prompt: int,
    logged_rollouts: int,
) -> Evaluation:
    """Return the evaluation of judged prompts, which may be in any order."""
    groups = sorted(groups, key=lambda group: group.place)
    by_prompt = np.array([group.pass_rate for group in groups])
    tasks = np.array([group.prompt.task for group in groups])
    known = ~np.isnan(by_prompt)
    num_known = int(known.sum())
    everything = [each for group in groups for each in group.completions]
    statuses = [status for group in groups for status in group.statuses]
    judged = [each for group in groups for each in group.judged]
    unjudged = [
        lacks_verdict(status, judged=each)
        for status, each in zip(statuses, judged, strict=True)
    ]
    rewards = [
        np.mean([each.reward for each in group.outcomes if each.judged])
        for group in groups
        if any(group.judged)
    ]
    parts = [verdict.parts for group in groups for verdict in group.verdicts]
    turns = [each for group in groups for each in group.turns]
    return Evaluation(
        mean_turns=float(np.mean(list(map(count_turns, turns))))
        if any(turns)
        else None,
        reward_mean=float(np.mean(rewards)) if rewards else math.nan,
        rewards=figures_of_parts(parts),
        pass_rate=float(by_prompt[known].mean()) if num_known else math.nan,
        pass_rate_se=standard_error(by_prompt[known]),
        pass_rate_by_task={
            str(task): float(by_prompt[known & (tasks == task)].mean())
            for task in np.unique(tasks[known])
        },
        prompt_pass_rates=by_prompt.tolist(),
        cut_off_share=float(np.mean([each.cut_off for each in everything])),
        interrupted_share=float(np.mean([each.interrupted for each in everything])),
        no_answer_share=float(np.mean([each == "no_answer" for each in statuses])),
        unjudged_share=float(np.mean(unjudged)),
        too_costly_share=float(np.mean([each == "too_costly" for each in statuses])),
        unjudged_prompts=len(groups) - num_known,
        mean_completion_tokens=float(
            np.mean([len(each.tokens) for each in everything])
        ),
        num_prompts=num_known,
        samples_per_prompt=samples_per_prompt,
        rollouts=tuple(_readable(groups, policy_version, judging, logged_rollouts)),
        details=tuple(group.detail for group in groups if group.detail),
    )


def reward_of(verdict: Verdict) -> dict[str, Any]:
    """Return a sample's reward and its parts, if they are a user's functions'."""
    if verdict.reward is None and not verdict.parts:
        return {}
    return {"reward": verdict.reward, "reward_parts": dict(verdict.parts)}


def _why(verdict: Verdict) -> dict[str, str]:
    """Return the reason of a verdict, if it has one: the first line of an error."""
    return {"detail": verdict.detail} if verdict.detail else {}


def prompt_text(prompt: Prompt, turns: Sequence[Turn], tokenizer: Tokenizer) -> str:
    """Return the text before a completion."""
    if turns and not turns[0].sampled:  # it begins with an environment's opening
        return tokenizer.decode_all(prompt.tokens.tolist())
    return prompt.text


def turns_of(
    turns: Sequence[Turn], tokenizer: Tokenizer, tokens: list[int]
) -> dict[str, Any]:
    """Return the end of each turn in a completion's text, and who wrote it."""
    if not turns:
        return {}
    texts = tokenizer.written.texts(tokens)
    return {
        "turns": [
            {
                "end": sum(map(len, texts[: turn.end])),
                "sampled": turn.sampled,
                **({} if turn.reward is None else {"reward": turn.reward}),
            }
            for turn in turns
        ]
    }


def _readable(
    groups: Sequence[JudgedPrompt], policy_version: int, judging: Judging, most: int
) -> list[dict[str, Any]]:
    """Return the first sample of prompts spread evenly over the set."""
    count = min(most, len(groups))
    places = np.linspace(0, len(groups) - 1, count).astype(int).tolist()
    rows = []
    for group in (groups[place] for place in places):
        completion = group.completions[0]
        tokens = completion.tokens.tolist()
        rows.append(
            {
                "policy_version": policy_version,
                "task": group.prompt.task,
                "prompt": prompt_text(group.prompt, group.turns[0], judging.tokenizer),
                "completion": judging.tokenizer.decode_all(tokens),
                "answer_start": judging.tokenizer.answer_start(
                    tokens, answer_after=judging.answer_after
                ),
                **turns_of(group.turns[0], judging.tokenizer, tokens),
                "reference": group.prompt.reference.get("answer"),
                "status": group.statuses[0],
                **reward_of(group.verdicts[0]),
                **_why(group.verdicts[0]),
                "tokens": len(tokens),
                "interrupted": completion.interrupted,
                "cut_off": completion.cut_off,
            }
        )
    return rows
