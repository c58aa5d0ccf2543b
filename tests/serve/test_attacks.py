"""What clients may do to a server that then answers others as before.

One server, with a key, few connections and little patience.
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import socket
import threading
import time
import urllib.request
from urllib.parse import urlsplit

import pytest
import uvicorn
from small_server import JSON
from uvicorn.server import ServerState

from scalerl_jax.serve.__main__ import main, read_flags
from scalerl_jax.serve.access import Connections, find_key, known_hosts, reserve_files

KEY = "sk-a/secret+of~hours"
MAX_CONNECTIONS, HEADER_S, BODY_S = 48, 2.0, 2.0
FILES = 400  # that the server may open, once it runs
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HEADERS = b"Authorization: Bearer %b\r\nContent-Type: application/json\r\n" % (
    KEY.encode()
)


@pytest.fixture(scope="module")
def guarded(start_server, tmp_path_factory):
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY + "\n")
    with start_server(
        api_key_file=file,
        allowed_hosts="box.example, other",
        max_connections=MAX_CONNECTIONS,
        header_s=HEADER_S,
        body_s=BODY_S,
        max_body_bytes=4 * 2**20,
    ) as server:
        if hasattr(resource, "prlimit"):
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (FILES,) * 2)
        assert_serves(server)  # it compiles, for longer than its patience
        yield server
        assert server.process.poll() is None
        assert "Traceback" not in server.said()
        assert KEY not in server.said()


def ask(server, path="/v1/completions", body=None, *, key=KEY, method=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named |= {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.ask(path, body, method=method, headers=named)


def assert_serves(server):
    assert ask(server, body={"prompt": "a", "max_tokens": 1})[0] == 200


@contextlib.contextmanager
def flood(server, count, first=b""):
    """So many connections with the same beginning of a request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, soft + count), hard))
    with contextlib.ExitStack() as opened:
        found = []
        for _ in range(count):
            raw = opened.enter_context(connect(server))
            with contextlib.suppress(OSError):  # the server has closed it
                raw.sendall(first)
            found.append(raw)
        yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server):
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def rest(raw):
    """What comes until the server closes a connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := raw.recv(1000):
            answer += piece
    return answer


def is_open(raw):
    raw.setblocking(False)
    try:
        raw.recv(1)
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def status(answer):
    return int(answer.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(GET, id="half of the headers"),
        pytest.param(POST + HEADERS + b"Content-Length: 9\r\n\r\n{", id="half a body"),
    ],
)
def test_clients_that_never_finish_keep_nobody_out(guarded, first):
    with flood(guarded, 1100, first) as raws:
        came = time.monotonic()  # the last of them, no sooner than its connection
        assert_serves(guarded)
        # It did not wait for these clients, whose time is not over.
        kept = is_open(raws[-1])
        assert kept or time.monotonic() - came > min(HEADER_S, BODY_S) / 2
        assert not is_open(raws[0])
    assert_serves(guarded)


def test_busy_connections_stay_and_are_the_most_there_are():
    async def never(scope, receive, send):
        await asyncio.Event().wait()

    async def attack():
        connections = Connections(max_connections=2, header_s=60.0, body_s=60.0)
        state = ServerState()
        config = uvicorn.Config(never, lifespan="off", ws="none", log_config=None)
        server = await asyncio.get_running_loop().create_server(
            lambda: connections(config=config, server_state=state, app_state={}),
            "127.0.0.1",
            0,
        )
        address = server.sockets[0].getsockname()

        writers = []

        async def come(first, waiting):
            reader, writer = await asyncio.open_connection(*address)
            writers.append(writer)
            writer.write(first)
            while len(connections.waiting) != waiting:
                await asyncio.sleep(0.01)
            return reader

        busy = await come(GET + b"\r\n", 0)
        idle = await come(GET, 1)
        also_busy = await come(GET + b"\r\n", 0)  # in place of the idle one
        assert await idle.read() == b""
        turned_away = await come(b"", 0)
        answer = await turned_away.read()
        assert status(answer) == 503 and b"--max_connections" in answer
        assert not busy.at_eof() and not also_busy.at_eof()
        server.close()
        for writer in writers:
            writer.close()
        for task in state.tasks:
            task.cancel()
        while state.tasks or state.connections:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(attack(), 30))


SLOW = {
    "nothing": (b"", None),
    "half of the headers": (GET, None),
    "half of the next": (GET + b"\r\n" + GET, 200),
    "a body that nobody asked for": (GET + b"Content-Length: 9999\r\n\r\n", 200),
    "half a body": (POST + HEADERS + b"Content-Length: 9999\r\n\r\n{", 408),
}


@pytest.mark.slow
def test_slow_clients_are_left(guarded):
    with contextlib.ExitStack() as opened:
        raws = {name: opened.enter_context(connect(guarded)) for name in SLOW}
        for name, (first, _) in SLOW.items():
            raws[name].sendall(first)
        ended = threading.Event()

        def drip():
            while not ended.wait(0.2):
                for name in SLOW.keys() - {"nothing"}:
                    with contextlib.suppress(OSError):
                        raws[name].send(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            for name, (_, code) in SLOW.items():
                answer = rest(raws[name])
                assert (status(answer) if answer else None) == code, name
        finally:
            ended.set()
            dripping.join()
    assert_serves(guarded)


def test_a_client_that_takes_nothing_is_left(guarded):
    address = urlsplit(guarded.url)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((address.hostname, address.port))
        # The answers are more than what the kernel holds.
        one = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + HEADERS + b"\r\n"
        raw.settimeout(5)
        with contextlib.suppress(OSError):
            raw.sendall(one * 2000)
        end = time.monotonic() + 30
        while connections(guarded) > 1:
            assert time.monotonic() < end
            time.sleep(0.1)
    assert_serves(guarded)


def connections(server):
    return metrics(server)["scalerl_connections"]


def metrics(server):
    """Values of the samples that Prometheus would read, by name and labels."""
    with contextlib.closing(server.connect()) as connection:
        headers = {"Authorization": f"Bearer {KEY}"}
        connection.request("GET", "/metrics", headers=headers)
        response = connection.getresponse()
        assert response.getheader("Content-Type").startswith("text/plain; version=")
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_a_prompt_of_millions_of_characters_is_not_made_into_tokens(guarded):
    code, body = ask(guarded, body={"prompt": "a" * 3_900_000})
    assert code == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert "3900000 characters, which are more than" in body["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[" * 2_000_000, id="deep"),
        pytest.param(b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", id="deep prompt"),
        pytest.param(b'{"prompt":[' + b"1," * 1_900_000 + b"1]}", id="many ids"),
        pytest.param(b'{"stop":[' + b"1," * 1_900_000 + b"1]}", id="many stops"),
        pytest.param(
            b'{"messages":[' + b"{}," * 1_000_000 + b"{}]}", id="many messages"
        ),
        pytest.param(
            b"{" + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}",
            id="many fields",
        ),
        pytest.param(b'{"n":' + b"9" * 4_000_000 + b"}", id="endless number"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_large_body_is_refused(guarded, path, body):
    assert ask(guarded, path, body)[0] == 400
    assert_serves(guarded)


def test_nonsense_behind_an_answer_is_no_fault(guarded):
    with connect(guarded) as raw:
        raw.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\n")
        raw.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        assert status(raw.recv(1000)) == 401
        raw.sendall(b"no chunk\r\nat all\r\n")
        rest(raw)
    assert_serves(guarded)


@pytest.mark.parametrize(
    "host, code",
    [
        ("localhost", 200),
        ("LOCALHOST.:9", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("203.0.113.7:80", 200),  # an address: no name that could be bent
        ("box.example", 200),
        ("other:1", 200),
        (socket.gethostname(), 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("evil.example:127.0.0.1", 421),
        ("127.0.0.1.evil.example", 421),
        ("user@localhost", 421),
        ("[", 421),
        ("", 421),
    ],
)
def test_a_host_must_be_a_name_of_the_server(guarded, host, code):
    for path in ("/v1/models", "/health"):
        found, body = ask(guarded, path, Host=host)
        assert found == code, body
    if code == 421:
        assert body["error"]["code"] == "unknown_host"
        assert "--allowed_hosts" in body["error"]["message"]


@pytest.mark.parametrize(
    "kind, code",
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),  # a page may send these three without asking
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonp", 415),
        ("", 415),
    ],
)
def test_a_body_must_be_called_json(guarded, kind, code):
    body = {"prompt": "a", "max_tokens": 1}
    found, answer = ask(guarded, body=body, Content_Type=kind)
    assert found == code, answer
    assert ask(guarded, "/tokenize", {"prompt": "a"}, Content_Type=kind)[0] == code


PATHS = ["/v1/models", "/v1/completions", "/tokenize", "/metrics", "/nowhere"]


@pytest.mark.parametrize(
    "authorization",
    [
        pytest.param({}, id="none"),
        pytest.param({"Authorization": f"Bearer {KEY[:-1]}"}, id="a part"),
        pytest.param({"Authorization": f"Bearer {KEY}x"}, id="more"),
        pytest.param({"Authorization": "Bearer "}, id="empty"),
        pytest.param({"Authorization": f"Basic {KEY}"}, id="another scheme"),
        pytest.param({"Authorization": KEY}, id="no scheme"),
        pytest.param({"Authorization": "Bearer \xff\xe9"}, id="not ASCII"),
    ],
)
def test_without_the_key_only_the_health_is_told(guarded, authorization):
    for path in PATHS:
        code, body = ask(guarded, path, key=None, **authorization)
        assert code == 401
        assert body["error"]["code"] == "invalid_api_key"
        assert body["error"]["type"] == "invalid_request_error"
        assert KEY not in json.dumps(body)
    assert ask(guarded, "/health", key=None, **authorization)[0] == 200


def test_the_chat_page_has_no_key_and_asks_its_own_server_alone(guarded):
    with urllib.request.urlopen(f"{guarded.url}/") as answer:
        page = answer.read().decode()
        policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert KEY not in page and "innerHTML" not in page
    assert not re.findall(r"(?:src|href)=|https?://", page)


def test_with_the_key_everything_is_told(guarded):
    with contextlib.closing(guarded.connect()) as connection:
        connection.request(
            "GET", "/v1/models", headers={"authorization": f"bearer {KEY}"}
        )
        assert connection.getresponse().status == 200
    found = metrics(guarded)
    assert found['scalerl_requests_total{path="other",status="401"}'] >= 1
    assert (found["scalerl_replicas"], found["scalerl_slots"]) == (1, 4)


def test_clients_that_leave_their_streams_leave_nothing_behind(guarded):
    text = json.dumps({"prompt": "a", "n": 20, "max_tokens": 64, "stream": True})
    for _ in range(20):
        with contextlib.closing(guarded.connect()) as connection:
            connection.request(
                "POST",
                "/v1/completions",
                text,
                headers=JSON | {"Authorization": f"Bearer {KEY}"},
            )
            connection.getresponse().read(10)
    guarded.wait_for(lambda load: load["running"] == load["waiting"] == 0)
    assert guarded.health()["pages_in_use"] == 0
    assert_serves(guarded)


def test_a_key_comes_from_one_place_and_is_never_shown(tmp_path):
    file = tmp_path / "key"
    file.write_text(f" {KEY}\n")
    variables = {"SCALERL_API_KEY": KEY}
    assert find_key(None, None, {}) == ""
    assert find_key(KEY, None, {}) == KEY
    assert find_key(None, str(file), {}) == KEY
    assert find_key(None, None, variables) == KEY
    for given in [
        (KEY, str(file), {}),
        (KEY, None, variables),
        (f"{KEY} {KEY}", None, {}),
        (None, None, {"SCALERL_API_KEY": f"{KEY}\n{KEY}"}),
        (None, None, {"SCALERL_API_KEY": f"\xe9{KEY}"}),
    ]:
        with pytest.raises(ValueError) as error:
            find_key(*given)
        assert KEY not in str(error.value)
    file.write_bytes(KEY.encode() + b"\xff")
    with pytest.raises(ValueError, match="cannot be read: .* is not UTF-8"):
        find_key(None, str(file), {})


@pytest.mark.parametrize(
    "flag", [f"--api_kye={KEY}", f"--api_kez {KEY}", f"--key {KEY}"]
)
def test_a_misspelt_flag_shows_no_key(flag):
    with pytest.raises(ValueError, match="unknown flags: --") as error:
        read_flags(["--checkpoint=x", *flag.split()])
    assert KEY not in str(error.value)


def test_every_host_can_be_allowed():
    assert known_hosts("localhost", "a,*") is None
    assert {"a", "b.c", "localhost"} < known_hosts("Host", " a, B.c,") | {"x"}


def test_files_are_reserved_for_connections():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, hard)
        )
        reserve_files(100)
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert 400 < raised < 2000
        reserve_files(1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(ValueError, match="ulimit -Hn"):
                reserve_files(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


AWAY = ("--checkpoint=/nowhere", "--port=0", "--compile_cache=")


def test_an_address_for_others_without_a_key_is_warned_of(caplog, capsys):
    # It is bound, and nobody listens: there is no such checkpoint.
    for flags, warned in [
        (["--host=0.0.0.0"], True),
        (["--host=0.0.0.0", f"--api_key={KEY}"], False),
        (["--host=127.0.0.1"], False),
    ]:
        caplog.clear()
        assert main([*AWAY, *flags]) == 2
        assert ("without an API key everyone there" in caplog.text) == warned
        assert KEY not in caplog.text + capsys.readouterr().err


def test_malformed_http_is_not_worth_a_line(guarded):
    before = len(guarded.lines)
    for first in (
        b"\x00" * 100,
        b"GET\r\n\r\n",
        GET + b"X: " + b"a" * 300_000,
    ):
        with connect(guarded) as raw, contextlib.suppress(ConnectionError):
            raw.sendall(first)
            assert status(rest(raw)) == 400
    with contextlib.suppress(http.client.HTTPException):
        ask(guarded, "/health", Upgrade="websocket", Connection="Upgrade")
    assert len(guarded.lines) == before
    assert_serves(guarded)
