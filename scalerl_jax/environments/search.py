"""Full-text search over a directory of text files, by SQLite's FTS5, in memory.

Each process of verifiers reads the files once.  Passages are paragraphs; they are
ranked by BM25 over the words of a query.
"""

import functools
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from scalerl_jax.formats.bounded import read_text

_SUFFIXES = (".txt", ".md")
_MOST_FILES, _MOST_BYTES = 10_000, 2**20  # of a file
_MOST_TOTAL = 2**28  # bytes of all of them
_MOST_WORDS = 32  # of a query
_MOST_PASSAGES, _MOST_CHARACTERS = 3, 1000  # of an answer; of a passage


class Search:
    """The passages of a directory."""

    def __init__(self, directory: str) -> None:
        """Read them.

        Raises:
            ValueError: the directory is missing, empty or too large, or FTS5 is absent.
        """
        passages = list(_read(Path(directory)))
        if not passages:
            raise ValueError(
                f"episode.documents = {directory!r} holds no text in files "
                f"{' or '.join(_SUFFIXES)}"
            )
        self._database = sqlite3.connect(":memory:")
        try:
            self._database.execute("CREATE VIRTUAL TABLE p USING fts5(name, text)")
        except sqlite3.OperationalError as error:
            raise ValueError(f"this Python's sqlite3 has no FTS5: {error}") from error
        self._database.executemany("INSERT INTO p VALUES (?, ?)", passages)

    @classmethod
    def of(cls, directory: str) -> "Search":
        """Return the search of a directory, whose files are read once."""
        return _of(directory)

    def passages(self, query: str) -> str:
        """Return the best passages for the words of a query, with their files' names.

        Raises:
            ValueError: the query has no word.
        """
        words = re.findall(r"\w+", query)[:_MOST_WORDS]
        if not words:
            raise ValueError("the query has no word")
        # Quoted: no word is an operator of the query language.
        wanted = " OR ".join(f'"{word}"' for word in words)
        rows = self._database.execute(
            "SELECT name, text FROM p WHERE p MATCH ? ORDER BY rank, rowid LIMIT ?",
            (wanted, _MOST_PASSAGES),
        ).fetchall()
        if not rows:
            return "nothing found"
        return "\n\n".join(f"{name}: {text[:_MOST_CHARACTERS]}" for name, text in rows)


@functools.cache
def _of(directory: str) -> Search:
    return Search(directory)


def _read(directory: Path) -> Iterator[tuple[str, str]]:
    if not directory.is_dir():
        raise ValueError(f"episode.documents = {str(directory)!r} is no directory")
    root = directory.resolve()
    files = sorted(
        path for suffix in _SUFFIXES for path in directory.rglob(f"*{suffix}")
    )
    if len(files) > _MOST_FILES:
        raise ValueError(
            f"episode.documents = {str(directory)!r} holds {len(files):,} files; "
            f"{_MOST_FILES:,} are the most that are searched"
        )
    total = 0
    for path in files:
        if not (path.is_file() and path.resolve().is_relative_to(root)):
            continue  # a link that leads out of the directory
        text = read_text(path, most=_MOST_BYTES)
        total += len(text)
        if total > _MOST_TOTAL:
            raise ValueError(
                f"episode.documents = {str(directory)!r} holds more than "
                f"{_MOST_TOTAL:,} characters"
            )
        name = path.relative_to(directory).as_posix()
        for passage in re.split(r"\n\s*\n", text):
            if passage := passage.strip():
                yield name, passage
