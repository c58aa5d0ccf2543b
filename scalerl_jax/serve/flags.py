"""The flags of the server, checked before anything is loaded."""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from typing import NoReturn

from scalerl_jax.config import Config

_EXTRA = ("uvicorn", "starlette", "pydantic", "prometheus_client")


class _Parser(argparse.ArgumentParser):
    """One whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} must be above 0")
    return value


def _not_negative(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{value} must be 0 or more")
    return value


def _port(text: str) -> int:
    if not 0 <= (value := int(text)) < 2**16:
        raise argparse.ArgumentTypeError(f"{value} must be from 0 to 65535")
    return value


def _seconds(text: str) -> float:
    if not 0.0 <= (value := float(text)) < 1e6:
        raise argparse.ArgumentTypeError(f"{value} must be from 0 to a million")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m scalerl_jax.serve",
        description="Completions over HTTP, in OpenAI's form.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )

    def add(
        name: str, kind: Callable[[str], object], default: object, meaning: str
    ) -> None:
        parser.add_argument(f"--{name}", type=kind, default=default, help=meaning)

    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a Hugging Face directory, a run directory (its newest checkpoint), or "
        "one checkpoint of a run",
    )
    add("host", str, "127.0.0.1", "address to listen on")
    add("port", _port, 8000, "0: a free one, which is logged")
    add("name", str, "", "the model's, for clients; empty: the directory's")
    add("dtype", str, "", "float32 or bfloat16; empty: the checkpoint's")
    add("tensor", _not_negative, 0, "devices that share a replica; 0: as many as can")
    add("slots", _positive, 32, "completions sampled together by a replica")
    add("max_prompt_tokens", _not_negative, 0, "0: half the model's, 2048 at most")
    add("max_completion_tokens", _not_negative, 0, "0: half the model's, 2048 at most")
    add("tokens_per_call", _positive, 8, "decode steps between two looks of the host")
    add("cache_tokens", _not_negative, 0, "of the KV cache; 0: every slot at its limit")
    add("max_waiting", _not_negative, 256, "completions that wait for a slot, then 429")
    add("max_samples", _positive, 128, "completions of one request: prompts times n")
    add("max_body_bytes", _positive, 4 * 2**20, "of one request, then 413")
    add("max_connections", _positive, 512, "then who waits longest has to go, or 503")
    add("header_s", _seconds, 10.0, "for the headers of a request, then the end")
    add("body_s", _seconds, 60.0, "for its body, then 408; and to take 48 KiB")
    kept = Config().compile_cache
    add("compile_cache", str, kept, "directory of compiled programs; '': none")
    add("drain_s", _seconds, 30.0, "for running requests, after SIGTERM")
    parser.add_argument(
        "--api_key",
        "--api-key",
        help="that clients must send; a process list shows it, unlike the next two",
    )
    add("api_key_file", str, None, "with the key; or set SCALERL_API_KEY")
    add("allowed_hosts", str, "", "names of this server, A,B; *: any (see docs)")
    return parser


def read_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags.

    Raises:
        ValueError: one is unknown or wrong, or the extra is not installed.
    """
    flags, unknown = _parser().parse_known_args(arguments)
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
