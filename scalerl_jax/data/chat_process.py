"""Chat templates in a process of their own, with little memory and little time.

jinja's sandbox keeps a template from files and from Python, but not from a loop without
end or a text without end.  One process serves every template; one that takes too long
is killed, and the next template gets another.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

TIMEOUT_S = 10.0  # of one text
MEMORY_MIB = 1024
MAX_CHARACTERS = 2**22  # of one text, and of a template
_START_TIMEOUT_S = 120.0  # of the process, on a machine that is busy


class TemplateProcess:
    """Asks the process; several threads may."""

    def __init__(self) -> None:
        """Starts nothing before there is something to render."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def render(self, source: str, values: dict[str, Any]) -> dict[str, Any]:
        """{"text": ...} of a template, or {"refused" | "syntax" | "failed": reason}."""
        if len(source) > MAX_CHARACTERS:
            return {"failed": f"it has more than {MAX_CHARACTERS:,} characters"}
        with self._lock:
            process = self._started()
            assert process.stdin is not None, "a pipe was asked for"
            try:
                process.stdin.write(json.dumps([source, values]).encode() + b"\n")
                process.stdin.flush()
                reply = _line_of(process, TIMEOUT_S)
            except TimeoutError:
                self.close()
                return {"failed": f"it takes longer than {TIMEOUT_S:g} s"}
            except OSError as error:
                self.close()
                return {"failed": f"it ended its process ({error})"}
            except BaseException:  # Ctrl-C: a reply that nobody reads would be the next
                self.close()
                raise
        return json.loads(reply)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # With what this process may import, and from no other folder.
            places = os.pathsep.join(place or os.getcwd() for place in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": places},
                start_new_session=True,  # Ctrl-C is for the command
            )
            _line_of(self._process, _START_TIMEOUT_S)
        return self._process


def _line_of(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """The next line that the process writes."""
    assert process.stdout is not None, "a pipe was asked for"
    end, found = time.monotonic() + timeout_s, bytearray()
    while not found.endswith(b"\n"):
        left = max(0.0, end - time.monotonic())
        if not select.select([process.stdout], [], [], left)[0]:
            raise TimeoutError(f"no line within {timeout_s} s")
        part = os.read(process.stdout.fileno(), 2**20)
        if not part:
            raise OSError("it closed its output")
        found += part
    return bytes(found)


def _answer(source: str, values: dict[str, Any]) -> dict[str, Any]:
    import jinja2

    from scalerl_jax.data.chat_environment import RefusedMessages, compiled

    try:
        text = compiled(source).render(values)
    except RefusedMessages as error:
        return {"refused": error.message}
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": f"line {error.lineno}: {error.message}"}
    except Exception as error:  # noqa: BLE001  whatever a program can do wrong
        return {"failed": f"{type(error).__name__}: {error}"}
    if len(text) > MAX_CHARACTERS:
        return {"failed": f"it writes more than {MAX_CHARACTERS:,} characters"}
    return {"text": text}


def _serve() -> None:
    import resource

    limit = MEMORY_MIB << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    replies.write(b"ready\n")
    for line in sys.stdin.buffer:
        replies.write(json.dumps(_answer(*json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    _serve()
