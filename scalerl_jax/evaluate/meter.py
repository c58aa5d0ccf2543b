"""How far the sampling is: prompts done and tokens per second."""

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from scalerl_jax.utils.progress import Progress

_PLAIN_S = 10.0  # between two lines where there is no terminal


class Meter:
    """Counts prompts and tokens for the newest bar of a display."""

    def __init__(self, progress: Progress, done: int) -> None:
        """With `done` prompts before."""
        self._progress, self._done = progress, done
        self._started_s = time.monotonic()
        self.tokens = 0

    def listen(self, sample: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Tokens of a sample have come; a `requests.Listener`."""
        self.tokens += len(tokens)

    def done(self) -> None:
        """One more prompt is judged."""
        self._done += 1
        rate = self.tokens / max(time.monotonic() - self._started_s, 1e-9)
        self._progress.show({"tokens/s": f"{rate:,.0f}"}, done=self._done)


@contextlib.contextmanager
def metered(progress: Progress, total: int, *, done: int = 0) -> Iterator[Meter]:
    """A meter and its bar: `total` prompts, `done` of them before."""
    with progress.bar("prompt", total=total, done=done, every_s=_PLAIN_S):
        yield Meter(progress, done)
