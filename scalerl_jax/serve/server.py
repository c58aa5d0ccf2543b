"""The server from its flags to its drain: load, compile, listen, answer, drain."""

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import ipaddress
import itertools
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import jax
import jax.numpy as jnp
import uvicorn
from jax.sharding import Mesh

from scalerl_jax.data.chat import (
    ChatTemplate,
    NoTemplate,
    TemplateUnstarted,
    read_chat_template,
)
from scalerl_jax.data.detokenizer import Detokenizer
from scalerl_jax.machines.processes import join_address
from scalerl_jax.model.architecture import (
    Architecture,
    param_shardings,
    sampler_shardings,
)
from scalerl_jax.model.transformer import unstack_layers
from scalerl_jax.parallel.mesh import Device, make_mesh
from scalerl_jax.parallel.xla import exact_products, is_full, keep_programs
from scalerl_jax.process.ending import first_line
from scalerl_jax.run.progress import Progress
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.scoring import PromptScorer
from scalerl_jax.sampler.warming import warm_up
from scalerl_jax.serve.access import (
    ACCEPTED_TOGETHER,
    KEY_VARIABLE,
    Connections,
    find_key,
    known_hosts,
    reserve_files,
)
from scalerl_jax.serve.app import make_app
from scalerl_jax.serve.fields import MAX_LOGPROBS
from scalerl_jax.serve.orders import Served
from scalerl_jax.serve.replica import HttpReplica, SamplingThread
from scalerl_jax.serve.service import Service
from scalerl_jax.types import PyTree
from scalerl_jax.wiring.loading import Model, load_model
from scalerl_jax.wiring.sampling import make_sampler

_LONGEST = 2048  # tokens; of prompts and of completions, unless flags say otherwise
_CLOSE_S = 5  # for clients to read their answers, once nothing is sampled
_QUEUE = 1024  # connections that wait in the kernel, where they take no file

_log = logging.getLogger(__name__)


