"""Scores: values per token in a batch that terms of the objective read."""

from typing import Literal

# The maker of a score: a forward pass of the policy at the start of the window, of the
# reference, of the teacher or of the critic; the verdicts of the token's group
# (`terms.Term.of_verdicts`); or the function that computes the advantages.
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


# Scores under params with the policy's shapes and shardings.
OF_POLICY = made_by("policy", "reference")
LOGPROBS = (*OF_POLICY, *made_by("teacher"))  # in nats; possible anchors of a ratio
# Scores that the learner adds to a window before its first step.
OF_PARAMS = made_by("policy", "reference", "teacher", "critic")
