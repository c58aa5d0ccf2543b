"""`Lengths` of rollouts, read from a run or a file, or assumed."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.batching.packing import first_fit, shorten_last
from scalerl_jax.config import Config
from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.model.attention import SPLASH_BLOCK
from scalerl_jax.parallel.mesh import largest_divisor
from scalerl_jax.run.directory import METRICS_FILE, ROLLOUTS_FILE

# Assumed completions are lognormal: MEAN_SHARE is their mean over the limit, SPREAD
# their standard deviation over the mean; lengths beyond the limit are cut off.  The
# values are 8k of ScaleRL's 14,336 tokens, and the typical spread of maths rollouts.
MEAN_SHARE, SPREAD = 4 / 7, 0.7
# Mean prompt over sampler.max_prompt_tokens: most maths prompts are much shorter.
PROMPT_SHARE = 1 / 8
_POINTS = 512  # quantiles that represent the assumed distribution
_STEPS = 20  # newest steps of a run that are read, since lengths drift
_FEW = 32  # with fewer rollouts their spread is not used


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of rollouts in tokens; the completions are equally likely."""

    prompt: float  # mean tokens of a prompt
    completions: tuple[int, ...]
    source: str  # for people

    @functools.cached_property
    def mean(self) -> float:
        """Mean tokens of a completion."""
        return statistics.fmean(self.completions)

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max(self.completions)

    @functools.cached_property
    def mean_context(self) -> float:
        """Mean tokens that a sequence holds, over all decode steps.

            prompt + E[L^2] / (2 E[L])

        A long completion counts for more decode steps than a short one.
        """
        squares = statistics.fmean(length**2 for length in self.completions)
        return self.prompt + squares / (2 * self.mean)

    def drawn(self, count: int) -> tuple[int, ...]:
        """Return `count` completions with the same distribution."""
        known, last = sorted(self.completions), len(self.completions)
        return tuple(known[int((n + 0.5) / count * last)] for n in range(count))


def assumed_lengths(config: Config) -> Lengths:
    """Return lengths assumed from a config's limits; see MEAN_SHARE and SPREAD."""
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
    """Read the lengths of a run, or those that a file lists.

    A run's mean is that of the last steps in metrics.jsonl, and its spread that of the
    rollouts in rollouts.jsonl, or the assumed spread if these are few.

    Args:
        path: the directory of a run; or a text file with the tokens of a completion
            on each line.
        config: gives the prompts' length, and the limit at which lengths are cut off.

    Raises:
        ValueError: the path has no lengths, or invalid ones.
    """
    place, assumed = Path(path), assumed_lengths(config)
    limit = config.sampler.max_completion_tokens
    try:
        if place.is_dir():
            steps = _lines(place / METRICS_FILE)[-_STEPS:]
            mean = statistics.fmean(each["completion/mean_tokens"] for each in steps)
            logged = place / ROLLOUTS_FILE
            rollouts = _lines(logged) if logged.exists() else []
            seen = [each["tokens"] for each in rollouts]
            spread = seen if len(seen) >= _FEW else assumed.completions
            # Of a run with longer completions, these are cut off below.
            found = scaled(spread, mean, limit=max([limit, *seen]))
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
        raise ValueError(f"--lengths={path}: a completion has at least one token")
    return dataclasses.replace(
        assumed,
        completions=tuple(min(limit, length) for length in found),
        source=source,
    )


def scaled(spread: Sequence[int], mean: float, *, limit: int) -> list[int]:
    """Return lengths, scaled and then cut off at `limit`, whose mean is `mean`.

    They are not cut off if the mean is not below the limit: it is of longer ones.
    """
    low = mean / statistics.fmean(spread)
    if mean >= limit:
        return [max(1, round(length * low)) for length in spread]
    high = float(limit)  # cuts off all of them
    for _ in range(60):
        middle = (low + high) / 2
        if statistics.fmean(min(limit, each * middle) for each in spread) < mean:
            low = middle
        else:
            high = middle
    return [min(limit, max(1, round(length * high))) for length in spread]


