"""Metrics of the groups of a batch: rewards, verdicts, lengths and staleness."""

import dataclasses
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from scalerl_jax.environments.verdict import figures_of_parts, lacks_verdict
from scalerl_jax.types import Group, Rollout, count_turns, rollouts_of

# Statuses of rollouts that were judged neither right nor wrong.
_NO_VERDICTS = (
    "no_answer",
    "unparsable",
    "too_costly",
    "verifier_timeout",
    "verifier_error",
    "bad_reward",
    "bad_observation",
    "no_end",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Columns:
    """Facts of B rollouts and of their N groups, as arrays."""

    lengths: Int[np.ndarray, " B"]  # tokens
    rewards: Float[np.ndarray, " B"]
    judged: Bool[np.ndarray, " B"]
    passed: Bool[np.ndarray, " B"]
    first: Int[np.ndarray, " N"]  # rollout of each group
    oldest: Int[np.ndarray, " N"]  # policy version

    @classmethod
    def of(cls, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> "_Columns":
        sizes = [0, *(len(group.rollouts) for group in groups)]
        tokens = _column(rollouts, "completion_tokens", object)
        return cls(
            lengths=np.fromiter(map(len, tokens), np.int64, len(tokens)),
            rewards=_column(rollouts, "reward", np.float64),
            judged=_column(rollouts, "judged", np.bool_),
            passed=_column(rollouts, "passed", np.bool_),
            first=np.cumsum(sizes[:-1]),
            oldest=_column(groups, "oldest_version", np.int64),
        )

    @property
    def pass_rates(self) -> Float[np.ndarray, " N"]:
        """Share of each group's judged rollouts that passed; NaN without any."""
        judged = np.add.reduceat(self.judged, self.first, dtype=np.float64)
        passed = np.add.reduceat(self.passed, self.first, dtype=np.float64)
        return np.divide(
            passed, judged, out=np.full(len(judged), np.nan), where=judged > 0
        )

    @property
    def with_variance(self) -> Bool[np.ndarray, " N"]:
        """Mark the groups whose `Group.has_reward_variance` is True."""
        rewards = self.rewards.astype(np.float32)
        least = np.where(self.judged, rewards, np.inf)
        most = np.where(self.judged, rewards, -np.inf)
        return np.minimum.reduceat(least, self.first) < np.maximum.reduceat(
            most, self.first
        )


def _column(records: Sequence[Any], name: str, dtype: Any) -> np.ndarray:
    values = map(operator.attrgetter(name), records)
    return np.fromiter(values, dtype, len(records))


def group_histograms(
    groups: Sequence[Group], *, learner_version: int
) -> dict[str, np.ndarray]:
    """Return per-rollout or per-token values of a batch for histograms, by name."""
    columns = _Columns.of(groups, rollouts_of(groups))
    rates = columns.pass_rates
    return {
        "completion/tokens": columns.lengths,
        "reward": columns.rewards[columns.judged],
        "staleness": learner_version - columns.oldest,
        "pass_rate/of_prompts": rates[~np.isnan(rates)],
    }


def group_metrics(groups: Sequence[Group], *, learner_version: int) -> dict[str, float]:
    """Return means of rewards, lengths (tokens) and staleness, by metric name."""
    rollouts = rollouts_of(groups)
    columns = _Columns.of(groups, rollouts)
    lengths, oldest = columns.lengths, columns.oldest
    finished = _column(groups, "finished_version", np.int64)
    cut_off = _column(rollouts, "cut_off", np.bool_)
    interrupted = _column(rollouts, "interrupted", np.bool_)
    metrics = {
        "reward/mean": _mean(columns.rewards[columns.judged]),
        "pass_rate/mean": _mean_rate(columns.pass_rates),
        "group/zero_variance_share": float((~columns.with_variance).mean()),
        "completion/mean_tokens": float(lengths.mean()),
        "completion/max_tokens": int(lengths.max()),
        "completion/cut_off_share": float(cut_off.mean()),
        "completion/interrupted_share": float(interrupted.mean()),
        "staleness/mean": float((learner_version - oldest).mean()),
        "staleness/max": int((learner_version - oldest).max()),
        # Staleness in two parts: until the last token was sampled, and after it.
        "staleness/in_flight_mean": float((finished - oldest).mean()),
        "staleness/in_flight_max": int((finished - oldest).max()),
        "staleness/queued_mean": float((learner_version - finished).mean()),
        "staleness/queued_max": int((learner_version - finished).max()),
    }
    metrics |= _of_verdicts(rollouts)
    if any(map(operator.attrgetter("turns"), rollouts)):
        sampled = sum(int(rollout.completion_mask.sum()) for rollout in rollouts)
        turns = np.array([count_turns(rollout.turns) for rollout in rollouts])
        metrics["episode/mean_turns"] = _mean(turns)
        metrics["episode/sampled_share"] = sampled / int(lengths.sum())
    rates = columns.pass_rates
    by_task: dict[str, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        by_task[group.prompt.task].append(number)
    for task in sorted(by_task):
        metrics[f"pass_rate/{task}"] = _mean_rate(rates[by_task[task]])
    return metrics


def _of_verdicts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return shares of rollouts by how they were judged, and parts of the reward."""
    kinds = Counter(map(operator.attrgetter("status", "judged"), rollouts))
    statuses, unjudged = Counter(), 0
    for (status, judged), count in kinds.items():
        statuses[status] += count
        unjudged += count * lacks_verdict(status, judged=judged)
    metrics = {
        f"verifier/{status.removeprefix('verifier_')}_share": statuses[status]
        / len(rollouts)
        for status in _NO_VERDICTS
    }
    metrics["verifier/unjudged_share"] = unjudged / len(rollouts)
    parts = [*map(operator.attrgetter("parts"), rollouts)]
    return metrics | (figures_of_parts(parts) if any(parts) else {})


def _mean_rate(rates: Float[np.ndarray, " n"]) -> float:
    """Mean over the groups with a verdict."""
    return _mean(rates[~np.isnan(rates)])


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan
