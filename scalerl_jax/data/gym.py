"""Any data set of reasoning_gym as a task: "gym:NAME", "gym:NAME@2(min_terms=3)".

A level is one of the package's curriculum for this data set, and sets what the
curriculum sets; settings in parentheses override it.  The verifier's process imports
this module: no JAX here.
"""

import ast
import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from scalerl_jax.formats.arguments import read_arguments

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

PREFIX = "gym:"
_NAME = re.compile(r"gym:(?P<dataset>\w+)(?:@(?P<level>\d{1,3}))?(?P<settings>\(.*\))?")
_MOST_CHARACTERS = 500  # of a task's name
_OWN = ("seed", "size")  # settings of a data set that the run itself sets

_NO_ANSWER = "it gives no answer of its own that could show that its score is right"
REFUSED: Mapping[str, str] = {
    "boxnet": _NO_ANSWER,
    "composite": "it is a mixture of others; name these in data.tasks",
    "game_of_life_halting": "it takes any answer for right",
    "rush_hour": _NO_ANSWER,
}

# Data sets without a single "answer" have an example in their metadata.
_EXAMPLES = ("possible_answer", "example_answer", "example_correct_answer")

# reasoning_gym passes answers to these to Python's eval(), for lists ...
LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
# ... and answers to these to SymPy's parse_expr(), which is an eval() too.
FORMULAS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
# Answers that these score with 1 to any question: each comparison with a NaN holds, and
# the beginning of a number, 0 or 0., is a whole match of digits.
_NAN = frozenset({"complex_arithmetic", "number_sorting"})
_BEGINNINGS = frozenset({"coin_flip"})
_NEAR = Fraction(1, 10_000)  # coin_flip's own tolerance
_FUNCTIONS = "sin cos tan asin acos atan sinh cosh tanh exp log ln sqrt Abs pi".split()
_FORMULA = re.compile(r"[\sA-Za-z0-9+\-*/^().,!]*")
_WORD = re.compile(r"[A-Za-z]+")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z]|[A-Za-z)]\s*\.")


class GymTask(NamedTuple):
    """A data set of reasoning_gym and its settings."""

    dataset: str
    settings: dict[str, Any]


@functools.cache
def read_task(task: str) -> GymTask:
    """Parse the name of a task, "gym:NAME@LEVEL(setting=value, ...)".

    Raises:
        ValueError: the data set, level or setting does not exist, or the data set
            cannot be used or rejects the value; the message is one line.
    """
    where = f"data.tasks holds {task[:_MOST_CHARACTERS]!r}"
    found = _NAME.fullmatch(task) if len(task) <= _MOST_CHARACTERS else None
    if not found:
        raise ValueError(
            f"{where}; write gym:NAME, gym:NAME@LEVEL or gym:NAME(setting=value, ...), "
            f"in {_MOST_CHARACTERS} characters at most"
        )
    dataset, level = found["dataset"], found["level"]
    try:
        config_type = _config_type(dataset)
        settings = _of_level(dataset, int(level)) if level else {}
        own = read_arguments(found["settings"] or "()")
        known = [each.name for each in dataclasses.fields(config_type)]
        for name in own:
            _refuse_unknown("setting", name, set(known) - {*_OWN})
        settings |= own
        _make(dataset, settings, seed=0, size=1)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{where}: {error}") from error
    return GymTask(dataset, settings)


def make_data_set(task: GymTask, *, seed: int, size: int) -> "ProceduralDataset":
    """Return the data set, whose question `index` is drawn by seed + index."""
    return _make(task.dataset, task.settings, seed=seed, size=size)


