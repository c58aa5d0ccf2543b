"""Figures as text: three digits that count, for large models and for small ones."""


def amount(value: float) -> str:
    """Return a number with three digits that count: 1,234, 12.3, 0.00123."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return seconds with three digits that count, in s, ms or us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{amount(seconds / size)} {unit}"
    return f"{amount(seconds / 1e-6)} us"


def gib(size: float) -> str:
    """Return bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"
