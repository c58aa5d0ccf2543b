"""Bytes that each token adds to a text: the only source of text from tokens.

The text of tokens is their bytes laid end to end and decoded as UTF-8, with U+FFFD for
invalid bytes.  It depends on the bytes of the tokens, not on their ids, so that a text
can be found in tokens as they are sampled, by a `Marker` on the device.  Ids would not
do: merges join the end of a marker with the text after it (Llama 3 has a token
">\\n\\n"), and a policy need not write it as its tokenizer would.
"""

import codecs
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt
from tokenizers import Tokenizer as Backend
from tokenizers import models

from scalerl_jax.formats.reading import parse_json

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token of `ByteFallback`


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Detokenizer:
    """The bytes of each id; an id past the last one adds none."""

    later: Sequence[bytes]  # after other bytes
    first: Sequence[bytes]  # where a text begins

    def without(self, ids: Iterable[int]) -> "Detokenizer":
        """Return a detokenizer in which these ids add nothing to a text."""
        later, first = list(self.later), list(self.first)
        for each in ids:
            later[each] = first[each] = b""
        return Detokenizer(later=later, first=first)

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        known = [each for each in ids if each < len(self.later)]
        spelled = (at for at, each in enumerate(known, 1) if self.later[each])
        begin = next(spelled, 0)
        pieces = [self.first[each] for each in known[:begin]]
        pieces += [self.later[each] for each in known[begin:]]
        return b"".join(pieces).decode(errors="replace")

    def texts(self, ids: Iterable[int]) -> list[str]:
        """Return the text that each id adds.

        An id that ends inside a character adds "", and the id that completes it adds
        all of it; a character that is never completed belongs to the last id.
        """
        stream = TextStream(self)
        texts = [stream.add(each) for each in ids]
        if texts:
            texts[-1] += stream.finish()
        return texts


class TextStream:
    """The text of tokens as they come, in whole characters."""

    def __init__(self, detokenizer: Detokenizer, *, begun: bool = False) -> None:
        """Start an empty text; `begun`: it continues the text of other tokens.

        What follows a prompt is such a text: its first token keeps its space.
        """
        self._detokenizer = detokenizer
        self._pieces = detokenizer.later if begun else detokenizer.first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the characters that this token completes."""
        if token >= len(self._pieces):
            return ""
        piece = self._pieces[token]
        # A space that is dropped at the start of a text still counts as its start.
        if self._detokenizer.later[token]:
            self._pieces = self._detokenizer.later
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return U+FFFD for a character that was not completed, else ""."""
        return self._decoder.decode(b"", final=True)


def read_detokenizer(backend: Backend) -> Detokenizer:
    """Read the bytes of each id, by the decoder of a `tokenizers` tokenizer.

    Raises:
        ValueError: it does not decode token by token.
    """
    spell, differs = _speller(read_decoder(backend))
    last = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    tokens = [backend.id_to_token(each) for each in range(last + 1)]

    def spelled(*, first: bool) -> list[bytes]:
        return [b"" if each is None else spell(each, first) for each in tokens]

    later = spelled(first=False)
    return Detokenizer(later=later, first=spelled(first=True) if differs else later)


def read_decoder(backend: Backend) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer's decoder, which `_speller` takes.

    Raises:
        ValueError: it does not decode token by token.
    """
    holder = Backend(models.BPE())  # to write out the decoder without the vocabulary
    if backend.decoder is None:
        return []
    holder.decoder = backend.decoder
    step = parse_json(holder.to_str())["decoder"]
    steps = step["decoders"] if step["type"] == "Sequence" else [step]
    _speller(steps)
    return steps


_Spell = Callable[[str, bool], bytes]  # token, whether it begins the text -> its bytes


def _speller(steps: list[dict[str, Any]]) -> tuple[_Spell, bool]:
    """Return the function from token to bytes, and whether a text's start differs."""
    names = [step["type"] for step in steps]
    if not steps:  # the library puts a space between tokens
        return lambda token, first: (token if first else f" {token}").encode(), True
    if names == ["ByteLevel"]:
        return lambda token, first: _byte_level(token), False
    if names == ["Metaspace"]:
        return _metaspace(steps[0])
    # A character replaced by a space, fallback to bytes, fusion, and the first space
    # dropped: in this order, any of them left out.
    order = ("Replace", "ByteFallback", "Fuse", "Strip")
    ranks = [order.index(name) if name in order else -1 for name in names]
    by_name = dict(zip(names, steps, strict=True))
    replace = by_name.get("Replace", {"pattern": {"String": ""}, "content": ""})
    strip = by_name.get("Strip", {"content": "", "start": 0, "stop": 0})
    if (
        -1 in ranks
        or sorted(set(ranks)) != ranks
        or "String" not in replace["pattern"]
        or ("Strip" in names and "Fuse" not in names)
        or (strip["start"], strip["stop"]) not in ((0, 0), (1, 0))
    ):
        raise ValueError(
            f"data.tokenizer: a decoder of {names} does not decode token by token, so "
            f"that no end of thinking and no answer can be found in what tokens "
            f"spell; it must be ByteLevel, Metaspace, or Replace (of a string), "
            f"ByteFallback, Fuse and Strip (of one at the start) in this order: name "
            f"the tokenizer.json of such a model as data.tokenizer"
        )
    pattern, content = replace["pattern"]["String"], replace["content"]
    dropped = strip["content"].encode() if strip["start"] else b""

    def spell(token: str, first: bool) -> bytes:
        text = token.replace(pattern, content)
        whole = _fallback(text) if "ByteFallback" in names else text.encode()
        return whole.removeprefix(dropped) if first else whole

    return spell, bool(dropped)


