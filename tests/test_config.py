"""Settings: names and types that are refused, and that every setting is used."""

import dataclasses
import importlib.util
import inspect
import re
import sys
import typing
from pathlib import Path

import ml_collections
import pytest

import scalerl_jax
from scalerl_jax import config as config_lib
from scalerl_jax.config import (
    LOSSES,
    SETTINGS,
    Config,
    bases,
    build,
    listing,
    resolve,
    to_json,
)
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.run.record import flatten
from scalerl_jax.wiring import fit_devices, make_ledger
from scalerl_jax.wiring.devices import ledger_pools

PACKAGE = Path(scalerl_jax.__file__).parent
CONFIGS = PACKAGE.parent / "configs"
# The defaults are ScaleRL's; what a run cannot do without must be named.
RUNNABLE = {"model.architecture": "tiny"}


@pytest.mark.parametrize(
    "name", ["based_on", "ask_polaris", "vanilla_grpo", "scalerl_baseline"]
)
def test_a_starting_point_of_recipes_has_its_old_place_too(name):
    assert getattr(config_lib, name) is getattr(bases, name)


def test_another_name_is_none_of_the_config():
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        config_lib.nobody  # noqa: B018  asked for, and nothing else


def changed(**changes):
    """The defaults with changes, `section__setting=value`."""
    config = config_lib.defaults().to_dict()
    for name, value in (RUNNABLE | changes).items():
        *sections, setting = name.replace("__", ".").split(".")
        part = config
        for section in sections:
            part = part[section]
        part[setting] = value
    return ml_collections.ConfigDict(config)


def test_defaults_resolve_to_what_is_written():
    resolved = resolve(changed())
    assert resolved == dataclasses.replace(
        Config(), model=dataclasses.replace(Config().model, architecture="tiny")
    )


def test_what_is_written_to_disk_reads_back():
    resolved = resolve(changed(data__tasks=("chain_sum", "spell_backward")))
    assert build(Config, to_json(resolved)) == resolved


@pytest.mark.parametrize(
    "changes, setting, kind",
    [
        pytest.param({"speed": 3}, "speed", "", id="top"),
        pytest.param({"batch__size": 3}, "batch.size", "", id="in a section"),
        pytest.param(
            {"batch__group_size": 3.5},
            "batch.group_size = 3.5",
            "type int",
            id="float for int",
        ),
        pytest.param(
            {"batch__group_size": True},
            "batch.group_size = True",
            "type int",
            id="bool for int",
        ),
        pytest.param(
            {"batch__packing": 1}, "batch.packing = 1", "type bool", id="int for bool"
        ),
        pytest.param(
            {"optimizer__learning_rate": True},
            "optimizer.learning_rate = True",
            "type float",
            id="bool for float",
        ),
        pytest.param(
            {"optimizer__learning_rate": "5e-7"},
            "optimizer.learning_rate = '5e-7'",
            "type float",
            id="text for float",
        ),
        pytest.param(
            {"data__tasks": "chain_sum"},
            "data.tasks = 'chain_sum'",
            "tuple",
            id="text for tuple",
        ),
        pytest.param(
            {"data__tasks": ("chain_sum", 3)},
            "data.tasks[] = 3",
            "type str",
            id="int in a tuple of texts",
        ),
        pytest.param({"batch": 3}, "batch = 3", "", id="a value for a section"),
    ],
)
def test_wrong_names_and_types_are_refused(changes, setting, kind):
    with pytest.raises(ValueError, match=f"^{re.escape(setting)} .*{kind}"):
        resolve(changed(**changes))


@pytest.mark.parametrize(
    "changes, setting",
    [
        pytest.param({"param_dtype": "bfloat16"}, "param_dtype", id="rounded already"),
        pytest.param({"float32_head": False}, "float32_head", id="no float32 product"),
    ],
)
def test_a_head_whose_weights_are_rounded_for_nothing_is_refused(changes, setting):
    rounded = dict(head_weights_dtype="bfloat16", sampler_dtype="bfloat16")
    changes = {f"model__{name}": value for name, value in (rounded | changes).items()}
    with pytest.raises(ValueError, match=rf"head_weights_dtype = .*model\.{setting}"):
        resolve(changed(**changes))


