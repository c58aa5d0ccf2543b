"""Corrections of old samples, for each token and for the whole sequence, on `base.py`.

scalerl study run corrections && scalerl study report corrections

`staleness.py` has windows of 1 to 32 steps with CISPO; here two of them, and the weight
of a token or of a sequence, truncated at the same value.  Not yet run: 18 runs.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return three corrections of samples up to 7 and up to 31 steps old."""
    losses = {
        "cispo": {},
        "token": {"objective.loss": "truncated_is"},
        "sequence": {"objective.loss": "sequence_truncated_is"},
    }
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
        pairs=[
            (f"token_{k}", f"{other}_{k}")
            for k in (8, 32)
            for other in ("sequence", "cispo")
        ],
    )
