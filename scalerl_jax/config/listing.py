"""Every setting in words: `--help` and docs/settings.md.

`python -m scalerl_jax.config.listing` prints docs/settings.md.
"""

import dataclasses
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from scalerl_jax.config import LOSSES, SETTINGS, Config
from scalerl_jax.config.settings import Setting

_INDENT = " " * 6
_HEAD = """# Settings

Made by `make settings` from `scalerl_jax/config/sections.py`.  Unknown names, wrong
types and impossible combinations are refused before anything is compiled.  Change one
with `--config.SECTION.NAME=VALUE` or in a file under `configs/`.  "ScaleRL" is arXiv
[2510.13786](https://arxiv.org/abs/2510.13786), appendix A.3 or the section named.
Other numbers of this form are arXiv ids, too.
"""


def sections() -> dict[str, str]:
    """Return the first docstring line of every section, by the section's name.

    The name "" is the run itself.  A nested section follows its parent: `model`,
    `model.lora`.
    """
    return dict(_sections("", Config))


def _sections(name: str, cls: Any) -> Iterator[tuple[str, str]]:
    yield name, (cls.__doc__ or "").splitlines()[0]
    for each in dataclasses.fields(cls):
        if dataclasses.is_dataclass(each.type):
            yield from _sections(f"{name}.{each.name}".removeprefix("."), each.type)


def list_settings() -> str:
    """Return the settings as `--help` prints them, a paragraph for each section."""
    found = []
    for name, title in sections().items():
        found.append(title)
        for each in _of_section(name):
            text = "; ".join(filter(None, _words(each)))
            lines = textwrap.wrap(
                text, 88, initial_indent=_INDENT, subsequent_indent=_INDENT
            )
            found += [f"  --config.{each.name}={each.default!r}", *lines]
        found.append("")
    return "\n".join(found[:-1])


def settings_page() -> str:
    """Return docs/settings.md: tables of sections, of their settings, of losses."""
    titles = sections()
    links = (
        [f"[`{name}`](#{name.replace('.', '')})", text]
        for name, text in titles.items()
        if name
    )
    page = f"{_HEAD}\n{_table(['section', 'what'], links)}"
    for name, title in titles.items():
        rows = (
            [f"`{each.name}`", f"`{each.default!r}`", *_words(each)]
            for each in _of_section(name)
        )
        columns = ["setting", "default", "values", "what it is", "source", "condition"]
        page += f"\n## {name or 'Run'}\n\n{title}\n\n{_table(columns, rows)}"
    rows = (
        [
            f"`{name}`",
            f"`{name}_loss`",
            ", ".join(f"`{each}`" for each in loss.settings),
            loss.paper,
        ]
        for name, loss in LOSSES.items()
    )
    columns = ["`objective.loss`", "function", "settings that it reads", "source"]
    return f"{page}\n## Losses\n\n{_table(columns, rows)}"


def _of_section(name: str) -> Iterable[Setting]:
    return (each for each in SETTINGS.values() if each.name.rpartition(".")[0] == name)


def _words(setting: Setting) -> list[str]:
    """Return values, text, source and condition of a setting; "" for a missing one."""
    values = ", ".join(
        filter(None, [setting.limits.unit, *(end for end, _ in setting.limits.ends())])
    )
    if typing.get_origin(setting.kind) is typing.Literal:
        values = f"one of {', '.join(typing.get_args(setting.kind))}"
    needs = f"only with {setting.needs}" if setting.needs else ""
    return [values, setting.text, setting.source, needs]


def _table(columns: list[str], rows: Iterable[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


if __name__ == "__main__":
    sys.stdout.write(settings_page())