def _lines(path: Path) -> list[Any]:
    return [parse_json(line) for line in read_lines(path) if line.strip()]


def count_rows(
    lengths: Lengths, *, rollouts: int, row_tokens: int, row_segments: int
) -> int:
    """Return the rows that `rollouts` rollouts fill, packed as by the learner."""
    return len(_blocks_of_rows(lengths, rollouts, row_tokens, row_segments))


@functools.lru_cache(maxsize=64)
def count_microbatches(
    lengths: Lengths,
    *,
    rollouts: int,
    row_tokens: int,
    row_segments: int,
    rows: int,
    short_rows: tuple[int, ...] = (),
) -> float:
    """Return the microbatches of a step; one of short rows counts as its share.

    So does what it reads and writes of params and gradients, of which it has no less.

    Args:
        lengths: token counts of rollouts.
        rollouts: rollouts of a step.
        row_tokens: batch.row_tokens.
        row_segments: sequences of a row, at most.
        rows: rows of a microbatch, over all shards.
        short_rows: tokens of the last microbatch's rows, if they fit; ascending.
    """
    used = _row_lengths(lengths, rollouts, row_tokens)
    fitted = first_fit(used, row_tokens, row_segments)
    fitted, end = shorten_last(
        fitted, used, (*short_rows, row_tokens), rows, row_segments
    )
    return math.ceil(len(fitted) / rows) - 1 + end / row_tokens


def attention_share(
    lengths: Lengths,
    *,
    rollouts: int,
    row_tokens: int,
    row_segments: int,
    rows: int,
    shards: int,
) -> float:
    """Return the share of its blocks below the diagonal that attention computes.

    The TPU's kernel skips the others: they are between different sequences of a row.
    Where it waits for the shard with most of them, that one counts.

    Args:
        lengths: token counts of rollouts.
        rollouts: rollouts of a step.
        row_tokens: batch.row_tokens.
        row_segments: sequences of a row, at most.
        rows: rows of a microbatch, over all shards.
        shards: shards that each compute some of these rows.
    """
    costs = list(_blocks_of_rows(lengths, rollouts, row_tokens, row_segments))
    blocks, each = row_tokens // _block(row_tokens), rows // shards
    costs += [blocks] * (-len(costs) % rows)  # rows of padding: their diagonals alone
    slowest = np.reshape(costs, (-1, shards, each)).sum(axis=2).max(axis=1)
    return float(slowest.mean() / (each * blocks * (blocks + 1) / 2))


@functools.lru_cache(maxsize=64)
def _blocks_of_rows(
    lengths: Lengths, rollouts: int, row_tokens: int, row_segments: int
) -> tuple[int, ...]:
    """Return the blocks that attention computes in each row of packed rollouts."""
    used = _row_lengths(lengths, rollouts, row_tokens)
    rows = first_fit(used, row_tokens, row_segments)
    size = _block(row_tokens)
    return tuple(
        count_blocks([used[each] for each in row], row_tokens, size=size)
        for row in rows
    )


def _row_lengths(lengths: Lengths, rollouts: int, row_tokens: int) -> list[int]:
    """Return the positions in a row of each rollout: all tokens but its last one."""
    return [
        min(row_tokens, max(1, round(lengths.prompt) + length - 1))
        for length in lengths.drawn(rollouts)
    ]


def _block(row_tokens: int) -> int:
    return largest_divisor(row_tokens, SPLASH_BLOCK)


def count_blocks(used: Sequence[int], row_tokens: int, *, size: int) -> int:
    """Return the blocks of `size` that attention needs for sequences end to end.

    They are those between the start of a block's first sequence and the diagonal.
    """
    first = np.arange(0, row_tokens, size)
    ends = np.cumsum([0, *used])
    starts = ends[np.searchsorted(ends, first, side="right") - 1]
    starts = np.where(first < ends[-1], starts, first)  # padding
    return int((first // size - starts // size + 1).sum())
