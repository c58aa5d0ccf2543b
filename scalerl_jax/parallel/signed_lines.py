"""Authenticated lines between processes that share a secret.

A line is PROOF BODY.  The proof is the HMAC-SHA256 of the sender's role, of a challenge
that the receiver made for this connection, and of the body, a JSON object.  The
receiver compares it before it parses the body, so that no text of a stranger reaches
the JSON parser.  A line recorded on another connection is no valid proof.  The secret
is never sent; lines are not encrypted.
"""

import asyncio
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from scalerl_jax.formats.reading import parse_json

MAX_BYTES = 16_384  # of a line
MAX_INTEGER = 2**31 - 1
_PROOF = re.compile(rb"[0-9a-f]{64}")
_CHALLENGE = re.compile(rb"[0-9a-f]{64}")


def new_secret() -> str:
    """Return a new random secret."""
    return secrets.token_hex(32)


def new_challenge() -> str:
    """Return a new random challenge, for one connection."""
    return secrets.token_hex(32)


def sign(
    message: Mapping[str, Any], *, secret: str, speaker: str, challenge: str
) -> bytes:
    """Return the line of a message, with the receiver's challenge in its proof."""
    body = json.dumps(message).encode()
    proof = _proof(body, secret=secret, speaker=speaker, challenge=challenge)
    return proof + b" " + body + b"\n"


def verify(
    line: bytes,
    fields: Mapping[str, type],
    *,
    secret: str,
    speaker: str,
    challenge: str,
) -> dict[str, Any]:
    """Return the message of a line, after checking its proof, fields and types.

    Raises:
        ValueError: the sender does not know the secret, or the message is invalid.
    """
    proof, _, body = line.rstrip(b"\n").partition(b" ")
    if len(line) > MAX_BYTES or not _PROOF.fullmatch(proof):
        raise ValueError("it is no signed line")
    expected = _proof(body, secret=secret, speaker=speaker, challenge=challenge)
    if not hmac.compare_digest(proof, expected):
        raise ValueError("its proof is not that of this start's secret")
    return parse_message(body, fields)


def parse_message(body: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """Parse a body: an object with exactly these fields of these types.

    Raises:
        ValueError: a field is missing, unknown, of another type, or an integer that is
            not from 0 to MAX_INTEGER.
    """
    message = parse_json(body)
    if not isinstance(message, dict) or message.keys() != fields.keys():
        raise ValueError(f"it must be an object with {', '.join(fields)}")
    for name, kind in fields.items():
        value = message[name]
        if type(value) is not kind:
            raise ValueError(f"{name} must be of the type {kind.__name__}")
        if kind is int and not 0 <= value <= MAX_INTEGER:
            raise ValueError(f"{name} must be from 0 to {MAX_INTEGER}")
    return message


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line; `reader` was made with the limit MAX_BYTES.

    Raises:
        ValueError: the line is longer.
        EOFError: the connection ends before the line does.
    """
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError(f"it is longer than {MAX_BYTES} bytes") from error


async def read_challenge(reader: asyncio.StreamReader) -> str:
    """Return the challenge that the receiver sends first.

    Raises:
        ValueError: the line is not a challenge.
        EOFError: the connection ends before the line does.
    """
    line = await read_line(reader)
    if not _CHALLENGE.fullmatch(line.rstrip(b"\n")):
        raise ValueError("it sends no challenge")
    return line.rstrip(b"\n").decode()


def _proof(body: bytes, *, secret: str, speaker: str, challenge: str) -> bytes:
    said = f"{speaker} {challenge} ".encode() + body
    return hmac.digest(secret.encode(), said, "sha256").hex().encode()
