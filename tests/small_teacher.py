"""A server that says how likely the tokens of a prompt are, as it is told."""

import contextlib
import http.server
import json
import threading


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
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.asked, made.failures, made.lock = [], [], threading.Lock()
        made.score = lambda ids: [-each / 10 - n for n, each in enumerate(ids[1:], 1)]
        made.url = f"http://127.0.0.1:{made.server_address[1]}/v1"
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()
