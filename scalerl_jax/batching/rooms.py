"""Places in an order, each with room left: which is the first with enough?"""


class Rooms:
    """A tree of greatest rooms, so that each question takes log(places) steps."""

    def __init__(self) -> None:
        """Begin without a place."""
        self._count, self._size = 0, 1
        # The children of node i are 2i and 2i + 1; leaves begin at the size.
        self._greatest = [-1, -1]

    def append(self, room: int) -> None:
        """Add a place behind the others."""
        if self._count == self._size:
            leaves = self._greatest[self._size :] + [-1] * self._size
            self._size *= 2
            self._greatest = [-1] * self._size + leaves
            for node in range(self._size - 1, 0, -1):
                self._renew(node)
        self._count += 1
        self[self._count - 1] = room

    def __setitem__(self, place: int, room: int) -> None:
        """Set the room that a place has left; -1 closes it."""
        node = place + self._size
        self._greatest[node] = room
        while node := node // 2:
            self._renew(node)

    def first(self, room: int, *, since: int = 0) -> int | None:
        """Return the first place from `since` on with this room, 0 or more; or None."""
        if since >= self._count:
            return None
        node = since + self._size
        while self._greatest[node] < room:
            while node % 2:  # of a right child all is looked at
                node //= 2
            if node == 0:
                return None
            node += 1
        while node < self._size:
            node *= 2
            node += self._greatest[node] < room
        return node - self._size

    def _renew(self, node: int) -> None:
        left, right = self._greatest[2 * node : 2 * node + 2]
        self._greatest[node] = max(left, right)
