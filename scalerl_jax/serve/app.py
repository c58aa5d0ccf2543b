"""The HTTP side: bodies in, JSON or server-sent events out, and counts of both."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scalerl_jax.data.chat_process import TIMEOUT_S
from scalerl_jax.serve.access import Connections, guarded
from scalerl_jax.serve.answers import ChatAnswer, PendingAnswer
from scalerl_jax.serve.fields import ApiError
from scalerl_jax.serve.orders import BodyReader, CompletionOrder
from scalerl_jax.serve.rendering import streamed_answer, whole_answer
from scalerl_jax.serve.service import Service

_HELD_BODIES = 64  # most bodies of the largest size in memory
_CHAT_WAIT_S = TIMEOUT_S  # for the chat template; its limit for one chat
_BUSY = ApiError(
    f"the chat template has been busy with other chats for {_CHAT_WAIT_S:g} s: try "
    f"again later",
    status=503,
    code="chat_template_busy",
)
_PAGE = Path(__file__).parents[1] / "assets" / "chat" / "chat.html"
# The page connects to this server only, and no other page may frame it.
_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; form-action 'none'; frame-ancestors 'none'"
)
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

T = TypeVar("T")


def make_app(
    service: Service,
    connections: Connections,
    *,
    key: str,
    hosts: frozenset[str] | None,
) -> Starlette:
    """Return the routes of a service, behind the checks of key and host."""
    reader = BodyReader(service.served)
    api, metrics = Api(service, reader, connections), Metrics(service, connections)
    completions = Completions(api, reader.completion, PendingAnswer)
    chats = Completions(api, reader.chat, ChatAnswer, is_chat=True)
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chats, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.health),
        Route("/", chat_page),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/tokenizer_info", api.tokenizer_info),
        Route("/metrics", metrics.page),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _refuse,
            HTTPException: _refuse,
            ClientDisconnect: _refuse,
        },
        middleware=[
            Middleware(metrics.counted, paths=frozenset(each.path for each in routes)),
            Middleware(guarded, key=key, hosts=hosts),
        ],
    )
    app.router.redirect_slashes = False
    return app


async def chat_page(request: Request) -> Response:
    """Answer with the chat page, which connects to this server only."""
    return HTMLResponse(
        _PAGE.read_bytes(), headers={"Content-Security-Policy": _POLICY}
    )


async def _refuse(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed."""
    match error:
        case ApiError():
            return error.response()
        case HTTPException():  # an unknown path or method
            message = f"{request.method} {request.scope['path']}: {error.detail}"
            response = ApiError(message, status=error.status_code).response()
            response.headers.update(error.headers or {})
            return response
    return Response()  # not sent: the client has disconnected


