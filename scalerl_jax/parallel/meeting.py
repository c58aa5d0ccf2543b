"""Wait until all processes of a run have started, before JAX starts.

Every process reports to process 0 over a TCP connection.  Process 0 listens at the
coordinator's address until all have reported, and then tells each of them to continue,
or which are missing.  Both sides prove that they know the start's secret
(`signed_lines`).  A connection without that proof is a stranger's: it is closed and
counted, and delays no one.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import time
from typing import Any

from scalerl_jax.parallel import signed_lines
from scalerl_jax.parallel.coordinator import Coordinator, ProcessPlace

# Extra seconds after the timeout, for the answers and for JAX's own start.
GRACE_S = 30.0
_RETRY_S = 0.2
_HELLO_S = 5.0  # seconds for a connection to identify itself
# Limit of connections that have not identified themselves, in addition to one for each
# process; beyond it the oldest is closed.
_MAX_GREETED = 128
_MAX_NAMES = 16  # missing processes that an error lists
_HELLO = {"process_id": int, "num_processes": int, "challenge": str}
_ANSWER = {"error": str, "mistake": bool, "coordinator": str}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Met:
    """Result of `meet` on one process."""

    coordinator: str  # address of JAX's coordinator
    strangers: int  # connections from outside this start; counted by process 0 only


def meet(
    place: ProcessPlace,
    *,
    secret: str,
    at: Coordinator | None,
    timeout_s: float,
    end: float,
) -> Met:
    """Return once all processes have reported; else raise the same error on all.

    Args:
        place: this process.
        secret: the secret that all processes share.
        at: where process 0 listens; None for the others.
        timeout_s: the timeout that error messages give.
        end: end of the timeout, by `time.monotonic`.

    Raises:
        ValueError: the arguments of two processes contradict each other.
        TimeoutError: a process did not report.
    """
    assert secret or place.num_processes == 1, "several processes share a secret"
    if at is None:
        answer = asyncio.run(_report(place, secret, timeout_s, end))
        return Met(coordinator=answer["coordinator"], strangers=0)
    gathering = Gathering(place, secret=secret, at=at)
    if place.num_processes > 1:
        with at.held.listen() as listening:
            asyncio.run(gathering.run(listening, timeout_s, end))
    if gathering.strangers:
        _log.warning(
            "%d connections at %s did not know this start's secret, and were ignored",
            gathering.strangers,
            at.held.address,
        )
    return Met(coordinator=at.address, strangers=gathering.strangers)


class Gathering:
    """Process 0's side of a start: which processes have reported, and strangers."""

    def __init__(self, place: ProcessPlace, *, secret: str, at: Coordinator) -> None:
        """Store the arguments; process 0 listens `at` its port, from `run` on."""
        self._place, self._at = place, at
        self._secret = secret
        self._most_greeted = _MAX_GREETED + place.num_processes
        self._come: dict[int, _Peer] = {}
        self._greeted: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._fault = ""
        self._refused: list[_Peer] = []
        self._over: asyncio.Event
        self.strangers = 0

    async def run(self, listening: socket.socket, timeout_s: float, end: float) -> None:
        """Wait for the others, and send them the result.

        Raises:
            ValueError: the arguments of two processes contradict each other.
            TimeoutError: a process did not report.
        """
        self._over = asyncio.Event()
        server = await asyncio.start_server(
            self._greet, sock=listening, limit=signed_lines.MAX_BYTES, backlog=1024
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                await self._over.wait()
        server.close()
        error = self._error(timeout_s)
        answer = {
            "error": str(error or ""),
            "mistake": isinstance(error, ValueError),
            "coordinator": self._at.address,
        }
        peers = (*self._come.values(), *self._refused)
        await asyncio.gather(
            *(peer.tell(answer, secret=self._secret) for peer in peers)
        )
        for writer in self._greeted:
            writer.transport.abort()
        if error:
            raise error

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Identify a new connection, and watch it if it is a process of the run."""
        if len(self._greeted) >= self._most_greeted:
            oldest = next(iter(self._greeted))
            del self._greeted[oldest]
            oldest.transport.abort()
        self._greeted[writer] = None
        try:
            async with asyncio.timeout(_HELLO_S):
                challenge = signed_lines.new_challenge()
                writer.write(challenge.encode() + b"\n")
                hello = signed_lines.verify(
                    await signed_lines.read_line(reader),
                    _HELLO,
                    secret=self._secret,
                    speaker="process",
                    challenge=challenge,
                )
        except (OSError, EOFError, ValueError):  # TimeoutError is an OSError
            self.strangers += not self._over.is_set()
            writer.transport.abort()
            return
        finally:
            self._greeted.pop(writer, None)
        process = hello["process_id"]
        peer = _Peer(reader, writer, challenge=hello["challenge"])
        self._enter(process, hello["num_processes"], peer)
        with contextlib.suppress(OSError):
            await reader.read(1)  # returns when the connection closes
        if self._come.get(process) is peer and not self._over.is_set():
            del self._come[process]  # it ended, and may be started again

    def _enter(self, process: int, count: int, peer: "_Peer") -> None:
        """Record that a process has reported; the last one ends the wait."""
        if self._over.is_set():
            return
        expected = self._place.num_processes
        before = self._come.get(process)
        if count != expected:
            self._fault = (
                f"process {process} was started with --num_processes={count} and "
                f"process 0 with {expected}; start all with the same"
            )
        elif not 0 < process < expected or (before is not None and before.is_there):
            self._fault = (
                f"two processes were started with --process_id={process}; each needs "
                f"one of its own, from 0 to {expected - 1}"
            )
        if self._fault:
            self._refused.append(peer)
        else:
            self._come[process] = peer
        if self._fault or len(self._come) == expected - 1:
            self._over.set()

    def _error(self, timeout_s: float) -> Exception | None:
        """Return the error with which the start fails, or None."""
        if self._fault:
            return ValueError(self._fault)
        count = self._place.num_processes
        missing = sorted(set(range(1, count)) - self._come.keys())
        if not missing:
            return None
        names = ", ".join(map(str, missing[:_MAX_NAMES]))
        names += ", ..." * (len(missing) > _MAX_NAMES)
        strangers = ""
        if self.strangers:
            strangers = (
                f"; {self.strangers} connections did not know the secret of this start"
            )
        return TimeoutError(
            f"process {names} of {count} did not come to the coordinator at "
            f"{self._place.coordinator} within {timeout_s:g} s; process 0 listens at "
            f"{self._at.held.address}: see whether they run and reach that "
            f"address{strangers}"
        )


class _Peer:
    """A process that has reported to process 0 and waits for its answer."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        challenge: str,
    ) -> None:
        self._reader, self._writer, self._challenge = reader, writer, challenge

    @property
    def is_there(self) -> bool:
        """True if the process keeps its connection open."""
        return not self._reader.at_eof()

    async def tell(self, answer: dict[str, Any], *, secret: str) -> None:
        """Send the answer; ignore a lost process, which is detected elsewhere."""
        line = signed_lines.sign(
            answer, secret=secret, speaker="process 0", challenge=self._challenge
        )
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_HELLO_S):
                self._writer.write(line)
                self._writer.close()
                await self._writer.wait_closed()


