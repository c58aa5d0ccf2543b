"""Long answers: what they cost others, and clients that take them slowly or not."""

import asyncio
import contextlib
import json
import math
import socket
import time

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route
from uvicorn.server import ServerState

from scalerl_jax.serve import access
from scalerl_jax.serve.access import Connections
from scalerl_jax.serve.rendering import render, streamed_answer, whole_answer

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=200) | st.dictionaries(st.text(st.characters()), inner)
    ),
    max_leaves=300,
)


@given(JSON)
def test_what_is_rendered_in_parts_is_the_value(value):
    text = render(value)
    assert json.loads(text) == value
    assert text.isascii()


@pytest.mark.parametrize(
    "value", [math.nan, {"a": [math.inf]}, {"a": [{"b": -math.inf}]}]
)
def test_what_is_no_json_is_not_rendered(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        render(value)


@contextlib.asynccontextmanager
async def connected(endpoint, **limits):
    """A client of a server of this endpoint; the kernel holds little between them."""
    connections = Connections(max_connections=9, **limits)
    state, app = ServerState(), Starlette(routes=[Route("/", endpoint)])
    config = uvicorn.Config(
        app, lifespan="off", ws="none", log_config=None, timeout_keep_alive=0
    )
    with socket.socket() as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        server = await asyncio.get_running_loop().create_server(
            lambda: connections(config=config, server_state=state, app_state={}),
            sock=listener,
        )
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
        yield client
        server.close()
        client.close()
        while state.tasks or state.connections:
            await asyncio.sleep(0.01)


async def taken(client, *, most=2**30, pause_s=0.0):
    """What a client reads, so much in all and with a pause after each 32 KiB."""
    found, rested = b"", 0
    while len(found) < most and b"\r\n0\r\n\r\n" not in found[-9:]:
        piece = await asyncio.get_running_loop().sock_recv(client, 2**15)
        if not piece:
            break
        found += piece
        if len(found) - rested >= 2**15:
            rested = len(found)
            await asyncio.sleep(pause_s)
    return found


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_reads_steadily_gets_all_of_a_long_answer(streamed):
    text, body_s = "#" * 2**21, 1.0

    async def endpoint(request):
        if not streamed:
            return await whole_answer(text)

        async def rest():
            yield text[1:]

        return streamed_answer(text[0], rest())

    async def run():
        async with connected(endpoint, header_s=60.0, body_s=body_s) as client:
            await asyncio.get_running_loop().sock_sendall(client, GET)
            begun = time.monotonic()
            if streamed:
                answer = await taken(client, pause_s=0.03)
                assert answer.count(b"#") == len(text)
            else:
                head = await taken(client, most=1)
                start = head.index(b"\r\n\r\n") + 4
                length = f"content-length: {len(text) + 2}\r\n".encode()
                assert length in head
                left = start + len(text) + 2 - len(head)
                answer = head[start:] + await taken(client, most=left, pause_s=0.03)
                assert json.loads(answer) == text
            # It took longer than the time for a part, which is the point.
            assert time.monotonic() - begun > 1.5 * body_s

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_client_that_takes_nothing_is_disconnected_and_logged(caplog):
    async def endpoint(request):
        return await whole_answer("#" * 2**20)

    async def run():
        for _ in range(2):
            limits = {"header_s": 60.0, "body_s": 0.2}
            async with connected(endpoint, **limits) as client:
                await asyncio.get_running_loop().sock_sendall(client, GET)
                await asyncio.sleep(1.0)
                with contextlib.suppress(ConnectionError):
                    assert len(await taken(client)) < 2**18

    asyncio.run(asyncio.wait_for(run(), 60))
    assert caplog.text.count("did not take 64 KiB of its answer within --body_s") == 2


def test_a_log_has_one_line_a_minute_of_such_clients(caplog, monkeypatch):
    connections = Connections(max_connections=1, header_s=1.0, body_s=4.0)
    for _ in range(3):
        connections.count_cut("1.2.3.4:5")
    monkeypatch.setattr(access, "_BETWEEN_LINES_S", 0.0)
    connections.count_cut("1.2.3.4:6")
    first, second = caplog.messages
    assert "1.2.3.4:5 did not" in first and "--body_s = 4 s" in first
    assert "1.2.3.4:6 did not" in second and "(4 so far)" in second


def test_the_wait_for_a_next_request_leaves_time_for_the_last_answer():
    async def endpoint(request):
        return await whole_answer("#" * 70_000)  # all of it is written at once

    async def run():
        async with connected(endpoint, header_s=0.2, body_s=30.0) as client:
            await asyncio.get_running_loop().sock_sendall(client, GET)
            await asyncio.sleep(1.0)
            assert (await taken(client, most=70_000)).count(b"#") > 69_000

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_connection_is_kept_for_the_next_request_as_long_as_is_said():
    async def endpoint(request):
        return await whole_answer("#")

    async def run():
        loop = asyncio.get_running_loop()
        async with connected(endpoint, header_s=60.0, body_s=60.0) as client:
            for _ in range(2):
                await loop.sock_sendall(client, GET)
                answer = b""
                while not answer.endswith(b'"#"'):
                    assert (piece := await loop.sock_recv(client, 2**10)), answer
                    answer += piece
                await asyncio.sleep(0.1)  # uvicorn's own time is over

    asyncio.run(asyncio.wait_for(run(), 60))
