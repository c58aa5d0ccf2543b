"""One evaluation: every held-out prompt sampled and judged at one version.

It runs in slots of its own, while the training worker stands still, so that no
token of it has another version and none of its time is charged to training.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.rewards.verifier import VerifierPool, extract_answer
from scalerl_jax.sampler.completing import complete
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.requests import Completion, Samples
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.types import Prompt, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The figures of one evaluation, and a few of its rollouts to read."""

    pass_rate: float
    pass_rate_se: float  # standard error over prompts
    pass_rate_by_task: dict[str, float]
    prompt_pass_rates: list[float]  # in the prompts' fixed order
    cut_off_share: float
    interrupted_share: float
    unjudged_share: float  # the verifier failed; they count as not passed
    mean_completion_tokens: float
    num_prompts: int
    samples_per_prompt: int
    rollouts: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator:
    """The fixed prompts, and everything needed to sample and judge them."""

    engine: Engine
    prompts: Sequence[Prompt]
    samples_per_prompt: int
    sampling: Sampling
    make_samples: Callable[[Prompt], Samples]
    verifier: VerifierPool
    tokenizer: Tokenizer
    answer_after: str
    logged_rollouts: int
    timeout_s: float

    def __call__(self, params: PyTree, *, policy_version: int) -> Evaluation:
        """Sample every prompt with these params, judge, and sum up."""
        completions = self._sample(params, policy_version)
        statuses = self._judge(completions)
        passed = np.array(
            [
                [status == "correct" for status in statuses[place]]
                for place in range(len(self.prompts))
            ]
        )
        by_prompt = passed.mean(axis=1)
        tasks = np.array([prompt.task for prompt in self.prompts])
        everything = [each for group in completions.values() for each in group.values()]
        spread = by_prompt.std(ddof=1) if len(by_prompt) > 1 else 0.0
        return Evaluation(
            pass_rate=float(passed.mean()),
            pass_rate_se=float(spread / np.sqrt(len(by_prompt))),
            pass_rate_by_task={
                str(task): float(by_prompt[tasks == task].mean())
                for task in np.unique(tasks)
            },
            prompt_pass_rates=by_prompt.tolist(),
            cut_off_share=float(np.mean([each.cut_off for each in everything])),
            interrupted_share=float(np.mean([each.interrupted for each in everything])),
            unjudged_share=float(
                np.mean(
                    [
                        status.startswith("verifier_")
                        for group in statuses.values()
                        for status in group
                    ]
                )
            ),
            mean_completion_tokens=float(
                np.mean([len(each.tokens) for each in everything])
            ),
            num_prompts=len(self.prompts),
            samples_per_prompt=self.samples_per_prompt,
            rollouts=tuple(self._readable(completions, statuses, policy_version)),
        )

    def _sample(
        self, params: PyTree, policy_version: int
    ) -> dict[int, dict[int, Completion]]:
        completions: dict[int, dict[int, Completion]] = {}
        for each in complete(
            self.engine,
            params,
            self.prompts,
            make_samples=self.make_samples,
            sampling=self.sampling,
            version=policy_version,
        ):
            completions.setdefault(each.request_id, {})[each.sample] = each
        return completions

    def _judge(
        self, completions: dict[int, dict[int, Completion]]
    ) -> dict[int, Sequence[str]]:
        for place, prompt in enumerate(self.prompts):
            answers = [
                self._answer(completions[place][sample])
                for sample in range(self.samples_per_prompt)
            ]
            self.verifier.submit(place, prompt.task, answers, prompt.reference)
        statuses: dict[int, Sequence[str]] = {}
        while len(statuses) < len(self.prompts):
            self.verifier.wait(self.timeout_s)
            for verdicts in self.verifier.poll():
                statuses[verdicts.key] = verdicts.statuses
        return statuses

    def _answer(self, completion: Completion) -> str | None:
        text = self.tokenizer.decode(completion.tokens.tolist())
        return extract_answer(text, answer_after=self.answer_after)

    def _readable(
        self,
        completions: dict[int, dict[int, Completion]],
        statuses: dict[int, Sequence[str]],
        policy_version: int,
    ) -> list[dict[str, Any]]:
        """The first sample of prompts spread evenly over the set."""
        count = min(self.logged_rollouts, len(self.prompts))
        places = np.linspace(0, len(self.prompts) - 1, count).astype(int).tolist()
        rows = []
        for place in places:
            prompt, completion = self.prompts[place], completions[place][0]
            rows.append(
                {
                    "policy_version": policy_version,
                    "task": prompt.task,
                    "prompt": prompt.text,
                    "completion": self.tokenizer.decode_all(completion.tokens.tolist()),
                    "reference": prompt.reference.get("answer"),
                    "status": statuses[place][0],
                    "tokens": len(completion.tokens),
                    "interrupted": completion.interrupted,
                    "cut_off": completion.cut_off,
                }
            )
        return rows
