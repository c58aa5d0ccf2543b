"""What the server counts, in the form that Prometheus reads."""

import time
from collections.abc import Iterable

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scalerl_jax.serve.connections import Connections
from scalerl_jax.serve.service import Service

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """Counts of requests, and at every look those of the sampler."""

    def __init__(self, service: Service, connections: Connections) -> None:
        """Nothing counted yet."""
        self._service = service
        self._connections = connections
        self.registry = prometheus_client.CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "scalerl_requests",
            "Requests that were answered",
            ("path", "status"),
            registry=self.registry,
        )
        self.seconds = prometheus_client.Histogram(
            "scalerl_request_seconds",
            "From the headers of a request to the end of its answer",
            ("path",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)
        prometheus_client.ProcessCollector(registry=self.registry)

    def collect(self) -> Iterable[Metric]:
        """How things stand now."""
        service, load = self._service, self._service.load
        gauges = {
            "samples_running": ("Completions in slots", load.running),
            "samples_waiting": ("Completions that wait for a slot", load.waiting),
            "slots": ("Completions sampled together", service.slots),
            "replicas": ("Copies of the model", len(service.samplers)),
            "connections": ("Open connections", self._connections.open),
            "policy_version": ("Optimizer steps", service.served.policy_version),
            "pages_in_use": ("Pages of the KV cache", self._sum("pages_in_use")),
        }
        counters = {
            "prompt_tokens": ("Tokens of prompts taken", service.prompt_tokens),
            "completion_tokens": (
                "Tokens of finished completions",
                service.completion_tokens,
            ),
            "wasted_tokens": (
                "Tokens sampled and given up",
                self._sum("wasted_tokens"),
            ),
            "suspended": (
                "Completions that gave their pages back for a while",
                self._sum("suspended"),
            ),
            "failed": ("Completions with logits not finite", self._sum("failed")),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"scalerl_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"scalerl_{name}", text, value=value)

    async def page(self, request: Request) -> Response:
        """The counts, as text."""
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.registry), headers={"Content-Type": media_type})

    def _sum(self, name: str) -> int:
        """Of a count of the schedulers."""
        return sum(getattr(each.stats, name) for each in self._service.samplers)


class Counted:
    """Counts the answers of an application, and how long they took."""

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, paths: frozenset[str]
    ) -> None:
        """Other paths than these are counted together: clients may make up any."""
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer and count."""
        path = scope["path"] if scope["path"] in self._paths else "other"
        begun = time.monotonic()

        async def counted(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, message["status"]).inc()

        try:
            await self._app(scope, receive, counted)
        finally:
            self._metrics.seconds.labels(path).observe(time.monotonic() - begun)
