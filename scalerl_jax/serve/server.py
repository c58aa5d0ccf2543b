"""A service on a socket, from the first request to an orderly end."""

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn

from scalerl_jax.serve.app import make_app
from scalerl_jax.serve.connections import (
    ACCEPTED_TOGETHER,
    ConnectionLimits,
    Connections,
    widen,
)
from scalerl_jax.serve.replicas import Replica
from scalerl_jax.serve.sampling_thread import SamplingThread
from scalerl_jax.serve.service import Served, Service

_CLOSE_S = 5  # for clients to take what is written, once nothing is sampled

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask, how often at once, and for how long."""

    key: str = dataclasses.field(repr=False)  # empty: everyone
    hosts: frozenset[str] | None  # names beside addresses; None: any
    connections: ConnectionLimits


class _Server(uvicorn.Server):
    """Signals end the service first, so that who comes then is answered with 503.

    uvicorn would refuse connections at once, and raise the signal again at the end.
    """

    def __init__(self, config: uvicorn.Config, service: Service, where: str) -> None:
        super().__init__(config)
        self._service = service
        self._where = where

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            widen(each)
        name = self._service.served.name
        _log.info("serving %s on %s", name, self._where)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.stop()


def serve(
    served: Served,
    replicas: Sequence[Replica],
    listener: socket.socket,
    *,
    access: Access,
    drain_s: float,
) -> bool:
    """Answer requests until SIGTERM or SIGINT, and then those that have begun.

    False: a sampler died, which is logged, and requests were answered with 500.
    """
    return asyncio.run(_serve(served, replicas, listener, access, drain_s))


async def _serve(
    served: Served,
    replicas: Sequence[Replica],
    listener: socket.socket,
    access: Access,
    drain_s: float,
) -> bool:
    samplers = [
        SamplingThread(
            scheduler,
            params,
            version=served.policy_version,
            slots=served.slots,
            on_death=lambda: service.stop(),
        )
        for scheduler, params in replicas
    ]
    service = Service(served, samplers)
    connections = Connections(access.connections)
    config = uvicorn.Config(
        make_app(service, connections, key=access.key, hosts=access.hosts),
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
    host, port = listener.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = _Server(config, service, where)
    for sampler in samplers:
        sampler.start()
    try:
        await _run(server, service, listener, drain_s)
    finally:
        for sampler in samplers:
            await asyncio.to_thread(sampler.stop)
    return all(sampler.failure is None for sampler in samplers)


async def _run(
    server: _Server, service: Service, listener: socket.socket, drain_s: float
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(service.stopping.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await service.drain(drain_s)
    server.should_exit = True
    await serving