def test_a_whole_number_will_do_for_a_float():
    learning_rate = resolve(changed(optimizer__learning_rate=1)).optimizer.learning_rate
    assert learning_rate == 1.0 and type(learning_rate) is float


def test_a_missing_package_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ValueError, match="tracking.wandb_project = 'p'.*pip install"):
        resolve(changed(tracking__wandb_project="p"))


def test_interruption_settings_do_not_matter_when_it_is_off():
    resolve(changed(interruption__enabled=False, interruption__max_tokens=20_000))


@pytest.mark.parametrize(
    "num_devices, changes, expected",
    [
        pytest.param(8, {}, (8, 8), id="all devices"),
        pytest.param(6, {}, (4, 8), id="6 divides neither 8 rows nor 128 units"),
        pytest.param(
            8,
            dict(generators__devices=2, mesh__tensor=2),
            (2, 8),
            id="the sampler and tensor have theirs",
        ),
        pytest.param(
            8,
            dict(mesh__data=2, batch__rows_per_microbatch=0),
            (4, 8),
            id="a row for every shard",
        ),
        pytest.param(
            8,
            dict(mesh__context=2, batch__rows_per_microbatch=0),
            (4, 4),
            id="context cuts no rows",
        ),
        pytest.param(
            8,
            dict(mesh__fsdp=2, batch__rows_per_microbatch=0),
            (2, 2),
            id="rows alone are left to the devices",
        ),
        pytest.param(
            8, dict(mesh__fsdp=2, batch__rows_per_microbatch=6), (2, 6), id="as set"
        ),
        pytest.param(
            7,
            dict(mesh__expert=4, batch__rows_per_microbatch=0),
            (4, 4),
            id="a multiple of the parts that experts are in",
        ),
    ],
)
def test_what_is_left_to_the_devices_is_as_many_shards_as_fit(
    num_devices, changes, expected
):
    config = resolve(changed(**({"mesh__fsdp": 0} | changes)))
    fitted = fit_devices(config, ARCHITECTURES["tiny"], num_devices)
    assert (fitted.mesh.fsdp, fitted.batch.rows_per_microbatch) == expected
    mesh = dataclasses.replace(fitted.mesh, fsdp=config.mesh.fsdp)
    assert mesh == config.mesh  # nothing else has changed


def test_the_ledger_counts_both_devices_of_a_tpu7x_as_one_chip():
    config = resolve(changed(mesh__fsdp=4, generators__count=2, generators__devices=1))
    fitted = fit_devices(config, ARCHITECTURES["tiny"], 6)
    pools = {"replica0": 1, "replica1": 1, "learner": 4}
    assert ledger_pools(fitted, "TPU v5p") == ledger_pools(fitted, "cpu") == pools
    halves = {name: devices / 2 for name, devices in pools.items()}
    assert ledger_pools(fitted, "TPU7x") == halves
    ledger = make_ledger(fitted, chip="TPU7x")
    assert ledger.idle_shares().keys() == pools.keys()


APART = {"generators__placement": "apart"}
SHARED = {"generators__placement": "shared"}


@pytest.mark.parametrize(
    "num_devices, changes, expected",
    [
        pytest.param(8, {}, (1, 1, "shared"), id="none asked for"),
        pytest.param(
            8, dict(mesh__tensor=2), (1, 2, "shared"), id="as the learner cuts heads"
        ),
        pytest.param(
            8, dict(generators__devices=2), (1, 2, "apart"), id="enough for both"
        ),
        pytest.param(
            8,
            dict(generators__devices=2, generators__count=0, mesh__fsdp=4),
            (2, 2, "apart"),
            id="as many as are left",
        ),
        pytest.param(
            2,
            dict(generators__devices=2),
            (1, 2, "shared"),
            id="too few for both: by turns, on all",
        ),
        pytest.param(
            1, dict(generators__devices=2), (1, 1, "shared"), id="on what there is"
        ),
        pytest.param(
            4,
            dict(generators__devices=2, generators__count=0, **SHARED),
            (2, 2, "shared"),
            id="shared, on all",
        ),
    ],
)
def test_generators_get_what_the_devices_allow(num_devices, changes, expected):
    config = resolve(changed(**({"mesh__fsdp": 0} | changes)))
    config = fit_devices(config, ARCHITECTURES["tiny"], num_devices)
    generators = config.generators
    found = (generators.count, generators.devices, generators.placement)
    assert found == expected
    again = fit_devices(config, ARCHITECTURES["tiny"], num_devices)
    assert again == config


