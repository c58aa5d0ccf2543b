"""Simulated lengths of completions, drawn from a law or from measured groups.

A group's lengths depend only on seed and ticket, not on the replica or the time: two
settings are compared on the same groups.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np

from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.formats.reading import parse_json

_BLOCK = 64  # groups drawn together
_P99 = NormalDist().inv_cdf(0.99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedLengths:
    """Token counts of completions, lognormal or measured, and cut off at a limit.

        log(tokens) = mu + sigma * (sqrt(r) * x[prompt] + sqrt(1 - r) * y[completion])

    with x, y normal, r = `alike`, sigma = log(p99 / median) / 2.33, and mu such that
    the mean after the cut is `mean_tokens`.  A group that begins at version v has
    drift^(v / num_steps) times as many tokens, up to the limit.
    """

    mean_tokens: float = 0.0
    tail: float = 4.0  # p99 over the median, before the cut
    alike: float = 0.5  # share of the variance (of logs) that is between prompts
    limit: int  # tokens of the longest completion
    drift: float = 1.0  # mean after `num_steps` over that at the start: exponential
    num_steps: int = 1
    measured: tuple[tuple[int, ...], ...] = ()  # groups to draw from instead of the law
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the parameters of the law.

        Raises:
            ValueError: a parameter is out of range.
        """
        if not 0.01 <= self.drift <= 100:
            raise ValueError(f"drift = {self.drift:g} must be from 0.01 to 100")
        if self.measured:
            return
        if not 1 <= self.mean_tokens < self.limit:
            raise ValueError(
                f"mean_tokens = {self.mean_tokens:g} must be 1 or more, and below the "
                f"longest completion, {self.limit:,} tokens"
            )
        if not 1 <= self.tail <= 1000:
            raise ValueError(f"tail = {self.tail:g} must be from 1 to 1,000")
        if not 0 <= self.alike <= 1:
            raise ValueError(f"alike = {self.alike:g} must be from 0 to 1")

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm, before the cut."""
        return math.log(self.tail) / _P99

    def mu(self) -> float:
        """Return the mean of the logarithm that yields `mean_tokens`."""
        low, high = math.log(self.mean_tokens), math.log(self.limit) + 20 * self.sigma
        low -= self.sigma**2
        for _ in range(60):
            middle = (low + high) / 2
            if _cut_mean(middle, self.sigma, self.limit) < self.mean_tokens:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def of_block(self, block: int, group_size: int) -> np.ndarray:
        """Return tokens of a block's groups, int [groups, group_size], before drift."""
        random = np.random.default_rng([self.seed, block])
        if self.measured:
            rows = random.integers(0, len(self.measured), _BLOCK)
            groups = [
                random.permutation(np.resize(self.measured[row], group_size))
                for row in rows
            ]
            return np.minimum(groups, self.limit)
        x = random.standard_normal((_BLOCK, 1)) * math.sqrt(self.alike)
        y = random.standard_normal((_BLOCK, group_size)) * math.sqrt(1 - self.alike)
        tokens = np.exp(self.mu() + self.sigma * (x + y))
        return np.clip(np.rint(tokens), 1, self.limit).astype(np.int64)


class Drawn:
    """Lengths of groups by ticket, drawn on request."""

    def __init__(self, lengths: SimulatedLengths, *, group_size: int) -> None:
        """Store the law; draw nothing."""
        self._lengths, self._group_size = lengths, group_size
        self._blocks: dict[int, np.ndarray] = {}

    def tokens(self, ticket: int, version: int = 0) -> list[int]:
        """Return tokens of each completion of a group that begins at `version`."""
        block, place = divmod(ticket, _BLOCK)
        if block not in self._blocks:
            self._blocks = {
                each: rows for each, rows in self._blocks.items() if each > block - 8
            }
            self._blocks[block] = self._lengths.of_block(block, self._group_size)
        row = self._blocks[block][place]
        drift = self._lengths.drift
        if drift != 1.0:
            row = row * drift ** (version / self._lengths.num_steps)
            row = np.clip(np.rint(row), 1, self._lengths.limit).astype(np.int64)
        return row.tolist()


def _cut_mean(mu: float, sigma: float, limit: int) -> float:
    """Return E[min(X, limit)] of a lognormal X."""
    normal = NormalDist()
    if not sigma:
        return min(math.exp(mu), limit)
    place = (math.log(limit) - mu) / sigma
    below = math.exp(min(mu + sigma**2 / 2, 700.0)) * normal.cdf(place - sigma)
    return below + limit * (1 - normal.cdf(place))


def law_of(completions: Sequence[int]) -> tuple[float, float]:
    """Return mean and tail (99th percentile over median) of a lognormal fit.

    The tail follows from the logarithms' standard deviation, so few lengths suffice.
    """
    logs = np.log(np.asarray(completions, np.float64))
    return float(np.mean(completions)), math.exp(_P99 * float(logs.std()))


def read_lengths(path: str) -> tuple[tuple[int, ...], ...]:
    """Read measured groups; each line of the file is a JSON list of one group's tokens.

    Raises:
        ValueError: a line is not such a list.
        OSError: the file cannot be read.
    """
    rows = []
    for number, line in enumerate(read_lines(Path(path)), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, list) or not row or not all(map(_is_length, row)):
            raise ValueError(
                f"--lengths={path}, line {number}: a line must be the tokens of one "
                f"prompt's completions, such as [512, 900]"
            )
        rows.append(tuple(row))
    if not rows:
        raise ValueError(f"--lengths={path} holds no groups")
    return tuple(rows)


def _is_length(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return 1 <= value <= 10_000_000
