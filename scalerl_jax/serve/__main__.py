"""Serve completions of a checkpoint:

    scalerl serve --checkpoint=scalerl_jax/assets/tiny_base --port=8000

The engine is the sampler of training runs, on every device of the machine.  Prompts
are taken as they are: no special token is added, as in training.  SIGTERM and SIGINT
answer what has begun, and then end with status 0.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

from scalerl_jax.config import Config
from scalerl_jax.config.sections import Count, Large, Tokens
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.printing import log_to_stderr

_EXTRA = ("uvicorn", "starlette", "pydantic", "prometheus_client")


def _between(kind: type, least: float, end: float, must: str) -> Callable[[str], float]:
    """Return the type of a flag that holds a number from `least` to below `end`."""

    def number(text: str) -> float:
        if not least <= (value := kind(text)) < end:  # NaN is in no range
            raise argparse.ArgumentTypeError(f"{value} must be {must}")
        return value

    number.__name__ = kind.__name__  # as argparse names it
    return number


def _as_setting(numbers: Any, least: int) -> Callable[[str], float]:
    """Return the type of a flag that holds a number up to the most of a run's settings.

    Args:
        numbers: the kind of the settings, of `config.sections`.
        least: the least number.
    """
    _, limits = get_args(numbers)
    return _between(
        int, least, limits.at_most + 1, f"from {least} to {limits.at_most:,}"
    )


_positive = _between(int, 1, float("inf"), "above 0")
_not_negative = _between(int, 0, float("inf"), "0 or more")


def _switch(text: str) -> bool:
    """Return whether the text is "on" and not "off"."""
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} must be on or off")
    return text == "on"


_port = _between(int, 0, 2**16, "from 0 to 65535")
_slots = _as_setting(Count, 1)
_tokens = _as_setting(Tokens, 1)
_cache_tokens = _as_setting(Large, 0)
_seconds = _between(float, 0.0, 1e6, "from 0 to a million")
# Name, type, default, meaning.
_FLAGS: tuple[tuple[str, Callable[[str], object], object, str], ...] = (
    ("host", str, "127.0.0.1", "address to listen on"),
    ("port", _port, 8000, "0: a free one, which is logged"),
    ("name", str, "", "the model's, for clients; empty: the directory's"),
    ("adapter", str, "", "directory of low-rank factors, merged into the checkpoint's"),
    ("dtype", str, "", "float32 or bfloat16; empty: the checkpoint's"),
    ("tensor", _not_negative, 0, "devices that share a replica; 0: as many as can"),
    ("slots", _slots, 32, "completions sampled together by a replica"),
    ("max_prompt_tokens", _not_negative, 0, "0: half the model's, 2048 at most"),
    ("max_completion_tokens", _not_negative, 0, "0: half the model's, 2048 at most"),
    ("tokens_per_call", _tokens, 8, "decode steps between two looks of the host"),
    ("cache_tokens", _cache_tokens, 0, "of the KV cache; 0: every slot at its limit"),
    ("prefix_cache", _switch, "on", "prompts that begin alike share its pages; or off"),
    ("max_waiting", _not_negative, 256, "completions that wait for a slot, then 429"),
    ("max_samples", _positive, 128, "completions of one request: prompts times n"),
    ("max_body_bytes", _positive, 4 * 2**20, "of one request, then 413"),
    ("max_connections", _positive, 512, "then who waits longest has to go, or 503"),
    ("header_s", _seconds, 10.0, "for the headers of a request, then the end"),
    ("body_s", _seconds, 60.0, "for its body, then 408; and to take 64 KiB"),
    (
        "compile_cache",
        str,
        Config().compile_cache,
        "directory of compiled programs; '': none",
    ),
    ("drain_s", _seconds, 30.0, "for running requests, after SIGTERM"),
    ("api_key_file", str, None, "with the key; or set SCALERL_API_KEY"),
    ("allowed_hosts", str, "", "names of this server, A,B; *: any (see docs)"),
)


def read_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags, checked before anything is loaded.

    Raises:
        ValueError: one is unknown or wrong, or the extra is not installed.
    """
    parser = Parser(
        prog="python -m scalerl_jax.serve",
        description="Completions over HTTP, in OpenAI's form.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a Hugging Face directory or id, a GGUF file, a run directory (its newest "
        "checkpoint), or one checkpoint of a run",
    )
    for name, kind, default, meaning in _FLAGS:
        parser.add_argument(f"--{name}", type=kind, default=default, help=meaning)
    parser.add_argument(
        "--api_key",
        "--api-key",
        help="that clients must send; a process list shows it, unlike the file or "
        "the variable",
    )
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        # Their names alone: what was misspelt may be the key.
        names = [each.partition("=")[0] for each in unknown if each.startswith("-")]
        raise ValueError(f"unknown flags: {' '.join(names) or 'a word without a flag'}")
    for name in _EXTRA:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"{name} is not installed: pip install 'scalerl_jax[serve]'"
            )
    if flags.dtype not in ("", "float32", "bfloat16"):
        raise ValueError(f"--dtype={flags.dtype}; choose from float32 and bfloat16")
    if flags.max_samples > flags.slots + flags.max_waiting:
        raise ValueError(
            f"--max_samples={flags.max_samples} is more than --slots + --max_waiting = "
            f"{flags.slots + flags.max_waiting}, so that such a request could never be "
            f"taken; lower the first or raise the others"
        )
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, compile, serve; return the exit status."""

    def run() -> int:
        flags = read_flags(arguments)
        # Its libraries are of the extra: --help and mistakes need none of them.
        from scalerl_jax.serve.server import serve

        return serve(flags)

    return answer(run)


if __name__ == "__main__":
    log_to_stderr()
    sys.exit(main())
