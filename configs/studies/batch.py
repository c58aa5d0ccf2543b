"""ScaleRL with larger and smaller batches, and with other groups, on `base.py`.

scalerl study run batch && scalerl study report batch

N x G: prompts times completions.  All runs end after the same number of sampled tokens,
so that a batch of half the size has twice the steps; the learning rate is unchanged.
Result: docs/studies.md.
"""

from scalerl_jax.study.design import Study

_SHAPES = ((16, 8), (8, 8), (32, 8), (32, 4), (8, 16), (4, 32))


def get_study() -> Study:
    """Return batches of 128, 64, 256 completions, and 128 in groups of 4, 16, 32."""
    return Study(
        base="configs/studies/base.py",
        common={"eval.samples_per_prompt": 2},
        arms={
            f"{prompts}x{size}": {
                "batch.num_prompts": prompts,
                "batch.group_size": size,
                "eval.every": 512 // (prompts * size),  # equal tokens for all
            }
            for prompts, size in _SHAPES
        },
        seeds=(0, 1, 2),
        steps=96,
        tokens=96_000,
    )