@pytest.mark.parametrize(
    "num_devices, changes, message",
    [
        pytest.param(
            2,
            dict(mesh__context=2, mesh__tensor=2),
            "mesh.fsdp = 0 .* 2 devices",
            id="too few devices",
        ),
        pytest.param(
            4,
            dict(generators__devices=2, generators__count=2, **APART),
            "generators.count = 2 x generators.devices = 2",
            id="the samplers have them all",
        ),
        pytest.param(
            8,
            dict(mesh__data=2, batch__rows_per_microbatch=3),
            "batch.rows_per_microbatch = 3 .* mesh.data = 2",
            id="uneven rows",
        ),
    ],
)
def test_devices_that_cannot_be_shared_out_are_refused(num_devices, changes, message):
    config = resolve(changed(mesh__fsdp=0, **changes))
    with pytest.raises(ValueError, match=message):
        fit_devices(config, ARCHITECTURES["tiny"], num_devices)


NUMBERS = [name for name, each in SETTINGS.items() if each.kind in (int, float)]
# Any number; the first two in their order.
REWARDS = {"reward.correct", "reward.wrong", "reward.passed_at"}


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in REWARDS])
def test_no_number_may_be_negative(name):
    # -1 is the number of no prompt.
    value = SETTINGS[name].kind(-2 if name == "debug.trace_prompt" else -1)
    with pytest.raises(ValueError, match=re.escape(f"{name} = {value} ")):
        resolve(changed(**{name: value}))


RUN_FILES = [
    path
    for path in sorted(CONFIGS.rglob("*.py"))
    if "config_lib.defaults()" in path.read_text()
]


def test_there_are_config_files_to_check():
    assert {"tiny.py"} <= {path.name for path in RUN_FILES}


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_config_file_resolves_and_holds_differences(path):
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Where its model is installed or not; the name of one is not looked up.
    given = ("model.gguf",) if path.stem == "smollm2" else ()
    resolved = resolve(module.get_config(*given))
    assert resolved != Config()
    assert re.search(r"^ *scalerl train ", module.__doc__, re.MULTILINE)


SOURCES = "\n".join(
    path.read_text()
    for path in PACKAGE.rglob("*.py")
    if PACKAGE / "config" not in path.parents
)
# What several settings say together.
SOURCES += "".join(
    inspect.getsource(each.fget)
    for each in vars(Config).values()
    if isinstance(each, property)
)


# It only lifts a refusal, which tests/objective/test_terms.py shows.
ALLOWS = "objective.allow_sampling_filters"


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {ALLOWS}))
def test_every_setting_is_read_somewhere(name):
    last = name.split(".")[-1]
    # A loss gets its settings by their names, as keywords.
    if any(last in loss.settings for loss in LOSSES.values()):
        return
    assert re.search(rf"\.{last}\b", SOURCES), f"{name} does nothing"


def test_every_setting_is_in_words_and_once():
    assert SETTINGS.keys() == flatten(to_json(Config())).keys()
    assert not [name for name, each in SETTINGS.items() if not each.text]


def test_a_condition_names_another_setting_and_values_that_it_takes():
    needed = [each.needs for each in SETTINGS.values() if each.needs]
    assert needed
    for each in needed:
        other = SETTINGS[each.setting]
        choices = typing.get_args(other.kind)
        assert set(each.values) <= set(choices or each.values)
        possible = {True, False} if other.kind is bool else set(choices)
        assert set(each.values) != possible or not possible, "it always holds"


def test_the_page_of_settings_is_what_the_code_says():
    page = (PACKAGE.parent / "docs" / "settings.md").read_text()
    assert page == listing.settings_page(), "run: make settings"
