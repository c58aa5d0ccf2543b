"""How a server begins and ends: in order, by a dead sampler, or not at all."""

import contextlib
import json
import shutil
import signal
import socket
import sys
import threading

import pytest
import small_run
from small_server import BASE, JSON

from scalerl_jax.serve.__main__ import main

pytestmark = pytest.mark.slow  # servers as processes

LONG = {"prompt": "Spell this word backward", "n": 300, "max_tokens": 64}


class Asking(threading.Thread):
    """One request in a thread: its status and its body."""

    def __init__(self, server, body):
        super().__init__()
        self.server, self.body, self.answer = server, body, None
        self.start()

    def run(self):
        self.answer = self.server.ask("/v1/completions", self.body)

    def result(self):
        self.join(60)
        return self.answer


def end(server, number=signal.SIGTERM):
    server.process.send_signal(number)


def status(server):
    """Exit status."""
    return server.process.wait(timeout=60)


def test_a_signal_lets_requests_end_and_takes_no_more(start_server):
    with start_server() as server, contextlib.closing(server.connect()) as stream:
        body = json.dumps({**LONG, "stream": True})
        stream.request("POST", "/v1/completions", body, headers=JSON)
        answered = Asking(server, {**LONG, "seed": 1})
        server.wait_for(lambda load: load["running"] + load["waiting"] > 550)
        end(server)
        server.wait_for(lambda health: health["status"] == "stopping")
        code, refusal = server.ask("/v1/completions", {"prompt": "a"})
        assert code == 503, refusal
        assert refusal["error"]["code"] == "stopping"
        assert stream.getresponse().read().endswith(b"data: [DONE]\n\n")
        code, body = answered.result()
        assert code == 200 and len(body["choices"]) == LONG["n"]
        assert status(server) == 0
        said = [line.split()[0] for line in server.said().splitlines()]
        said = list(dict.fromkeys(said))  # programs are lines of their own
        assert said == ["loading", "compiling", "serving"], "and no complaint"


def test_who_takes_longer_than_the_server_waits_is_told(start_server):
    with start_server(drain_s=0.0) as server:
        answered = Asking(server, LONG)
        server.wait_for(lambda load: load["running"] > 0)
        end(server, signal.SIGINT)
        code, body = answered.result()
        assert code == 503 and "--drain_s = 0.0" in body["error"]["message"]
        assert status(server) == 0


# Serves with samplers that lose their params after they are made.
DYING = """
import sys

import jax

from scalerl_jax.serve import server
from scalerl_jax.serve.__main__ import main
from scalerl_jax.process.printing import log_to_stderr

make_replicas = server.make_replicas


def make_broken(*arguments, **options):
    replicas = make_replicas(*arguments, **options)
    for replica in replicas:
        replica.sampler._params = {}
    return replicas


server.make_replicas = make_broken
log_to_stderr()
sys.exit(main())
"""


def test_a_dead_sampler_answers_everyone_and_ends_the_server(start_server, tmp_path):
    program = tmp_path / "dying.py"
    program.write_text(DYING)
    with start_server((program,)) as server:
        asking = [Asking(server, LONG) for _ in range(3)]
        answers = [each.result() for each in asking]
        assert status(server) == 1
    for code, body in answers:
        assert code in (500, 503), body  # 503: it came when the sampler was dead
    failed = [body["error"]["message"] for code, body in answers if code == 500]
    assert any("parameter" in message for message in failed), answers
    assert "the sampler died" in server.said()


def refused(capsys, *arguments, words):
    """Exit status 2 and one line that holds these words, after what was begun."""
    with pytest.raises(SystemExit, match="^2$"):
        sys.exit(main(arguments))
    *begun, line = capsys.readouterr().err.splitlines()
    assert {each.split()[0] for each in begun} <= {"loading", "compiling"}, begun
    assert line.startswith("error: ")
    for word in words:
        assert word in line, line


FLAGS = [
    pytest.param((), ("--checkpoint",), id="no checkpoint"),
    pytest.param(("--checkpoint=/nowhere",), ("/nowhere", "no such"), id="missing"),
    pytest.param(("--port=high",), ("--port", "'high'"), id="no number"),
    pytest.param(("--port=70000",), ("--port", "from 0 to 65535"), id="no port"),
    pytest.param(("--host=no.such.host.invalid",), ("--host=no.such",), id="no host"),
    pytest.param(("--slots=0",), ("--slots", "0 must be from 1 to 100,000"), id="none"),
    pytest.param(
        ("--slots=1000000000",),
        ("--slots", "1000000000 must be from 1 to 100,000"),
        id="too many slots",
    ),
    pytest.param(
        (f"--cache_tokens={10**23}",),
        ("--cache_tokens", f"{10**23} must be from 0 to 4,294,967,295"),
        id="too large a cache",
    ),
    pytest.param(
        ("--tokens_per_call=1000000000",),
        ("--tokens_per_call", "1000000000 must be from 1 to 16,777,216"),
        id="too long a call",
    ),
    pytest.param(("--max_samples=0",), ("--max_samples", "0 must be above 0"), id="0"),
    pytest.param(("--dtype=int8",), ("--dtype=int8", "bfloat16"), id="unknown dtype"),
    pytest.param(("--drain_s=nan",), ("--drain_s", "nan must be"), id="nan"),
    pytest.param(
        ("--prefix_cache=no",), ("'no' must be on or off",), id="neither on nor off"
    ),
    pytest.param(("--slot=5",), ("unknown flags: --slot",), id="unknown flag"),
    pytest.param(("--tensor=3",), ("--tensor=3", "a divisor of 2"), id="uneven cut"),
    pytest.param(("--api_key=",), ("--api_key holds no key",), id="an empty key"),
    pytest.param(
        ("--api_key_file=/nowhere",),
        ("--api_key_file=/nowhere cannot be read: /nowhere: there is no such file",),
        id="no file of a key",
    ),
    pytest.param(
        ("--max_samples=99", "--slots=8", "--max_waiting=9"),
        ("--max_samples=99", "--slots + --max_waiting = 17", "lower the first"),
        id="more than may wait",
    ),
    pytest.param(
        ("--max_prompt_tokens=500", "--max_completion_tokens=13"),
        ("= 513 is more than the 512 positions",),
        id="longer than the model",
    ),
    pytest.param(
        ("--cache_tokens=64",),
        ("--cache_tokens=64 does not hold", "raise it to 544"),
        id="cache too small",
    ),
]


@pytest.mark.parametrize("arguments, words", FLAGS)
def test_a_wrong_flag_is_one_line(capsys, arguments, words):
    given = [f"--checkpoint={BASE}"] if words[0] != "--checkpoint" else []
    given += ["--port=0"]
    refused(capsys, *given, *arguments, words=words)


def test_a_port_in_use_is_named_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        arguments = ("--checkpoint=/nowhere", f"--port={port}")
        refused(capsys, *arguments, words=(f"--port={port}", "Address already in use"))


def test_the_program_ends_with_a_status_and_one_line(tmp_path):
    shutil.copytree(BASE, tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    flags = ("--checkpoint", weights.parent, "--port=0")
    process = small_run.start("-m", "scalerl_jax.serve", *flags)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and output == ""
    begun, line = errors.splitlines()
    assert begun == f"loading {weights.parent}"
    assert line.startswith(f"error: --checkpoint={weights.parent}: {weights}")
