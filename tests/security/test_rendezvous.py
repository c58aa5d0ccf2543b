"""A start of several processes among strangers: it neither fails nor waits for them."""

import contextlib
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from scalerl_jax.parallel import meeting, rendezvous, signed_lines
from scalerl_jax.parallel.coordinator import (
    Coordinator,
    HeldPort,
    ProcessPlace,
    opened_coordinator,
)

SECRET, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
LONG_S = 300.0  # for what happens at once on an idle machine
GIGABYTE = 2**30
FIELDS = {"process_id": int, "num_processes": int, "challenge": str}
HELLO = {"process_id": 1, "num_processes": 3, "challenge": "0" * 64}

# Bodies of a hello that are none, whoever says them.
BODIES = {
    "infinity": b'{"process_id": Infinity, "num_processes": 3, "challenge": ""}',
    "not a number": b'{"process_id": NaN, "num_processes": 3, "challenge": ""}',
    "a bare infinity": b"Infinity",
    "a number": b"1",
    "nothing": b"",
    "60,000 brackets": b"[" * 60_000,
    "nesting that ends": b"[" * 5_000 + b"]" * 5_000,
    "objects in objects": b'{"a":' * 2_000 + b"1" + b"}" * 2_000,
    "a huge integer": b'{"process_id": 1' + b"0" * 4_000 + b"}",
    "2^31": b'{"process_id": 2147483648, "num_processes": 3, "challenge": ""}',
    "a negative integer": b'{"process_id": -1, "num_processes": 3, "challenge": ""}',
    "a float": b'{"process_id": 1.0, "num_processes": 3, "challenge": ""}',
    "true": b'{"process_id": true, "num_processes": 3, "challenge": ""}',
    "a text": b'{"process_id": "1", "num_processes": 3, "challenge": ""}',
    "a list": b"[1, 3]",
    "a field more": b'{"process_id":1,"num_processes":3,"challenge":"","error":""}',
    "a field less": b'{"process_id": 1, "num_processes": 3}',
    "no UTF-8": b'{"process_id": 1, "num_processes": 3, "challenge": "\xff\xfe"}',
    "a surrogate": b'{"process_id": "\\ud800"}',
    "zeros": b"\0" * 1_000,
    "HTTP": b"GET / HTTP/1.1\r\nHost: x",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2, as gRPC begins": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


def sign(message, *, secret=SECRET, challenge, speaker="process"):
    return signed_lines.sign(
        message, secret=secret, speaker=speaker, challenge=challenge
    )


def verify(line, challenge):
    return signed_lines.verify(
        line, FIELDS, secret=SECRET, speaker="process", challenge=challenge
    )


def hostile_lines(seed):
    """Lines of strangers, in a random order: bodies, forgeries, replays, noise."""
    chance = random.Random(seed)
    plain = json.dumps(HELLO).encode()
    old = signed_lines.new_challenge()
    lines = [
        *BODIES.values(),
        *(b"0" * 64 + b" " + body for body in BODIES.values()),
        plain,  # process 1, forged: without a proof, with one of another secret, and
        sign(HELLO, secret=OTHER, challenge=old).rstrip(),
        sign(HELLO, challenge=old).rstrip(),  # one that was true on a connection before
        sign(HELLO, challenge=old, speaker="process 0").rstrip(),
        json.dumps(HELLO | {"process_id": 99}).encode(),
        json.dumps(HELLO | {"num_processes": 10**9}).encode(),
        b"z" * 64 + b" " + plain,
        *(chance.randbytes(chance.randrange(1, 3_000)) for _ in range(20)),
    ]
    chance.shuffle(lines)
    return [line + b"\n" for line in lines]


class Start:
    """The processes of one start, each in a thread of its own."""

    def __init__(self, count, *, timeout_s=LONG_S):
        self.held = HeldPort("127.0.0.1")
        self.address = ("127.0.0.1", int(self.held.address.rpartition(":")[2]))
        self._at = Coordinator(held=self.held, address="unix:/a/file", bind_address="")
        self._count, self._timeout_s = count, timeout_s
        self._threads, self.outcomes = {}, {}

    def begin(self, process, *, secret=SECRET, count=None):
        """Start one process; `secret` is what it believes to be the secret."""
        place = ProcessPlace(
            coordinator=self.held.address,
            num_processes=count or self._count,
            process_id=process,
        )

        def run():
            try:
                self.outcomes[process] = meeting.meet(
                    place,
                    secret=secret,
                    at=None if process else self._at,
                    timeout_s=self._timeout_s,
                    end=time.monotonic() + self._timeout_s,
                )
            except Exception as error:  # noqa: BLE001  told by the tests
                self.outcomes[process] = error

        self._threads[process] = threading.Thread(target=run)
        self._threads[process].start()

    def end(self):
        for thread in self._threads.values():
            thread.join()
        self.held.close()
        return self.outcomes


@contextlib.contextmanager
def connected(address):
    """A connection that has been greeted with a challenge."""
    with retried(address) as connection, connection.makefile("rb") as file:
        challenge = file.readline().decode().strip()
        assert len(challenge) == 64
        yield connection


def retried(address):
    """A connection, once somebody listens there."""
    end = time.monotonic() + LONG_S
    while True:
        try:
            return socket.create_connection(address, timeout=LONG_S)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)


