"""Whether template, answer and interruption agree on the policy's thinking.

They do where a thinking follows every prompt and none is interrupted, unless the prompt
has a date.
"""

import logging

from scalerl_jax.config import Config
from scalerl_jax.data.chat import read_chat_template
from scalerl_jax.data.questions import CHAT, THINKING_TAGS, Renderer
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.wiring.prompts import AUTO, answer_after

_log = logging.getLogger(__name__)


def check_thinking(config: Config, render: Renderer) -> None:
    """Refuse answers and interruptions that do not fit how the policy thinks.

    A tag that nothing asks for and a prompt with a date may be meant so: a warning.

    Raises:
        ValueError: the prompt itself closes the thinking that an answer should
            follow, or an interruption would end one that is not there.
    """
    data = config.data
    if render.dated:
        _log.warning(
            "the chat template asks for today's date: prompts of another day differ, "
            "when a run goes on or data.difficulty is read; write a date into it"
        )
    after, end = data.answer_after, render.end_of_thinking
    if any(after == tags.end for tags in THINKING_TAGS) and not end:
        if render.example.rstrip().endswith(after):
            raise ValueError(
                f"data.answer_after = {after!r}, and the prompt ends with it already "
                f"(data.enable_thinking = {data.enable_thinking}), so that no "
                f"completion holds it; set data.answer_after = {AUTO!r}"
            )
        if after not in render.example:
            _log.warning(
                "data.answer_after = %r, of which neither the template nor the prompt "
                "says anything: completions without it have no answer; with %r, all "
                "of a completion is the answer",
                after,
                AUTO,
            )
    looked_up = after == AUTO or (not after and data.template == CHAT)
    if not config.interruption.enabled or not looked_up:
        return
    ours = config.interruption.end_of_thinking
    if not end:
        raise ValueError(
            f"interruption.enabled = True forces the end of a thinking, {ours!r}, and "
            f"none follows a prompt of data.template = {data.template!r} with "
            f"data.enable_thinking = {data.enable_thinking}; set "
            f"interruption.enabled = False"
        )
    if ours != end:
        raise ValueError(
            f"interruption.end_of_thinking = {ours!r}, and the thinking after a prompt "
            f"ends with {end!r}; end it and interruption.phrase with that"
        )


def why_no_answers(config: Config) -> str:
    """Return a likely cause if no completion holds an answer, and its remedy."""
    data = config.data
    source = data.tokenizer or config.model.checkpoint
    if data.template != CHAT and _has_chat_template(source):
        return (
            f"{source} has a chat template, which data.template = {data.template!r} "
            f"does not use; if the model was trained on chats, set data.template = "
            f"{CHAT!r} and data.answer_after = {AUTO!r}"
        )
    if after := answer_after(config):
        return (
            f"an answer is what follows {after!r} (data.answer_after = "
            f"{data.answer_after!r}); set data.answer_after = '' for a model that does "
            f"not think, or raise sampler.max_completion_tokens = "
            f"{config.sampler.max_completion_tokens} if completions are cut off"
        )
    return (
        f"completions are read whole (data.answer_after = {data.answer_after!r}); say "
        f"in the prompt in which form the answer is wanted, or change "
        f"reward.math_answer = {config.reward.math_answer!r}"
    )


def _has_chat_template(source: str) -> bool:
    try:
        read_chat_template(source)
    except ValueError:  # none, or none that could be used
        return False
    return True


def check_phrase(config: Config, tokenizer: Tokenizer) -> None:
    """Refuse an interruption whose tokens do not end the thinking.

    Raises:
        ValueError: the tokenizer lacks tokens for the phrase's end.
    """
    interruption = config.interruption
    if not interruption.enabled:
        return
    written = tokenizer.decode(tokenizer.encode(interruption.phrase))
    if not written.endswith(interruption.end_of_thinking):
        raise ValueError(
            f"interruption.phrase = {interruption.phrase!r} becomes {written!r} in the "
            f"tokens of data.tokenizer, which does not end with "
            f"interruption.end_of_thinking = {interruption.end_of_thinking!r}: end "
            f"both with a text that the tokenizer has tokens for"
        )
