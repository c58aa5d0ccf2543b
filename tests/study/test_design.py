"""Studies as their files say them: what is refused, and the order of the runs."""

import dataclasses
from pathlib import Path

import pytest

from scalerl_jax.study.design import Study, check, interleaved, read_study

SMALL = Study(
    base="configs/tiny.py",
    common={"eval.every": 2},
    arms={"prompt": {}, "token": {"objective.aggregation": "token"}},
    seeds=(0, 1, 2),
    steps=12,
)

FOLDER = Path(__file__).parents[2] / "configs" / "studies"
SHIPPED = sorted(
    file.stem for file in FOLDER.glob("*.py") if "def get_study" in file.read_text()
)


def test_each_arm_differs_in_what_it_says_alone():
    settings = check(SMALL)
    differing = {
        name
        for name, value in settings["prompt"].items()
        if settings["token"][name] != value
    }
    assert differing == {"objective.aggregation"}
    assert settings["token"]["train.num_steps"] == 12


def test_arms_of_a_seed_come_together_and_each_seed_begins_with_another():
    names = [run.name for run in interleaved(SMALL)]
    assert names == [
        "prompt/seed0",
        "token/seed0",
        "token/seed1",
        "prompt/seed1",
        "prompt/seed2",
        "token/seed2",
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"arms": {}}, "arms"),
        ({"arms": {"../x": {}}}, "'../x'"),
        ({"arms": {"a" * 256: {}}}, "cannot be the name of a folder"),
        ({"arms": {"a": {}, "b": {}}}, "a and b differ in nothing"),
        ({"arms": {"a": {}, "b": {"seed": 4}}}, "arm b sets seed"),
        ({"common": {"train.num_steps": 4}}, "common sets train.num_steps"),
        ({"arms": {"a": {"objective.los": "x"}}}, "arm a.*objective.los"),
        ({"arms": {"a": {"objective.loss": "x"}}}, "arm a.*objective.loss"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, r"seeds = \(1, 1\)"),
        ({"seeds": range(1001)}, "2002 runs"),
        ({"steps": 0}, "steps = 0"),
        ({"steps": 7}, "steps = 7"),
        ({"tokens": 0.0}, "tokens = 0"),
        ({"tokens": 500.0}, "tokens = 500 .* 4 of arm prompt"),
        ({"chip_hours": -1.0}, "chip_hours = -1"),
        ({"pairs": [("prompt", "sample")]}, "pairs.*'sample'"),
        ({"pairs": [("token", "token")]}, "pairs.*token"),
        ({"base": "configs/none.py"}, "base = configs/none.py"),
        ({"axis": "hours"}, "axis = 'hours'; choose from generated_tokens"),
        (
            {"arms": {"a": {}, "b": {"eval.num_prompts": 30}}},
            "a and b are not evaluated alike: eval.num_prompts",
        ),
        (
            {"arms": {"a": {}, "b": {"eval.temperature": 0.5}}},
            "a and b are not evaluated alike: eval.temperature = 1.0 and 0.5",
        ),
        (
            {"arms": {"a": {}, "b": {"data.tasks": ("chain_sum",)}}},
            "not evaluated alike: data.tasks .*name eval.sets in common",
        ),
        (
            {"common": {"scaling.live": True, "scaling.stop": "plateau"}},
            "scaling.stop = 'plateau' of arm prompt would end",
        ),
        # All seeds, and not the first alone, whose run would be the last to fail.
        ({"seeds": (0, -1)}, "seed -1 of seeds must be 0 or more"),
        ({"seeds": (0, 2**40)}, f"seed {2**40} of seeds must be"),
        ({"seeds": (0, 1.5)}, r"seeds = \(0, 1.5\) must be whole numbers"),
        ({"seeds": 3}, "seeds = 3 must be whole numbers"),
        ({"seeds": "01"}, "seeds = '01' must be whole numbers"),
        ({"arms": ["a", "b"]}, r"arms = \['a', 'b'\] must be settings by the arm's"),
        ({"arms": {"a": None}}, "arms = {'a': None} must be"),
        ({"arms": {1: {}}}, "arms = {1: {}} must be"),
        ({"common": None}, "common = None must be settings by name"),
        ({"base": None}, "base = None must be the name"),
        ({"steps": 12.0}, "steps = 12.0 must be a whole number"),
        ({"tokens": "1e6"}, "tokens = '1e6' must be a number"),
        ({"pairs": ("prompt", "token")}, "pairs = .* must be names of arms by twos"),
        ({"pairs": [("prompt",)]}, "pairs = .* must be names of arms by twos"),
    ],
)
def test_what_makes_no_study_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        check(dataclasses.replace(SMALL, **changes))


def test_arms_of_other_tasks_are_compared_on_the_sets_that_all_share():
    study = dataclasses.replace(
        SMALL,
        common=SMALL.common | {"eval.sets": ("letter_counting",)},
        arms={"a": {}, "b": {"data.tasks": ("chain_sum",)}},
    )
    assert check(study)["b"]["data.tasks"] == ["chain_sum"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("raise OSError('no disk')", "base = .*base.py fails: OSError: no disk"),
        ("raise SystemExit(3)", "base = .*base.py fails: SystemExit: 3"),
        ("def get_config(): return 3", "arm prompt: .* returns int"),
        # Another value at each call: arms would differ in what they do not say.
        (
            "import random, runpy\n"
            "def get_config():\n"
            "    config = runpy.run_path('configs/tiny.py')['get_config']()\n"
            "    config.optimizer.learning_rate = random.uniform(1e-6, 1e-5)\n"
            "    return config\n",
            "differs from the base in more than it says: optimizer.learning_rate",
        ),
    ],
)
def test_a_base_that_cannot_start_is_refused_by_name(tmp_path, text, named):
    (tmp_path / "base.py").write_text(text)
    study = dataclasses.replace(SMALL, base=str(tmp_path / "base.py"))
    with pytest.raises(ValueError, match=named):
        check(study)


@pytest.mark.parametrize("text", ["", "def get_study(): return 1", "get_study = 2"])
def test_a_file_without_a_study_is_refused(tmp_path, text):
    (tmp_path / "x.py").write_text(text)
    with pytest.raises(ValueError, match="get_study"):
        read_study(str(tmp_path / "x.py"))


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"nosuch.*smoke"):
        read_study("nosuch")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_study_can_be_run(name):
    assert check(read_study(name))
