"""Every recipe and ablation: its file, and some steps of it on the tiny policy."""

import runpy

import jax
import pytest
import small_run
from absl import flags

from scalerl_jax import config as config_lib
from scalerl_jax import main

# ml_collections loads config files in a way that Python means to drop.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
ROOT = small_run.ROOT / "configs"
FILES = sorted((*ROOT.glob("recipes/*.py"), *ROOT.glob("ablations/*.py")))
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
    return main.flatten(on_base.to_dict()), main.flatten(plain.to_dict())


@every_file
def test_a_file_is_short_and_says_its_source_command_and_result(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 20
    docstring = text.split('"""')[1]
    source, command = docstring.split("\n\n")
    assert "arXiv " in source or "ScaleRL's figure 5" in source
    assert "Not yet run" in source or "pass rate" in source
    assert f"--config=configs/{name_of(path)}.py:tiny" in command


@every_file
@pytest.mark.parametrize("base", ["8b", "32b", "tiny"])
def test_a_file_works_with_any_policy(path, base):
    config = runpy.run_path(str(path))["get_config"](base)
    if base != "tiny":
        config.model.checkpoint = "named, not read"
    config_lib.resolve(config)


@every_file
def test_on_the_tiny_policy_nothing_of_a_large_one_is_left(path):
    found, plain = settings_of(path, "tiny")
    for setting in ("optimizer.learning_rate", "batch.num_prompts", "model.checkpoint"):
        assert found[setting] == plain[setting]


def test_each_ablation_changes_one_choice():
    changed = {
        path.stem: {
            setting.split(".")[0]
            for setting, value in settings_of(path, "8b")[0].items()
            if value != settings_of(path, "8b")[1][setting]
        }
        for path in FILES
        if path.parent.name == "ablations"
    }
    assert len(changed) == 10
    # The length penalty takes the place of the interruptions.
    assert changed.pop("length_penalty") == {"objective", "interruption"}
    assert all(len(sections) == 1 for sections in changed.values()), changed


def test_scalerl_is_the_default():
    found, plain = settings_of(ROOT / "recipes/scalerl.py", "8b")
    assert found == plain


def test_an_unknown_base_lists_the_known_ones():
    get_config = runpy.run_path(str(ROOT / "recipes/dapo.py"))["get_config"]
    with pytest.raises(ValueError, match=r"\.\.\.:9b: choose from \['32b', '8b'"):
        get_config("9b")


@pytest.fixture(scope="module")
def quick_compilation(program_cache):
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


@every_file
def test_it_runs_on_the_tiny_policy(path, tmp_path, monkeypatch, quick_compilation):
    config = runpy.run_path(str(path))["get_config"]("tiny")
    # As many batches at a time as there are steps.
    changes = {"queue.max_staleness": 2} if config.queue.mode == "batched" else {}
    run(path, tmp_path, monkeypatch, changes)
    rows = small_run.rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["train/tokens"] > 0 for row in rows)
    if config.objective.kl_coefficient:
        assert rows[0]["kl/mean"] == pytest.approx(0.0, abs=1e-6)  # its own reference
    if config.objective.anchor == "recomputed":
        assert rows[0]["proximal/mean_abs"] < 1e-4  # the sampler is the policy
