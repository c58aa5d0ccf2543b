"""Who owns which page of the KV cache: counts on the host, no array of the device."""

import numpy as np


class PageRun(RuntimeError):
    """More pages were asked for than are free."""


class PageLedger:
    """Pages by number; one may have several owners, and is free when it has none."""

    def __init__(self, num_pages: int) -> None:
        """A ledger in which every page is free."""
        self._owners = np.zeros(num_pages, np.int32)
        # The lowest number last, so that it is taken first: equal histories are equal.
        self._free = list(range(num_pages - 1, -1, -1))
        self.peak = 0

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages with an owner."""
        return len(self._owners) - len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages with one owner each.

        Raises:
            PageRun: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise PageRun(f"{count} pages wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        self._owners[taken] = 1
        self.peak = max(self.peak, self.in_use)
        return taken

    def share(self, pages: list[int]) -> list[int]:
        """The same pages with one more owner."""
        self._owners[pages] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """One owner fewer for each page."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} has no owner to lose"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)
