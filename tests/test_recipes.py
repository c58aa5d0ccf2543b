"""Every recipe and ablation: its file, its numbers, some steps on the tiny policy."""

import ast
import re
import runpy

import jax
import pytest
import small_run
from absl import flags

from scalerl_jax import config as config_lib
from scalerl_jax import main
from scalerl_jax.objective.describe import describe
from scalerl_jax.run.record import flatten

# ml_collections loads config files in a way that Python means to drop.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
ROOT = small_run.ROOT / "configs"
FOLDERS = ("recipes", "ablations", "forward")
FILES = sorted(path for name in FOLDERS for path in ROOT.glob(f"{name}/*.py"))
# The runs here: whatever part of a run only these recipes use.  Other losses and
# weights have their tests by themselves; `make ablations-smoke` runs all files.
RUN = [path for path in FILES if path.stem in ("dapo", "scalerl_baseline", "tan2025")]
# Without a meaning where all is computed in float32.
ONLY_BFLOAT16 = ("ablations/no_float32_head", "forward/float32_head")
SOURCE = re.compile(r"[Ss]ection|[Aa]ppendix|paper's|code|script|figure|[Aa]ssumed")
SMALL = {
    "batch.num_prompts": 2,
    "batch.group_size": 4,
    "batch.rows_per_microbatch": 2,
    "sampler.slots": 8,
    "data.train_prompts": 64,
    "eval.num_prompts": 2,
    "eval.samples_per_prompt": 1,
    "eval.every": 2,
    "train.num_steps": 2,
    "optimizer.warmup_steps": 1,
}


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


every_file = pytest.mark.parametrize("path", FILES, ids=name_of)


def settings_of(path, base):
    """The flat settings of a file on a base, and the base's own."""
    on_base = runpy.run_path(str(path))["get_config"](base)
    plain = runpy.run_path(str(ROOT / f"{base}.py"))["get_config"]()
    return flatten(on_base.to_dict()), flatten(plain.to_dict())


def config_of(path, base):
    """The file's settings on a base, with what a user of it must give."""
    config = runpy.run_path(str(path))["get_config"](base)
    if config.data.order != "shuffled":
        config.data.difficulty = "measured"
    if base != "tiny":
        config.model.checkpoint = "named, not read"
    return config


