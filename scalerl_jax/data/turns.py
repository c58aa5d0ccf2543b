"""Turns of a conversation, of which a question is one."""

import re
from typing import Any, NamedTuple

from scalerl_jax.data.drafts import Malformed, Unusable, from_text

# Columns of what is seen and heard, and the sign for it in texts: verl's, LLaVA's.
PICTURES = ("image", "images", "decoded_image", "video", "videos", "audio", "audios")
_PICTURE = re.compile(r"<(?:image|video|audio)(?:[_ ]?\d+)?>")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's
# How a list of turns begins that was written as a text, in JSON or as Python shows it.
_LIST = re.compile(r"\s*\[\s*\{\s*(['\"])(?:role|content|from|value)\1\s*:")


class Turns(NamedTuple):
    """A question of a conversation."""

    text: str
    system: str
    answer: str | None  # of an assistant, behind the question


def has_picture(text: str) -> bool:
    """Return whether a text has a place for a picture, a sound or a film."""
    return bool(_PICTURE.search(text))


def read_turns(
    given: Any, *, role: str = "user", answered: bool = False
) -> Turns | None:
    """Read the one turn of a role, and the system's before it if there is one.

    Return None where there are no turns.  An assistant's may follow if `answered`.
    """
    if isinstance(given, str) and _LIST.match(given):
        given = from_text(given)
        if not isinstance(given, list):
            raise Unusable("the prompt is a list of turns that cannot be read")
    if not isinstance(given, list) or not given:
        return None
    turns = [_turn(each) for each in given]
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


def _turn(each: Any) -> tuple[str, str]:
    """The role and the text of a turn."""
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
    """The text of one of the parts of a turn."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if re.match("image|video|audio|input_", kind):
            raise Unusable("the question has a picture, sound or film")
    raise Malformed("a message has no text 'content'")
