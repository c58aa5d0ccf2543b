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
            self.answer(200, server.form(body, server.score(body["prompt"])))

    def answer(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def least(body, scores):
    """The fields of an answer that are read, alone."""
    return {"choices": [{"logprobs": {"token_logprobs": [None, *scores]}}]}


def vllm(body, scores):
    """An answer with all fields that vLLM 0.11 writes for these of the request.

    By entrypoints/openai's CompletionResponse: echo without max_tokens returns the
    prompt alone, after it has sampled a token, which the usage counts.
    """
    ids = body["prompt"]
    assert (body["max_tokens"], body["echo"], body["logprobs"]) == (0, True, 1)
    names = [f"<{each}>" for each in ids]
    starts = [sum(map(len, names[:n])) for n in range(len(ids))]
    # The prompt's token, and the likeliest one beside it.
    pairs = [
        {str(each): score, "0": -0.5}
        for each, score in zip(ids[1:], scores, strict=True)
    ]
    choice = {
        "index": 0,
        "text": "".join(names),
        "logprobs": {
            "text_offset": starts,
            "token_logprobs": [None, *scores],
            "tokens": names,
            "top_logprobs": [
                None,
                *({f"<{k}>": v for k, v in p.items()} for p in pairs),
            ],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": [
            None,
            *(
                {
                    k: {"logprob": v, "rank": n, "decoded_token": f"<{k}>"}
                    for n, (k, v) in enumerate(pair.items(), 1)
                }
                for pair in pairs
            ),
        ],
        "prompt_token_ids": None,
    }
    usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
    return {
        "id": "cmpl-0a1b",
        "object": "text_completion",
        "created": 1_760_000_000,
        "model": body["model"],
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            **usage,
            "total_tokens": len(ids) + 1,
            "prompt_tokens_details": None,
        },
        "kv_transfer_params": None,
    }


@contextlib.contextmanager
def serving():
    """Gives token t behind n others -t / 10 - n nats, until its `score` is another."""
    known = {"asked": [], "failures": [], "lock": threading.Lock()}
    with small_server.answering(Handler, **known) as made:
        made.score = lambda ids: [-each / 10 - n for n, each in enumerate(ids[1:], 1)]
        made.form = least
        made.url = f"http://127.0.0.1:{made.server_port}/v1"
        yield made