def serve(flags: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status, 1 if a sampler died.

    Raises:
        ValueError: a flag or the checkpoint cannot be used.
        RuntimeError: the devices have not enough memory.
    """
    with contextlib.ExitStack() as held:
        keep_programs(flags.compile_cache)
        held.enter_context(_signals_end_the_process())
        listener = _bind(flags.host, flags.port, held)
        key = find_key(flags.api_key, flags.api_key_file, os.environ)
        address = listener.getsockname()[0]
        if not key and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            _log.warning(
                "warning: %s can be reached from other machines, and without an API "
                "key everyone there may use this server; set --api_key_file or %s",
                *(address, KEY_VARIABLE),
            )
        reserve_files(flags.max_connections)
        connections = Connections(
            max_connections=flags.max_connections,
            header_s=flags.header_s,
            body_s=flags.body_s,
        )
        try:
            with Progress() as progress:
                served, replicas = _load(flags, progress)
        except jax.errors.JaxRuntimeError as error:
            if not is_full(error):
                raise
            raise RuntimeError(
                f"the devices have not enough memory for the model and its KV cache: "
                f"lower --slots={flags.slots}, --cache_tokens={flags.cache_tokens} (0: "
                f"every slot at its limit), --max_prompt_tokens or "
                f"--max_completion_tokens, or set --dtype=bfloat16 (XLA: "
                f"{first_line(error)})"
            ) from error
        in_order = answer_requests(
            served,
            replicas,
            connections,
            listener,
            key=key,
            hosts=known_hosts(flags.host, flags.allowed_hosts),
            drain_s=flags.drain_s,
        )
        return 0 if asyncio.run(in_order) else 1


@contextlib.contextmanager
def _signals_end_the_process() -> Iterator[None]:
    """Make signals end the process at once, until the server has its own handlers."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    # Python would wait for the threads that compile.
    before = [signal.signal(number, lambda *_: os._exit(0)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _bind(host: str, port: int, held: contextlib.ExitStack) -> socket.socket:
    """Return a socket that listens only once the server is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = held.enter_context(socket.socket(family, kind, protocol))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(
            f"--host={host} --port={port} cannot be listened on ({error}); choose "
            f"others, 0 is a free port"
        ) from error
    return listener


# -- the model ------------------------------------------------------------------------


def _load(
    flags: argparse.Namespace, progress: Progress
) -> tuple[Served, list[HttpReplica]]:
    """Load the model, and compile a replica for each mesh of devices."""

    def meshes(arch: Architecture) -> list[Mesh]:
        return make_meshes(arch, jax.devices(), flags.tensor)

    def placement(arch: Architecture) -> PyTree:
        _settings(flags, arch)  # a wrong flag is refused before the weights are read
        return param_shardings(arch, meshes(arch)[0])

    with progress.bar(f"loading {flags.checkpoint}"):
        model = load_model(
            flags.checkpoint,
            dtype=flags.dtype,
            placement=placement,
            adapter=flags.adapter,
        )
    exact_products(jnp.dtype(model.dtype).name)  # without --dtype the checkpoint's
    settings = dataclasses.replace(
        _settings(flags, model.arch),
        dtype=model.dtype,
        eos_ids=model.tokenizer.eos_ids,
        float32_head=model.config.model.float32_head,
    )
    params = unstack_layers(model.params, model.arch)
    model = dataclasses.replace(model, params=None)  # its layers are a second copy
    found = meshes(model.arch)
    devices = f"{len(found)} times {found[0].devices.size}"
    with progress.bar(f"compiling for {devices} devices"):
        replicas = make_replicas(
            settings,
            params,
            found,
            model.tokenizer.shown,
            progress.program,
            version=model.policy_version,
            prefix_cache=flags.prefix_cache,
        )
    served = Served(
        name=flags.name or Path(flags.checkpoint).absolute().name,
        policy_version=model.policy_version,
        tokenizer=model.tokenizer,
        template=_template(model),
        enable_thinking=model.config.data.enable_thinking,
        vocab_size=model.arch.vocab_size,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_completion_tokens=settings.max_completion_tokens,
        max_samples=flags.max_samples,
        max_body_bytes=flags.max_body_bytes,
        slots=settings.slots,
        max_waiting=flags.max_waiting,
    )
    return served, replicas


def _settings(flags: argparse.Namespace, arch: Architecture) -> EngineSettings:
    """Return the engine's settings, as far as flags and architecture determine them.

    Raises:
        ValueError: the model has too few positions, or the cache is too small.
    """
    positions = arch.max_positions
    half = min(_LONGEST, positions // 2)
    settings = EngineSettings(
        arch=arch,
        slots=flags.slots,
        max_prompt_tokens=flags.max_prompt_tokens or half,
        max_completion_tokens=flags.max_completion_tokens or half,
        tokens_per_call=flags.tokens_per_call,
        dtype=jnp.float32,
        eos_ids=(),
        cache_tokens=flags.cache_tokens,
        top_logprobs=MAX_LOGPROBS,
    )
    if settings.max_tokens > positions:
        raise ValueError(
            f"--max_prompt_tokens + --max_completion_tokens = {settings.max_tokens} is "
            f"more than the {positions} positions of the model; lower one of them"
        )
    if 0 < flags.cache_tokens < settings.tokens_of(1):
        raise ValueError(
            f"--cache_tokens={flags.cache_tokens} does not hold one sequence of "
            f"--max_prompt_tokens + --max_completion_tokens = {settings.max_tokens} "
            f"tokens; raise it to {settings.tokens_of(1)} or more, or lower one of "
            f"the others"
        )
    return settings


def _template(model: Model) -> ChatTemplate | None:
    """Return the tokenizer's chat template, if it has one; warn where it is broken.

    Raises:
        TemplateUnstarted: it cannot be tried.
    """
    config = model.config
    try:
        found = read_chat_template(config.data.tokenizer or config.model.checkpoint)
        found.render([{"role": "user", "content": "Hello"}], options={})
    except NoTemplate:
        return None
    except TemplateUnstarted:
        raise
    except ValueError as error:
        _log.warning("warning: there are no chats: %s", error)
        return None
    # Messages to clients name it, but not its file.
    return dataclasses.replace(found, origin="the model's chat template")


def make_meshes(
    arch: Architecture, devices: Sequence[Device], tensor: int
) -> list[Mesh]:
    """Return a mesh per replica, of `tensor` devices; 0: as many as can share it.

    Raises:
        ValueError: `tensor` devices cannot share it, or do not divide the devices.
    """
    pieces = [arch.num_kv_heads, arch.num_heads, arch.ffn_size, arch.vocab_size]
    mixed = "" if arch.experts is None else f", {arch.experts.count} experts"
    if arch.experts is not None:
        pieces.append(arch.experts.count)
    most = math.gcd(len(devices), *pieces)
    size = tensor or most
    if most % size:
        raise ValueError(
            f"--tensor={tensor} must divide the {len(devices)} devices and, in the "
            f"model, {arch.num_kv_heads} kv heads, {arch.num_heads} heads, "
            f"{arch.ffn_size} of a layer and {arch.vocab_size} tokens{mixed}; choose a "
            f"divisor of {most}"
        )
    return [
        make_mesh(devices[start : start + size], tensor=size)
        for start in range(0, len(devices), size)
    ]


def make_replicas(
    settings: EngineSettings,
    params: PyTree,
    meshes: Sequence[Mesh],
    detokenizer: Detokenizer,
    notice: Callable[[int, int], None] = lambda *_: None,
    *,
    version: int,
    prefix_cache: bool,
) -> list[HttpReplica]:
    """Return, per mesh, a compiled sampler that has the params (as `layered_table`).

    The prompt scorer is compiled by the first request that needs it.

    `notice` is called, in several threads, with the number of programs compiled so far
    and of all programs.
    """
    count = itertools.count(1)

    def make(mesh: Mesh) -> HttpReplica:
        own = jax.device_put(params, sampler_shardings(settings.arch, mesh))
        engine = Engine(settings, mesh=mesh)
        engine.notice = lambda _, total: notice(next(count), len(meshes) * total)
        pages = PagePool(engine, prefix_cache=prefix_cache)
        warm_up(pages, own)
        sampler = make_sampler(pages, detokenizer=detokenizer)
        sampler.load(own, version)
        return HttpReplica(sampler, PromptScorer(settings, own, mesh))

    # Each mesh compiles its own programs: one mesh after another would take long.
    with concurrent.futures.ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(make, meshes))


# -- the server -----------------------------------------------------------------------


class _Server(uvicorn.Server):
    """A server that drains at a signal, and answers later requests with 503.

    uvicorn would refuse connections at once, and raise the signal again at the end.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            # asyncio has one number for connections accepted together and the queue.
            each.listen(_QUEUE)
            host, port = each.getsockname()[:2]
            where = join_address(host, port)
            _log.info("serving %s on http://%s", self._service.served.name, where)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.stop()


async def answer_requests(
    served: Served,
    replicas: Sequence[HttpReplica],
    connections: Connections,
    listener: socket.socket,
    *,
    key: str,
    hosts: frozenset[str] | None,
    drain_s: float,
) -> bool:
    """Answer requests until SIGTERM or SIGINT, then finish those that have begun.

    Return False if a sampler died, which is logged; its requests get a 500.
    """
    samplers = [
        SamplingThread(replica, on_death=lambda: service.stop()) for replica in replicas
    ]
    service = Service(served, samplers)
    config = uvicorn.Config(
        make_app(service, connections, key=key, hosts=hosts),
        loop="asyncio",
        http=connections,  # type: ignore[arg-type]  makes protocols, as their class
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # a line per malformed request is itself an attack
        access_log=False,
        server_header=False,
        backlog=ACCEPTED_TOGETHER,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = _Server(config, service)
    for sampler in samplers:
        sampler.start()
    try:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(service.stopping.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await service.drain(drain_s)
        server.should_exit = True
        await serving
    finally:
        for sampler in samplers:
            await asyncio.to_thread(sampler.stop)
    return all(sampler.failure is None for sampler in samplers)
