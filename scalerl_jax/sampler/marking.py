"""Seeing a text in what tokens spell, whichever tokens they are, one token at a time.

Merges join the end of a marker with what follows it (Llama 3 has a token ">\\n\\n"),
and a policy need not write it as its tokenizer would.  `Marker` is looked for on the
device, with every token; `StopWatch` on the host, in what has been written.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import UInt

from scalerl_jax.data.spelling import Spelling, TextStream


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Marker:
    """A text to be seen in tokens, as the automaton of Knuth, Morris and Pratt.

        state = next_states[state, token]

    A state is how many bytes of the marker the text so far ends with; all of them is
    `ended`, which is never left.  Rows past it are of a text without tokens.
    """

    next_states: UInt[np.ndarray, "states V"]
    start: int
    ended: int

    def state(self, tokens: Iterable[int]) -> int:
        """The state after the tokens of a whole text."""
        state = self.start
        for token in tokens:
            state = int(self.next_states[state, token])
        return state


def make_marker(text: str, spelling: Spelling, *, vocabulary: int) -> Marker:
    """The marker that is `text`, for ids below `vocabulary`."""
    by_byte = _states_by_byte(text.encode())
    start, ended = 0, len(by_byte) - 1
    later, first = (each[:vocabulary] for each in (spelling.later, spelling.first))
    states = _states_by_token(by_byte, later, vocabulary)
    if first != later:
        start = ended + 1
        begins = [at for at, piece in enumerate(later) if piece]
        begun = np.full((1, vocabulary), start, states.dtype)
        begun[0, begins] = _states_by_token(by_byte, first, vocabulary)[0, begins]
        states = np.concatenate([states, begun])
    return Marker(next_states=states, start=start, ended=ended)


def _states_by_byte(marker: bytes) -> UInt[np.ndarray, "states 256"]:
    """The state that follows a state and a byte."""
    # One number more is wanted where a text without tokens has a state of its own.
    table = np.zeros((len(marker) + 1, 256), np.min_scalar_type(len(marker) + 1))
    shorter = 0  # the state of what has been read of the marker less its first byte
    for place, byte in enumerate(marker):
        table[place] = table[shorter]
        table[place, byte] = place + 1
        shorter = table[shorter, byte] if place else 0
    table[-1] = len(marker)
    return table


def _states_by_token(
    by_byte: UInt[np.ndarray, "states 256"], pieces: Sequence[bytes], vocabulary: int
) -> UInt[np.ndarray, "states V"]:
    """The state that follows a state and all bytes of a token."""
    text = np.frombuffer(b"".join(pieces), np.uint8)
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    starts = np.cumsum(lengths) - lengths
    longest_first = np.argsort(-lengths, kind="stable")
    states = np.repeat(np.arange(len(by_byte), dtype=by_byte.dtype), vocabulary)
    states = states.reshape(-1, vocabulary)
    for place in range(lengths.max(initial=0)):
        tokens = longest_first[: np.count_nonzero(lengths > place)]
        states[:, tokens] = by_byte[states[:, tokens], text[starts[tokens] + place]]
    return states


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
