"""Tasks with a verifier: reasoning_gym data sets with fixed settings.

All others are "gym:NAME(setting=value)"; see `data.gym`.  A question is drawn from its
task by (seed, index), so that a split can be drawn again anywhere.  The verifier's
process imports this module: no JAX here.
"""

import dataclasses
import functools
import string
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl_jax.data import gym
from scalerl_jax.data.questions import Question

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

# The small tokenizer has only these characters.
_CHARACTERS = frozenset(string.ascii_letters + string.digits + string.punctuation + " ")

# Held-out questions do not depend on a run's seed: runs with different seeds are
# judged on the same ones, and their curves can be compared.
_EVAL_SEED = 0
_EVAL, _TRAIN = 0, 1  # purposes of the draws


def has_known_characters(text: str) -> bool:
    """Return whether the small tokenizer can spell `text` (printable ASCII)."""
    return _CHARACTERS.issuperset(text)


def has_lower_case_words(text: str) -> bool:
    """Return whether `text` can be spelled, and has no capitals after its last ": ".

    Words come from book texts: "Wilson" would be asked to be reversed as "nosliW",
    and "aërial" holds a letter that the small tokenizer does not have.
    """
    return has_known_characters(text) and text.rpartition(": ")[2].islower()


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A reasoning_gym data set, its settings, and which of its questions count."""

    dataset: str
    settings: Mapping[str, Any]
    keep: Callable[[str], bool] = has_known_characters


_DIGITS = {"min_digits": 1, "max_digits": 2}
TASKS: dict[str, TaskSpec] = {
    "chain_sum": TaskSpec("chain_sum", _DIGITS | {"min_terms": 2, "max_terms": 3}),
    "chain_sum_long": TaskSpec("chain_sum", _DIGITS | {"min_terms": 3, "max_terms": 4}),
    # With words of 9 letters, reasoning_gym scores the answer plus anything above 1.
    "spell_backward": TaskSpec(
        "spell_backward",
        dict(min_word_len=3, max_word_len=7),
        keep=has_lower_case_words,
    ),
    "letter_counting": TaskSpec(
        "letter_counting", dict(min_words=1, max_words=3), keep=has_lower_case_words
    ),
    # Not for the small tokenizer: a question has two lines.
    "needle_haystack": TaskSpec(
        "needle_haystack",
        dict(min_num_statements=2, max_num_statements=3),
        keep=str.isascii,
    ),
    "products": TaskSpec("products", _DIGITS | {"min_terms": 2, "max_terms": 2}),
}


def make_questions(
    task: str,
    *,
    count: int,
    seed: int,
    exclude: set[str],
    setting: str = "data.train_prompts",
) -> list[Question]:
    """Make `count` questions with different texts, none of them in `exclude`.

    Raises:
        ValueError: the task has fewer; the message names `setting`.
    """
    spec = _spec(task)
    draws = 20 * count + 1000
    dataset = _data_set(spec, seed=seed, size=draws)
    questions: dict[str, Question] = {}
    for index in range(draws):
        if len(questions) == count:
            break
        try:
            entry = dataset[index]
        except Exception as error:  # settings that reasoning_gym does not check
            raise ValueError(
                f"{setting}: task {task!r} cannot make a question: {error!r:.200}; "
                f"change its settings in data.tasks"
            ) from error
        text = entry["question"]
        if text in exclude or text in questions or not spec.keep(text):
            continue
        reference = gym.reference_of(entry)
        if not gym.is_answer(spec.dataset, reference["answer"], reference):
            continue
        questions[text] = Question(task=task, text=text, reference=reference)
    if len(questions) < count:
        raise ValueError(
            f"{setting} asks for {count} questions of task {task!r}, which gave "
            f"{len(questions)} different ones in {draws} draws (beside "
            f"{len(exclude)} used elsewhere); lower {setting} or add to data.tasks"
        )
    return list(questions.values())


def equal_shares(names: Sequence[str], count: int) -> dict[str, int]:
    """Divide `count` into equal parts by name; the first ones get the rest."""
    if not names or len(set(names)) < len(names):
        raise ValueError(f"data.tasks = {names} must hold tasks, each of them once")
    share, rest = divmod(count, len(names))
    return {name: share + (place < rest) for place, name in enumerate(names)}


def draw_questions(
    shares: Mapping[str, int], *, used: set[str], seed: int | None = None
) -> list[Question]:
    """Draw each task's share of questions, without `used` ones, and add these to it.

    Without a seed they are the questions that are held out from every run.

    Raises:
        ValueError: a task has too few questions.
    """
    purpose, setting = _TRAIN, "data.train_prompts"
    if seed is None:
        seed, purpose, setting = _EVAL_SEED, _EVAL, "eval.num_prompts"
    drawn = []
    for task, share in shares.items():
        # A seed for reasoning_gym, which draws index i from Random(seed + i).
        sequence = np.random.SeedSequence([seed, purpose, zlib.crc32(task.encode())])
        questions = make_questions(
            task,
            count=share,
            seed=int(sequence.generate_state(1)[0]),
            exclude=used,
            setting=setting,
        )
        used.update(question.text for question in questions)
        drawn.extend(questions)
    return drawn


def score(task: str, answer: str, reference: dict[str, Any]) -> float:
    """Return reasoning_gym's score of an answer; 1 is right, less is partial credit."""
    return gym.score(_scorer(task), _spec(task).dataset, answer, reference)


def is_generated(name: str) -> bool:
    """Return whether a name is a task's, and not a data set's."""
    return name in TASKS or name.startswith(gym.PREFIX)


def check_task(name: str) -> None:
    """Check that a task exists and takes its settings, before any is drawn.

    Raises:
        ValueError: its name or a setting is invalid; the message names it.
    """
    _spec(name)


@functools.cache
def _scorer(task: str) -> "ProceduralDataset":
    return _data_set(_spec(task), seed=0, size=1)


def _data_set(spec: TaskSpec, *, seed: int, size: int) -> "ProceduralDataset":
    task = gym.GymTask(spec.dataset, dict(spec.settings))
    return gym.make_data_set(task, seed=seed, size=size)


def _spec(task: str) -> TaskSpec:
    if task.startswith(gym.PREFIX):
        dataset, settings = gym.read_task(task)
        return TaskSpec(dataset, settings, keep=bool)  # any text that is not empty
    if task not in TASKS:
        raise ValueError(
            f"data.tasks holds {task!r}; choose from {sorted(TASKS)}, or any of "
            f"reasoning_gym as gym:NAME"
        )
    return TASKS[task]
