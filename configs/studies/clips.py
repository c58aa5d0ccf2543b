"""The effect of the ratio's bound where ratios exceed it, on `base.py`.

scalerl study run clips && scalerl study report clips

ScaleRL's baseline (`forward.py`) on samples up to 31 steps old, with DAPO's upper clip
at .26 and .27 and CISPO's cap at 4, 5 and 8.

Result: docs/studies.md.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return arms of each loss's bounds, compared with each other."""
    clips = {f"dapo_{high}": {"objective.clip_high": high} for high in (0.26, 0.27)}
    caps = {
        f"cispo_{cap:g}": {
            "objective.loss": "cispo",
            "objective.clip_low": 0.0,
            "objective.clip_high": 0.0,
            "objective.max_importance_ratio": cap,
        }
        for cap in (4.0, 5.0, 8.0)
    }
    return Study(
        base="configs/studies/base.py:baseline",
        common={"queue.max_staleness": 32, "eval.samples_per_prompt": 2},
        arms=clips | caps,
        seeds=(0, 1, 2),
        steps=64,
        axis="train_flops",  # sampled tokens come in windows
        pairs=[
            ("dapo_0.26", "dapo_0.27"),
            ("cispo_5", "cispo_4"),
            ("cispo_5", "cispo_8"),
            ("dapo_0.26", "cispo_5"),
        ],
    )
