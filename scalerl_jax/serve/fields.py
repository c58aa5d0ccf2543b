"""The bodies of requests, field by field: names, types and fixed bounds.

What depends on the server's own limits is checked in `protocol`.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from scalerl_jax.serve.errors import ApiError
from scalerl_jax.serve.orders import MAX_LOGPROBS

_MAX_STOPS, _MAX_STOP_LENGTH = 4, 128  # OpenAI's limit; characters
_SEEDS = 2**32
_UNKNOWN = "unknown_field"


class Fields(BaseModel):
    """A JSON object whose names are all known; null is the same as absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values  # refused with its type
        for name in values:
            if name not in cls.model_fields:
                raise PydanticCustomError(
                    _UNKNOWN,
                    "{shown} is not a field; choose from {known}",
                    {
                        "name": ascii(name)[1:-1][:80],  # it may be no text
                        "shown": show(name),
                        "known": str(list(cls.model_fields)),
                    },
                )
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Fields):
    """Of a stream."""

    include_usage: bool = False


def _check_temperature(value: float) -> float:
    if 0.0 < value < 1e-3:  # logits over it would not be finite
        raise ValueError("it must be 0 or from 0.001 to 100")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Sampled(Fields):
    """Fields of every request for completions."""

    model: str = ""
    temperature: Annotated[
        float, Field(ge=0.0, le=100.0), AfterValidator(_check_temperature)
    ] = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    # Both bounds are those of the sampler's number formats.
    top_k: int = Field(0, ge=-1, le=2**63)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=0, lt=_SEEDS)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]],
        Field(max_length=_MAX_STOPS),
        BeforeValidator(_as_list),
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # Known, and without effect: taken only where they ask for nothing.
    presence_penalty: float = Field(0.0, ge=0.0, le=0.0)
    frequency_penalty: float = Field(0.0, ge=0.0, le=0.0)
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    user: str = ""


class CompletionFields(Sampled):
    """Of /v1/completions."""

    prompt: Any = None  # its four forms are told apart in `protocol`
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    echo: Literal[False] = False
    suffix: str = Field("", max_length=0)


def _check_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates take it: `content` a text, arguments of tools values."""
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
    return {**message, "content": content}


def _check_part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise ValueError("parts of 'content' must be {'type': 'text', 'text': ...}")


def _read_arguments(call: Any) -> None:
    """Make the arguments of a call, which are JSON in a text, an object."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                function["arguments"] = json.loads(text)
            except (ValueError, RecursionError):
                pass  # as a model wrote it
        case {"function": {}}:
            pass
        case _:
            raise ValueError("'tool_calls' must hold objects with a 'function'")


Message = Annotated[dict[str, Any], AfterValidator(_check_message)]


class Conversation(Fields):
    """What a chat template is given."""

    messages: Annotated[list[Message], FailFast()] = []
    tools: Annotated[list[dict[str, Any]], FailFast()] = []
    chat_template_kwargs: dict[str, Any] = {}  # such as enable_thinking


class TextFormat(Fields):
    """Of a reply: no other than text."""

    type: Literal["text"] = "text"


class ChatFields(Sampled, Conversation):
    """Of /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)  # its older name
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    response_format: TextFormat = TextFormat()
    store: Literal[False] = False
    metadata: dict[str, Any] = {}


class TokenizeFields(Conversation):
    """Of /tokenize: a prompt, or else a conversation."""

    model: str = ""
    prompt: str | None = None


F = TypeVar("F", bound=Fields)


def read_fields(kind: type[F], body: bytes) -> F:
    """The fields in the body of a request.

    Raises:
        ApiError: it is not JSON, or a field is unknown, of a wrong type or value.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:  # broken, no text, or too deep
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError("the body is JSON, but not an object")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> ApiError:
    """The first of what is wrong."""
    first = error.errors(include_url=False)[0]
    place, message = list(first["loc"]), first["msg"]
    if first["type"] == _UNKNOWN:
        place.append(first.get("ctx", {})["name"])
    else:
        name = ".".join(map(str, place))
        message = f"{name} = {show(first['input'])}: {message}"
    return ApiError(message, param=".".join(map(str, place)))


def show(value: Any) -> str:
    """A value in an error, at most 80 characters of it."""
    try:
        text = repr(value)
    except RecursionError:  # JSON may nest deeper than it can be written
        text = "..."
    return text if len(text) <= 80 else f"{text[:80]}..."