def reference_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the verifier needs of an entry, as JSON values.

    Tuples become lists here, as they would when a checkpoint is read.
    """
    metadata, answer = entry["metadata"], entry["answer"]
    if answer is None:
        shown = next(metadata[name] for name in _EXAMPLES if name in metadata)
        answer = shown if isinstance(shown, str) else json.dumps(shown)
    return json.loads(json.dumps({"answer": answer, "metadata": metadata}))


def score(
    dataset: "ProceduralDataset", name: str, answer: str, reference: dict[str, Any]
) -> float:
    """Return reasoning_gym's score of an answer; 1 is right, less is partial credit.

    An answer that would be run as a program gets 0, and so does one that the data set
    cannot read or takes for right whatever the question.
    """
    if not is_answer(name, answer, reference):
        return 0.0
    if name in _NAN and "nan" in answer.lower():
        return 0.0
    if name in ("arc_agi", "rearc"):  # compared with a tuple of tuples
        board = tuple(map(tuple, reference["metadata"]["output"]))
        metadata = reference["metadata"] | {"output": board}
        reference = reference | {"metadata": metadata}
    try:
        found = float(dataset.score_answer(answer, entry=reference))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        dataset.score_answer(
            reference["answer"], entry=reference
        )  # else it is no fault
        return 0.0
    if found >= 1 and name in _BEGINNINGS and not _is_near(answer, reference["answer"]):
        return 0.0
    return found


def _is_near(answer: str, own: str) -> bool:
    one, other = (Fraction(each.replace(",", "")) for each in (answer, own))
    return abs(one - other) <= _NEAR


def is_answer(name: str, answer: str, reference: Mapping[str, Any]) -> bool:
    """Return whether an answer may be scored: parsing it runs no program.

    Questions whose own answer may not be scored are not used: SymPy leaves some
    integrals as "Integral(...)", which would be a right answer to every question.
    """
    if name in LISTS:
        return answer == reference["answer"] or _is_literal(answer)
    return name not in FORMULAS or is_formula(answer)


def is_formula(answer: str) -> bool:
    """Return whether a text is a formula: numbers, letters, known functions, signs.

    SymPy then finds no attribute, no string and no other name in it.
    """
    if not _FORMULA.fullmatch(answer) or _ATTRIBUTE.search(answer):
        return False
    words = (match[0] for match in _WORD.finditer(answer))
    return all(len(word) == 1 or word in _FUNCTIONS for word in words)


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer.strip())
    except (ValueError, SyntaxError, TypeError):
        return False
    return True


def _config_type(dataset: str) -> type:
    """Return the class of a data set's settings; raise if it is unknown or unusable."""
    from reasoning_gym import factory  # it brings SymPy and Matplotlib

    _refuse_unknown("data set", dataset, factory.DATASETS)
    if dataset in REFUSED:
        raise ValueError(f"{dataset} cannot be used: {REFUSED[dataset]}")
    return factory.DATASETS[dataset][1]


def _make(
    dataset: str, settings: dict[str, Any], *, seed: int, size: int
) -> "ProceduralDataset":
    import reasoning_gym  # it brings SymPy and Matplotlib

    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **settings)
    except (AssertionError, ValueError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split()) or "it does not take these settings"
        raise ValueError(f"{dataset} with {settings}: {said}") from error


def _of_level(dataset: str, level: int) -> dict[str, Any]:
    """Return the settings of a level; some of its attributes may have fewer levels."""
    from reasoning_gym import factory  # it brings SymPy and Matplotlib

    if not factory.has_curriculum(dataset):
        raise ValueError(f"{dataset} has no levels; leave @{level} out")
    curriculum = factory.create_curriculum(dataset)
    last = max(len(each.levels) for each in curriculum.attributes.values()) - 1
    if level > last:
        raise ValueError(f"{dataset} has the levels 0 to {last}")
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration()
    return {
        each.name: getattr(config, each.name)
        for each in dataclasses.fields(config)
        if each.init and each.name not in _OWN
    }


def _refuse_unknown(kind: str, name: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
        rest = "" if len(names) <= len(close) else f" (of {len(names)})"
        raise ValueError(f"no {kind} is called {name!r}; near it: {close}{rest}")