async def _report(
    place: ProcessPlace, secret: str, timeout_s: float, end: float
) -> dict[str, Any]:
    """Report this process to process 0, with retries; return its answer."""
    reason = "it does not answer"
    while time.monotonic() < end:
        try:
            answer = await _ask(place, secret, end)
        except TimeoutError:
            pass
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
        except EOFError:
            reason = "it closes the connection, as on another start's processes"
        except ValueError as error:
            reason = f"the program that listens there is not of this start: {error}"
        else:
            if answer["error"]:
                kind = ValueError if answer["mistake"] else TimeoutError
                raise kind(answer["error"])
            return answer
        await asyncio.sleep(_RETRY_S)
    raise TimeoutError(
        f"process 0 did not answer at --coordinator={place.coordinator} within "
        f"{timeout_s:g} s ({reason}), seen from process {place.process_id} of "
        f"{place.num_processes}; see whether it runs there, and whether this host "
        f"reaches that address"
    )


async def _ask(place: ProcessPlace, secret: str, end: float) -> dict[str, Any]:
    """Report once to process 0, and return its answer.

    Raises:
        OSError, EOFError: the connection failed or was closed.
        ValueError: the listening program does not know the secret.
    """
    host, port = place.address
    async with asyncio.timeout_at(end) as limit:
        reader, writer = await asyncio.open_connection(
            host, port, limit=signed_lines.MAX_BYTES
        )
        with contextlib.closing(writer):
            async with asyncio.timeout(_HELLO_S):
                theirs = await signed_lines.read_challenge(reader)
            own = signed_lines.new_challenge()
            hello = {
                "process_id": place.process_id,
                "num_processes": place.num_processes,
                "challenge": own,
            }
            writer.write(
                signed_lines.sign(
                    hello, secret=secret, speaker="process", challenge=theirs
                )
            )
            # Process 0 may have started later; wait for its list of missing processes.
            limit.reschedule(end + GRACE_S)
            return signed_lines.verify(
                await signed_lines.read_line(reader),
                _ANSWER,
                secret=secret,
                speaker="process 0",
                challenge=own,
            )
