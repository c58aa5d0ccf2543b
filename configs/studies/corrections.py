"""Corrections of old samples, for each token and for the whole sequence, on `base.py`.

scalerl study run corrections && scalerl study report corrections

`staleness.py` has windows of 1 to 32 steps with CISPO, whose ratio is the truncated
weight of a token; here two of them, and the weight of a sequence, truncated at the same
value.  `objective.loss=truncated_is` has CISPO's gradient: its runs would be the same.

Result: docs/studies.md.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return two corrections of samples up to 7 and up to 31 steps old."""
    losses = {"token": {}, "sequence": {"objective.loss": "sequence_truncated_is"}}
    return Study(
        base="configs/studies/base.py",
        common={"queue.mode": "batched", "eval.samples_per_prompt": 2},
        arms={
            f"{name}_{k}": loss | {"queue.max_staleness": k}
            for name, loss in losses.items()
            for k in (8, 32)
        },
        seeds=(0, 1, 2),
        steps=64,
        axis="train_flops",  # sampled tokens come in windows
        pairs=[(f"token_{k}", f"sequence_{k}") for k in (8, 32)],
    )
