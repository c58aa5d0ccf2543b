"""The sampler's events as answers in OpenAI's forms, in one piece or in many.

Streamed or not, a completion's text is made here, one token after another, so that
both are the same: whole characters, cut before a stop string.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from scalerl_jax.data.detokenizer import TextStream
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.serve.fields import ApiError
from scalerl_jax.serve.orders import Served
from scalerl_jax.serve.service import Placed

_LEAST_LOGPROB = -9999.0  # OpenAI's


class CompletionText:
    """The text of one completion: without its EOS, cut before the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Make a text without tokens yet."""
        self._eos_ids = tokenizer.eos_ids
        self._text = TextStream(tokenizer.shown)
        self._stop = stop
        self._held = ""  # it may begin a stop string
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
    """Return the characters of the text before each token, were nothing cut."""
    whole, offsets, length = CompletionText(tokenizer), [], 0
    for token in tokens:
        offsets.append(length)
        length += len(whole.add([token]))
    return offsets


class PendingAnswer:
    """The answer to one order, to be asked for once, in the form of /v1/completions."""

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
            ApiError: a completion failed before there was an event; later it is one.
        """
        head = {**self._head, "object": self._PART}
        include_usage = self._order.fields.stream_options.include_usage
        more, begun = {"usage": None} if include_usage else {}, False
        try:
            async for choice in self._choices(streamed=True):
                yield _event({**head, "choices": [choice], **more})
                begun = True
            if include_usage:
                yield _event({**head, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            if not begun:
                raise
            yield f"data: {json.dumps(error.body())}\n\n"  # ASCII: maybe no text

    async def _choices(self, *, streamed: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield choices as they are complete, or pieces of them as they come."""
        left = self._order.num_choices
        stop = self._order.fields.stop
        texts = [CompletionText(self._tokenizer, stop) for _ in range(left)]
        added, begun = [0] * left, set[int]()  # tokens; places
        while left:
            place, event = await self._placed.next()
            text, end = texts[place], {"logprobs": None, "finish_reason": None}
            if isinstance(event, Completion):
                left, self._tokens = left - 1, self._tokens + len(event.tokens)
                tokens = event.tokens.tolist()[added[place] :]
                # Texts may be long: other requests go on.
                piece = await asyncio.to_thread(text.finish, tokens)
                end = await asyncio.to_thread(self._end, event, text)
            elif self._order.logprobs is None:
                added[place] += len(event.tokens)
                piece = text.add(event.tokens.tolist())
                if not piece:
                    continue
            else:  # the whole text comes with its log-probabilities
                continue
            content = self._message(piece)
            if streamed:
                content = self._delta(piece, first=place not in begun)
            begun.add(place)
            yield {"index": place, **content, **end}

    def _end(self, completion: Completion, text: CompletionText) -> dict[str, Any]:
        """Return the fields that a choice has at its end."""
        ended = text.stopped or not completion.cut_off
        wanted = self._order.logprobs is not None
        return {
            "logprobs": self._logprobs(completion) if wanted else None,
            "finish_reason": "stop" if ended else "length",
        }

    def _message(self, text: str) -> dict[str, Any]:
        """Return the field of a choice that holds its text."""
        return {"text": text}

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        """Return the field of a chunk that holds a piece of a choice's text."""
        return {"text": text}

    def _logprobs(self, completion: Completion) -> dict[str, Any]:
        """Return the log-probabilities of all sampled tokens, EOS and stop strings too.

        They are of the distribution at the order's temperature before top-k, top-p
        and min-p; at temperature 0, of that at temperature 1.
        """
        rows = self._rows(completion)
        return {
            "tokens": [name for name, _, _ in rows],
            "token_logprobs": [own for _, own, _ in rows],
            "top_logprobs": [{**likeliest, name: own} for name, own, likeliest in rows],
            "text_offset": text_offsets(self._tokenizer, completion.tokens.tolist()),
        }

    def _rows(
        self, completion: Completion
    ) -> list[tuple[str, float, dict[str, float]]]:
        """Return name and log-probability of each token, and those of the likeliest."""
        count = self._order.logprobs
        rows = []
        for token, own, others, logprobs in zip(
            completion.tokens.tolist(),
            completion.full_logprobs.tolist(),
            completion.top_tokens[:, :count].tolist(),
            completion.top_logprobs[:, :count].tolist(),
            strict=True,
        ):
            likeliest: dict[str, float] = {}
            for other, logprob in zip(others, logprobs, strict=True):
                likeliest.setdefault(self._name(other), _finite(logprob))
            rows.append((self._name(token), _finite(own), likeliest))
        return rows

    def _name(self, token: int) -> str:
        return self._tokenizer.decode_all([token])

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

    def _logprobs(self, completion: Completion) -> dict[str, Any]:
        content = [
            {
                **_token(name, own),
                "top_logprobs": [_token(*each) for each in likeliest.items()],
            }
            for name, own, likeliest in self._rows(completion)
        ]
        return {"content": content, "refusal": None}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _token(name: str, logprob: float) -> dict[str, Any]:
    """Return a token of a chat's logprobs; part of a character has no bytes."""
    whole = "\N{REPLACEMENT CHARACTER}" not in name
    return {
        "token": name,
        "logprob": logprob,
        "bytes": list(name.encode()) if whole else None,
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)  # JSON has no -inf
