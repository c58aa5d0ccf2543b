"""A line about the run, again and again, for whoever is watching."""

import sys
import time
from typing import TextIO

_TERMINAL_INTERVAL_S = 0.2
_FILE_INTERVAL_S = 5.0


class Progress:
    """Shows where a run is: rewritten in place on a terminal, lines elsewhere."""

    def __init__(
        self, *, first_step: int, num_steps: int, stream: TextIO = sys.stderr
    ) -> None:
        """A display of steps `first_step` + 1 to `num_steps`."""
        self._first_step = first_step
        self._num_steps = num_steps
        self._stream = stream
        self._started_s = time.monotonic()
        self._shown_s = -float("inf")
        self._width = 0

    def note(self, text: str) -> None:
        """A line that stays."""
        self._clear()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def show(self, step: int, facts: dict[str, str]) -> None:
        """The state after `step`, unless one was shown a moment ago."""
        now = time.monotonic()
        terminal = self._stream.isatty()
        interval = _TERMINAL_INTERVAL_S if terminal else _FILE_INTERVAL_S
        if now - self._shown_s < interval and step < self._num_steps:
            return
        self._shown_s = now
        done = step - self._first_step
        left_s = (now - self._started_s) / max(done, 1) * (self._num_steps - step)
        parts = [f"step {step}/{self._num_steps}"]
        parts += [f"{name} {value}" for name, value in facts.items()]
        parts.append(f"left {_duration(left_s)}")
        line = "  ".join(parts)
        if terminal:
            self._clear()
            self._stream.write(f"\r{line}")
            self._width = len(line)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def _clear(self) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
