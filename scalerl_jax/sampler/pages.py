"""The host's records of the KV cache: the owners of pages, and cached prefixes.

No array here is on a device.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(eq=False, kw_only=True)
class Prefix:
    """Tokens whose keys and values are being cached, at one policy version."""

    tokens: np.ndarray  # int32
    pages: list[int]
    version: int
    done: int = 0  # tokens in the cache
    place: slice | None = None  # its tokens in the last chunk; None: it had none there
    # Experts, if reported: the chunks' outputs, and the prefix's tokens in each.
    experts: list[tuple[Any, slice]] = dataclasses.field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Return whether the whole prefix is in the cache."""
        return self.done == len(self.tokens)


class PageLedger:
    """The owners of pages by number; a page may have several, and is free without."""

    def __init__(self, num_pages: int, *, first: int = 0) -> None:
        """Start with every page from `first` up to `num_pages` free."""
        self._owners = np.zeros(num_pages, np.int32)
        self._first = first
        # The lowest number is last, so that it is taken first: runs are reproducible.
        self._free = list(range(num_pages - 1, first - 1, -1))
        self.peak = 0

    @property
    def free(self) -> int:
        """Number of pages without an owner."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Number of pages with an owner."""
        return len(self._owners) - self._first - len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free pages, with one owner each."""
        assert count <= len(self._free), f"{count} pages needed, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        self._owners[taken] = 1
        self.peak = max(self.peak, self.in_use)
        return taken

    def share(self, pages: list[int]) -> list[int]:
        """Add an owner to each page, and return the pages."""
        self._owners[pages] += 1
        return list(pages)

    def release(self, pages: list[int]) -> int:
        """Remove an owner from each page; return the number that are free now."""
        before = self.free
        for page in pages:
            assert self._owners[page] > 0, f"page {page} has no owner to lose"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)
        return self.free - before


class Need(NamedTuple):
    """Numbers of pages: in rings, and in layers that keep whole sequences alone."""

    rings: int = 0
    whole: int = 0

    def __add__(self, other: tuple) -> "Need":
        """Return the sum of two."""
        return Need(self.rings + other[0], self.whole + other[1])

    def within(self, other: "Need") -> bool:
        """Return whether another has at least as many of both kinds."""
        return self.rings <= other.rings and self.whole <= other.whole


class SequencePages:
    """The pages of a scheduler's sequences, from ledgers that it shares with others.

    A sequence's first `ring` pages are those of its ring.  They are in all layers, the
    others in layers that see all tokens.  Without rings there is one kind of pages.
    """

    def __init__(self, rings: PageLedger, whole: PageLedger, *, ring: int) -> None:
        """Start without a page; the ledger `whole` begins where `rings` ends."""
        self._ring, self._in_rings = ring, rings.free + rings.in_use
        self._rings, self._whole = rings, whole
        self.held = Need()  # pages of these sequences
        self.peak = 0

    @property
    def in_use(self) -> int:
        """Number of pages of these sequences."""
        return sum(self.held)

    def need(self, start: int, count: int) -> Need:
        """Return what `count` pages of a sequence from its page `start` on need."""
        rings = max(0, min(self._ring, start + count) - start)
        return Need(rings, count - rings)

    def reserve(self, held: Iterable[int]) -> Need:
        """Return one page more for each sequence, of the pages that each holds."""
        each = [self.need(count, 1) for count in held]
        return Need(sum(one.rings for one in each), sum(one.whole for one in each))

    def fit(self, need: Need) -> bool:
        """Return whether the pages of a need are free."""
        return need.rings <= self._rings.free and need.whole <= self._whole.free

    def take(self, start: int, count: int) -> list[int]:
        """Take the `count` pages of a sequence from its page `start` on."""
        need = self.need(start, count)
        taken = self._rings.take(need.rings) + self._whole.take(need.whole)
        self.held += need
        self.peak = max(self.peak, self.in_use)
        return taken

    def share(self, pages: list[int]) -> list[int]:
        """Add an owner to each page, none of a ring, and return the pages."""
        return self._whole.share(pages)

    def release(self, pages: list[int]) -> None:
        """Remove an owner from each page."""
        in_rings = [page for page in pages if page < self._in_rings]
        others = [page for page in pages if page >= self._in_rings]
        rings, whole = self._rings.release(in_rings), self._whole.release(others)
        self.held = Need(self.held.rings - rings, self.held.whole - whole)
