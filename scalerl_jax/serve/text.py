"""From tokens to text, piece by piece: whole characters, cut before a stop string.

Streamed or not, a completion's text is made here, one token after another, so that
both are the same.
"""

from collections.abc import Sequence

from scalerl_jax.data.spelling import TextStream
from scalerl_jax.data.tokenizer import Tokenizer


class CompletionText:
    """The text of one completion: without its EOS, cut before the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Text without tokens yet."""
        self._eos_ids = tokenizer.eos_ids
        self._text = TextStream(tokenizer.shown)
        self._stop = stop
        self._held = ""  # it may begin a stop string
        self.stopped = False  # by a stop string: no more text comes

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add for certain."""
        added = (
            self._add(self._text.add(token))
            for token in tokens
            if token not in self._eos_ids
        )
        return "".join(added)

    def finish(self) -> str:
        """What is left when no token follows."""
        last = self._add(self._text.finish())
        held, self._held = self._held, ""
        return last + held

    def _add(self, piece: str) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + piece, ""
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        keep = len(text) - _begun(text, self._stop)
        self._held = text[keep:]
        return text[:keep]


def _begun(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def text_offsets(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Characters of the text before each token, were nothing cut."""
    whole, offsets, length = CompletionText(tokenizer), [], 0
    for token in tokens:
        offsets.append(length)
        length += len(whole.add([token]))
    return offsets