class Api:
    """Reading of all bodies, and every endpoint except those of completions."""

    def __init__(
        self, service: Service, reader: BodyReader, connections: Connections
    ) -> None:
        """Make the endpoints of a service."""
        self.service = service
        self._reader = reader
        self._timeout_s = connections.body_s
        self._held = 0  # bytes of all bodies that are not parsed yet
        self._parsing = asyncio.Semaphore(4)  # JSON takes 30 times its size
        # A template may take seconds: only other chats wait for it.
        self._chats = asyncio.Semaphore(1)
        self._card = {
            "id": service.served.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "scalerl_jax",
        }

    async def models(self, request: Request) -> Response:
        """Answer with the list of models, which has one entry."""
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        """Return the model of this name."""
        name, own = request.path_params["name"], self.service.served.name
        if name == own:
            return JSONResponse(self._card)
        message = f"model {name!r} is not served here; this server has {own!r}"
        raise ApiError(message, status=404, code="model_not_found")

    async def health(self, request: Request) -> Response:
        """Answer with the server's status and its load."""
        service = self.service
        stopping = service.stopping.is_set()
        body = {
            "status": "stopping" if stopping else "ok",
            "policy_version": service.served.policy_version,
            "slots": service.slots,
            "running": service.running,
            "waiting": service.waiting,
            "pages_in_use": service.count("pages_in_use"),
        }
        return JSONResponse(body, status_code=503 if stopping else 200)

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of a text or of a conversation."""
        reader = self._reader
        async with self._body(request) as body:
            is_chat = await self._made(reader.is_chat, body, is_chat=False)
            tokens = await self._made(reader.tokens, body, is_chat=is_chat)
        served = self.service.served
        most = served.max_prompt_tokens + served.max_completion_tokens
        return await whole_answer(
            {"count": len(tokens), "max_model_len": most, "tokens": tokens}
        )

    async def tokenizer_info(self, request: Request) -> Response:
        """Answer with the token that ends a completion, under vLLM's name for it."""
        tokenizer = self.service.served.tokenizer
        name = tokenizer.backend.id_to_token(tokenizer.eos_ids[0])
        return JSONResponse({"eos_token": name})

    async def read(
        self, request: Request, parse: Callable[[bytes], T], *, is_chat: bool
    ) -> T:
        """Read the body of a request and parse it by `parse`; chats wait in line.

        The chat template renders one chat at a time.

        Raises:
            ApiError: it is not JSON, too large or too slow, other chats keep the
                template busy, or the server is stopping.
            ClientDisconnect: the client has disconnected.
        """
        async with self._body(request) as body:
            return await self._made(parse, body, is_chat=is_chat)

    async def _made(
        self, parse: Callable[[bytes], T], body: bytes, *, is_chat: bool
    ) -> T:
        """Parse a body by `parse`, in a thread; chats wait in line."""
        gate = self._chats if is_chat else self._parsing
        try:
            async with asyncio.timeout(_CHAT_WAIT_S if is_chat else None):
                await gate.acquire()
        except TimeoutError:
            raise _BUSY from None
        try:
            # Other requests continue while long texts are tokenised.
            return await asyncio.to_thread(parse, body)
        finally:
            gate.release()

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Receive the body; its bytes count as held until the block ends."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                f"Content-Type: {kind[:80]!r} must be application/json",
                status=415,
                code="unsupported_media_type",
            )
        body = bytearray()
        try:
            await _unless(
                self._receive(request, body),
                self.service.stopping.wait(),
                self.service.stopped(),
            )
            yield bytes(body)
        finally:
            self._held -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Add the whole body to `body`, up to the limit."""
        limit = self.service.served.max_body_bytes
        too_large = ApiError(
            f"the body has more than --max_body_bytes = {limit} bytes: send several "
            f"requests",
            status=413,
            code="request_too_large",
        )
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self._timeout_s):
                async for piece in request.stream():
                    body += piece
                    self._held += len(piece)
                    if len(body) > limit:
                        raise too_large
                    if self._held > _HELD_BODIES * limit:
                        message = "too many bodies at once: try again later"
                        raise ApiError(message, status=503)
        except TimeoutError:
            message = f"the body did not come within --body_s = {self._timeout_s}"
            raise ApiError(message, status=408) from None


@dataclasses.dataclass(frozen=True)
class Completions:
    """The ASGI application behind a path that gives completions."""

    api: Api
    read: Callable[[bytes], CompletionOrder]
    form: type[PendingAnswer]
    is_chat: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; its samples are cancelled if the client disconnects."""
        with contextlib.suppress(ClientDisconnect):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        order = await self.api.read(request, self.read, is_chat=self.is_chat)
        service, gone = self.api.service, ClientDisconnect()
        with service.answering():
            async with service.placed(order) as placed:
                answer = self.form(service.served, placed)
                if order.fields.stream:
                    chunks = answer.chunks()
                    # Until the first chunk has come, the request can be refused.
                    first = await _unless(anext(chunks), _left(receive), gone)
                    response = streamed_answer(first, chunks)
                else:
                    whole = await _unless(answer.whole(), _left(receive), gone)
                    response = await whole_answer(whole)
                await response(scope, receive, send)


async def _unless(work: Awaitable[T], end: Awaitable[Any], error: Exception) -> T:
    """Await `work` and return its result; raise `error` if `end` comes first."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        working.cancel()
        ending.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Metrics:
    """Counts of requests, and at every scrape those of the sampler, for Prometheus."""

    def __init__(self, service: Service, connections: Connections) -> None:
        """Make the counts, all zero."""
        self._service = service
        self._connections = connections
        self._registry = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "scalerl_requests",
            "Requests that were answered",
            ("path", "status"),
            registry=self._registry,
        )
        self._seconds = prometheus_client.Histogram(
            "scalerl_request_seconds",
            "From the headers of a request to the end of its answer",
            ("path",),
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(self)
        prometheus_client.ProcessCollector(registry=self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the current values."""
        service, count = self._service, self._service.count
        gauges = {
            "samples_running": ("Completions in slots", service.running),
            "samples_waiting": ("Completions that wait for a slot", service.waiting),
            "slots": ("Completions sampled together", service.slots),
            "replicas": ("Copies of the model", len(service.samplers)),
            "connections": ("Open connections", self._connections.open),
            "policy_version": ("Optimizer steps", service.served.policy_version),
            "pages_in_use": ("Pages of the KV cache", count("pages_in_use")),
        }
        counters = {
            "prompt_tokens": ("Tokens of prompts taken", service.prompt_tokens),
            "completion_tokens": (
                "Tokens of finished completions",
                service.completion_tokens,
            ),
            "wasted_tokens": ("Tokens sampled and given up", count("wasted_tokens")),
            "suspended": ("Completions that gave pages back", count("suspended")),
            "failed": ("Completions with logits not finite", count("failed")),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"scalerl_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"scalerl_{name}", text, value=value)

    async def page(self, request: Request) -> Response:
        """Return the counts, as text."""
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"Content-Type": media_type})

    def counted(self, app: ASGIApp, *, paths: frozenset[str]) -> ASGIApp:
        """Return the application with its answers counted.

        Paths not in `paths` are counted together: clients may invent any number.
        """

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"] if scope["path"] in paths else "other"
            begun = time.monotonic()

            async def sent(message: Message) -> None:
                await send(message)
                if message["type"] == "http.response.start":
                    self._requests.labels(path, message["status"]).inc()

            try:
                await app(scope, receive, sent)
            finally:
                self._seconds.labels(path).observe(time.monotonic() - begun)

        return count
