"""Checks that template, answer and interruption agree about the policy's thinking.

Nothing is refused if thinking follows every prompt and is never interrupted; a template
with today's date gets a warning.
"""

import logging
from typing import get_args

from scalerl_jax.config import Config, MathAnswer
from scalerl_jax.data.chat import read_chat_template
from scalerl_jax.data.questions import CHAT, THINKING_TAGS, Renderer
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.wiring.prompts import AUTO, answer_after

_log = logging.getLogger(__name__)


def check_thinking(config: Config, render: Renderer) -> None:
    """Refuse answers and interruptions that do not fit the policy's thinking.

    A tag that the prompt does not mention, and a prompt with a date, may be intended:
    they get a warning.

    Raises:
        ValueError: the prompt itself closes the thinking that an answer should
            follow, or interruption is on and the policy does not think.
    """
    data = config.data
    if render.dated:
        _log.warning(
            "the chat template asks for today's date: prompts of another day differ, "
            "when a run is resumed or data.difficulty is read; write a date into it"
        )
    after, end = data.answer_after, render.end_of_thinking
    if any(after == tags.end for tags in THINKING_TAGS) and not end:
        if render.example.rstrip().endswith(after):
            raise ValueError(
                f"data.answer_after = {after!r} is already the end of the prompt "
                f"(data.enable_thinking = {data.enable_thinking}), so that no "
                f"completion holds it; set data.answer_after = {AUTO!r}"
            )
        if after not in render.example:
            _log.warning(
                "data.answer_after = %r is neither in the template nor in the prompt: "
                "completions without it have no answer; with %r, the whole completion "
                "is the answer",
                after,
                AUTO,
            )
    looked_up = after == AUTO or (not after and data.template == CHAT)
    if not config.interruption.enabled or not looked_up:
        return
    ours = config.interruption.end_of_thinking
    if not end:
        raise ValueError(
            f"interruption.enabled = True forces {ours!r}, the end of thinking, but no "
            f"thinking follows a prompt of data.template = {data.template!r} with "
            f"data.enable_thinking = {data.enable_thinking}; set "
            f"interruption.enabled = False"
        )
    if ours != end:
        raise ValueError(
            f"interruption.end_of_thinking = {ours!r}, but the thinking after a prompt "
            f"ends with {end!r}; set it to that, and end interruption.phrase with it"
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
        f"in the prompt which form the answer must have, or change "
        f"reward.math_answer = {config.reward.math_answer!r} to another of "
        f"{', '.join(get_args(MathAnswer))}"
    )


def _has_chat_template(source: str) -> bool:
    try:
        read_chat_template(source)
    except ValueError:  # missing, or not usable
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
