"""The sampler's events as answers in OpenAI's forms, in one piece or in many."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.serve.errors import ApiError
from scalerl_jax.serve.service import Placed
from scalerl_jax.serve.text import CompletionText, text_offsets

_LEAST_LOGPROB = -9999.0  # OpenAI's


class Answer:
    """What is said about one order; to be asked once.  The form of /v1/completions."""

    _PREFIX, _WHOLE, _PART = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, placed: Placed, tokenizer: Tokenizer) -> None:
        """For an order that is with the sampler."""
        self._order = placed.order
        self._placed = placed
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self._PREFIX}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """All choices, once they are complete.

        Raises:
            ApiError: one of them failed.
        """
        completions: dict[int, Completion] = {}
        while len(completions) < self._order.num_choices:
            place, event = await self._placed.next()
            if isinstance(event, Completion):
                completions[place] = event
        # Texts may be long: other requests go on.
        return await asyncio.to_thread(self._assemble, completions)

    def _assemble(self, completions: dict[int, Completion]) -> dict[str, Any]:
        choices = []
        for place, completion in sorted(completions.items()):
            text = CompletionText(self._tokenizer, self._order.stop)
            shown = text.add(completion.tokens.tolist()) + text.finish()
            choices.append(
                {
                    "index": place,
                    **self._message(shown),
                    "logprobs": self._logprobs(completion),
                    "finish_reason": _reason(completion, text),
                }
            )
        tokens = sum(len(each.tokens) for each in completions.values())
        return {
            **self._head,
            "object": self._WHOLE,
            "choices": choices,
            "usage": self._usage(tokens),
        }

    async def chunks(self) -> AsyncIterator[str]:
        """Server-sent events, until `[DONE]`.

        With log-probabilities a choice is one event: the sampler reports them with
        the finished completion.

        Raises:
            ApiError: a completion failed before there was an event; later it is one.
        """
        begun = False
        try:
            async for chunk in self._chunks():
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
                begun = True
        except ApiError as error:
            if not begun:
                raise
            yield f"data: {json.dumps(error.body())}\n\n"
        else:
            yield "data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        texts = [
            CompletionText(self._tokenizer, self._order.stop)
            for _ in range(self._order.num_choices)
        ]
        head = {**self._head, "object": self._PART}
        more = {"usage": None} if self._order.include_usage else {}
        begun: set[int] = set()
        tokens = 0
        left = len(texts)
        while left:
            place, event = await self._placed.next()
            text, shown, completion = texts[place], "", None
            if isinstance(event, Completion):
                completion = event
                tokens, left = tokens + len(event.tokens), left - 1
            # With log-probabilities the whole text comes with the completion.
            if (completion is not None) == (self._order.logprobs is not None):
                shown = text.add(event.tokens.tolist())
            if completion is not None:
                shown += text.finish()
            if not shown and completion is None:
                continue
            choice = {
                "index": place,
                **self._delta(shown, first=place not in begun),
                "logprobs": completion and self._logprobs(completion),
                "finish_reason": completion and _reason(completion, text),
            }
            begun.add(place)
            yield {**head, "choices": [choice], **more}
        if more:
            yield {**head, "choices": [], "usage": self._usage(tokens)}

    def _message(self, text: str) -> dict[str, Any]:
        """The text of a choice, as a field of it."""
        return {"text": text}

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        """A piece of a choice's text, as a field of a chunk."""
        return {"text": text}

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        """Of every token that was sampled, EOS and stop strings included.

        They are of the distribution at the order's temperature before top-k, top-p
        and min-p; at temperature 0, of that at temperature 1.
        """
        if self._order.logprobs is None:
            return None
        tokens = completion.tokens.tolist()
        rows = self._rows(completion)
        return {
            "tokens": [name for name, _, _ in rows],
            "token_logprobs": [own for _, own, _ in rows],
            "top_logprobs": [{**likeliest, name: own} for name, own, likeliest in rows],
            "text_offset": text_offsets(self._tokenizer, tokens),
        }

    def _rows(
        self, completion: Completion
    ) -> list[tuple[str, float, dict[str, float]]]:
        """Name and log-probability of each token, and those of the likeliest ones."""
        count = self._order.logprobs
        rows = []
        for place, (token, own) in enumerate(
            zip(
                completion.tokens.tolist(),
                completion.full_logprobs.tolist(),
                strict=True,
            )
        ):
            likeliest: dict[str, float] = {}
            for other, logprob in zip(
                completion.top_tokens[place, :count].tolist(),
                completion.top_logprobs[place, :count].tolist(),
                strict=True,
            ):
                likeliest.setdefault(self._name(other), _finite(logprob))
            rows.append((self._name(token), _finite(own), likeliest))
        return rows

    def _name(self, token: int) -> str:
        return self._tokenizer.decode_all([token])

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(len(prompt) for prompt in self._order.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


class ChatAnswer(Answer):
    """The form of /v1/chat/completions."""

    _PREFIX, _WHOLE, _PART = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": text} if text or first else {}}

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        if self._order.logprobs is None:
            return None
        content = [
            {
                **_token(name, own),
                "top_logprobs": [_token(*each) for each in likeliest.items()],
            }
            for name, own, likeliest in self._rows(completion)
        ]
        return {"content": content, "refusal": None}


def _token(name: str, logprob: float) -> dict[str, Any]:
    """A token in the log-probabilities of a chat; part of a character has no bytes."""
    whole = "\N{REPLACEMENT CHARACTER}" not in name
    return {
        "token": name,
        "logprob": logprob,
        "bytes": list(name.encode()) if whole else None,
    }


def _reason(completion: Completion, text: CompletionText) -> str:
    """Why a completion ended."""
    return "stop" if text.stopped or not completion.cut_off else "length"


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)  # JSON has no -inf
