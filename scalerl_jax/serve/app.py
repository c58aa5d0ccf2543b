"""The HTTP side: bodies in, JSON or server-sent events out."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from scalerl_jax.serve.access import Guard
from scalerl_jax.serve.answers import Answer, ChatAnswer
from scalerl_jax.serve.connections import Connections
from scalerl_jax.serve.errors import ApiError
from scalerl_jax.serve.metrics import Counted, Metrics
from scalerl_jax.serve.orders import Order
from scalerl_jax.serve.protocol import Reader
from scalerl_jax.serve.service import Service

_HELD_BODIES = 64  # of the largest size, that are held together

T = TypeVar("T")


def make_app(
    service: Service,
    connections: Connections,
    *,
    key: str,
    hosts: frozenset[str] | None,
) -> Starlette:
    """The routes of a service, for those who send the key to one of its hosts."""
    served = service.served
    bodies = Bodies(service, connections.limits.body_s)
    reader = Reader(
        model=served.name,
        limits=served.limits,
        encode=served.tokenizer.encode_aside,
        template=served.template,
        enable_thinking=served.enable_thinking,
    )

    about = About(service, bodies, reader)
    metrics = Metrics(service, connections)
    routes = [
        Route(
            "/v1/completions",
            Completions(service, bodies, reader.completion, Answer),
            methods=["POST"],
        ),
        Route(
            "/v1/chat/completions",
            Completions(service, bodies, reader.chat, ChatAnswer),
            methods=["POST"],
        ),
        Route("/v1/models", about.models),
        Route("/v1/models/{name:path}", about.model),
        Route("/health", about.health),
        Route("/tokenize", about.tokenize, methods=["POST"]),
        Route("/metrics", metrics.page),
    ]
    paths = frozenset(route.path for route in routes)
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _other},
        middleware=[
            Middleware(Counted, metrics=metrics, paths=paths),
            Middleware(Guard, key=key, hosts=hosts),
        ],
    )
    app.router.redirect_slashes = False
    return app


async def _other(request: Request, error: Exception) -> Response:
    """The refusal of a path or method that there is none of."""
    assert isinstance(error, HTTPException), "registered for these alone"
    message = f"{request.method} {request.scope['path']}: {error.detail}"
    response = ApiError(message, status=error.status_code).response()
    response.headers.update(error.headers or {})
    return response


class About:
    """What the server says of itself and its model."""

    def __init__(self, service: Service, bodies: "Bodies", reader: Reader) -> None:
        """Of this service."""
        self._service = service
        self._bodies = bodies
        self._reader = reader
        self._card = {
            "id": service.served.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "scalerl_jax",
        }

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        """The model of this name."""
        name, own = request.path_params["name"], self._service.served.name
        if name == own:
            return JSONResponse(self._card)
        message = f"model {name!r} is not served here; this server has {own!r}"
        return ApiError(message, status=404, code="model_not_found").response()

    async def health(self, request: Request) -> Response:
        """How the server is, and how much it has to do."""
        service, load = self._service, self._service.load
        stopping = service.stopping.is_set()
        body = {
            "status": "stopping" if stopping else "ok",
            "policy_version": service.served.policy_version,
            "slots": service.slots,
            "running": load.running,
            "waiting": load.waiting,
            "pages_in_use": sum(each.stats.pages_in_use for each in service.samplers),
        }
        return JSONResponse(body, status_code=503 if stopping else 200)

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text or of a conversation."""
        try:
            tokens = await self._bodies.read(request, self._reader.tokens)
        except ApiError as error:
            return error.response()
        except ClientDisconnect:
            return Response()  # to nobody
        limits = self._service.served.limits
        most = limits.max_prompt_tokens + limits.max_completion_tokens
        return JSONResponse(
            {"count": len(tokens), "max_model_len": most, "tokens": tokens}
        )


class Bodies:
    """Reads the bodies of requests, of limited size, time and number."""

    def __init__(self, service: Service, timeout_s: float) -> None:
        """For the requests to a service."""
        self._service = service
        self._limit = service.served.limits.max_body_bytes
        self._timeout_s = timeout_s
        self._held = 0  # bytes of all bodies that are not orders yet
        self._parsing = asyncio.Semaphore(4)  # JSON takes 30 times its size

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """What `parse` makes of the body.

        Raises:
            ApiError: it is not JSON, too large or too slow, or the server is stopping.
            ClientDisconnect: the client left.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                f"Content-Type: {kind[:80]!r} must be application/json",
                status=415,
                code="unsupported_media_type",
            )
        stopped = ApiError("the server is stopping", status=503, code="stopping")
        body = bytearray()
        try:
            receiving = self._receive(request, body)
            await _unless(receiving, self._service.stopping.wait(), stopped)
            async with self._parsing:
                # Other requests go on while long texts are made into tokens.
                return await asyncio.to_thread(parse, bytes(body))
        finally:
            self._held -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        """The whole body, no more of it held than the limit."""
        if int(request.headers.get("content-length", 0)) > self._limit:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for piece in request.stream():
                    body += piece
                    self._held += len(piece)
                    if len(body) > self._limit:
                        raise self._too_large()
                    if self._held > _HELD_BODIES * self._limit:
                        raise ApiError(
                            "too many bodies at once: try again later", status=503
                        )
        except TimeoutError:
            raise ApiError(
                f"the body did not come within --body_s = {self._timeout_s}", status=408
            ) from None

    def _too_large(self) -> ApiError:
        return ApiError(
            f"the body has more than --max_body_bytes = {self._limit} bytes: send "
            f"several requests",
            status=413,
            code="request_too_large",
        )


class Completions:
    """The ASGI application behind a path that gives completions."""

    def __init__(
        self,
        service: Service,
        bodies: Bodies,
        read: Callable[[bytes], Order],
        form: type[Answer],
    ) -> None:
        """Answers from this service, to bodies that `read` takes, in this form."""
        self._service = service
        self._bodies = bodies
        self._read = read
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that leaves takes its samples with it."""
        try:
            order = await self._bodies.read(Request(scope, receive), self._read)
            with self._service.answering():
                await self._answer(order, scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ClientDisconnect:
            pass

    async def _answer(
        self, order: Order, scope: Scope, receive: Receive, send: Send
    ) -> None:
        served = self._service.served
        async with self._service.placed(order) as placed:
            answer = self._form(served.name, placed, served.tokenizer)
            if order.stream:
                response = StreamingResponse(
                    await _begun(answer.chunks(), receive),
                    media_type="text/event-stream",
                    headers={"Cache-Control": "no-cache"},
                )
            else:
                whole = _unless(answer.whole(), _gone(receive), ClientDisconnect())
                response = JSONResponse(await whole)
            await response(scope, receive, send)


async def _begun(chunks: AsyncIterator[str], receive: Receive) -> AsyncIterator[str]:
    """The same chunks, the first of them there: until then all can be refused."""
    first = await _unless(_next(chunks), _gone(receive), ClientDisconnect())

    async def stream() -> AsyncIterator[str]:
        yield first
        async for chunk in chunks:
            yield chunk

    return stream()


async def _next(chunks: AsyncIterator[str]) -> str:
    return await anext(chunks)


async def _unless(
    work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, Any], error: Exception
) -> T:
    """What `work` returns, or else the error, once `end` has come before it."""
    working, ending = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        working.cancel()
        ending.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
