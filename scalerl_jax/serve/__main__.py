"""Serve completions of a checkpoint:

    python -m scalerl_jax.serve --checkpoint=scalerl_jax/assets/tiny_base --port=8000

The engine is the sampler of training runs.  Prompts are taken as they are: no special
token is added, as in training.  SIGTERM and SIGINT answer what has begun, and then
end with status 0.
"""

import argparse
import contextlib
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import jax

from scalerl_jax.build.loading import Model, load_model
from scalerl_jax.config import Config
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler.engine import Engine, EngineSettings
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.serve.protocol import MAX_LOGPROBS, Limits
from scalerl_jax.utils.failures import is_explained
from scalerl_jax.utils.programs import keep_programs

_log = logging.getLogger("scalerl_jax.serve")  # not "__main__", when run as a module
_MISTAKE, _FAILURE = 2, 1  # exit statuses: the user's, and everything else
_LONGEST = 2048  # tokens; of prompts and of completions, unless flags say otherwise


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
    """The flags."""
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
    add("slots", _positive, 32, "completions sampled together")
    add("max_prompt_tokens", _not_negative, 0, "0: half the model's, 2048 at most")
    add("max_completion_tokens", _not_negative, 0, "0: half the model's, 2048 at most")
    add("tokens_per_call", _positive, 8, "decode steps between two looks of the host")
    add("cache_tokens", _not_negative, 0, "of the KV cache; 0: every slot at its limit")
    add("max_waiting", _not_negative, 256, "completions that wait for a slot, then 429")
    add("max_samples", _positive, 128, "completions of one request: prompts times n")
    add("max_body_bytes", _positive, 4 * 2**20, "of one request, then 413")
    kept = Config().compile_cache
    add("compile_cache", str, kept, "directory of compiled programs; '': none")
    add("drain_s", _seconds, 30.0, "for running requests, after SIGTERM")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, compile, serve; the exit status."""
    with contextlib.ExitStack() as held:
        try:
            flags = _parser().parse_args(arguments)
            _check(flags)
            keep_programs(flags.compile_cache)
            held.enter_context(_signals_end_the_process())
            listener = held.enter_context(_bind(flags.host, flags.port))
            model = load_model(flags.checkpoint, dtype=flags.dtype)
            engine = _make_engine(flags, model)
        except ValueError as error:
            if not is_explained(error):
                raise
            sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
            return _MISTAKE
        return 0 if _serve(flags, model, engine, listener) else _FAILURE


def _check(flags: argparse.Namespace) -> None:
    if importlib.util.find_spec("uvicorn") is None:
        raise ValueError("uvicorn is not installed: pip install 'scalerl_jax[serve]'")
    if flags.dtype not in ("", "float32", "bfloat16"):
        raise ValueError(f"--dtype={flags.dtype}; choose from float32 and bfloat16")
    if flags.max_samples > flags.slots + flags.max_waiting:
        raise ValueError(
            f"--max_samples={flags.max_samples} is more than --slots + --max_waiting = "
            f"{flags.slots + flags.max_waiting}, so that such a request could never be "
            f"taken; lower the first or raise the others"
        )


@contextlib.contextmanager
def _signals_end_the_process() -> Iterator[None]:
    """Until the server has its own handlers, SIGTERM has nothing to wait for."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = {
        number: signal.signal(number, leave)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens only once the server is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ValueError(
            f"--host={host} --port={port} cannot be listened on ({error}); choose "
            f"others, 0 is a free port"
        ) from error
    with listener:
        yield listener


def _make_engine(flags: argparse.Namespace, model: Model) -> Engine:
    """Compiled for the model."""
    positions = model.arch.max_positions
    half = min(_LONGEST, positions // 2)
    settings = EngineSettings(
        arch=model.arch,
        slots=flags.slots,
        max_prompt_tokens=flags.max_prompt_tokens or half,
        max_completion_tokens=flags.max_completion_tokens or half,
        tokens_per_call=flags.tokens_per_call,
        dtype=model.dtype,
        eos_ids=model.tokenizer.eos_ids,
        float32_head=model.float32_head,
        cache_tokens=flags.cache_tokens,
        top_logprobs=MAX_LOGPROBS,
    )
    if settings.max_tokens > positions:
        raise ValueError(
            f"--max_prompt_tokens + --max_completion_tokens = {settings.max_tokens} is "
            f"more than the {positions} positions of the model; lower one of them"
        )
    engine = Engine(settings, mesh=make_mesh(jax.devices()[:1]))
    _log.info("compiling")
    engine.warm_up(model.params)
    return engine


def _serve(
    flags: argparse.Namespace, model: Model, engine: Engine, listener: socket.socket
) -> bool:
    """Whether it ended in order."""
    # Here and not above: without the extra, --help and mistakes need no server.
    from scalerl_jax.serve.server import serve
    from scalerl_jax.serve.service import Served

    settings = engine.settings
    served = Served(
        name=flags.name or Path(flags.checkpoint).absolute().name,
        policy_version=model.policy_version,
        tokenizer=model.tokenizer,
        limits=Limits(
            max_prompt_tokens=settings.max_prompt_tokens,
            max_completion_tokens=settings.max_completion_tokens,
            max_samples=flags.max_samples,
            max_body_bytes=flags.max_body_bytes,
            vocab_size=model.arch.vocab_size,
        ),
        slots=settings.slots,
        max_waiting=flags.max_waiting,
    )
    scheduler = Scheduler(engine, spelling=model.tokenizer.shown)
    return serve(served, scheduler, model.params, listener, drain_s=flags.drain_s)


if __name__ == "__main__":
    # Other libraries have set up logging when they were imported: `force`.
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    logging.getLogger("scalerl_jax").setLevel(logging.INFO)
    sys.exit(main())
