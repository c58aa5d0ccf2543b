"""Reader of conversations, of which the question is one turn."""

import re
from typing import Any, NamedTuple

from scalerl_jax.data.drafts import Malformed, Unusable, from_text

# Columns of pictures, films and sounds, and their placeholders in texts (verl, LLaVA).
PICTURES = ("image", "images", "decoded_image", "video", "videos", "audio", "audios")
_PICTURE = re.compile(r"<(?:image|video|audio)(?:[_ ]?\d+)?>")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's
# The start of a list of turns that was written as text, in JSON or as a Python literal.
_LIST = re.compile(r"\s*\[\s*\{\s*(['\"])(?:role|content|from|value)\1\s*:")


class Turns(NamedTuple):
    """A question of a conversation."""

    text: str
    system: str
    answer: str | None  # of an assistant, after the question


def has_picture(text: str) -> bool:
    """Return whether a text has a placeholder for a picture, a sound or a film."""
    return bool(_PICTURE.search(text))


def read_turns(
    given: Any, *, role: str = "user", answered: bool = False
) -> Turns | None:
    """Read the one turn of a role, and the system's before it if there is one.

    Return None if there are no turns.  If `answered`, an assistant's turn may follow.
    """
    turns = read_conversation(given)
    if turns is None:
        return None
    system = ""
    if turns[0][0] == "system":
        (_, system), *turns = turns
    match turns:
        case [(found, text)] if found == role:
            answer = None
        case [(found, text), ("assistant", answer)] if found == role and answered:
            pass
        case _:
            raise Unusable("the prompt is not one turn of a user")
    if has_picture(text):
        raise Unusable("the question has a picture, sound or film")
    return Turns(text, system, answer)


def read_conversation(given: Any) -> list[tuple[str, str]] | None:
    """Return the role and the text of every turn; None where there are no turns."""
    if isinstance(given, str) and _LIST.match(given):
        given = from_text(given)
        if not isinstance(given, list):
            raise Unusable("the prompt is a list of turns that cannot be read")
    if not isinstance(given, list) or not given:
        return None
    return [_turn(each) for each in given]


def _turn(each: Any) -> tuple[str, str]:
    """Return the role and the text of a turn."""
    if not isinstance(each, dict):
        raise Malformed("a message has no text 'content'")
    role = each.get("role") or each.get("from")
    if each.get("tool_calls") or role in ("tool", "function"):
        raise Unusable("the conversation calls tools")
    content = each.get("content", each.get("value"))
    if isinstance(content, list) and content:
        content = "\n".join(map(_part, content))
    if not isinstance(content, str):
        raise Malformed("a message has no text 'content'")
    return _ROLES.get(str(role), str(role)), content


def _part(part: Any) -> str:
    """Return the text of one part of a turn."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if re.match("image|video|audio|input_", kind):
            raise Unusable("the question has a picture, sound or film")
    raise Malformed("a message has no text 'content'")