def _metaspace(step: dict[str, Any]) -> tuple[_Spell, bool]:
    """Return `_speller`'s result if a letter is written for each space."""
    letter, kept = step["replacement"], step["prepend_scheme"] == "never"

    def spell(token: str, first: bool) -> bytes:
        return token.replace(letter, "" if first and not kept else " ").encode()

    return spell, not kept


def _fallback(token: str) -> bytes:
    """Return the byte that "<0x0A>" and the like stand for, else the token itself."""
    byte = _BYTE.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.encode()


def _byte_letters() -> dict[int, int]:
    """Return GPT-2's letters for bytes: visible ones, and others from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {letter: letter for letter in seen} | {
        0x100 + place: byte for place, byte in enumerate(rest)
    }


_BYTES = _byte_letters()
_LETTERS = frozenset(map(chr, _BYTES))


def _byte_level(token: str) -> bytes:
    """Return a byte per letter; an added token, with other letters, as UTF-8."""
    if _LETTERS.issuperset(token):
        return token.translate(_BYTES).encode("latin-1")
    return token.encode()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Marker:
    """A text to be found in tokens, as the automaton of Knuth, Morris and Pratt.

        state = next_states[state, token]

    A state is the number of the marker's bytes that the text so far ends with; all of
    them is `ended`, which is never left.  A row past it is for a text without tokens.
    """

    next_states: UInt[np.ndarray, "states V"]
    start: int
    ended: int

    def state(self, tokens: Iterable[int]) -> int:
        """Return the state after the tokens of a whole text."""
        state = self.start
        for token in tokens:
            state = int(self.next_states[state, token])
        return state


def make_marker(text: str, detokenizer: Detokenizer, *, vocabulary: int) -> Marker:
    """Return the marker of `text`, for ids below `vocabulary`."""
    by_byte = _states_by_byte(text.encode())
    start, ended = 0, len(by_byte) - 1
    later, first = (
        each[:vocabulary] for each in (detokenizer.later, detokenizer.first)
    )
    states = _states_by_token(by_byte, later, vocabulary)
    if first != later:
        start = ended + 1
        begins = [at for at, piece in enumerate(later) if piece]
        begun = np.full((1, vocabulary), start, states.dtype)
        begun[0, begins] = _states_by_token(by_byte, first, vocabulary)[0, begins]
        states = np.concatenate([states, begun])
    return Marker(next_states=states, start=start, ended=ended)


def _states_by_byte(marker: bytes) -> UInt[np.ndarray, "states 256"]:
    """Return the next state after each state and byte."""
    # One more state is needed if a text without tokens has its own.
    table = np.zeros((len(marker) + 1, 256), np.min_scalar_type(len(marker) + 1))
    shorter = 0  # the state after the marker so far, without its first byte
    for place, byte in enumerate(marker):
        table[place] = table[shorter]
        table[place, byte] = place + 1
        shorter = table[shorter, byte] if place else 0
    table[-1] = len(marker)
    return table


def _states_by_token(
    by_byte: UInt[np.ndarray, "states 256"], pieces: Sequence[bytes], vocabulary: int
) -> UInt[np.ndarray, "states V"]:
    """Return the next state after each state and all bytes of a token."""
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
