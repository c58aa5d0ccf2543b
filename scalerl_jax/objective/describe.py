"""The objective of a config in words and formulas, for `main --describe`.

Words, formulas and sources are the docstrings of the functions that a run uses, so that
they cannot differ from the code.
"""

import inspect
import textwrap
from collections.abc import Sequence
from operator import attrgetter

from scalerl_jax.config import Config
from scalerl_jax.objective.terms import Term, terms_of


def describe(config: Config) -> str:
    """Return the objective's formula, each active term, and the names of the others."""
    parts = list(terms_of(config))
    text = ["The objective", "", *_indented(_whole(config, parts)), ""]
    for part in parts:
        if not part.on:
            continue
        where = f"{part.function.__module__}.{part.function.__qualname__}"
        text += [f"{part.name}  ({where})"]
        text += [f"    {name} = {attrgetter(name)(config)!r}" for name in part.settings]
        text += ["", *_indented(inspect.getdoc(part.function) or ""), ""]
    text += ["Off", ""]
    for part in parts:
        if not part.on:
            switch = part.settings[0]
            text += [f"    {part.name}: {switch} = {attrgetter(switch)(config)!r}"]
    return "\n".join(text) + "\n"


def _indented(text: str) -> list[str]:
    return textwrap.indent(text, "    ").splitlines()


def _whole(config: Config, terms: Sequence[Term]) -> str:
    """Return the objective of an optimizer step as a formula."""
    objective, batch = config.objective, config.batch
    on = [term for term in terms if term.on]
    scaled = any("regularization" in term.scores for term in on)
    token, factor = "loss[t]", "regularization[t] * " if scaled else ""
    for sign, _, added in (term.formula.partition(" ") for term in on if term.formula):
        token += f" {sign} {factor}{added}"
    advantages = f"{objective.advantage} / {objective.advantage_normalization}"
    if config.teacher.alone:
        advantages = "the teacher's"
    elif config.teacher.on:
        advantages += " + the teacher's"
    balance = '  +  the loss of "Even experts"' if objective.expert_balance else ""
    lines = [
        f"minimise  sum over the tokens t of a batch of  weight[t] * token[t]{balance}",
        f"token[t] = {token}",
        f"loss = {objective.loss}, weight = {objective.aggregation}, "
        f"advantages = {advantages}",
        f"{batch.num_prompts} prompts x {batch.group_size} completions a batch, "
        f"optimizer steps per window: {config.steps_per_window} "
        f"(batch.epochs = {batch.epochs}, queue.mode = {config.queue.mode!r}, "
        f"queue.max_staleness = {config.queue.max_staleness})",
    ]
    return "\n".join(lines)
