"""The sampler's events as answers in OpenAI's forms, in one piece or in many.

Streamed or not, a completion's text is made here, one token after another, so that
both are the same: whole characters, cut before a stop string.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.data.detokenizer import TextStream
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.sampler.scoring import ScoredTokens
from scalerl_jax.serve.fields import ApiError
from scalerl_jax.serve.orders import Served
from scalerl_jax.serve.rendering import server_sent
from scalerl_jax.serve.service import Placed

_LEAST_LOGPROB = -9999.0  # OpenAI's


class CompletionText:
    """The text of one completion: without its EOS, cut before the first stop string.

    It is what the completion adds to the text of its prompt, so that a space between
    the two is part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Make a text without tokens yet."""
        self._eos_ids = tokenizer.eos_ids
        self._text = TextStream(tokenizer.shown, begun=True)
        self._stop = stop
        self._held = ""  # the end of the text, which may begin a stop string
        self.stopped = False  # by a stop string: no more text comes

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens add for certain."""
        texts = (self._text.add(each) for each in tokens if each not in self._eos_ids)
        return "".join(map(self._add, texts))

    def finish(self, tokens: Sequence[int] = ()) -> str:
        """Add the last tokens; return their text, and the text that was held back."""
        last = self.add(tokens) + self._add(self._text.finish())
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
    """Return the length of the longest end of `text` that a stop string begins with."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def text_offsets(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Return the number of characters before each token in the uncut text."""
    whole, offsets, length = CompletionText(tokenizer), [], 0
    for token in tokens:
        offsets.append(length)
        length += len(whole.add([token]))
    return offsets


class TokenRow(NamedTuple):
    """A token with its log-probability, and those of the likeliest in its place.

    Tokens are the bytes that they add to a text.
    """

    spelled: bytes
    logprob: float | None  # None: of a prompt's first token
    likeliest: dict[bytes, float]  # the likeliest first

    @property
    def name(self) -> str:
        """The token's name."""
        return name_of(self.spelled)

    def named(self) -> dict[str, float] | None:
        """Return the log-probability of each token by name; None: there are none."""
        if self.logprob is None:
            return None
        found: dict[str, float] = {}
        for spelled, logprob in self.likeliest.items():
            found.setdefault(name_of(spelled), logprob)
        return {**found, self.name: self.logprob}