def closes(connection):
    """Whether the other end closes it, however."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            pass
    return True


@contextlib.contextmanager
def dripping(connection, byte=b"["):
    """A byte now and then, without end, for as long as the block runs."""
    over = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                connection.sendall(byte)

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_message_is_refused_even_with_a_proof(body):
    with pytest.raises(ValueError):
        signed_lines.parse_message(body, FIELDS)
    challenge = signed_lines.new_challenge()
    proof = sign(HELLO, challenge=challenge).partition(b" ")[0]
    with pytest.raises(ValueError, match="proof|signed line"):
        verify(proof + b" " + body + b"\n", challenge)


def test_a_line_is_taken_once_from_who_knows_the_secret():
    challenge = signed_lines.new_challenge()
    line = sign(HELLO, challenge=challenge)
    assert verify(line, challenge) == HELLO
    for other in (
        sign(HELLO, challenge=signed_lines.new_challenge()),  # said before
        sign(HELLO, challenge=challenge, secret=OTHER),
        sign(HELLO, challenge=challenge, speaker="process 0"),  # one's own, sent back
        line.replace(b'"process_id": 1', b'"process_id": 2'),
        sign(HELLO | {"challenge": "0" * 2**20}, challenge=challenge),
    ):
        with pytest.raises(ValueError):
            verify(other, challenge)


@pytest.mark.parametrize("seed", range(3))
def test_a_start_succeeds_among_strangers(seed):
    start = Start(3)
    start.begin(0)
    lines = hostile_lines(seed)
    with contextlib.ExitStack() as opened:
        # They come first, and some stay: silent, or with a byte now and then.
        for number in range(6):
            connection = opened.enter_context(connected(start.address))
            if number % 2:
                opened.enter_context(dripping(connection))
        for line in lines:
            with connected(start.address) as connection:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(line)
                assert closes(connection)
        start.begin(1)
        start.begin(2)
        outcomes = start.end()
    assert {each.coordinator for each in outcomes.values()} == {"unix:/a/file"}
    assert outcomes[0].strangers >= len(lines)


def test_a_gigabyte_without_a_newline_is_not_taken():
    start = Start(2)
    start.begin(0)
    sent, part = 0, b"[" * 2**20
    with connected(start.address) as connection:
        with contextlib.suppress(ConnectionError):
            while sent < GIGABYTE:
                connection.sendall(part)
                sent += len(part)
    assert sent < GIGABYTE / 8  # what the kernel holds between the two
    start.begin(1)
    outcomes = start.end()
    assert (outcomes[0].strangers, outcomes[1].strangers) == (1, 0)


def test_more_connections_than_are_listened_to_keep_no_process_out(monkeypatch):
    monkeypatch.setattr(meeting, "_MAX_GREETED", 2)
    start = Start(2)
    start.begin(0)
    with contextlib.ExitStack() as opened:
        for _ in range(30):
            opened.enter_context(connected(start.address))
        start.begin(1)
        assert start.end()[1].coordinator == "unix:/a/file"


def test_who_stays_away_is_named_beside_the_strangers():
    start = Start(3, timeout_s=2.0)
    start.begin(0)
    with connected(start.address) as connection:
        connection.sendall(json.dumps(HELLO).encode() + b"\n")
        assert closes(connection)
        with connected(start.address) as other, dripping(other):
            error = start.end()[0]
    assert isinstance(error, TimeoutError)
    assert "process 1, 2 of 3 did not come" in str(error)
    assert "1 connections did not know the secret" in str(error)


def test_a_process_with_another_secret_is_told_of_it():
    start = Start(2, timeout_s=2.0)
    start.begin(0)
    start.begin(1, secret=OTHER)
    outcomes = start.end()
    assert "connections did not know the secret" in str(outcomes[0])
    assert "as on another start's processes" in str(outcomes[1])


def test_processes_that_contradict_are_told_so():
    start = Start(3)
    start.begin(0)
    start.begin(1, count=4)
    outcomes = start.end()
    assert str(outcomes[0]) == str(outcomes[1])
    assert "process 1 was started with --num_processes=4 and process 0 with 3" in str(
        outcomes[0]
    )


# What a stranger says who listens where process 0 should, and what process 1 says then.
IMPOSTORS = {
    "nothing": (b"", "it does not answer"),
    "no challenge": (b"Infinity\n", "not of this start"),
    "no end": (b"[" * 60_000, "not of this start"),
    "an answer without a proof": (
        b"0" * 64 + b'\n{"error": "", "mistake": false, "coordinator": "x"}\n',
        "not of this start",
    ),
    "an answer of another start": (
        b"0" * 64
        + b"\n"
        + sign(
            {"error": "", "mistake": False, "coordinator": "x"},
            challenge=signed_lines.new_challenge(),
            speaker="process 0",
        ),
        "not of this start",
    ),
}


@contextlib.contextmanager
def saying(start, says):
    """A stranger at the address of process 0, who goes on with a byte now and then."""
    over = threading.Event()
    with start.held.listen() as listening, contextlib.ExitStack() as opened:
        listening.settimeout(0.05)

        def answer():
            while not over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listening.accept()
                    opened.enter_context(connection)
                    connection.sendall(says)
                    opened.enter_context(dripping(connection))

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        over.set()
        thread.join()


def test_nobody_else_speaks_for_process_0(monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_S", 0.5)
    starts = {name: Start(2, timeout_s=2.0) for name in IMPOSTORS}
    with contextlib.ExitStack() as opened:
        for name, start in starts.items():
            opened.enter_context(saying(start, IMPOSTORS[name][0]))
            start.begin(1)
        errors = {name: start.end()[1] for name, start in starts.items()}
    for name, error in errors.items():
        assert isinstance(error, TimeoutError), name
        assert IMPOSTORS[name][1] in str(error), name


def test_process_0_listens_at_one_address():
    with contextlib.closing(HeldPort("127.0.0.1")) as held:
        port = int(held.address.rpartition(":")[2])
        with held.listen():
            socket.create_connection(("127.0.0.1", port)).close()
            for other in ("127.0.0.2", "::1"):
                with pytest.raises(OSError):
                    socket.create_connection((other, port))


def test_another_user_cannot_take_the_port_before_jax_does():
    if os.geteuid():
        pytest.skip("only root can be another user")
    with contextlib.closing(HeldPort("127.0.0.1")) as held:
        port = int(held.address.rpartition(":")[2])
        for user, status in ((0, 0), (65_534, 98)):  # 98: the address is in use
            child = os.fork()
            if child == 0:
                taken = 1
                try:
                    os.setuid(user)
                    with socket.socket() as taking:
                        taking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        taking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                        taking.bind(("127.0.0.1", port))
                        taking.listen()
                    taken = 0
                except OSError as error:
                    taken = error.errno
                finally:
                    os._exit(taken)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "0"])
def test_no_process_listens_at_all_addresses(host):
    place = ProcessPlace(coordinator=f"{host}:4321", num_processes=1, process_id=0)
    with pytest.raises(ValueError, match="all addresses of a machine"):
        rendezvous.initialize(place)


def test_on_one_machine_jax_listens_at_a_file_of_this_user():
    place = ProcessPlace(coordinator="127.0.0.1:4321", num_processes=2, process_id=0)
    with opened_coordinator(place, HeldPort("127.0.0.1")) as at:
        folder = Path(at.bind_address.removeprefix("unix:")).parent
        assert at.address == at.bind_address
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.stat().st_uid == os.geteuid()
    assert not folder.exists()
