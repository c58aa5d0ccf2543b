"""Print docs/objective.md's table of symbols: `python -m ...wiring.paper_table`.

The values are those of the recipes in `configs/recipes`, on their default base.
"""

import dataclasses
import runpy
from typing import Any

from scalerl_jax.config.names import FOLDER
from scalerl_jax.process.printing import to_stdout

RECIPES = FOLDER / "recipes"


@dataclasses.dataclass(frozen=True)
class Row:
    """A symbol of a paper, the setting for it, and a recipe that sets it."""

    recipe: str  # a file of RECIPES
    symbol: str  # in the paper's words, with its equation or section
    setting: str


ROWS = (
    Row("scalerl", "CISPO, eq. 4", "objective.loss"),
    Row("scalerl", "eps_max", "objective.max_importance_ratio"),
    Row("scalerl", "1 / sum of \\|y_g\\|, prompt average", "objective.aggregation"),
    Row("scalerl", "A / A_std of the batch", "objective.advantage_normalization"),
    Row("scalerl", "0 < mean(r) < 1", "objective.zero_variance_filter"),
    Row("scalerl", "pass_rate(x) < 0.9", "data.max_history_pass_rate"),
    Row("scalerl_baseline", "min(rho A, clip(rho) A)", "objective.loss"),
    Row("scalerl_baseline", "DAPO's eps_high", "objective.clip_high"),
    Row("scalerl_baseline", "sample average", "objective.aggregation"),
    Row("scalerl_baseline", "A^G", "objective.advantage_normalization"),
    Row("scalerl_baseline", "PPO-off-policy-k", "queue.mode"),
    Row("scalerl_baseline", "k", "queue.max_staleness"),
    Row("scalerl_baseline", "no float32 head", "model.float32_head"),
    Row("grpo", "pi_theta / pi_old, eq. 3", "objective.loss"),
    Row("grpo", "epsilon, below", "objective.clip_low"),
    Row("grpo", "epsilon, above", "objective.clip_high"),
    Row("grpo", "beta", "objective.kl_coefficient"),
    Row("grpo", "D_KL, eq. 4", "objective.kl_estimator"),
    Row("grpo", "1 / \\|o_i\\|, sample average", "objective.aggregation"),
    Row("grpo", "(r - mean) / std", "objective.advantage_normalization"),
    Row("grpo", "G", "batch.group_size"),
    Row("dapo", "eps_low, eq. 8", "objective.clip_low"),
    Row("dapo", "eps_high, eq. 8", "objective.clip_high"),
    Row("dapo", "token-level loss", "objective.aggregation"),
    Row("dapo", "dynamic sampling, eq. 11", "batch.dynamic_sampling"),
    Row("dapo", "L_cache, eq. 13", "objective.overlong_cache_tokens"),
    Row("dapo", "updates per rollout", "queue.max_staleness"),
    Row("dapo", "20 rollout steps of warm-up", "optimizer.warmup_steps"),
    Row("dr_grpo", "constant divisor, appendix", "objective.aggregation"),
    Row("dr_grpo", "no std, eq. 3", "objective.advantage_normalization"),
    Row("gspo", "s_i(theta), eq. 7", "objective.loss"),
    Row("gspo", "left clip", "objective.clip_low"),
    Row("gspo", "right clip", "objective.clip_high"),
    Row("gspo", "minibatches per rollout batch", "queue.max_staleness"),
    Row("minimax", "sg(r_hat), eq. 4", "objective.loss"),
    Row("minimax", "1 + eps_high", "objective.max_importance_ratio"),
    Row("minimax", "eps_low: no lower bound", "objective.min_importance_ratio"),
    Row("minimax", "off-policy updates", "queue.max_staleness"),
    Row("magistral", "eps_high", "objective.clip_high"),
    Row("magistral", "A over the minibatch's std", "objective.advantage_normalization"),
    Row("ppo", "GAE", "objective.advantage"),
    Row("ppo", "gamma", "critic.gamma"),
    Row("ppo", "lambda", "critic.gae_lambda"),
    Row("ppo", "critic's learning rate", "critic.learning_rate"),
    Row("ppo", "critic's steps per iteration", "critic.minibatches"),
    Row("ppo", "value_clip", "critic.value_clip"),
    Row("ppo", "no weight decay", "optimizer.weight_decay"),
    Row("isocompute_easy", "TIS, C", "objective.correction_cap"),
    Row("isocompute_easy", "KL", "objective.kl_coefficient"),
    Row("isocompute_easy", "entropy bonus", "objective.entropy_coefficient"),
    Row("isocompute_easy", "1024 of sqrt(B / 1024)", "optimizer.base_rollouts"),
    Row("isocompute_hard", "no KL", "objective.kl_coefficient"),
    Row("tan2025", "kl_loss_coef", "objective.kl_coefficient"),
    Row("tan2025", "low_var_kl", "objective.kl_estimator"),
    Row("tan2025", "pi_old, recomputed", "objective.anchor"),
    Row("tan2025", "curriculum", "data.order"),
)


def paper_of(recipe: str) -> str:
    """Return the paper's name, with which a recipe's docstring begins."""
    docstring = (RECIPES / f"{recipe}.py").read_text().split('"""')[1]
    return docstring.split(", arXiv")[0].split(" (")[0]


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| paper | its symbol | setting | value | recipe |",
        "|---|---|---|---|---|",
    ]
    configs: dict[str, Any] = {}
    for row in ROWS:
        path = RECIPES / f"{row.recipe}.py"
        if row.recipe not in configs:
            configs[row.recipe] = runpy.run_path(str(path))["get_config"]()
        section, name = row.setting.split(".")
        value = configs[row.recipe][section][name]
        lines.append(
            f"| {paper_of(row.recipe)} | {row.symbol} | `{row.setting}` | {value} | "
            f"[`{path.name}`](../configs/recipes/{path.name}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    to_stdout(table() + "\n")
