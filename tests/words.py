"""Refuse words that a stranger cannot parse, in comments, docstrings and pages.

    python tests/words.py           # all files; exit status 1 if a form was found
    python tests/words.py docs configs/8b.py

`words.tsv` has the forms, as regular expressions with a replacement and a reason each.
Code, error messages and what Markdown marks as code are not read.
"""

import ast
import csv
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ = ("*.md", "docs", "configs", "examples", "benchmarks", "launch", "scalerl_jax")
UNCLEAN = ()  # files and folders that are not read
# A docstring begins with what the thing is or does.
OPENINGS = "As Have How Of Say So Such Tell Those What Whose With".split()
OPENING = re.compile(rf"({'|'.join(OPENINGS)}|The same)\b")
CODE = re.compile(r"<!--.*?-->|^(```|~~~).*?^\1|``.+?``|`[^`\n]+(\n[^`\n]+)?`", re.DOTALL | re.M)


@functools.cache
def read_forms() -> list[tuple[re.Pattern[str], str]]:
    """Return each refused form, and what to write instead with the reason."""
    with open(Path(__file__).with_suffix(".tsv")) as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return [
        (re.compile(rf"\b{form}".replace(" ", r"\s+"), re.I), f"{better} ({why})")
        for form, better, why in rows
    ]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each run of comments in one column."""
    first, column, lines = 0, 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, at = token.start
            if not lines or (row, at) != (first + len(lines), column):
                if lines:
                    yield first, "\n".join(lines)
                first, column, lines = row, at, []
            lines.append(token.string.lstrip("#!"))
    if lines:
        yield first, "\n".join(lines)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text


def findings(text: str, *, markdown: bool = False) -> list[tuple[int, str, str]]:
    """Return line, form and replacement of each refused form in a file's text."""
    found, read = [], [(1, text)] if markdown else [*comments(text), *docstrings(text)]
    for first, each in () if markdown else docstrings(text):
        if opening := OPENING.match(each):
            found.append((first, opening[0], "begin with what it is or does"))
    for first, each in read:
        plain = CODE.sub(lambda code: re.sub(r"[^\n]", "_", code[0]), each)
        for form, better in read_forms():
            for match in form.finditer(plain):
                line = first + plain.count("\n", 0, match.start())
                found.append((line, " ".join(match[0].split()), better))
    return sorted(found)


def main(names: list[str]) -> int:
    """Print what is found below `names`, and counts by folder; return the status."""
    starts = [ROOT / name for name in names] or [p for n in READ for p in ROOT.glob(n)]
    below = [file for start in starts for file in (start, *sorted(start.rglob("*.*")))]
    skipped = () if names else UNCLEAN
    counts = Counter()
    for path in below:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in (".py", ".md") or f"{name}/".startswith(skipped):
            continue
        text = path.read_text()
        for line, form, better in findings(text, markdown=path.suffix == ".md"):
            sys.stdout.write(f"{name}:{line}: {form!r}: {better}\n")
            counts[Path(name).parent.as_posix()] += 1
    for folder, count in counts.items():
        sys.stdout.write(f"{count} in {folder}\n")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
