"""The host's records of the KV cache: the owners of pages, and cached prefixes.

No array here is on a device.
"""

import dataclasses
from typing import Any

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

    def __init__(self, num_pages: int) -> None:
        """Start with every page free."""
        self._owners = np.zeros(num_pages, np.int32)
        # The lowest number is last, so that it is taken first: runs are reproducible.
        self._free = list(range(num_pages - 1, -1, -1))
        self.peak = 0

    @property
    def free(self) -> int:
        """Number of pages without an owner."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Number of pages with an owner."""
        return len(self._owners) - len(self._free)

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

    def release(self, pages: list[int]) -> None:
        """Remove an owner from each page."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} has no owner to lose"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)
