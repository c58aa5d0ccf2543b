"""Corrections of old samples, for each token and for the whole sequence, on `base.py`.

scalerl study run corrections && scalerl study report corrections

The windows are those of `staleness.py` in which samples get old, with CISPO, whose
ratio is the truncated weight of a token, and with the weight of a sequence, truncated
at the same value.  `objective.loss=truncated_is` has CISPO's gradient: its runs would
be the same.

Result: docs/studies.md.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return two corrections of samples up to 1, 3, 7, 15 and 31 steps old."""
    windows = (2, 4, 8, 16, 32)
    losses = {"token": {}, "sequence": {"objective.loss": "sequence_truncated_is"}}
    return Study(
        base="configs/studies/base.py",
        common={"queue.mode": "batched", "eval.samples_per_prompt": 2},
        arms={
            f"{name}_{k}": loss | {"queue.max_staleness": k}
            for name, loss in losses.items()
            for k in windows
        },
        seeds=(0, 1, 2),
        steps=64,
        axis="train_flops",  # sampled tokens come in windows
        pairs=[(f"token_{k}", f"sequence_{k}") for k in windows],
    )
