"""The jinja sandbox that chat templates run in, as `transformers` sets it up.

See `transformers.utils.chat_template_utils`.  A template comes from a stranger: it
may read what it is given and write text, and nothing else.
"""

import datetime
import functools
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class RefusedMessages(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


@functools.cache
def chat_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with the names that templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """A template of this sandbox."""
    return chat_environment().from_string(source)


class _Generation(jinja2.ext.Extension):
    """{% generation %}: around what the model says, to train on; here just text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict`, less the type, whose methods could change what a template is given."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace`, less the names with which Python reaches its own workings."""

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


def _refuse(message: str) -> None:
    raise RefusedMessages(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja's own filter, which escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
