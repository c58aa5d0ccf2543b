"""A server that says how likely the tokens of a prompt are, as it is told."""

import contextlib
import http.server
import json
import threading

import small_server


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {"data": [{"id": "large"}]})

    def do_POST(self):
        server, size = self.server, int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        with server.lock:
            server.asked.append((self.path, body, self.headers["Authorization"]))
            status = server.failures.pop(0) if server.failures else 200
        if status != 200:
            self.answer(status, {})
        elif self.path == "/tokenize":
            self.answer(200, {"tokens": server.tokenize(body["prompt"])})
        else:
            scores = server.score(body["prompt"])
            found = {"logprobs": {"token_logprobs": [None, *scores]}}
            self.answer(200, {"choices": [found]})

    def answer(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving():
    """Gives token t behind n others -t / 10 - n nats, until its `score` is another."""
    known = {"asked": [], "failures": [], "lock": threading.Lock()}
    with small_server.answering(Handler, **known) as made:
        made.score = lambda ids: [-each / 10 - n for n, each in enumerate(ids[1:], 1)]
        made.url = f"http://127.0.0.1:{made.server_port}/v1"
        yield made
