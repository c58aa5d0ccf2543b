"""Orders: requests for completions that keep all limits of the server.

The length of a text is checked before it is tokenised, and that of messages before a
template renders them: a text longer than the limit's tokens could make is refused.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.data.chat import ChatTemplate, TemplateUnstarted
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.serve.fields import (
    ApiError,
    ChatFields,
    CompletionFields,
    Conversation,
    F,
    Sampled,
    TokenizeFields,
    read_fields,
    show,
)

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
# Arguments of a template that the server sets.
_OURS = ("messages", "tools", "documents", "add_generation_prompt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """The model of a server, and the limits of a request."""

    name: str
    policy_version: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    enable_thinking: bool  # in chats, unless a request says otherwise
    vocab_size: int
    max_prompt_tokens: int
    max_completion_tokens: int
    max_samples: int  # prompts times n
    max_body_bytes: int
    slots: int  # completions sampled together, of each replica
    max_waiting: int  # completions beyond those in slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOrder:
    """A valid request for completions."""

    prompts: tuple[np.ndarray, ...]  # int32 [P] each
    fields: Sampled
    sampling: Sampling
    max_tokens: int  # 0: nothing is sampled
    logprobs: int | None  # likeliest tokens beside the sampled one; None: no logprobs
    echo: bool = False  # the prompt is repeated before its completions

    @property
    def num_choices(self) -> int:
        """Completions of all prompts."""
        return len(self.prompts) * self.fields.n

    @property
    def scores_prompts(self) -> bool:
        """Whether the log-probabilities of the prompts' tokens are requested."""
        return self.echo and self.logprobs is not None

    @property
    def temperature(self) -> float:
        """Temperature of log-probabilities: 1 if sampling is greedy."""
        return self.sampling.temperature or 1.0


class _Limit(NamedTuple):
    """The most tokens of a prompt, and the flags that set this limit."""

    name: str
    tokens: int


