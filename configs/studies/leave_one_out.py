"""ScaleRL with one of its choices taken back at a time, on `base.py`: figure 5.

scalerl study run leave_one_out && scalerl study report leave_one_out

The arms are those of `configs/ablations`, without the float32 head, since everything is
float32.  Result: docs/studies.md.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return the arms, losses first, since arms start in this order."""
    return Study(
        base="configs/studies/base.py",
        arms={
            "scalerl": {},
            "dapo_loss": {
                "objective.loss": "clipped",
                "objective.clip_low": 0.2,
                "objective.clip_high": 0.26,
            },
            "off_policy_8": {
                "queue.mode": "batched",
                "eval.every": 8,  # at the ends of windows
            },
            "sample_average": {"objective.aggregation": "sample"},
            "prompt_normalization": {"objective.advantage_normalization": "prompt"},
            "no_filter": {"objective.zero_variance_filter": False},
            "uniform_sampling": {"data.no_positive_resampling": False},
            "length_penalty": {
                "interruption.enabled": False,
                "objective.overlong_cache_tokens": 9,  # a seventh, as 2k of 14k
                "objective.overlong_on": "correct",
            },
        },
        seeds=(0, 1, 2),
        steps=40,
    )
