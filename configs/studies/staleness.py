"""ScaleRL on samples that are 0 to 31 optimizer steps old at most, on `base.py`.

scalerl study run staleness && scalerl study report staleness

In batched mode all samples of k steps are generated at one version, so that the i-th
step has staleness i - 1, whatever the machine's speed.

Result: docs/studies.md.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return windows of 1 to 32 steps; the correction is CISPO's, per token."""
    windows = {f"window_{k}": {"queue.max_staleness": k} for k in (1, 2, 4, 8, 16, 32)}
    return Study(
        base="configs/studies/base.py",
        common={"queue.mode": "batched", "eval.samples_per_prompt": 2},
        arms=windows,
        seeds=(0, 1, 2),
        steps=64,
        axis="train_flops",  # sampled tokens come in windows
    )
