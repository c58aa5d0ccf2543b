"""Tags of families of models around their thinking, and the answer after it."""

from typing import NamedTuple


class ThinkingTags(NamedTuple):
    """Texts that a family of models writes around its thinking."""

    begin: str
    end: str


THINKING_TAGS = (
    # Qwen3 and QwQ: https://huggingface.co/Qwen/Qwen3-8B; DeepSeek-R1 and what was
    # distilled from it: https://huggingface.co/deepseek-ai/DeepSeek-R1; SmolLM3:
    # https://huggingface.co/HuggingFaceTB/SmolLM3-3B
    ThinkingTags("<think>", "</think>"),
    # Magistral: https://huggingface.co/mistralai/Magistral-Small-2507
    ThinkingTags("[THINK]", "[/THINK]"),
    # Llama 3, Qwen2.5 and SmolLM2 have none.
)


def end_of_thinking(prompt: str, template: str) -> str:
    """Return the tag that ends the thinking after a prompt; "" where there is none.

    The prompt may leave a thinking open, or close an empty one and so switch it off.
    Where it does neither, a template that names a family's tags is that of a model
    which opens its thinking by itself.
    """
    text = prompt.rstrip()
    for tags in THINKING_TAGS:
        if text.endswith(tags.begin):
            return tags.end
        if text.endswith(tags.end):
            return ""
    return next((tags.end for tags in THINKING_TAGS if tags.end in template), "")


def find_answer(text: str, *, answer_after: str) -> int | None:
    """Return where an answer begins in a completion: behind the last `answer_after`.

    None where the text does not hold it; an empty `answer_after` is before the text.
    """
    place = text.rfind(answer_after) if answer_after else 0
    return None if place < 0 else place + len(answer_after)


def extract_answer(text: str, *, answer_after: str) -> str | None:
    """Return the answer in a completion, without spaces around; None without one."""
    start = find_answer(text, answer_after=answer_after)
    return None if start is None else text[start:].strip()
