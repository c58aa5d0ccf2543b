"""Writing of prompts, and the place of the answer in a completion of one."""

import logging

from scalerl_jax.config import Config
from scalerl_jax.data.chat import Renderer, make_renderer
from scalerl_jax.data.thinking import THINKING_TAGS

_log = logging.getLogger(__name__)

_AUTO = "auto"


def make_render(config: Config) -> Renderer:
    """Return what writes the prompts."""
    return make_renderer(config.data, config.data.tokenizer or config.model.checkpoint)


def answer_after(config: Config) -> str:
    """Return what stands before the answer; "" where all of a completion is it.

    It is data.answer_after; "auto" is the tag that ends the thinking after a prompt, if
    the prompt opens one or is written by the chat template of a family that thinks.
    """
    after = config.data.answer_after
    return make_render(config).end_of_thinking if after == _AUTO else after


def check_thinking(config: Config) -> None:
    """Refuse answers and interruptions that do not fit how the policy thinks.

    A tag that nothing asks for and a prompt with a date may be meant so: a warning.

    Raises:
        ValueError: the prompt itself closes the thinking that an answer should
            follow, or an interruption would end one that is not there.
    """
    data, render = config.data, make_render(config)
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
                f"completion holds it; set data.answer_after = {_AUTO!r}"
            )
        if after not in render.example:
            _log.warning(
                "data.answer_after = %r, of which neither the template nor the prompt "
                "says anything: completions without it have no answer; with %r, all "
                "of a completion is the answer",
                after,
                _AUTO,
            )
    looked_up = after == _AUTO or (not after and data.template == "chat")
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
