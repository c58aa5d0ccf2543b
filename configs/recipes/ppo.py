"""PPO with a critic, Open-Reasoner-Zero, arXiv 2503.24290, section 2.  Not yet run.

scalerl train --config=configs/recipes/ppo.py:tiny --workdir=runs/ppo

"Their code" is https://github.com/Open-Reasoner-Zero/Open-Reasoner-Zero, config.py and
orz/exps/examples/ppo/ppo_base_exp.py: one step of the policy and 12 of the critic on
each batch that is generated together.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    # 128 prompts x 64, warm-up 50: their code.
    config = vanilla_grpo(
        base, __file__, num_prompts=128, group_size=64, warmup_steps=50
    )
    config.objective.update(advantage="critic", advantage_normalization="batch")
    config.objective.aggregation = "token"
    config.critic.update(minibatches=12, value_clip=0.2)  # their code
    config.optimizer.weight_decay = 0.0  # their code
    config.reward.wrong = 0.0  # their code
    return config