@every_file
def test_a_file_is_short_and_says_its_source_command_and_result(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    source, command, *rest = text.split('"""')[1].split("\n\n")
    assert "arXiv " in source or "ScaleRL's figure 5" in source
    assert "Not yet run" in source or "pass rate" in source
    base = "" if name_of(path) in ONLY_BFLOAT16 else ":tiny"
    assert f"--config=configs/{name_of(path)}.py{base} " in command.replace("\n", " ")
    if path.parent.name != "recipes":
        assert rest[0].startswith(("Published: ", "Not an arm ", "L_max "))


@every_file
def test_a_number_has_its_source_beside_it(path):
    """In a comment on its statement's lines or above, or it is said to be assumed."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Assign | ast.Expr):
            continue
        numbers = [
            each.value
            for each in ast.walk(node)
            if isinstance(each, ast.Constant) and type(each.value) in (int, float)
        ]
        if numbers:
            first = node.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            text = "\n".join(lines[first : node.end_lineno])
            comments = " ".join(re.findall(r"# (.*)", text))
            assert SOURCE.search(comments), f"{numbers} in {text}"


@every_file
@pytest.mark.parametrize("base", ["8b", "32b", "tiny"])
def test_a_file_works_with_any_policy(path, base):
    if base == "tiny" and name_of(path) in ONLY_BFLOAT16:
        with pytest.raises(ValueError, match=r"float32.* nothing|nothing.* float32"):
            config_lib.resolve(config_of(path, base))
        return
    config = config_lib.resolve(config_of(path, base))
    text = describe(config)
    assert f"loss = {config.objective.loss}, weight = " in text


@every_file
def test_on_the_tiny_policy_nothing_of_a_large_one_is_left(path):
    if name_of(path) == "forward/float32_head":
        pytest.skip("refused")
    found, plain = settings_of(path, "tiny")
    for setting in (
        "optimizer.learning_rate",
        "optimizer.warmup_steps",
        "batch.num_prompts",
        "model.checkpoint",
    ):
        assert found[setting] == plain[setting]


def changed_sections(folder, plain):
    """By file: the sections of settings in which it differs from `plain`."""
    return {
        path.stem: {
            setting.split(".")[0]
            for setting, value in settings_of(path, "8b")[0].items()
            if value != plain[setting]
        }
        for path in FILES
        if path.parent.name == folder
    }


def test_each_ablation_changes_one_choice():
    changed = changed_sections("ablations", settings_of(FILES[0], "8b")[1])
    assert len(changed) == 10
    # The length penalty takes the place of the interruptions.
    assert changed.pop("length_penalty") == {"objective", "interruption"}
    assert all(len(sections) == 1 for sections in changed.values()), changed


def test_each_forward_ablation_changes_one_choice_of_the_baseline():
    baseline, _ = settings_of(ROOT / "recipes/scalerl_baseline.py", "8b")
    changed = changed_sections("forward", baseline)
    assert len(changed) == 10
    assert all(len(sections) == 1 for sections in changed.values()), changed


def test_forward_ablations_go_from_the_baseline_to_scalerl():
    """Together they are ScaleRL, and each of its choices is one of them."""
    start, scalerl = settings_of(ROOT / "recipes/scalerl_baseline.py", "8b")
    together = dict(start)
    for name in (
        "cispo_loss",
        "float32_head",
        "pipeline_rl_8",
        "prompt_average",
        "batch_normalization",
        "zero_variance_filter",
        "no_positive_resampling",
    ):
        found, _ = settings_of(ROOT / f"forward/{name}.py", "8b")
        changes = {
            setting: value
            for setting, value in found.items()
            if value != start[setting]
        }
        assert changes
        together |= changes
    assert together == scalerl


# ScaleRL, arXiv 2510.13786, sections 2 and 3, appendix A.3.
BASELINE = {
    "objective.loss": "clipped",
    "objective.anchor": "behavior",
    "objective.clip_low": 0.2,
    "objective.clip_high": 0.26,
    "objective.aggregation": "sample",
    "objective.advantage": "group_mean",
    "objective.advantage_normalization": "prompt",
    "objective.kl_coefficient": 0.0,
    "objective.entropy_coefficient": 0.0,
    "objective.zero_variance_filter": False,
    "data.no_positive_resampling": False,
    "model.float32_head": False,
    "queue.mode": "batched",
    "queue.max_staleness": 8,
    "batch.num_prompts": 48,
    "batch.group_size": 16,
    "sampler.max_prompt_tokens": 2048,
    "sampler.max_completion_tokens": 12_288 + 2048,
    "optimizer.learning_rate": 5e-7,
    "optimizer.warmup_steps": 100,
    "optimizer.eps": 1e-15,
    "optimizer.weight_decay": 0.01,
    "reward.correct": 1.0,
    "reward.wrong": -1.0,
}


def test_the_baseline_has_the_papers_numbers():
    found, _ = settings_of(ROOT / "recipes/scalerl_baseline.py", "8b")
    assert {setting: found[setting] for setting in BASELINE} == BASELINE


@pytest.mark.parametrize(
    "recipe, expected",
    [
        # 20 rollout steps of 16 updates.
        pytest.param("dapo", {"optimizer.warmup_steps": 320}, id="dapo"),
        pytest.param(
            "ppo",
            {
                "critic.minibatches": 12,
                "critic.value_clip": 0.2,
                "critic.learning_rate": 5e-6,
                "critic.warmup_steps": 50,
                "optimizer.warmup_steps": 50,
                "optimizer.weight_decay": 0.0,
                "batch.num_prompts": 128,
                "batch.group_size": 64,
            },
            id="ppo",
        ),
    ],
)
def test_a_recipe_has_its_papers_schedule(recipe, expected):
    found, _ = settings_of(ROOT / f"recipes/{recipe}.py", "8b")
    assert {setting: found[setting] for setting in expected} == expected


def test_a_curriculum_without_difficulties_says_how_to_have_them():
    config = runpy.run_path(str(ROOT / "recipes/tan2025.py"))["get_config"]("tiny")
    with pytest.raises(ValueError, match=r"data\.difficulty.*scalerl data diff"):
        config_lib.resolve(config)


def test_scalerl_is_the_default():
    found, plain = settings_of(ROOT / "recipes/scalerl.py", "8b")
    assert found == plain


def test_an_unknown_base_lists_the_known_ones():
    get_config = runpy.run_path(str(ROOT / "recipes/dapo.py"))["get_config"]
    with pytest.raises(ValueError, match=r"\.\.\.:9b: choose from \['32b', '8b'"):
        get_config("9b")


@pytest.fixture(scope="module")
def quick_compilation(shared_parts):
    """Nothing here depends on how fast the programs are."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def run(path, directory, monkeypatch, changes):
    """`python -m scalerl_jax.main` in this process."""
    settings = SMALL | changes
    line = [
        "main",
        f"--config={path}:tiny",
        f"--workdir={directory}",
        *(f"--config.{name}={value}" for name, value in settings.items()),
    ]
    monkeypatch.setattr("sys.argv", line)  # ml_collections looks there
    values = flags.FLAGS
    known = set(values)
    try:
        main.main(main.parse_flags(line))
    finally:
        for name in set(values) - known:
            delattr(values, name)
        values.unparse_flags()


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=name_of)
def test_it_runs_on_the_tiny_policy(path, tmp_path, monkeypatch, quick_compilation):
    config = config_of(path, "tiny")
    # As many batches at a time as there are steps.
    changes = {"queue.max_staleness": 2} if config.queue.mode == "batched" else {}
    if config.critic.minibatches > 1:
        changes["critic.minibatches"] = 3
    if config.data.difficulty:
        changes["data.difficulty"] = config.data.difficulty
    run(path, tmp_path, monkeypatch, changes)
    rows = small_run.rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["train/tokens"] > 0 for row in rows)
    if config.objective.kl_coefficient:
        assert rows[0]["kl/mean"] == pytest.approx(0.0, abs=1e-6)  # its own reference
    if config.objective.anchor == "recomputed":
        assert rows[0]["proximal/mean_abs"] < 1e-4  # the sampler is the policy
