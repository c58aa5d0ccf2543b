"""The text of a prompt: a plain template, or the chat template that a model brings.

A chat template is a jinja program in a file that somebody else wrote.  The question
and the settings are values to it, and never evaluated.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl_jax.config import DataConfig
from scalerl_jax.data.questions import Question
from scalerl_jax.data.thinking import end_of_thinking
from scalerl_jax.data.tokenizer import read_json, read_special_tokens
from scalerl_jax.utils.hub import local_directory

if TYPE_CHECKING:
    from scalerl_jax.data.chat_process import TemplateProcess

CHAT = "chat"  # the value of data.template that asks for the model's own
_PLACE = "{question}"
_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


@functools.cache
def _template_process() -> "TemplateProcess":
    """Return the process that all templates run in; few runs need one."""
    from scalerl_jax.data.chat_process import TemplateProcess

    return TemplateProcess()


class NoTemplate(ValueError):
    """A model that brings no chat template."""


class Refused(ValueError):
    """A template that will not write these messages, by its own words."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A jinja template from messages to text, and the special tokens it may write."""

    source: str
    special_tokens: Mapping[str, str]  # "bos_token" and the like
    origin: str  # where it is from, for errors

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        options: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Return the text of messages {"role", "content"} and of how a reply begins.

        Equals `apply_chat_template(messages, add_generation_prompt=True, tokenize=
        False, tools=tools, **options)` of `transformers`.  What nobody defines is
        empty.  A template may write today's date, as Llama 3.2's does.

        Raises:
            Refused: the template refuses the messages.
            ValueError: the template is malformed, or fails.
        """
        found = _template_process().render(
            self.source,
            {
                **self.special_tokens,
                **options,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": True,
            },
        )
        if "refused" in found:
            roles = " and ".join(
                dict.fromkeys(repr(message["role"]) for message in messages)
            )
            raise Refused(
                f"{self.origin} refuses messages of {roles}: {found['refused']}"
            )
        if "syntax" in found:
            raise ValueError(f"{self.origin} is no jinja template: {found['syntax']}")
        if "failed" in found:
            raise ValueError(f"{self.origin} fails: {found['failed']}")
        return found["text"]

    def ask(self, question: Question, data: DataConfig) -> str:
        """Return the text of a question's prompt under these settings.

        Raises:
            ValueError: the template refuses the messages, or fails.
        """
        user = data.user_template.replace(_PLACE, question.text)
        messages = [{"role": "user", "content": user}]
        if system := data.system_prompt or question.system:
            messages.insert(0, {"role": "system", "content": system})
        options = {"enable_thinking": data.enable_thinking}
        try:
            return self.render(messages, options=options)
        except Refused as error:
            raise ValueError(
                f"{error}; change data.system_prompt or data.user_template, or the "
                f"template"
            ) from error


@dataclasses.dataclass(frozen=True)
class Renderer:
    """The text of a question's prompt, and what ends the thinking that follows it."""

    write: Callable[[Question], str]
    example: str  # a prompt
    end_of_thinking: str  # empty: the policy answers at once
    dated: bool = False  # whether the template asks for today's date

    def __call__(self, question: Question) -> str:
        """Return the prompt's text.

        Raises:
            ValueError: the template refuses the question, or has no place for it.
        """
        return self.write(question)


def make_renderer(data: DataConfig, source: str | Path) -> Renderer:
    """Return what writes prompts under these settings.

    With data.template = "chat", the user's message is data.user_template with the
    question in place of "{question}".  Before it comes a system message, if there is
    one: data.system_prompt, else the question's own.  `source` is a directory or file
    as `read_chat_template` takes it, and is read for this alone.

    Raises:
        ValueError: a template is missing or malformed, refuses a question with these
            settings, or shows none.
    """
    if data.template == CHAT:
        _check_place("data.user_template", data.user_template)
        chat = read_chat_template(source)
        dated = "strftime_now" in chat.source
        return _tried(lambda question: chat.ask(question, data), chat.source, dated)
    template = data.template
    _check_place("data.template", template, f", or be {CHAT!r}")

    def write(question: Question) -> str:
        if question.system:
            raise ValueError(
                f"a question of {question.task!r} brings a system message, for which "
                f"data.template = {template!r} has no place; set it to {CHAT!r}"
            )
        # Not str.format: a template may hold braces of its own.
        return template.replace(_PLACE, question.text)

    return _tried(write, template)


def _tried(
    write: Callable[[Question], str], template: str, dated: bool = False
) -> Renderer:
    """The renderer, after a question: what is wrong with a template shows here."""
    example = write(Question(task="", text="1 + 1 = ?", reference={}))
    return Renderer(write, example, end_of_thinking(example, template), dated)


def _check_place(setting: str, template: str, otherwise: str = "") -> None:
    if _PLACE not in template:
        raise ValueError(
            f"{setting} = {template!r} must hold {_PLACE!r}, where the question "
            f"goes{otherwise}"
        )


def read_chat_template(path: str | Path) -> ChatTemplate:
    """The chat template of a Hugging Face directory, a `tokenizer.json`, or a GGUF.

    `chat_template.jinja`, else "chat_template" of `tokenizer_config.json`: a template,
    or a list of named ones, of which "default" is taken.

    Raises:
        NoTemplate: there is none.
        ValueError: a file is malformed.
    """
    directory = local_directory(path)
    file, config_file = directory / _FILE, directory / _CONFIG
    origin = f"the chat template {file}"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{origin} is not UTF-8") from error
    else:
        source = read_json(directory, _CONFIG).get("chat_template")
        origin = f"the chat template in {config_file}"
        if isinstance(source, list):
            source = _default_of(source, config_file)
    if source is None:
        raise NoTemplate(
            f"data.template = {CHAT!r}, and {directory} has no chat template: no file "
            f"{_FILE}, and no 'chat_template' in {_CONFIG}; most base models have "
            f"none: set data.template to a text that holds {_PLACE!r}, or put a "
            f"template there"
        )
    if not isinstance(source, str):
        raise ValueError(
            f"'chat_template' in {config_file} must be a text or a list of named ones"
        )
    return ChatTemplate(source, read_special_tokens(directory), origin)


def _default_of(named: list[Any], file: object) -> Any:
    try:
        templates = {each["name"]: each["template"] for each in named}
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"'chat_template' in {file} is a list, and must then hold objects with "
            f"'name' and 'template'"
        ) from error
    if "default" not in templates:
        raise ValueError(
            f"'chat_template' in {file} names no 'default' among {sorted(templates)}; "
            f"write the one to use to {_FILE} beside it"
        )
    return templates["default"]
