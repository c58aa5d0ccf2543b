"""From the bodies of requests to what the sampler is asked for, all limits kept.

Texts are measured before they are made into tokens, and messages before a template
sees them: a text longer than the longest tokens could make cannot be a prompt.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from scalerl_jax.data.chat import ChatTemplate
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.serve.errors import ApiError
from scalerl_jax.serve.fields import (
    ChatFields,
    CompletionFields,
    Conversation,
    Sampled,
    TokenizeFields,
    read_fields,
    show,
)
from scalerl_jax.serve.orders import Limits, Order

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions that are no chat
_OURS = ("messages", "tools", "documents", "add_generation_prompt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads bodies for one model."""

    model: str
    limits: Limits
    encode: Callable[[str], list[int]]
    template: ChatTemplate | None
    enable_thinking: bool  # unless a request says otherwise

    def completion(self, body: bytes) -> Order:
        """The order of a request to /v1/completions.

        Raises:
            ApiError: the body is malformed, or asks for what cannot be had.
        """
        fields = read_fields(CompletionFields, body)
        self._check_model(fields.model)
        prompts = self._prompts(fields.prompt)
        if fields.best_of not in (None, fields.n):
            raise ApiError(
                f"best_of = {fields.best_of} is not supported; leave it out or set it "
                f"to n = {fields.n}",
                param="best_of",
            )
        longest = self.limits.max_completion_tokens
        return self._order(
            fields,
            prompts=prompts,
            max_tokens=fields.max_tokens or min(_DEFAULT_MAX_TOKENS, longest),
            max_tokens_name="max_tokens",
            logprobs=fields.logprobs,
        )

    def chat(self, body: bytes) -> Order:
        """The order of a request to /v1/chat/completions.

        Raises:
            ApiError: the body is malformed, asks for what cannot be had, or the model
                has no chat template.
        """
        fields = read_fields(ChatFields, body)
        self._check_model(fields.model)
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError(
                f"top_logprobs = {fields.top_logprobs} needs logprobs = true",
                param="top_logprobs",
            )
        if fields.tool_choice == "none":
            fields = fields.model_copy(update={"tools": []})
        name = "max_tokens" if fields.max_tokens else "max_completion_tokens"
        asked = getattr(fields, name) or self.limits.max_completion_tokens
        return self._order(
            fields,
            prompts=(self._prompt(self._write(fields), "messages"),),
            max_tokens=asked,
            max_tokens_name=name,
            logprobs=fields.top_logprobs if fields.logprobs else None,
        )

    def tokens(self, body: bytes) -> list[int]:
        """The ids of a text or of a conversation, as completions would take them.

        Raises:
            ApiError: as `chat`, but for prompts of too many tokens.
        """
        fields = read_fields(TokenizeFields, body)
        self._check_model(fields.model)
        if (fields.prompt is None) == (not fields.messages):
            raise ApiError("give a prompt or messages, and not both", param="prompt")
        if fields.prompt is not None:
            return self._encode(fields.prompt, "prompt")
        return self._encode(self._write(fields), "messages")

    def _check_model(self, asked: str) -> None:
        if asked not in ("", self.model):
            raise ApiError(
                f"model = {asked!r} is not served here; this server has {self.model!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _order(
        self,
        fields: Sampled,
        *,
        prompts: tuple[np.ndarray, ...],
        max_tokens: int,
        max_tokens_name: str,
        logprobs: int | None,
    ) -> Order:
        longest = self.limits.max_completion_tokens
        if max_tokens > longest:
            raise ApiError(
                f"{max_tokens_name} = {show(max_tokens)}; it must be from 1 to "
                f"--max_completion_tokens = {longest}",
                param=max_tokens_name,
            )
        order = Order(
            prompts=prompts,
            sampling=_sampling(fields, self.limits.vocab_size),
            max_tokens=max_tokens,
            num_samples=fields.n,
            seed=fields.seed,
            stop=tuple(fields.stop),
            logprobs=logprobs,
            stream=fields.stream,
            include_usage=fields.stream_options.include_usage,
        )
        if order.num_choices > self.limits.max_samples:
            raise ApiError(
                f"{len(prompts)} prompts with n = {show(fields.n)} are more "
                f"completions than --max_samples = {self.limits.max_samples} of one "
                f"request: send several requests",
                param="n",
            )
        return order

    # -- texts ------------------------------------------------------------------------

    def _write(self, fields: Conversation) -> str:
        """The prompt of a conversation, by the template of the model."""
        if self.template is None:
            raise ApiError(
                "this model has no chat template: send a prompt to /v1/completions, or "
                "put a chat_template.jinja into the directory of its tokenizer and "
                "start the server again",
                code="no_chat_template",
            )
        if not fields.messages:
            raise ApiError(
                "messages is missing; it must be a list of {'role', 'content'}, and "
                "not be empty",
                param="messages",
            )
        if len(fields.messages) > self.limits.max_prompt_tokens:
            raise self._too_long("messages", f"{len(fields.messages)} messages")
        given = [fields.messages, fields.tools, fields.chat_template_kwargs]
        self._check_length(_count_chars(given), "messages")
        for name in _OURS:
            if name in fields.chat_template_kwargs:
                raise ApiError(
                    f"chat_template_kwargs may not hold {name!r}",
                    param="chat_template_kwargs",
                )
        options = {"enable_thinking": self.enable_thinking}
        try:
            return self.template.render(
                fields.messages,
                tools=fields.tools or None,
                options=options | fields.chat_template_kwargs,
            )
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error

    def _encode(self, text: str, name: str) -> list[int]:
        self._check_length(len(text), name)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                f"{name} is not text: {error}", param=name.split()[0]
            ) from error
        return self.encode(text)

    def _check_length(self, chars: int, name: str) -> None:
        if chars > self.limits.max_prompt_chars:
            raise self._too_long(name, f"{chars} characters")

    def _too_long(self, name: str, length: str) -> ApiError:
        most = self.limits.max_prompt_tokens
        return ApiError(
            f"{name} has {length}, which are more than --max_prompt_tokens = {most} "
            f"tokens",
            param=name.split()[0],
            code="context_length_exceeded",
        )

    def _prompts(self, value: Any) -> tuple[np.ndarray, ...]:
        """Token ids of each prompt, from any of the four forms."""
        one = isinstance(value, str) or (
            isinstance(value, list) and value and type(value[0]) is int
        )
        prompts = [value] if one else value
        if not isinstance(prompts, list) or not prompts:
            raise ApiError(
                f"prompt = {show(value)}; it must be a string, a list of strings, a "
                f"list of token ids, or a list of such lists, and not be empty",
                param="prompt",
            )
        if len(prompts) > self.limits.max_samples:
            raise ApiError(
                f"{len(prompts)} prompts; the limit is --max_samples = "
                f"{self.limits.max_samples} of one request: send several requests",
                param="prompt",
            )
        if len({type(prompt) for prompt in prompts}) > 1:
            raise ApiError(
                "prompt holds both strings and token ids; use one of the two",
                param="prompt",
            )
        return tuple(
            self._prompt(prompt, f"prompt {place}")
            for place, prompt in enumerate(prompts)
        )

    def _prompt(self, prompt: Any, name: str) -> np.ndarray:
        param = name.split()[0]
        if isinstance(prompt, str):
            tokens = self._encode(prompt, name)
        elif isinstance(prompt, list):
            tokens = prompt
        else:
            raise ApiError(
                f"{name} = {show(prompt)}; it must be a string or a list of token ids",
                param=param,
            )
        if len(tokens) > self.limits.max_prompt_tokens:
            raise self._too_long(name, f"{len(tokens)} tokens")
        if not tokens:
            raise ApiError(f"{name} has no tokens; it must have one", param=param)
        size = self.limits.vocab_size
        for token in tokens:
            if type(token) is not int or not 0 <= token < size:
                raise ApiError(
                    f"{name} holds {show(token)}; a token id is an integer from 0 to "
                    f"{size - 1}",
                    param=param,
                )
        return np.array(tokens, np.int32)


def _sampling(fields: Sampled, vocab_size: int) -> Sampling:
    # The sampler's number formats are narrower; no completion is changed by it.
    return Sampling(
        temperature=fields.temperature,
        top_k=min(max(fields.top_k, 0), vocab_size),
        top_p=max(fields.top_p, 1e-9),
        min_p=fields.min_p,
    )


def _count_chars(value: Any) -> int:
    """Characters of all texts in a JSON value, at any depth; of other values, one."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list):
            left += each
        else:
            count += len(each) if isinstance(each, str) else 1
    return count
