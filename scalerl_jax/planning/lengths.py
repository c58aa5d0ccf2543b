"""Lengths of rollouts: from a run, from a file, or assumed."""

import dataclasses
import functools
import math
import statistics
from pathlib import Path
from typing import Any

from scalerl_jax.batching.packing import first_fit
from scalerl_jax.config import Config
from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.run.directory import METRICS_FILE, ROLLOUTS_FILE

# The assumption: lognormal completions, whose mean is this share of the limit, and
# whose standard deviation this share of the mean; those beyond the limit are cut off.
# 8k of ScaleRL's 14,336 tokens, and a spread as maths rollouts have it.
MEAN_SHARE, SPREAD = 4 / 7, 0.7
# Prompts of maths are much shorter than the limit that drops the longest few.
PROMPT_SHARE = 1 / 8
_POINTS = 512  # quantiles that stand for the assumed distribution
_STEPS = 20  # of a run, the newest: lengths drift
_FEW = 32  # rollouts whose spread says too little


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of rollouts, in tokens; each completion is equally likely."""

    prompt: float  # mean
    completions: tuple[int, ...]
    source: str  # for people

    @functools.cached_property
    def mean(self) -> float:
        """Tokens of a completion, on average."""
        return statistics.fmean(self.completions)

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max(self.completions)

    @functools.cached_property
    def mean_context(self) -> float:
        """Tokens that a sequence holds while it is decoded, over its decode steps.

            prompt + E[L^2] / (2 E[L])

        A long completion is there for more steps than a short one.
        """
        squares = statistics.fmean(length**2 for length in self.completions)
        return self.prompt + squares / (2 * self.mean)

    def drawn(self, count: int) -> tuple[int, ...]:
        """Return `count` completions that are spread as these are."""
        known, last = sorted(self.completions), len(self.completions)
        return tuple(known[int((n + 0.5) / count * last)] for n in range(count))


def assumed_lengths(config: Config) -> Lengths:
    """Return lengths that a config's limits let expect; see MEAN_SHARE and SPREAD."""
    limit = config.sampler.max_completion_tokens
    mean = MEAN_SHARE * limit
    sigma = math.sqrt(math.log(1 + SPREAD**2))
    middle = math.log(mean) - sigma**2 / 2
    normal = statistics.NormalDist(middle, sigma)
    points = (normal.inv_cdf((n + 0.5) / _POINTS) for n in range(_POINTS))
    return Lengths(
        prompt=PROMPT_SHARE * config.sampler.max_prompt_tokens,
        completions=tuple(min(limit, max(1, round(math.exp(x)))) for x in points),
        source=f"assumed: lognormal completions of mean {mean:,.0f} tokens and a "
        f"standard deviation of {SPREAD:.0%} of it, cut off at {limit:,}; prompts of "
        f"{PROMPT_SHARE * config.sampler.max_prompt_tokens:,.0f}",
    )


def read_lengths(path: str, config: Config) -> Lengths:
    """Return the lengths that a run has seen, or that a file lists.

    Of a run it is the mean of the last steps in metrics.jsonl, spread as the rollouts
    in rollouts.jsonl are, or as assumed if these are few.

    Args:
        path: the directory of a run; or a text file with the tokens of a completion
            on each line.
        config: for the prompts' length, and the limit that lengths are cut off at.

    Raises:
        ValueError: there is none.
    """
    place, assumed = Path(path), assumed_lengths(config)
    try:
        if place.is_dir():
            steps = _lines(place / METRICS_FILE)[-_STEPS:]
            mean = statistics.fmean(each["completion/mean_tokens"] for each in steps)
            logged = place / ROLLOUTS_FILE
            rollouts = _lines(logged) if logged.exists() else []
            seen = [each["tokens"] for each in rollouts]
            spread = seen if len(seen) >= _FEW else assumed.completions
            scale = mean / statistics.fmean(spread)
            found = [max(1, round(length * scale)) for length in spread]
            source = f"{place}: {mean:,.0f} tokens on average, last {len(steps)} steps"
        else:
            found = [int(each) for each in _lines(place)]
            source = f"{len(found):,} completions of {place}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--lengths={path}: {str(error) or type(error).__name__}; give the "
            f"directory of a run, or a file with the tokens of one completion on each "
            f"line"
        ) from error
    if not found or min(found) < 1:
        raise ValueError(f"--lengths={path}: a completion has a token at least")
    limit = config.sampler.max_completion_tokens
    return dataclasses.replace(
        assumed,
        completions=tuple(min(limit, length) for length in found),
        source=source,
    )


def _lines(path: Path) -> list[Any]:
    return [parse_json(line) for line in read_lines(path) if line.strip()]


@functools.lru_cache(maxsize=64)
def count_rows(
    lengths: Lengths, *, rollouts: int, row_tokens: int, packing: bool
) -> int:
    """Return the rows that so many rollouts fill, laid out as the learner does."""
    # The last token of a rollout predicts nothing.
    used = [
        min(row_tokens, max(1, round(lengths.prompt) + length - 1))
        for length in lengths.drawn(rollouts)
    ]
    return len(first_fit(used, row_tokens, packing=packing))
