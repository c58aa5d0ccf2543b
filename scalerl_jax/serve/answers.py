"""The sampler's events as answers in OpenAI's form, in one piece or in many."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.serve.protocol import ApiError
from scalerl_jax.serve.sampling_thread import Tokens
from scalerl_jax.serve.service import Placed
from scalerl_jax.serve.text import CompletionText, text_offsets

_LEAST_LOGPROB = -9999.0  # JSON has no -inf


class Answer:
    """What is said about one order; to be asked once."""

    def __init__(self, model: str, placed: Placed, tokenizer: Tokenizer) -> None:
        """For an order that is with the sampler."""
        self._order = placed.order
        self._placed = placed
        self._tokenizer = tokenizer
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """All choices, once they are complete.

        Raises:
            ApiError: one of them failed.
        """
        completions: dict[int, Completion] = {}
        while len(completions) < self._placed.num_choices:
            place, event = await self._placed.next()
            if isinstance(event, Completion):
                completions[place] = event
        choices = []
        for place, completion in sorted(completions.items()):
            text = CompletionText(self._tokenizer, self._order.stop)
            shown = text.add(completion.tokens.tolist()) + text.finish()
            choices.append(self._choice(place, shown, completion, text))
        tokens = sum(len(each.tokens) for each in completions.values())
        return {**self._head, "choices": choices, "usage": self._usage(tokens)}

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
            for _ in range(self._placed.num_choices)
        ]
        more = {"usage": None} if self._order.include_usage else {}
        tokens, left = 0, len(texts)
        while left:
            place, event = await self._placed.next()
            text, completion = texts[place], None
            if isinstance(event, Tokens):
                if self._order.logprobs is not None:
                    continue
                shown = text.add(event.tokens.tolist())
            else:
                completion = event
                shown = ""
                if self._order.logprobs is not None:
                    shown = text.add(completion.tokens.tolist())
                shown += text.finish()
                tokens, left = tokens + len(completion.tokens), left - 1
            if shown or completion:
                choice = self._choice(place, shown, completion, text)
                yield {**self._head, "choices": [choice], **more}
        if more:
            yield {**self._head, "choices": [], "usage": self._usage(tokens)}

    def _choice(
        self,
        place: int,
        shown: str,
        completion: Completion | None,
        text: CompletionText,
    ) -> dict[str, Any]:
        """A part of a completion, or with `completion` its last or only one."""
        reason = None
        if completion is not None:
            ended = text.stopped or not completion.cut_off
            reason = "stop" if ended else "length"
        return {
            "index": place,
            "text": shown,
            "logprobs": self._logprobs(completion),
            "finish_reason": reason,
        }

    def _logprobs(self, completion: Completion | None) -> dict[str, Any] | None:
        """Of every token that was sampled, EOS and stop strings included.

        They are of the distribution at the order's temperature before top-k, top-p
        and min-p; at temperature 0, of that at temperature 1.
        """
        count = self._order.logprobs
        if completion is None or count is None:
            return None
        tokens = completion.tokens.tolist()
        own = [_finite(each) for each in completion.full_logprobs.tolist()]
        names = [self._name(token) for token in tokens]
        likeliest = []
        for place, name in enumerate(names):
            row: dict[str, float] = {}
            for token, logprob in zip(
                completion.top_tokens[place, :count].tolist(),
                completion.top_logprobs[place, :count].tolist(),
                strict=True,
            ):
                row.setdefault(self._name(token), _finite(logprob))
            likeliest.append({**row, name: own[place]})
        return {
            "tokens": names,
            "token_logprobs": own,
            "top_logprobs": likeliest,
            "text_offset": text_offsets(self._tokenizer, tokens),
        }

    def _name(self, token: int) -> str:
        return self._tokenizer.decode_all([token])

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(len(prompt) for prompt in self._order.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
