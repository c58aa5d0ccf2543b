"""Chat templates in a separate process, in a sandbox, with limited memory and time.

A template is untrusted: it may read its inputs and write text, and nothing else.
jinja's sandbox, set up as `transformers.utils.chat_template_utils` does, keeps it from
files and from Python, but not from an endless loop or an endless text.  One process
serves every template; if a template takes too long, the process is killed, and the next
template gets a new one.
"""

import atexit
import datetime
import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scalerl_jax.process.child_environment import child_environment, own_python

TIMEOUT_S = 10.0  # of one text
MEMORY_MIB = 1024
MAX_CHARACTERS = 2**22  # of one text, and of a template
_MOST_REASON = 500  # characters of a template's error, which it can choose
_START_TIMEOUT_S = 120.0  # of the process, on a machine that is busy


class TemplateProcess:
    """Client of the process, for several threads."""

    def __init__(self) -> None:
        """Start no process before the first text is rendered."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def render(self, source: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return {"text": ...}, or a reason for none.

        The reason is {"refused" | "syntax" | "failed" | "unstarted": ...}; the last is
        no fault of the template.
        """
        if len(source) > MAX_CHARACTERS:
            return {"failed": f"it has more than {MAX_CHARACTERS:,} characters"}
        with self._lock:
            try:
                process = self._started()
            except OSError as error:  # TimeoutError is one
                self.close()
                return {"unstarted": str(error)}
            except BaseException:  # Ctrl-C: the next call would read its first line
                self.close()
                raise
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
            except BaseException:  # Ctrl-C: the next call would read an old reply
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
            self._process = subprocess.Popen(
                [*own_python(), "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C is for the command
            )
            _line_of(self._process, _START_TIMEOUT_S)
        return self._process


def _line_of(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Return the next line that the process writes."""
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


# In the process.


def _serve() -> None:
    import resource

    limit = MEMORY_MIB << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    replies.write(b"ready\n")
    for line in sys.stdin.buffer:
        replies.write(json.dumps(_answer(*json.loads(line))).encode() + b"\n")


def _answer(source: str, values: dict[str, Any]) -> dict[str, Any]:
    try:
        text = _compiled(source).render(values)
    except _RefusedMessages as error:
        return {"refused": str(error.message)[:_MOST_REASON]}
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": f"line {error.lineno}: {error.message}"[:_MOST_REASON]}
    except Exception as error:  # noqa: BLE001  whatever a program can do wrong
        return {"failed": f"{type(error).__name__}: {error}"[:_MOST_REASON]}
    if len(text) > MAX_CHARACTERS:
        return {"failed": f"it writes more than {MAX_CHARACTERS:,} characters"}
    return {"text": text}


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _sandbox().from_string(source)


@functools.cache
def _sandbox() -> ImmutableSandboxedEnvironment:
    """Return the sandbox, with the names that templates use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda pattern: datetime.datetime.now().strftime(pattern),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _RefusedMessages(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


def _refuse(message: str) -> None:
    raise _RefusedMessages(message)


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, around text of the model to train on; here a no-op."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the type, whose methods could change a template's inputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` without the names that give access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that an attribute may be called "self"
        values = dict(*rest, **kwargs)
        for name in values:
            _check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


if __name__ == "__main__":
    _serve()
