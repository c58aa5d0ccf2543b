"""A command that ends with the process that started it, however that one ends.

    python -m scalerl_jax.cluster.parent_watch COMMAND ...

Standard input is watched: its other end closes when the starter is gone, killed or not.
The command then gets SIGTERM, and SIGKILL if it stays.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from scalerl_jax.process.child_environment import own_python

_END_S = 20.0


@contextlib.contextmanager
def watching_parent(
    command: Sequence[str], *, environment: Mapping[str, str], output: IO[Any]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while the block runs; what it says goes to a file.

    The process that is yielded ends as the command does, with its status.
    """
    process = subprocess.Popen(
        [*own_python(), "-m", "scalerl_jax.cluster.parent_watch", *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is for the starter
    )
    assert process.stdin is not None, "asked for above"
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(2 * _END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """Run the command of the command line; return its status."""
    command = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True
    )

    def end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        command.terminate()
        try:
            command.wait(_END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)

    threading.Thread(target=end, name="parent-watch", daemon=True).start()
    return command.wait()


if __name__ == "__main__":
    sys.exit(main())
