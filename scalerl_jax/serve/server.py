"""A service on a socket, from the first request to an orderly end."""

import asyncio
import logging
import socket
from types import FrameType

import uvicorn

from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.serve.app import make_app
from scalerl_jax.serve.sampling_thread import SamplingThread
from scalerl_jax.serve.service import Served, Service
from scalerl_jax.types import PyTree

_CLOSE_S = 5  # for clients to take what is written, once nothing is sampled

_log = logging.getLogger(__name__)


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
        name = self._service.served.name
        _log.info("serving %s on %s", name, self._where)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.stop()


def serve(
    served: Served,
    scheduler: Scheduler,
    params: PyTree,
    listener: socket.socket,
    *,
    drain_s: float,
) -> bool:
    """Answer requests until SIGTERM or SIGINT, and then those that have begun.

    False: the sampler died, which is logged, and requests were answered with 500.
    """
    return asyncio.run(_serve(served, scheduler, params, listener, drain_s))


async def _serve(
    served: Served,
    scheduler: Scheduler,
    params: PyTree,
    listener: socket.socket,
    drain_s: float,
) -> bool:
    sampler = SamplingThread(
        scheduler,
        params,
        version=served.policy_version,
        slots=served.slots,
        on_death=lambda: service.stop(),
    )
    service = Service(served, sampler)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        make_app(service),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = _Server(config, service, where)
    sampler.start()
    try:
        await _run(server, service, listener, drain_s)
    finally:
        await asyncio.to_thread(sampler.stop)
    return sampler.failure is None


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
