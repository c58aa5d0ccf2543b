"""The cost of a bfloat16 or int8 sampler, its head and its correction, on `base.py`.

scalerl study run precision && scalerl study report precision

The learner is float32 in all arms.  CISPO's ratio over the sampler's log-probabilities
is itself a truncated importance weight, so the arms "no_tis" and "tis" take the ratio
over log-probabilities that the learner recomputes at the start of a window of 4 steps,
without and with the weight recomputed / behavior, capped at 2.  The arms "int8" have
the layers' matrices in int8, and bfloat16 activations.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return float32, and bfloat16 and int8 with and without their remedies."""
    half = {"model.sampler_dtype": "bfloat16"}
    int8 = half | {"sampler.weights_dtype": "int8"}
    recomputed = {"objective.anchor": "recomputed"}
    return Study(
        base="configs/studies/base.py",
        common={
            "train.max_mismatch_nats": 0.05,  # the base's is for float32
            "queue.mode": "batched",
            "queue.max_staleness": 4,
        },
        arms={
            "float32": {},
            "bfloat16": half,
            "bfloat16_head": half | {"model.float32_head": False},
            "bfloat16_no_tis": half | recomputed,
            "bfloat16_tis": half | recomputed | {"objective.correction_cap": 2.0},
            "int8": int8,
            "int8_no_tis": int8 | recomputed,
            "int8_tis": int8 | recomputed | {"objective.correction_cap": 2.0},
        },
        seeds=(0, 1, 2),
        steps=40,
        pairs=[
            ("float32", "bfloat16"),
            ("bfloat16", "bfloat16_head"),
            ("bfloat16_tis", "bfloat16_no_tis"),
            ("bfloat16", "int8"),
            ("int8_tis", "int8_no_tis"),
        ],
    )
