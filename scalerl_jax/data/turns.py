"""Reader of conversations, of which the question is one turn."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from scalerl_jax.data.drafts import Malformed, Unusable, from_text, is_filled
from scalerl_jax.data.files import Row

# Reasons for rows that are left out, which are counted by their texts.
HAS_PICTURE = "the question has a picture, sound or film"
_NO_CONTENT = "a message has no text 'content'"
# Columns of pictures, films and sounds, and their placeholders in texts (verl, LLaVA).
PICTURES = ("image", "images", "decoded_image", "video", "videos", "audio", "audios")
_PICTURE = re.compile(r"<(?:image|video|audio)(?:[_ ]?\d+)?>")
# The roles that are read, as templates call them; "human" and "gpt" are ShareGPT's.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_LONGEST_ROLE = 40  # characters, in a reason
# The start of a list of turns that was written as text, in JSON or as a Python literal.
_LIST = re.compile(r"\s*\[\s*\{\s*(['\"])(?:role|content|from|value)\1\s*:")


class Turn(NamedTuple):
    """A turn of a conversation."""

    role: str  # "system", "user" or "assistant"
    text: str
    given: Mapping[str, Any] = MappingProxyType({})  # the message, as in the row


class Turns(NamedTuple):
    """A question of a conversation."""

    text: str
    system: str
    answer: str | None  # of an assistant, after the question


def has_picture(text: str) -> bool:
    """Return whether a text has a placeholder for a picture, a sound or a film."""
    return bool(_PICTURE.search(text))


def check_no_pictures(row: Row) -> None:
    """Raise Unusable for a row that has a column of pictures, sounds or films."""
    if any(is_filled(row.get(name)) for name in PICTURES):
        raise Unusable(HAS_PICTURE)


def listed_tools(row: Row) -> list[Any]:
    """Return the tools of a row, as chat templates list them; [] if it has none.

    The column may be a text of JSON.
    """
    if not is_filled(row.get("tools")):
        return []
    listed = from_text(row["tools"])
    if not isinstance(listed, list) or not all(
        isinstance(each, dict) for each in listed
    ):
        raise Malformed("field 'tools' is no list of objects")
    return listed


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
    if turns[0].role == "system":
        (_, system, _), *turns = turns
    match turns:
        case [Turn(found, text)] if found == role:
            answer = None
        case [Turn(found, text), Turn("assistant", answer)] if (
            found == role and answered
        ):
            pass
        case _:
            raise Unusable("the prompt is not one turn of a user")
    if has_picture(text):
        raise Unusable(HAS_PICTURE)
    return Turns(text, system, answer)


def read_conversation(given: Any) -> list[Turn] | None:
    """Return every turn; None where there are no turns."""
    if isinstance(given, str) and _LIST.match(given):
        given = from_text(given)
        if not isinstance(given, list):
            raise Unusable("the prompt is a list of turns that cannot be read")
    if not isinstance(given, list) or not given:
        return None
    return [_turn(each) for each in given]


def _turn(each: Any) -> Turn:
    """Read a turn; raise Unusable for a role that templates leave out in silence."""
    if not isinstance(each, dict):
        raise Malformed(_NO_CONTENT)
    role = each.get("role") or each.get("from")
    calls = each.get("tool_calls") or each.get("function_call")
    if calls or role in ("tool", "function"):
        raise Unusable("the conversation calls tools")
    if role and str(role) not in _ROLES:
        shown = str(role)[:_LONGEST_ROLE]
        raise Unusable(f"a turn is of the role {shown!r}, which is not read")
    content = each.get("content", each.get("value"))
    if isinstance(content, list) and content:
        content = "\n".join(map(_part, content))
    if not isinstance(content, str):
        raise Malformed(_NO_CONTENT)
    if not role:
        raise Unusable("a turn has no role")
    return Turn(_ROLES[str(role)], content, each)


def _part(part: Any) -> str:
    """Return the text of one part of a turn."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if re.match("image|video|audio|input_", kind):
            raise Unusable(HAS_PICTURE)
    raise Malformed(_NO_CONTENT)
