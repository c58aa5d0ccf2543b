"""The bodies of requests: names, types and fixed bounds of fields, or a refusal.

Limits on several fields together are checked in `orders`.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from scalerl_jax.formats.reading import parse_json

MAX_LOGPROBS = 5  # likeliest tokens of a place: OpenAI's limit for completions
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 128  # four times OpenAI's limit; characters
_SEEDS = 2**32  # of the sampler; OpenAI's are signed, of 64 bits
_UNKNOWN = "unknown_field"


class ApiError(Exception):
    """The error of a refused or failed request, in OpenAI's form."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """Make the error; `param` names the field that is wrong."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the error as a JSON object."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": "rate_limit_error" if self.status == 429 else default,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """Return the answer, in ASCII: what a client sent may not be valid text."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        content = json.dumps(self.body())
        return Response(content, self.status, headers, media_type="application/json")


class BodyFields(BaseModel):
    """A JSON object whose names are all known; null is the same as absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values  # refused with its type
        for name in values:
            if name not in cls.model_fields:  # report the first: there may be thousands
                raise PydanticCustomError(
                    _UNKNOWN,
                    "{shown} is not a field; choose from {known}",
                    {
                        "name": ascii(name)[1:-1][:80],  # it may not be valid text
                        "shown": show(name),
                        "known": str(list(cls.model_fields)),
                    },
                )
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(BodyFields):
    """Options of a stream."""

    include_usage: bool = False


def _check_temperature(value: float) -> float:
    if 0.0 < value < 1e-3:  # logits over it would not be finite
        raise ValueError("it must be 0 or from 0.001 to 100")
    return value


def _as_seed(value: int | None) -> int | None:
    return None if value is None else value % _SEEDS


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Sampled(BodyFields):
    """Fields of every request for completions."""

    model: str = ""
    temperature: Annotated[
        float, Field(ge=0.0, le=100.0), AfterValidator(_check_temperature)
    ] = 1.0
    top_p: float = Field(1.0, ge=0.0, le=1.0)  # 0: the likeliest token
    # Both bounds are those of the sampler's number formats.
    top_k: int = Field(0, ge=-1, le=2**63)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    n: int = Field(1, ge=1)
    seed: Annotated[
        int | None, Field(ge=-(2**63), lt=2**63), AfterValidator(_as_seed)
    ] = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]],
        Field(max_length=_MAX_STOPS),
        BeforeValidator(_as_list),
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # Only values that change nothing are accepted.
    presence_penalty: float = Field(0.0, ge=0.0, le=0.0)
    frequency_penalty: float = Field(0.0, ge=0.0, le=0.0)
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    user: str = ""  # whatever it is, it has no effect


def _check_max_tokens(value: int | None, info: ValidationInfo) -> int | None:
    assert info.context is not None, "read_fields gives the limits"
    most = info.context.max_completion_tokens
    if value is not None and value > most:
        raise ValueError(f"it must be at most --max_completion_tokens = {most}")
    return value


_MaxTokens = Annotated[int | None, Field(ge=1), AfterValidator(_check_max_tokens)]
_MaxTokensOr0 = Annotated[int | None, Field(ge=0), AfterValidator(_check_max_tokens)]


def _as_prompts(value: Any, info: ValidationInfo) -> Any:
    """Return the list of prompts; a single prompt becomes a list of one."""
    assert info.context is not None, "read_fields gives the limits"
    if isinstance(value, str) or (
        isinstance(value, list) and value and type(value[0]) is int
    ):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            "it must be a string, a list of strings, a list of token ids, or a list "
            "of such lists, and not be empty"
        )
    if len({type(prompt) for prompt in value}) > 1:
        raise ValueError("it holds both strings and token ids; use one of the two")
    if len(value) > info.context.max_samples:
        raise ValueError(
            f"{len(value)} prompts; the limit is --max_samples = "
            f"{info.context.max_samples} of one request: send several requests"
        )
    return value


_TokenId = Annotated[int, Field(ge=0)]
_Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[_TokenId], Field(min_length=1, fail_fast=True), Tag("ids")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "ids"),
]


class CompletionFields(Sampled):
    """Fields of /v1/completions."""

    prompt: Annotated[list[_Prompt], FailFast(), BeforeValidator(_as_prompts)] = Field(
        None, validate_default=True
    )
    max_tokens: _MaxTokensOr0 = None  # 0: the prompt alone, echoed
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    echo: bool = False
    suffix: str = Field("", max_length=0)


def _check_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message for a template: `content` is a text, arguments are values.

    Fields that are null are left out, as is an empty list of calls: clients send back
    replies with every field, and templates ask whether a message has calls.
    """
    if not isinstance(message.get("role"), str):
        raise ValueError("'role' must be a text")
    content, calls = message.get("content"), message.get("tool_calls") or []
    if isinstance(content, list):
        content = "\n".join(map(_check_part, content))
    elif not isinstance(content, str | None):
        raise ValueError("'content' must be a text, or a list of parts")
    elif content is None and not calls:
        content = ""
    if not isinstance(calls, list):
        raise ValueError("'tool_calls' must be a list")
    for call in calls:
        _read_arguments(call)
    given = {name: value for name, value in message.items() if value is not None}
    if not calls:
        given.pop("tool_calls", None)
    return {**given, "content": content}


