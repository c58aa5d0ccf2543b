"""Markdown's blocks of code, and which of a completion's blocks is the program.

Blocks are CommonMark's fenced ones (https://spec.commonmark.org/0.31.2, section 4.5),
found by line and pattern: nothing that a policy wrote is compiled here.  Three things
are taken that CommonMark takes otherwise: a fence may be indented by any amount, a
closing fence may be at the end of the last line of code, and a block that is never
closed does not count, for its completion was cut off.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

# The fence's own line: quotes and list markers before it, the fence, the info string.
# An info string behind backticks has no backtick, or the line is code within a text.
_OPENING = re.compile(
    r"(?P<quotes>(?> {0,3}> ?)*+)"
    r"(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*+)"
    r"(?P<fence>`{3,}(?=[^`]*$)|~{3,})[ \t]*(?P<info>.*)"
)
_LANGUAGE = re.compile(r"[{.\s]*([\w+#-]*)")
_PYTHON = re.compile(r"(?:i?python|pypy|py)[\d.]*")
_READS = re.compile(r"\b(?:input|stdin|fileinput)\b|\bopen\(\s*0\b|\bread\(\s*0\b")


class Block(NamedTuple):
    """A closed block."""

    language: str  # as it is tagged, in small letters
    content: str


def find_blocks(text: str) -> list[Block]:
    """Return the closed fenced blocks of a text, in order."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    blocks, number = [], 0
    while number < len(lines):
        number += 1
        if opening := _OPENING.fullmatch(lines[number - 1]):
            content, number = _read_block(lines, number, opening)
            language = _LANGUAGE.match(opening["info"].lower())
            if content is not None and language:
                blocks.append(Block(language[1], content))
    return blocks


def _read_block(
    lines: Sequence[str], start: int, opening: re.Match[str]
) -> tuple[str | None, int]:
    """Return the content of a block, None if it is not closed, and the line after it.

    A fence at the end of a line of code closes a block that nothing else closes before
    the text ends or another block is opened.
    """
    fence, indent = opening["fence"], opening["indent"]
    own = fence[0] * len(fence)
    closing = re.compile(rf"[ \t]*{own}{re.escape(fence[0])}*[ \t]*")
    quote = re.compile(rf"(?> {{0,3}}> ?){{{opening['quotes'].count('>')}}}")
    width = len(indent.expandtabs(4))
    content: list[str] = []
    glued = 0  # lines of content up to a fence at the end of one
    for number in range(start, len(lines)):
        inside = quote.match(lines[number])
        if not inside:
            return None, number
        line = lines[number][inside.end() :]
        spaces = len(line) - len(line.lstrip())
        if closing.fullmatch(line) and spaces <= max(3, width + 3):
            return "".join(content), number + 1
        opened = _OPENING.fullmatch(line)
        if glued and opened and opened["info"]:
            return _unglued(content[:glued], own), number
        content.append(_without_indent(line, indent) + "\n")
        if not glued and line.rstrip().endswith(own):
            glued = len(content)
    return (_unglued(content[:glued], own) if glued else None), len(lines)


def _unglued(content: list[str], fence: str) -> str:
    return "".join(content).rstrip().removesuffix(fence) + "\n"


def _without_indent(line: str, indent: str) -> str:
    """Return a line without the indentation of its block's fence, or what it has."""
    if indent.isspace() and line.startswith(indent):
        return line[len(indent) :]
    width = len(indent.expandtabs(4))
    return line[min(width, len(line) - len(line.lstrip(" "))) :]


def find_program(
    text: str, names: Sequence[str] = (), *, reads: bool = False
) -> str | None:
    """Return the content of the block that is the program; None without one.

    It is the last of the blocks that define most of `names`; of those, of the ones
    that read the standard input, if the program `reads` one; of those, of the ones that
    are tagged as Python's rather than not at all.  So output and a demonstration after
    the program do not count.
    """
    defining = [
        re.compile(
            rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b"
            rf"|^{name}[ \t]*(?::[^=\n]*)?=(?!=)",
            re.MULTILINE,
        )
        for name in map(re.escape, names)
    ]

    def merits(numbered: tuple[int, Block]) -> tuple[int, bool, bool, int]:
        number, (language, content) = numbered
        defined = sum(bool(pattern.search(content)) for pattern in defining)
        read = reads and bool(_READS.search(content))
        return defined, read, bool(language), number

    blocks = [
        block
        for block in find_blocks(text)
        if not block.language or _PYTHON.fullmatch(block.language)
    ]
    return max(enumerate(blocks), key=merits)[1].content if blocks else None
