"""Scores: values per token that a batch carries for the terms of the objective."""

from typing import Literal

# What makes a score: a forward pass of the policy at the start of the window, of the
# reference, of the teacher or of the critic; the verdicts of the token's group
# (`terms.Term.of_verdicts`); or the map that makes the advantages.
Maker = Literal["policy", "reference", "teacher", "critic", "groups", "advantages"]
SCORES: dict[str, Maker] = {
    "proximal": "policy",
    "reference": "reference",
    "teacher": "teacher",
    "regularization": "groups",
    "values": "critic",
    "returns": "advantages",
}


def made_by(*makers: Maker) -> tuple[str, ...]:
    """Return the scores of these makers, in the order of `SCORES`."""
    return tuple(name for name, maker in SCORES.items() if maker in makers)


# Of params in the policy's shapes and shardings.
OF_POLICY = made_by("policy", "reference")
LOGPROBS = (*OF_POLICY, *made_by("teacher"))  # in nats; a ratio may be over them
# Those that the learner gives a window before its first step.
OF_PARAMS = made_by("policy", "reference", "teacher", "critic")