class Echo(NamedTuple):
    """A prompt that is repeated before its completions; empty: it is not."""

    text: str = ""
    offsets: tuple[int, ...] = ()  # characters before each token
    rows: tuple[TokenRow, ...] = ()  # empty without log-probabilities


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token that follows others, special ones written out."""
    table = tokenizer.written.later
    return table[token] if token < len(table) else b""


def name_of(spelled: bytes) -> str:
    """Return the name of a token: its text.

    A part of a character is named by its bytes, as OpenAI does: "bytes:\\xe2\\x82".
    """
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class PendingAnswer:
    """The answer to one order, to be read once, in the form of /v1/completions."""

    _PREFIX, _WHOLE, _PART = "cmpl", "text_completion", "text_completion"

    def __init__(self, served: Served, placed: Placed) -> None:
        """Make the answer to an order that is with the sampler."""
        self._order = placed.order
        self._placed = placed
        self._tokenizer = served.tokenizer
        self._tokens = 0  # of finished completions
        self._head = {
            "id": f"{self._PREFIX}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
        }

    async def whole(self) -> dict[str, Any]:
        """Return all choices, once they are complete.

        Raises:
            ApiError: one of them failed.
        """
        choices = [choice async for choice in self._choices(streamed=False)]
        choices.sort(key=lambda choice: choice["index"])
        head = {**self._head, "object": self._WHOLE}
        return {**head, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[str]:
        """Yield server-sent events, until `[DONE]`.

        With log-probabilities a choice is one event: the sampler reports them with
        the finished completion.

        Raises:
            ApiError: a completion failed before the first event; later it is an event.
        """
        head = {**self._head, "object": self._PART}
        include_usage = self._order.fields.stream_options.include_usage
        more, begun = {"usage": None} if include_usage else {}, False
        try:
            async for choice in self._choices(streamed=True):
                value = {**head, "choices": [choice], **more}
                if choice["logprobs"] is None:
                    yield server_sent(value)
                else:  # it is long
                    yield await asyncio.to_thread(server_sent, value)
                begun = True
            if include_usage:
                yield server_sent({**head, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            if not begun:
                raise
            yield server_sent(error.body())

    async def _choices(self, *, streamed: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield choices as they are complete, or pieces of them as they come."""
        left, samples = self._order.num_choices, self._order.fields.n
        echoes = await self._echoes()
        if not self._order.max_tokens:
            for place in range(left):
                echo = echoes[place // samples]
                logprobs = await asyncio.to_thread(self._logprobs, echo, None)
                end = {"logprobs": logprobs, "finish_reason": "length"}
                yield {"index": place, **self._message(echo.text), **end}
            return
        stop = self._order.fields.stop
        texts = [CompletionText(self._tokenizer, stop) for _ in range(left)]
        added, begun = [0] * left, set[int]()  # tokens; places
        while left:
            place, event = await self._placed.next()
            echo = echoes[place // samples]
            text, end = texts[place], {"logprobs": None, "finish_reason": None}
            if isinstance(event, Completion):
                left, self._tokens = left - 1, self._tokens + len(event.tokens)
                tokens = event.tokens.tolist()[added[place] :]
                # Texts may be long: in a thread, so that other requests continue.
                piece = await asyncio.to_thread(text.finish, tokens)
                end = await asyncio.to_thread(self._end, echo, event, text)
            elif self._order.logprobs is None:
                added[place] += len(event.tokens)
                piece = text.add(event.tokens.tolist())
                if not piece:
                    continue
            else:  # the whole text comes with its log-probabilities
                continue
            if place not in begun:
                piece = echo.text + piece
            content = self._message(piece)
            if streamed:
                content = self._delta(piece, first=place not in begun)
            begun.add(place)
            yield {"index": place, **content, **end}

    async def _echoes(self) -> list[Echo]:
        """Return each prompt as repeated at the beginning of its choices."""
        order = self._order
        if not order.echo:
            return [Echo()] * len(order.prompts)
        scores: list[ScoredTokens | None] = [None] * len(order.prompts)
        if order.scores_prompts:
            scores[:] = await self._placed.prompt_scores()
        return [
            await asyncio.to_thread(self._echo, tokens, scored)
            for tokens, scored in zip(order.prompts, scores, strict=True)
        ]

    def _echo(self, prompt: np.ndarray, scored: ScoredTokens | None) -> Echo:
        """Return a prompt as the text of its tokens, special ones written out."""
        tokens = prompt.tolist()
        texts = self._tokenizer.written.texts(tokens)
        *offsets, _ = itertools.accumulate(map(len, texts), initial=0)
        rows = []
        if scored is not None:
            first = TokenRow(token_bytes(self._tokenizer, tokens[0]), None, {})
            rows = [first, *self._rows(tokens[1:], scored.logprobs, scored)]
        return Echo("".join(texts), tuple(offsets), tuple(rows))

    def _end(
        self, echo: Echo, completion: Completion, text: CompletionText
    ) -> dict[str, Any]:
        """Return the fields that a choice has at its end."""
        ended = text.stopped or not completion.cut_off
        return {
            "logprobs": self._logprobs(echo, completion),
            "finish_reason": "stop" if ended else "length",
        }

    def _message(self, text: str) -> dict[str, Any]:
        """Return the field of a choice that holds its text."""
        return {"text": text}

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        """Return the field of a chunk that holds a piece of a choice's text."""
        return {"text": text}

    def _logprobs(
        self, echo: Echo, completion: Completion | None
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of all tokens, if they are asked for.

        Sampled tokens include EOS and stop strings.  Log-probabilities are of the
        distribution at the order's temperature before top-k, top-p and min-p; at
        temperature 0, of the distribution at temperature 1.
        """
        if self._order.logprobs is None:
            return None
        rows, offsets = list(echo.rows), list(echo.offsets)
        if completion is not None:
            tokens = completion.tokens.tolist()
            rows += self._rows(tokens, completion.full_logprobs, completion)
            places = text_offsets(self._tokenizer, tokens)
            offsets += [len(echo.text) + place for place in places]
        return {
            "tokens": [row.name for row in rows],
            "token_logprobs": [row.logprob for row in rows],
            "top_logprobs": [row.named() for row in rows],
            "text_offset": offsets,
        }

    def _rows(
        self,
        tokens: list[int],
        logprobs: np.ndarray,
        found: Completion | ScoredTokens,
    ) -> list[TokenRow]:
        """Return bytes and log-probability of each token and of the likeliest."""
        count = self._order.logprobs
        rows = []
        for token, own, others, others_logprobs in zip(
            tokens,
            logprobs.tolist(),
            found.top_tokens[:, :count].tolist(),
            found.top_logprobs[:, :count].tolist(),
            strict=True,
        ):
            likeliest: dict[bytes, float] = {}
            for other, logprob in zip(others, others_logprobs, strict=True):
                spelled = token_bytes(self._tokenizer, other)
                likeliest.setdefault(spelled, _finite(logprob))
            spelled = token_bytes(self._tokenizer, token)
            rows.append(TokenRow(spelled, _finite(own), likeliest))
        return rows

    def _usage(self) -> dict[str, int]:
        prompt_tokens = sum(len(prompt) for prompt in self._order.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": prompt_tokens + self._tokens,
        }


class ChatAnswer(PendingAnswer):
    """The answer to one order in the form of /v1/chat/completions."""

    _PREFIX, _WHOLE, _PART = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": text} if text or first else {}}

    def _logprobs(
        self, echo: Echo, completion: Completion | None
    ) -> dict[str, Any] | None:
        assert completion is not None, "chats have no echo"
        if self._order.logprobs is None:
            return None
        content = [
            {
                **_token(row.spelled, row.logprob),
                "top_logprobs": [_token(*each) for each in row.likeliest.items()],
            }
            for row in self._rows(
                completion.tokens.tolist(), completion.full_logprobs, completion
            )
        ]
        return {"content": content, "refusal": None}


def _token(spelled: bytes, logprob: float | None) -> dict[str, Any]:
    """Return a token of a chat's logprobs."""
    return {"token": name_of(spelled), "logprob": logprob, "bytes": list(spelled)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)  # JSON has no -inf
