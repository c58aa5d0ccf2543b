"""How extents are cut evenly."""


def largest_divisor(length: int, most: int) -> int:
    """The largest divisor of `length` that is at most `most`."""
    return max(n for n in range(1, min(length, most) + 1) if length % n == 0)
