"""Numbers as text with three significant digits, for large and small models."""


def amount(value: float) -> str:
    """Return a number with three significant digits or more: 1,234, 12.3, 0.00123."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return seconds with three significant digits, in s, ms or us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{amount(seconds / size)} {unit}"
    return f"{amount(seconds / 1e-6)} us"


def gib(size: float) -> str:
    """Return a size in bytes as text in GiB."""
    return f"{size / 2**30:.2f} GiB"
