"""Servers of tests: ours in a process of its own, and others in this process."""

import contextlib
import dataclasses
import http.client
import http.server
import json
import re
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import small_run

BASE = Path(small_run.ROOT) / "scalerl_jax" / "assets" / "tiny_base"
POISON = 71
JSON = {"Content-Type": "application/json"}
# Of a model: its own words are those of the base checkpoint's prompts.
TEMPLATE = """\
{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}
{%- for message in messages %}
{%- if message.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}
{%- if message.role == 'user' %}
{{- 'Spell this word backward (example: sun -> nus): ' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- call.function.arguments.word }}{% endfor %}
{%- endfor %}
{%- if enable_thinking %}<think>{% endif %}"""
FLAGS = {
    "port": 0,
    "slots": 4,
    "max_prompt_tokens": 32,
    "max_completion_tokens": 64,
    "tokens_per_call": 4,
    "max_waiting": 1000,
    "max_samples": 1000,
    "max_body_bytes": 20_000,
}


@dataclasses.dataclass(kw_only=True)
class Server:
    """A running server."""

    process: subprocess.Popen
    model: Path  # directory
    url: str = ""
    lines: list[str] = dataclasses.field(default_factory=list)  # of stderr
    ready: threading.Event = dataclasses.field(default_factory=threading.Event)

    def listen(self):
        """Hear it until it ends."""
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"serving \S+ on (\S+)", line):
                self.url = found[1]
                self.ready.set()
        self.ready.set()

    def said(self):
        """What it wrote to stderr; all of it, once it has ended."""
        return "".join(self.lines)

    def connect(self):
        """A connection to it."""
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)

    def ask(self, path, body=None, *, method=None, headers=None):
        """Status and JSON of one request; a body that is no text is made JSON."""
        body = body if body is None or isinstance(body, bytes) else json.dumps(body)
        method = method or ("POST" if body else "GET")
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, JSON | (headers or {}))
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def health(self):
        """What it says of its load."""
        return self.ask("/health")[1]

    def wait_for(self, condition, timeout_s=30.0):
        """Return once its health is so."""
        end = time.monotonic() + timeout_s
        while not condition(health := self.health()):
            assert time.monotonic() < end, health
            time.sleep(0.01)


@contextlib.contextmanager
def running(command, model):
    """A process that says where it serves; killed at the end, if it still runs."""
    process = small_run.start(*command)
    server = Server(process=process, model=model)
    reader = threading.Thread(target=server.listen)
    reader.start()
    try:
        assert server.ready.wait(300) and server.url, server.said()
        yield server
    finally:
        process.kill()
        reader.join()
        process.communicate()


class Answering(http.server.ThreadingHTTPServer):
    """Refuses nobody of the many who connect at once."""

    request_queue_size = 128


@contextlib.contextmanager
def answering(handler, **known):
    """A server of this process, on loopback; `known` is set on it for its handler."""
    with Answering(("127.0.0.1", 0), handler) as server:
        for name, value in known.items():
            setattr(server, name, value)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
