"""The cost of a KV cache in int8 and its correction, on `base.py`.

scalerl study run kv_int8 && scalerl study report kv_int8

The arms are those of `precision.py`, with the sampler's cache in place of its dtype:
"int8_no_tis" and "int8_tis" take the ratio over log-probabilities that the learner
recomputes, without and with the weight recomputed / behavior.  On this base int8 makes
a difference of 0.01 nats, where float32 makes one of 1e-6.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return a cache of floats, and one of int8 with and without its remedy."""
    int8 = {"sampler.kv_dtype": "int8"}
    recomputed = {"objective.anchor": "recomputed"}
    return Study(
        base="configs/studies/base.py",
        common={
            "train.max_mismatch_nats": 0.05,  # the base's is for floats
            "queue.mode": "batched",
            "queue.max_staleness": 4,
        },
        arms={
            "float": {},
            "int8": int8,
            "int8_no_tis": int8 | recomputed,
            "int8_tis": int8 | recomputed | {"objective.correction_cap": 2.0},
        },
        seeds=(0, 1, 2),
        steps=40,
        pairs=[("float", "int8"), ("int8_tis", "int8_no_tis")],
    )
