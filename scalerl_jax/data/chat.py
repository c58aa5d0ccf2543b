"""Chat templates: the texts of messages as a model was trained on them.

A chat template is a jinja program in a file that somebody else wrote.  The question
and the settings are values to it, and never evaluated.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl_jax.config import DataConfig
from scalerl_jax.data.chat_process import TemplateProcess
from scalerl_jax.data.questions import CHAT, PLACE, Question, Renderer, check_place
from scalerl_jax.data.tokenizer import read_json, read_special_tokens
from scalerl_jax.formats.bounded import read_text
from scalerl_jax.formats.model_files import local_directory

_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_HARMONY_CALL = "<|call|>"  # ends a call of a tool in gpt-oss's format
_PROCESS = TemplateProcess()  # runs all templates


class NoTemplate(ValueError):
    """A model that brings no chat template."""


class TemplateRefused(ValueError):
    """A template that refuses these messages with its own error."""


class TemplateUnstarted(ValueError):
    """No process that renders templates: the template and the messages may be good."""


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
        replied_to: bool = True,
    ) -> str:
        """Return the text of messages {"role", "content"} and of the start of a reply.

        Equals `apply_chat_template(messages, add_generation_prompt=replied_to, tokenize
        =False, tools=tools, **options)` of `transformers`.  Undefined names are empty.
        A template may write today's date, as Llama 3.2's does.

        Raises:
            TemplateRefused: the template refuses the messages.
            TemplateUnstarted: the process of templates does not start.
            ValueError: the template is malformed, or fails.
        """
        found = _PROCESS.render(
            self.source,
            {
                **self.special_tokens,
                **options,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": replied_to,
            },
        )
        if "refused" in found:
            roles = " and ".join(
                dict.fromkeys(repr(message["role"]) for message in messages)
            )
            raise TemplateRefused(
                f"{self.origin} refuses messages of {roles}: {found['refused']}"
            )
        if "syntax" in found:
            raise ValueError(f"{self.origin} is no jinja template: {found['syntax']}")
        if "unstarted" in found:
            raise TemplateUnstarted(
                f"the process that renders {self.origin} does not start "
                f"({found['unstarted']}): try again later"
            )
        if "failed" in found:
            raise ValueError(f"{self.origin} fails: {found['failed']}")
        return found["text"]


def chat_renderer(
    data: DataConfig,
    source: str | Path,
    *,
    tools: list[dict[str, Any]] | None = None,
) -> Renderer:
    """Make the renderer that writes prompts by a model's chat template.

    The user's message is data.user_template with the question in place of
    "{question}".  Before it comes a system message, if there is one:
    data.system_prompt, else the question's own.  `source` is a directory or file as
    `read_chat_template` takes it.  The template lists `tools`, and those of a question,
    in its own form.

    Raises:
        ValueError: a template is missing or malformed, refuses a question with these
            settings, or does not show it.
    """
    check_place("data.user_template", data.user_template)
    chat = read_chat_template(source)
    options = {"enable_thinking": data.enable_thinking}

    def write(question: Question) -> str:
        user = data.user_template.replace(PLACE, question.text)
        messages = [{"role": "user", "content": user}]
        if system := data.system_prompt or question.system:
            messages.insert(0, {"role": "system", "content": system})
        listed = [*(tools or ()), *question.reference.get("tools", ())] or None
        if listed and _HARMONY_CALL in chat.source:
            raise ValueError(
                f"{chat.origin} asks for calls of tools as messages that end in "
                f"{_HARMONY_CALL!r} (gpt-oss's format), which are not read here; use a "
                f"model that writes <tool_call>, or an environment without tools"
            )
        try:
            return chat.render(messages, options=options, tools=listed)
        except TemplateRefused as error:
            raise ValueError(
                f"{error}; change data.system_prompt or data.user_template, or the "
                f"template"
            ) from error

    return Renderer(write, chat.source, dated="strftime_now" in chat.source)


def read_chat_template(path: str | Path) -> ChatTemplate:
    """Read the chat template of a Hugging Face directory, `tokenizer.json`, or GGUF.

    It is `chat_template.jinja`, else "chat_template" of `tokenizer_config.json`: a
    template, or a list of named ones, of which "default" is taken.

    Raises:
        NoTemplate: the model has no chat template.
        ValueError: a file is malformed.
    """
    directory = local_directory(path)
    file, config_file = directory / _FILE, directory / _CONFIG
    origin = f"the chat template {file}"
    if file.is_file():
        source = read_text(file)
    else:
        source = read_json(directory, _CONFIG).get("chat_template")
        origin = f"the chat template in {config_file}"
        if isinstance(source, list):
            source = _default_of(source, config_file)
    if source is None:
        raise NoTemplate(
            f"data.template = {CHAT!r}, and {directory} has no chat template: no file "
            f"{_FILE}, and no 'chat_template' in {_CONFIG}; most base models have "
            f"none: set data.template to a text that holds {PLACE!r}, or put a "
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
