"""The host's records of the KV cache: the owners of pages, and cached prefixes.

A page that loses its last owner keeps its content until it is taken again.  What a full
page holds is known by a digest of all tokens up to its end, under a policy version, so
that a sequence that begins with the same tokens gets the page and not a copy: automatic
prefix caching, as in vLLM.

No array here is on a device.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(eq=False, kw_only=True)
class Prefix:
    """Tokens whose keys and values are being cached, at one policy version."""

    tokens: np.ndarray  # int32
    pages: list[int]
    version: int
    digests: Sequence[bytes] = ()  # of its full pages; empty: its pages stay its own
    done: int = 0  # tokens in the cache
    found: int = 0  # of them: those that another sequence has put there
    place: slice | None = None  # its tokens in the last chunk; None: it had none there
    # Experts, if reported: the chunks' outputs, and the prefix's tokens in each.
    experts: list[tuple[Any, slice]] = dataclasses.field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Return whether the whole prefix is in the cache."""
        return self.done == len(self.tokens)


def page_digests(tokens: np.ndarray, page_size: int) -> list[bytes]:
    """Return the digest of each page that `tokens`, int32 [T], fill.

    It is that of all tokens up to the page's end, since keys and values depend on them.
    """
    data, digests, digest = np.ascontiguousarray(tokens, np.int32).data, [], b""
    for end in range(page_size, len(tokens) + 1, page_size):
        page = data[end - page_size : end]
        digest = hashlib.blake2b(digest + bytes(page), digest_size=16).digest()
        digests.append(digest)
    return digests


class PageLedger:
    """The owners of pages by number; a page may have several, and is free without.

    Free pages whose content is known are taken last, those free for longest first.
    """

    def __init__(self, num_pages: int, *, first: int = 0) -> None:
        """Start with every page from `first` up to `num_pages` free."""
        self._owners = np.zeros(num_pages, np.int32)
        self._first = first
        # The lowest number is last, so that it is taken first: runs are reproducible.
        self._free = list(range(num_pages - 1, first - 1, -1))
        # Free and known, in the order of release.  The first go first: a dict would
        # look through the places of all that have gone before.
        self._kept: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._known: dict[Hashable, dict[bytes, int]] = {}  # group -> digest -> page
        self._contents: dict[int, tuple[Hashable, bytes]] = {}  # the same by page
        self.peak = 0

    @property
    def free(self) -> int:
        """Number of pages without an owner."""
        return len(self._free) + len(self._kept)

    @property
    def in_use(self) -> int:
        """Number of pages with an owner."""
        return len(self._owners) - self._first - self.free

    def take(self, count: int) -> list[int]:
        """Take `count` free pages, with one owner each."""
        assert count <= self.free, f"{count} pages needed, {self.free} free"
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(taken) < count:
            self._forget(next(iter(self._kept)))
            taken.append(self._free.pop())
        self._owners[taken] = 1
        self.peak = max(self.peak, self.in_use)
        return taken

    def share(self, pages: list[int]) -> list[int]:
        """Add an owner to each page, owned or found, and return the pages."""
        for page in pages:
            if self._owners[page] == 0:
                del self._kept[page]
            self._owners[page] += 1
        self.peak = max(self.peak, self.in_use)
        return list(pages)

    def release(self, pages: list[int]) -> int:
        """Remove an owner from each page; return the number that are free now."""
        before, kept = self.free, []
        for page in pages:
            assert self._owners[page] > 0, f"page {page} has no owner to lose"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                (kept if page in self._contents else self._free).append(page)
        # A sequence's last page goes first: without the first ones none is found.
        self._kept |= dict.fromkeys(reversed(kept))
        return self.free - before

    def know(self, page: int, group: Hashable, digest: bytes) -> None:
        """Note what an owned page holds from now on, unless another page has it."""
        pages = self._known.setdefault(group, {})
        if digest not in pages and page not in self._contents:
            pages[digest], self._contents[page] = page, (group, digest)

    def find(self, group: Hashable, digests: Sequence[bytes]) -> list[int]:
        """Return the pages of the first digests, up to one that no page holds."""
        pages, found = self._known.get(group, {}), []
        for digest in digests:
            if digest not in pages:
                break
            found.append(pages[digest])
        return found

    def forget(self, group: Hashable) -> None:
        """Forget the contents of a group's pages."""
        for page in list(self._known.get(group, {}).values()):
            self._forget(page)

    def _forget(self, page: int) -> None:
        group, digest = self._contents.pop(page)
        del self._known[group][digest]
        if not self._known[group]:
            del self._known[group]
        if page in self._kept:
            del self._kept[page]
            self._free.append(page)


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
        self._group = object()  # of the pages whose content is known
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
        in_rings = [count < self._ring for count in held]
        return Need(sum(in_rings), len(in_rings) - sum(in_rings))

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
        before = self._whole.free
        shared = self._whole.share(pages)
        self.held += Need(whole=before - self._whole.free)
        self.peak = max(self.peak, self.in_use)
        return shared

    def know(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """Note what the first pages of a sequence hold, none of them in a ring."""
        for page, digest in zip(pages, digests, strict=False):
            self._whole.know(page, self._group, digest)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return pages that hold the beginning of a sequence; `share` before use."""
        return self._whole.find(self._group, digests)

    def forget(self) -> None:
        """Forget what the pages hold: for other params it would be something else."""
        self._whole.forget(self._group)

    def release(self, pages: list[int]) -> None:
        """Remove an owner from each page."""
        in_rings = [page for page in pages if page < self._in_rings]
        others = [page for page in pages if page >= self._in_rings]
        rings, whole = self._rings.release(in_rings), self._whole.release(others)
        self.held = Need(self.held.rings - rings, self.held.whole - whole)
