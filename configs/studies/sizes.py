"""Policies of three sizes on the tasks of `base.py`: sizes x compute (Tan et al.).

python -m scalerl_jax.demonstrations --config=configs/tiny_base.py \
    --config.hidden_size=64 --config.ffn_size=192 --config.num_heads=2 \
    --config.num_kv_heads=1 --out=runs/bases/small
python -m scalerl_jax.demonstrations --config=configs/tiny_base.py \
    --config.hidden_size=192 --config.ffn_size=576 --config.num_heads=6 \
    --config.num_kv_heads=3 --out=runs/bases/large
scalerl study run sizes && scalerl study report sizes && scalerl study export sizes
scalerl fit studies/sizes --x train_flops --model-size model_size

0.2, 0.8 and 1.8 million parameters, warm-started on the same demonstrations.

Result: A is .645, .741 and .805; over FLOPs the smallest leads first; docs/studies.md.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return the three sizes; the middle one is the base of the other studies."""
    return Study(
        base="configs/studies/base.py",
        arms={
            "middle": {},
            "small": {"model.checkpoint": "runs/bases/small"},
            "large": {"model.checkpoint": "runs/bases/large"},
        },
        seeds=(0, 1, 2),
        steps=64,
        axis="train_flops",
    )
