"""What a client may ask for, checked; and errors in OpenAI's form."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.sampler.sampling import Sampling

MAX_LOGPROBS = 5  # likeliest tokens beside the drawn one; OpenAI's limit
_MAX_STOPS, _MAX_STOP_LENGTH = 4, 128  # OpenAI's limit; characters
_SEEDS = 2**32
_DEFAULT_MAX_TOKENS = 16  # OpenAI's

# Fields that this server knows and cannot obey, and the values that ask for nothing.
_WITHOUT_EFFECT: dict[str, Any] = {
    "echo": False,
    "suffix": "",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
_FIELDS = (
    "model prompt max_tokens temperature top_p top_k min_p n best_of seed stop "
    "logprobs stream stream_options user"
).split()


class ApiError(Exception):
    """A request that is not answered with completions, and why."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """`param` names the field that is wrong."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """As OpenAI says it."""
        kinds = {429: "rate_limit_error"}
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": kinds.get(self.status, default),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for."""

    max_prompt_tokens: int
    max_completion_tokens: int
    max_samples: int  # prompts times n
    max_body_bytes: int
    vocab_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A request for completions that can be met."""

    prompts: tuple[np.ndarray, ...]  # int32 [P] each
    sampling: Sampling
    max_tokens: int
    num_samples: int  # of each prompt
    seed: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    stream: bool
    include_usage: bool


def read_order(
    body: bytes, *, model: str, limits: Limits, encode: Callable[[str], list[int]]
) -> Order:
    """The order in the body of a request.

    Raises:
        ApiError: it is not JSON, or a field is unknown, of a wrong type or value.
    """
    fields = _Fields(_read_json(body))
    fields.check_names()
    asked = fields.text("model", model)
    if asked != model:
        raise ApiError(
            f"model = {asked!r} is not served here; this server has {model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    prompts = _read_prompts(fields.get("prompt"), limits, encode)
    num_samples = fields.integer("n", 1, low=1, high=limits.max_samples)
    if len(prompts) * num_samples > limits.max_samples:
        raise ApiError(
            f"{len(prompts)} prompts with n = {num_samples} are "
            f"{len(prompts) * num_samples} completions; the limit is --max_samples = "
            f"{limits.max_samples} of one request: send several requests",
            param="prompt",
        )
    if fields.integer("best_of", num_samples, low=1, high=_SEEDS) != num_samples:
        raise ApiError(
            f"best_of = {fields.get('best_of')} is not supported; leave it out or set "
            f"it to n = {num_samples}",
            param="best_of",
        )
    options = fields.section("stream_options", ("include_usage",))
    longest = limits.max_completion_tokens
    return Order(
        prompts=prompts,
        sampling=_read_sampling(fields, limits),
        max_tokens=fields.integer(
            "max_tokens", min(_DEFAULT_MAX_TOKENS, longest), low=1, high=longest
        ),
        num_samples=num_samples,
        seed=fields.optional_integer("seed", low=0, high=_SEEDS - 1),
        stop=_read_stops(fields.get("stop")),
        logprobs=fields.optional_integer("logprobs", low=0, high=MAX_LOGPROBS),
        stream=fields.boolean("stream"),
        include_usage=options.boolean("include_usage"),
    )


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:  # broken, no text, or too deep
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError(f"the body is a JSON {_kind(values)}; it must be an object")
    return values


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean"}
    return kinds.get(type(value), "null" if value is None else "number")


class _Fields:
    """The fields of a JSON object; null is the same as absent."""

    def __init__(self, values: dict[str, Any], *, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def check_names(self, known: Sequence[str] = (*_FIELDS, *_WITHOUT_EFFECT)) -> None:
        """Refuse what is unknown, or would have to be ignored."""
        for name, value in self._values.items():
            if name not in known:
                raise ApiError(
                    f"{_show(self._prefix + name)} is not a field; choose from "
                    f"{list(known)}",
                    param=(self._prefix + name)[:80],
                )
            if value is None or name not in _WITHOUT_EFFECT:
                continue
            if value != _WITHOUT_EFFECT[name]:
                raise ApiError(
                    f"{name} = {_show(value)} is not supported by this server; leave "
                    f"it out",
                    param=name,
                )

    def text(self, name: str, default: str) -> str:
        return self._typed(name, default, str, "a string")

    def boolean(self, name: str) -> bool:
        return self._typed(name, False, bool, "true or false")

    def section(self, name: str, known: Sequence[str]) -> "_Fields":
        values = self._typed(name, {}, dict, "an object")
        fields = _Fields(values, prefix=f"{name}.")
        fields.check_names(known)
        return fields

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        value = self._typed(name, default, int, "an integer")
        return self._bounded(name, value, low, high)

    def optional_integer(self, name: str, *, low: int, high: int) -> int | None:
        if self.get(name) is None:
            return None
        return self.integer(name, low, low=low, high=high)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self._typed(name, default, (int, float), "a number")
        return float(self._bounded(name, value, low, high))

    def _bounded(self, name: str, value: Any, low: Any, high: Any) -> Any:
        if not low <= value <= high:  # so is NaN refused
            raise ApiError(
                f"{name} = {_show(value)}; it must be from {low} to {high}", param=name
            )
        return value

    def _typed(self, name: str, default: Any, kind: Any, meaning: str) -> Any:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (type(value) is bool and kind is not bool):
            raise ApiError(
                f"{self._prefix}{name} = {_show(value)} is a JSON {_kind(value)}; it "
                f"must be {meaning}",
                param=name,
            )
        return value


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:  # JSON may nest deeper than it can be written
        text = "..."
    return text if len(text) <= 80 else f"{text[:80]}..."


def _read_sampling(fields: _Fields, limits: Limits) -> Sampling:
    temperature = fields.number("temperature", 1.0, low=0.0, high=100.0)
    if 0.0 < temperature < 1e-3:  # logits over it would not be finite
        raise ApiError(
            f"temperature = {temperature}; it must be 0 or from 0.001 to 100",
            param="temperature",
        )
    top_p = fields.number("top_p", 1.0, low=0.0, high=1.0)
    if top_p == 0.0:
        raise ApiError(
            "top_p = 0; it must be above 0: for the likeliest token set temperature "
            "to 0",
            param="top_p",
        )
    # Both bounds are those of the sampler's number formats and change no completion.
    top_k = fields.integer("top_k", 0, low=-1, high=2**63)
    return Sampling(
        temperature=temperature,
        top_k=min(max(top_k, 0), limits.vocab_size),
        top_p=max(top_p, 1e-9),
        min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
    )


def _read_stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    good = len(stops) <= _MAX_STOPS and all(
        isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP_LENGTH for stop in stops
    )
    if not good:
        raise ApiError(
            f"stop = {_show(value)}; it must be a string, or a list of at most "
            f"{_MAX_STOPS}, each of 1 to {_MAX_STOP_LENGTH} characters",
            param="stop",
        )
    return tuple(stops)


def _read_prompts(
    value: Any, limits: Limits, encode: Callable[[str], list[int]]
) -> tuple[np.ndarray, ...]:
    """Token ids of each prompt, from any of the four forms."""
    one = isinstance(value, str) or (
        isinstance(value, list) and value and type(value[0]) is int
    )
    prompts = [value] if one else value
    if not isinstance(prompts, list) or not prompts:
        raise ApiError(
            f"prompt = {_show(value)}; it must be a string, a list of strings, a list "
            f"of token ids, or a list of such lists, and not be empty",
            param="prompt",
        )
    if len(prompts) > limits.max_samples:
        raise ApiError(
            f"{len(prompts)} prompts; the limit is --max_samples = "
            f"{limits.max_samples} of one request: send several requests",
            param="prompt",
        )
    if len({type(prompt) for prompt in prompts}) > 1:
        raise ApiError(
            "prompt holds both strings and token ids; use one of the two",
            param="prompt",
        )
    return tuple(
        _read_prompt(prompt, place, limits, encode)
        for place, prompt in enumerate(prompts)
    )


def _read_prompt(
    prompt: Any, place: int, limits: Limits, encode: Callable[[str], list[int]]
) -> np.ndarray:
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                f"prompt {place} is not text: {error}", param="prompt"
            ) from error
        tokens = encode(prompt)
    elif isinstance(prompt, list):
        tokens = prompt
    else:
        raise ApiError(
            f"prompt {place} is a JSON {_kind(prompt)}; it must be a string or a list "
            f"of token ids",
            param="prompt",
        )
    if not 0 < len(tokens) <= limits.max_prompt_tokens:
        raise ApiError(
            f"prompt {place} has {len(tokens)} tokens; it must have from 1 to "
            f"--max_prompt_tokens = {limits.max_prompt_tokens}",
            param="prompt",
            code="context_length_exceeded" if tokens else None,
        )
    for token in tokens:
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise ApiError(
                f"prompt {place} holds {_show(token)}; a token id is an integer from "
                f"0 to {limits.vocab_size - 1}",
                param="prompt",
            )
    return np.array(tokens, np.int32)
