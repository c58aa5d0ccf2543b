"""Stop strings: the end of a completion by what its tokens spell, seen on the host."""

from collections.abc import Sequence

import numpy as np

from scalerl_jax.data.spelling import Spelling, TextStream


class StopWatch:
    """Looks for stop strings in one completion, as its tokens come."""

    def __init__(self, stops: Sequence[str], spelling: Spelling) -> None:
        """A watch before the first token."""
        self._stops = stops
        self._text = TextStream(spelling)
        self._before = ""  # as much as a stop string that is not complete can hold
        self._reach = max(map(len, stops)) - 1

    def end(self, tokens: np.ndarray) -> int | None:
        """Count the tokens that it takes to complete a stop string; None: more."""
        for count, token in enumerate(tokens.tolist(), 1):
            text = self._before + self._text.add(token)
            if any(stop in text for stop in self._stops):
                return count
            self._before = text[max(0, len(text) - self._reach) :]
        return None
