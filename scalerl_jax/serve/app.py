"""The HTTP side: bodies in, JSON or server-sent events out."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from scalerl_jax.serve.answers import Answer
from scalerl_jax.serve.protocol import ApiError, read_order
from scalerl_jax.serve.service import Service

_BODY_TIMEOUT_S = 60.0  # from the headers to the end of the body

T = TypeVar("T")


def make_app(service: Service) -> Starlette:
    """The routes of a service."""
    made = int(time.time())
    served = service.served
    card = {
        "id": served.name,
        "object": "model",
        "created": made,
        "owned_by": "scalerl_jax",
    }

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name == served.name:
            return JSONResponse(card)
        message = f"model {name!r} is not served here; this server has {served.name!r}"
        return _refusal(ApiError(message, status=404, code="model_not_found"))

    async def health(request: Request) -> Response:
        load = service.sampler.load
        stopping = service.stopping.is_set()
        body = {
            "status": "stopping" if stopping else "ok",
            "policy_version": served.policy_version,
            "slots": served.slots,
            "running": load.running,
            "waiting": load.waiting,
            "pages_in_use": load.pages_in_use,
        }
        return JSONResponse(body, status_code=503 if stopping else 200)

    async def other(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for these alone"
        message = f"{request.method} {request.url.path}: {error.detail}"
        refusal = _refusal(ApiError(message, status=error.status_code))
        refusal.headers.update(error.headers or {})
        return refusal

    return Starlette(
        routes=[
            Route("/v1/completions", Completions(service), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
        ],
        exception_handlers={HTTPException: other},
    )


def _refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status)


class Completions:
    """The ASGI application behind /v1/completions."""

    def __init__(self, service: Service) -> None:
        """Answers from this service."""
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that leaves takes its samples with it."""
        answer = self._answer(scope, receive, send)
        try:
            with self._service.answering():
                await answer
        except ApiError as error:
            answer.close()
            await _refusal(error)(scope, receive, send)
        except ClientDisconnect:
            pass

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._service.served
        body = await _read_body(Request(scope, receive), served.limits.max_body_bytes)
        # Texts may be long: other requests go on while they are made into tokens.
        order = await asyncio.to_thread(
            read_order,
            body,
            model=served.name,
            limits=served.limits,
            encode=served.tokenizer.encode,
        )
        async with self._service.placed(order) as placed:
            answer = Answer(served.name, placed, served.tokenizer)
            if order.stream:
                response = StreamingResponse(
                    await _begun(answer.chunks(), receive),
                    media_type="text/event-stream",
                    headers={"Cache-Control": "no-cache"},
                )
            else:
                whole = await _unless_gone(answer.whole(), receive)
                response = JSONResponse(whole)
            await response(scope, receive, send)


async def _read_body(request: Request, limit: int) -> bytes:
    """The whole body, no more of it held than the limit."""
    too_large = ApiError(
        f"the body has more than --max_body_bytes = {limit} bytes: send several "
        f"requests",
        status=413,
        code="request_too_large",
    )
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            f"the body did not come within {_BODY_TIMEOUT_S} s", status=408
        ) from None
    return bytes(body)


async def _begun(chunks: AsyncIterator[str], receive: Receive) -> AsyncIterator[str]:
    """The same chunks, the first of them there: until then all can be refused."""
    first = await _unless_gone(_next(chunks), receive)

    async def stream() -> AsyncIterator[str]:
        yield first
        async for chunk in chunks:
            yield chunk

    return stream()


async def _next(chunks: AsyncIterator[str]) -> str:
    return await anext(chunks)


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What `work` returns.

    Raises:
        ClientDisconnect: the client left before; the work is cancelled.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
