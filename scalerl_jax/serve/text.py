"""From tokens to text, piece by piece: whole characters, cut before a stop string.

Streamed or not, a completion's text is made here, one token after another, so that
both are the same.
"""

from collections.abc import Callable, Sequence

from scalerl_jax.data.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_OPEN_TOKENS = 3  # a character of four bytes may lack one


class Detokenizer:
    """Text of tokens as they come.

    A tokenizer of bytes decodes a part of a character to U+FFFD.  Tokens that end in
    one are held back, until what follows completes it or cannot any more.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """`decode` gives the text of tokens."""
        self._decode = decode
        # Given out last: some decoders treat the first token of a text as another.
        self._context: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self._held.append(token)
        if not self._text(len(self._held)).endswith(_BROKEN):
            return self._give(len(self._held))
        if len(self._held) > _OPEN_TOKENS:  # what comes first stays as it is
            return self._give(self._settled())
        return ""

    def finish(self) -> str:
        """What is left when no token follows."""
        return self._give(len(self._held))

    def _settled(self) -> int:
        """The fewest tokens whose text those after them do not change.

        It may be U+FFFD for good: of a broken character, or the text's own.
        """
        whole = self._text(len(self._held))
        for count in range(1, len(self._held)):
            if self._text(count) + self._decode(self._held[count:]) == whole:
                return count
        return 1

    def _text(self, count: int) -> str:
        """Of the first `count` tokens that are held back."""
        before = self._decode(self._context)
        return self._decode(self._context + self._held[:count])[len(before) :]

    def _give(self, count: int) -> str:
        if not count:
            return ""
        text = self._text(count)
        self._context, self._held = self._held[:count], self._held[count:]
        return text


class CompletionText:
    """The text of one completion: without its EOS, cut before the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Text without tokens yet."""
        self._eos_ids = tokenizer.eos_ids
        self._detokenizer = Detokenizer(tokenizer.decode)
        self._stop = stop
        self._held = ""  # it may begin a stop string
        self.stopped = False  # by a stop string: no more text comes

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add for certain."""
        pieces = (
            self._add(self._detokenizer.add(token))
            for token in tokens
            if token not in self._eos_ids
        )
        return "".join(pieces)

    def finish(self) -> str:
        """What is left when no token follows."""
        last = self._add(self._detokenizer.finish())
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
