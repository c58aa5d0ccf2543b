"""Answers as JSON, made and sent in pieces, so that a long one holds up no other.

The JSON is ASCII: clients split the lines of a stream at U+0085 and U+2028, too, and a
text in an error may be invalid.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.responses import Response, StreamingResponse

# Bytes written at a time.  Writing pauses above 64 KiB that the client has not taken,
# until 16 KiB are left, so that at most 64 KiB have to be taken in a pause.
PIECE = 16 * 1024
_TOGETHER = 64  # items of a list
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def render(value: Any, *, depth: int = 4) -> str:
    """Return the JSON of a value, encoding a few items at a time.

    The encoder holds the GIL: a 10 MB answer would stop the event loop for 0.2 s, also
    from another thread.  An answer has its log-probabilities at the default depth.
    """
    if depth and isinstance(value, dict):
        items = value.items()
        pairs = [f"{render(k)}:{render(v, depth=depth - 1)}" for k, v in items]
        return f"{{{','.join(pairs)}}}"
    if not isinstance(value, list):
        return _ENCODER.encode(value)
    if depth and value and isinstance(value[0], dict):
        parts = [render(each, depth=depth - 1) for each in value]
    else:
        starts = range(0, len(value), _TOGETHER)
        parts = [_ENCODER.encode(value[at : at + _TOGETHER])[1:-1] for at in starts]
    return f"[{','.join(parts)}]"


def server_sent(value: Any) -> str:
    """Return a server-sent event."""
    return f"data: {render(value)}\n\n"


async def whole_answer(value: Any) -> Response:
    """Return the answer that holds a value."""
    text = await asyncio.to_thread(render, value)
    return StreamingResponse(
        _pieces(text),
        media_type="application/json",
        headers={"Content-Length": str(len(text))},
    )


def streamed_answer(first: str, rest: AsyncIterator[str]) -> Response:
    """Return the answer that holds events."""
    return StreamingResponse(
        _pieces(first, rest),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache"},
    )


async def _pieces(
    first: str, rest: AsyncIterator[str] | None = None
) -> AsyncIterator[bytes]:
    """Yield the pieces of ASCII texts."""
    for piece in _cut(first):
        yield piece
    if rest is not None:
        async for text in rest:
            for piece in _cut(text):
                yield piece


def _cut(text: str) -> Iterator[bytes]:
    return (text[at : at + PIECE].encode() for at in range(0, len(text), PIECE))
