"""Refuse words that a stranger cannot parse, in comments, docstrings and pages.

    python tests/words.py                    # all but UNCLEAN; status 1 after a find
    python tests/words.py scalerl_jax/data   # this folder, also if it is in UNCLEAN

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
UNCLEAN: tuple[str, ...] = ()  # files and packages that are not read
# A docstring begins with what the thing is or does.
OPENING = re.compile(
    r"(As|Have|How|Of|Say|So|Such|Tell|The same|Those|What|Whose|With)\b"
)
CODE = re.compile(r"(?sm)<!--.*?-->|^(```|~~~).*?^\1|``.+?``|`[^`\n]+(\n[^`\n]+)?`")


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
    """Yield the first line and the text of each run of comments."""
    first, lines = 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != first + len(lines):
                yield first, "\n".join(lines)
                lines = []
            first = token.start[0] - len(lines)
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
    begun = [] if markdown else list(docstrings(text))
    found = [
        (line, opening[0], "begin with what it is or does")
        for line, said in begun
        if (opening := OPENING.match(said))
    ]
    for first, said in [(1, text)] if markdown else [*comments(text), *begun]:
        plain = CODE.sub(lambda code: re.sub(r"[^\n]", "_", code[0]), said)
        for form, better in read_forms():
            for match in form.finditer(plain):
                line = first + plain.count("\n", 0, match.start())
                found.append((line, " ".join(match[0].split()), better))
    return sorted(found)


def main(names: list[str]) -> int:
    """Print what is found below `names`, and counts by folder; return the status."""
    starts = [ROOT / name for name in names] or [p for n in READ for p in ROOT.glob(n)]
    counts: Counter[str] = Counter()
    for path in (file for start in starts for file in (start, *start.rglob("*.*"))):
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        skipped = not names and name.as_posix().startswith(UNCLEAN)
        if path.suffix not in (".py", ".md") or skipped:
            continue
        markdown = path.suffix == ".md"
        for line, form, better in findings(path.read_text(), markdown=markdown):
            sys.stdout.write(f"{name}:{line}: {form!r}: {better}\n")
            counts[str(name.parent)] += 1
    sys.stdout.writelines(f"{n} in {folder}\n" for folder, n in sorted(counts.items()))
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