def _check_part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise ValueError("parts of 'content' must be {'type': 'text', 'text': ...}")


def _read_arguments(call: Any) -> None:
    """Replace a call's arguments, which are JSON in a text, by the parsed object.

    Missing arguments, which clients write in several ways, become an empty object:
    templates iterate over the arguments' items.
    """
    match call:
        case {"function": {} as function}:
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = parse_json(arguments.strip() or "null")
                except ValueError:
                    pass  # kept as the model wrote it
            function["arguments"] = {} if arguments is None else arguments
        case _:
            raise ValueError("'tool_calls' must hold objects with a 'function'")


Message = Annotated[dict[str, Any], AfterValidator(_check_message)]


class Conversation(BodyFields):
    """Fields that a chat template is given."""

    messages: Annotated[list[Message], FailFast()] = []
    tools: Annotated[list[dict[str, Any]], FailFast()] = []
    chat_template_kwargs: dict[str, Any] = {}  # such as enable_thinking


class TextFormat(BodyFields):
    """The form of a reply: only text."""

    type: Literal["text"] = "text"


class ChatFields(Sampled, Conversation):
    """Fields of /v1/chat/completions."""

    max_completion_tokens: _MaxTokens = None
    max_tokens: _MaxTokens = None  # its older name
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True  # without effect: calls stay in the text
    response_format: TextFormat = TextFormat()
    store: Literal[False] = False
    metadata: dict[str, Any] = {}  # without effect: nothing is stored


class TokenizeFields(Conversation):
    """Fields of /tokenize: a prompt, or else a conversation."""

    model: str = ""
    prompt: str | None = None
    add_special_tokens: Literal[False] = False  # vLLM's name; none is ever added


F = TypeVar("F", CompletionFields, ChatFields, TokenizeFields)


def read_fields(kind: type[F], body: bytes, limits: Any) -> F:
    """Return the fields in a body; `limits` are those of an `orders.Served`.

    Raises:
        ApiError: it is not JSON, or a field is unknown, of a wrong type or value.
    """
    try:
        values = parse_json(body)
    except ValueError as error:  # malformed, not valid text, or too deep
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError("the body is JSON, but not an object")
    try:
        return kind.model_validate(values, context=limits)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, message = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] == _UNKNOWN:
            name = ".".join(filter(None, [name, first.get("ctx", {})["name"]]))
        else:
            said = message.removeprefix("Value error, ")
            message = f"{name} = {show(first['input'])}: {said}"
        raise ApiError(message, param=name) from error


def show(value: Any) -> str:
    """Return a value as shown in errors: at most its first 80 characters."""
    try:
        text = repr(value)
    except RecursionError:  # JSON may nest deeper than `repr` can write
        text = "..."
    return text if len(text) <= 80 else f"{text[:80]}..."
