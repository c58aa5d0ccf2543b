"""Things that `--describe` and the table of symbols say are what the code does."""

import pytest
import small_commands
import small_run

from scalerl_jax.objective.describe import describe
from scalerl_jax.objective.terms import terms_of
from scalerl_jax.wiring import paper_table

PAGE = (small_run.ROOT / "docs" / "objective.md").read_text()


def described(changes=None):
    return describe(small_run.make_config(changes))


def test_the_default_is_described_by_the_docstrings_of_what_runs():
    text = described()
    on, off = text.split("\nOff\n")
    for words in (
        "scalerl_jax.algo.losses.cispo_loss",
        "loss = -sg(truncated) * advantage * logprob",
        "https://arxiv.org/abs/2510.13786, equation 4",
        "objective.max_importance_ratio = 5.0",
        "scalerl_jax.algo.advantages.prompt_weights",
        "scalerl_jax.algo.advantages.normalize_by_batch",
        "token[t] = loss[t]\n",
    ):
        assert words in on
    assert "KL to the reference: objective.kl_coefficient = 0.0" in off
    assert "kl_k3" not in text


def test_a_regularised_objective_has_its_terms_in_the_formula():
    text = described(
        {
            "objective.kl_coefficient": 0.01,
            "objective.kl_estimator": "k2",
            "objective.entropy_coefficient": 0.002,
            "objective.regularize": "easy",
            "objective.regularize_from_pass_rate": 0.3,
        }
    )
    formula = (
        "token[t] = loss[t] + regularization[t] * 0.01 * k2[t] - regularization[t] * "
        "0.002 * entropy[t]"
    )
    assert formula in text
    assert "d^2 / 2" in text and "IsoCompute" in text


@pytest.mark.parametrize(
    "alone, said",
    [(False, "group_mean / batch + the teacher's"), (True, "the teacher's")],
)
def test_a_teacher_alone_takes_the_place_of_the_groups_advantages(alone, said):
    changes = {
        "teacher.checkpoint": str(small_run.ROOT / "scalerl_jax/assets/tiny_base"),
        "teacher.alone": alone,
        "objective.zero_variance_filter": False,
        "objective.overlong_cache_tokens": 8,
        "batch.group_size": 1 if alone else 2,
    }
    on, off = described(changes).split("\nOff\n")
    assert f"advantages = {said}\n" in on
    for name in ("Advantages", "Their scale", "Overlong punishment"):
        assert (f"\n{name}  (" in on, f" {name}: " in off) == (not alone, alone)


def test_a_loss_that_is_none_of_a_token_is_in_the_formula_too():
    formula = "weight[t] * token[t]"
    assert f"{formula}\n" in described()
    added = f'{formula}  +  the loss of "Even experts"\n'
    assert added in described({"objective.expert_balance": 0.01})
    assert added not in described({"objective.expert_bias_rate": 0.001})


def test_an_order_by_difficulty_is_described():
    ordered = {"data.order": "easy_to_hard", "data.difficulty": "measured"}
    said = "sorted by difficulty, and the hardest"
    assert said in " ".join(described(ordered).split())
    assert said not in " ".join(described().split())


def test_every_setting_of_the_objective_is_described():
    named = {
        setting
        for changes in ({}, {"objective.loss": "dppo"}, {"objective.loss": "dual_clip"})
        for part in terms_of(_with(changes))
        for setting in part.settings
    }
    missing = {
        f"objective.{name}" for name in vars(small_run.make_config().objective)
    } - named
    assert not missing


def _with(changes):
    bounds = {
        "dppo": dict(mask_low=0.2, mask_high=0.2),
        "dual_clip": dict(clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    }
    more = bounds[changes["objective.loss"]] if changes else {}
    return small_run.make_config(
        changes | {f"objective.{name}": value for name, value in more.items()}
    )


@pytest.mark.parametrize("row", paper_table.ROWS, ids=lambda row: row.symbol)
def test_a_row_of_the_table_is_of_a_recipe(row):
    assert (paper_table.RECIPES / f"{row.recipe}.py").is_file()


def test_the_table_of_symbols_is_what_the_script_prints():
    assert f"\n{paper_table.table()}\n" in PAGE, "run: make objective-table"


def test_every_recipe_is_in_the_table():
    recipes = {path.stem for path in paper_table.RECIPES.glob("*.py")}
    assert {row.recipe for row in paper_table.ROWS} == recipes


def test_describe_needs_no_workdir_and_runs_nothing():
    config = paper_table.RECIPES / "grpo.py:tiny"
    status, said, errors = small_commands.outcome(f"main --config={config} --describe")
    assert (status, errors) == (0, "")
    assert "token[t] = loss[t] + 0.04 * k3[t]" in said


def test_a_base_that_there_is_not_is_one_line():
    config = paper_table.RECIPES / "grpo.py:9b"
    status, said, errors = small_commands.outcome(f"main --config={config} --describe")
    assert (status, said) == (2, "")
    known = [
        *("32b", "8b", "8b_32k", "8b_lora", "gsm8k_1gpu", "qwen3_30b_a3b"),
        *("scout", "smollm2", "smollm2_cpu", "tiny", "tiny_fleet", "tiny_moe", "tools"),
    ]
    assert errors == f"error: --config=...:9b: choose from {known}\n"
