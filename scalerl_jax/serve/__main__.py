"""Serve completions of a checkpoint:

    python -m scalerl_jax.serve --checkpoint=scalerl_jax/assets/tiny_base --port=8000

The engine is the sampler of training runs, on every device of the machine.  Prompts
are taken as they are: no special token is added, as in training.  SIGTERM and SIGINT
answer what has begun, and then end with status 0.
"""

import argparse
import contextlib
import dataclasses
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from scalerl_jax.build.loading import Model, load_model
from scalerl_jax.data.chat import ChatTemplate, NoTemplate, read_chat_template
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.shardings import param_shardings
from scalerl_jax.model.transformer import unstack_layers
from scalerl_jax.sampler.engine import EngineSettings
from scalerl_jax.serve.flags import read_flags
from scalerl_jax.serve.orders import MAX_LOGPROBS, Limits
from scalerl_jax.serve.replicas import Replica, make_meshes, make_replicas
from scalerl_jax.utils.failures import tell
from scalerl_jax.utils.xla import keep_programs

if TYPE_CHECKING:  # without the extra, --help and mistakes need no server
    from scalerl_jax.serve.server import Access

_log = logging.getLogger("scalerl_jax.serve")  # not "__main__", when run as a module
_LONGEST = 2048  # tokens; of prompts and of completions, unless flags say otherwise


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, compile, serve; the exit status."""
    with contextlib.ExitStack() as held:
        try:
            flags = read_flags(arguments)
            keep_programs(flags.compile_cache)
            held.enter_context(_signals_end_the_process())
            listener = held.enter_context(_bind(flags.host, flags.port))
            access = _access(flags, listener)
            model, settings, replicas = _load(flags)
        except ValueError as error:
            return tell(error)
        return _serve(flags, access, model, settings, replicas, listener)


@contextlib.contextmanager
def _signals_end_the_process() -> Iterator[None]:
    """Until the server has its own handlers, SIGTERM has nothing to wait for."""

    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(0)  # threads that compile would be waited for

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


def _access(flags: argparse.Namespace, listener: socket.socket) -> "Access":
    """Who may ask; warns where that is everyone.

    Raises:
        ValueError: there is no such key, or too few files for the connections.
    """
    from scalerl_jax.serve.access import KEY_VARIABLE, find_key, known_hosts
    from scalerl_jax.serve.connections import ConnectionLimits, reserve_files
    from scalerl_jax.serve.server import Access

    key = find_key(flags.api_key, flags.api_key_file, os.environ)
    address = listener.getsockname()[0]
    if not key and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        _log.warning(
            "warning: %s can be reached from other machines, and without an API key "
            "everyone there may use this server; set --api_key_file or %s",
            *(address, KEY_VARIABLE),
        )
    reserve_files(flags.max_connections)
    return Access(
        key=key,
        hosts=known_hosts(flags.host, flags.allowed_hosts),
        connections=ConnectionLimits(
            max_connections=flags.max_connections,
            header_s=flags.header_s,
            body_s=flags.body_s,
        ),
    )


def _load(flags: argparse.Namespace) -> tuple[Model, EngineSettings, list[Replica]]:
    """The model, less its params, and its replicas with them."""

    def meshes(arch: Architecture) -> list[Mesh]:
        return make_meshes(arch, jax.devices(), flags.tensor)

    model = load_model(
        flags.checkpoint,
        dtype=flags.dtype,
        placement=lambda arch: param_shardings(arch, meshes(arch)[0]),
    )
    settings = _settings(flags, model)
    params = unstack_layers(model.params, model.arch)
    model = dataclasses.replace(model, params=None)  # its layers are a second copy
    found = meshes(model.arch)
    _log.info(
        "compiling, for devices of %s times %s", len(found), found[0].devices.size
    )
    replicas = make_replicas(settings, params, found, model.tokenizer.shown)
    return model, settings, replicas


def _settings(flags: argparse.Namespace, model: Model) -> EngineSettings:
    """What the engine is compiled for.

    Raises:
        ValueError: the model has too few positions.
    """
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
        float32_head=model.config.model.float32_head,
        cache_tokens=flags.cache_tokens,
        top_logprobs=MAX_LOGPROBS,
    )
    if settings.max_tokens > positions:
        raise ValueError(
            f"--max_prompt_tokens + --max_completion_tokens = {settings.max_tokens} is "
            f"more than the {positions} positions of the model; lower one of them"
        )
    return settings


def _template(model: Model) -> ChatTemplate | None:
    """The chat template of the tokenizer, if there is one; warns where it is broken."""
    config = model.config
    try:
        found = read_chat_template(config.data.tokenizer or config.model.checkpoint)
        found.render([{"role": "user", "content": "Hello"}], options={})
    except NoTemplate:
        return None
    except ValueError as error:
        _log.warning("warning: there are no chats: %s", error)
        return None
    # Clients hear of it, and not where it is from.
    return dataclasses.replace(found, origin="the model's chat template")


def _serve(
    flags: argparse.Namespace,
    access: "Access",
    model: Model,
    settings: EngineSettings,
    replicas: Sequence[Replica],
    listener: socket.socket,
) -> int:
    """The exit status."""
    from scalerl_jax.serve.server import serve
    from scalerl_jax.serve.service import Served

    served = Served(
        name=flags.name or Path(flags.checkpoint).absolute().name,
        policy_version=model.policy_version,
        tokenizer=model.tokenizer,
        template=_template(model),
        enable_thinking=model.config.data.enable_thinking,
        limits=Limits(
            max_prompt_tokens=settings.max_prompt_tokens,
            max_prompt_chars=settings.max_prompt_tokens * model.tokenizer.longest_token,
            max_completion_tokens=settings.max_completion_tokens,
            max_samples=flags.max_samples,
            max_body_bytes=flags.max_body_bytes,
            vocab_size=model.arch.vocab_size,
        ),
        slots=settings.slots,
        max_waiting=flags.max_waiting,
    )
    in_order = serve(served, replicas, listener, access=access, drain_s=flags.drain_s)
    return 0 if in_order else 1


if __name__ == "__main__":
    # Other libraries have set up logging when they were imported: `force`.
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    logging.getLogger("scalerl_jax").setLevel(logging.INFO)
    sys.exit(main())