class BodyReader:
    """Reads bodies for one model; each method raises `ApiError` for a bad body."""

    def __init__(self, served: Served) -> None:
        """Make the reader of a server's bodies."""
        self._served = served
        # Most characters that a token stands for: a byte is written as one character.
        tokens = served.tokenizer.backend.get_vocab(with_added_tokens=True)
        self._longest_token = max(map(len, tokens), default=1)
        self._limit = _Limit("--max_prompt_tokens", served.max_prompt_tokens)
        # The limit of a prompt after which nothing is sampled.
        self._whole_limit = _Limit(
            "--max_prompt_tokens + --max_completion_tokens",
            served.max_prompt_tokens + served.max_completion_tokens,
        )

    def completion(self, body: bytes) -> CompletionOrder:
        """Return the order of a request to /v1/completions."""
        fields = self._fields(CompletionFields, body)
        if fields.best_of not in (None, fields.n):
            raise ApiError(
                f"best_of = {fields.best_of} is not supported; leave it out or set it "
                f"to n = {fields.n}",
                param="best_of",
            )
        served, max_tokens = self._served, fields.max_tokens
        if max_tokens == 0 and not fields.echo:
            raise ApiError(
                "max_tokens = 0 asks for nothing: add echo = true for the prompt "
                "itself, and logprobs for those of its tokens",
                param="max_tokens",
            )
        if max_tokens is None:
            max_tokens = min(_DEFAULT_MAX_TOKENS, served.max_completion_tokens)
        limit = self._limit if max_tokens else self._whole_limit
        return self._order(
            fields,
            tuple(
                self._prompt(prompt, f"prompt {place}", limit)
                for place, prompt in enumerate(fields.prompt)
            ),
            max_tokens=max_tokens,
            logprobs=fields.logprobs,
            echo=fields.echo,
        )

    def chat(self, body: bytes) -> CompletionOrder:
        """Return the order of a request to /v1/chat/completions."""
        fields = self._fields(ChatFields, body)
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError(
                f"top_logprobs = {fields.top_logprobs} needs logprobs = true",
                param="top_logprobs",
            )
        if fields.tool_choice == "none":
            fields = fields.model_copy(update={"tools": []})
        asked = fields.max_completion_tokens or fields.max_tokens
        if fields.max_tokens and asked != fields.max_tokens:
            raise ApiError(
                f"max_tokens = {fields.max_tokens} and max_completion_tokens = {asked} "
                f"are two names of one limit; leave the first out",
                param="max_tokens",
            )
        return self._order(
            fields,
            (self._prompt(self._write(fields), "messages", self._limit),),
            max_tokens=asked or self._served.max_completion_tokens,
            logprobs=fields.top_logprobs if fields.logprobs else None,
        )

    def is_chat(self, body: bytes) -> bool:
        """Return whether a body asks for the token ids of a conversation."""
        return bool(self._fields(TokenizeFields, body).messages)

    def tokens(self, body: bytes) -> list[int]:
        """Return the ids of a text or a conversation, as completions would take them.

        There may be more ids than a prompt may have.
        """
        fields = self._fields(TokenizeFields, body)
        if (fields.prompt is None) == (not fields.messages):
            raise ApiError("give a prompt or messages, and not both", param="prompt")
        if fields.prompt is not None:
            return self._encode(fields.prompt, "prompt", self._limit)
        return self._encode(self._write(fields), "messages", self._limit)

    def _fields(self, kind: type[F], body: bytes) -> F:
        fields, own = read_fields(kind, body, self._served), self._served.name
        if fields.model not in ("", own):
            raise ApiError(
                f"model = {fields.model!r} is not served here; this server has {own!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return fields

    def _order(
        self,
        fields: Sampled,
        prompts: tuple[np.ndarray, ...],
        *,
        max_tokens: int,
        logprobs: int | None,
        echo: bool = False,
    ) -> CompletionOrder:
        served = self._served
        if "stream_options" in fields.model_fields_set and not fields.stream:
            raise ApiError(
                "stream_options needs stream = true; leave it out",
                param="stream_options",
            )
        if len(prompts) * fields.n > served.max_samples:
            raise ApiError(
                f"{len(prompts)} prompts with n = {show(fields.n)} are more "
                f"completions than --max_samples = {served.max_samples} of one "
                f"request: send several requests",
                param="n",
            )
        # The sampler's number formats are narrower; this changes no completion.
        sampling = Sampling(
            temperature=fields.temperature,
            top_k=min(max(fields.top_k, 0), served.vocab_size),
            top_p=max(fields.top_p, 1e-9),
            min_p=fields.min_p,
        )
        return CompletionOrder(
            prompts=prompts,
            fields=fields,
            sampling=sampling,
            max_tokens=max_tokens,
            logprobs=logprobs,
            echo=echo,
        )

    def _write(self, fields: Conversation) -> str:
        """Return the prompt of a conversation, rendered by the model's template."""
        served = self._served
        if served.template is None:
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
        if len(fields.messages) > self._limit.tokens:
            length = f"{len(fields.messages)} messages"
            raise _too_long("messages", length, self._limit)
        given = [fields.messages, fields.tools, fields.chat_template_kwargs]
        self._check_length(_count_chars(given), "messages", self._limit)
        if taken := [name for name in _OURS if name in fields.chat_template_kwargs]:
            raise ApiError(
                f"chat_template_kwargs may not hold {taken[0]!r}",
                param="chat_template_kwargs",
            )
        options = {"enable_thinking": served.enable_thinking}
        try:
            return served.template.render(
                fields.messages,
                tools=fields.tools or None,
                options=options | fields.chat_template_kwargs,
            )
        except TemplateUnstarted as error:
            code = "chat_template_unstarted"
            raise ApiError(str(error), status=503, code=code) from error
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error

    def _prompt(self, prompt: str | list[int], name: str, limit: _Limit) -> np.ndarray:
        """Return the token ids, int32 [P], of a text or of a list of ids."""
        served, param, tokens = self._served, name.split()[0], prompt
        if isinstance(tokens, str):
            tokens = self._encode(tokens, name, limit)
        if len(tokens) > limit.tokens:
            raise _too_long(name, f"{len(tokens)} tokens", limit)
        if not tokens:
            raise ApiError(f"{name} has no tokens; it must have one", param=param)
        if max(tokens) >= served.vocab_size:
            raise ApiError(
                f"{name} holds {show(max(tokens))}; a token id is an integer from 0 to "
                f"{served.vocab_size - 1}",
                param=param,
            )
        return np.array(tokens, np.int32)

    def _encode(self, text: str, name: str, limit: _Limit) -> list[int]:
        self._check_length(len(text), name, limit)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            param = name.split()[0]
            raise ApiError(f"{name} is not text: {error}", param=param) from error
        return self._served.tokenizer.encode_aside(text)

    def _check_length(self, chars: int, name: str, limit: _Limit) -> None:
        if chars > limit.tokens * self._longest_token:
            raise _too_long(name, f"{chars} characters", limit)


def _too_long(name: str, length: str, limit: _Limit) -> ApiError:
    return ApiError(
        f"{name} has {length}, which are more than {limit.name} = {limit.tokens} "
        f"tokens",
        param=name.split()[0],
        code="context_length_exceeded",
    )


def _count_chars(value: Any) -> int:
    """Return the characters of all texts in a JSON value; other values count as one."""
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
