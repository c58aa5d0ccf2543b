"""Settings: what is refused and in which words; and that every one of them is used."""

import dataclasses
import importlib.util
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
from scalerl_jax.wiring import fit_devices

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
    "changes, message",
    [
        pytest.param(
            {"speed": 3}, r"speed is not a setting; choose from \['seed'", id="top"
        ),
        pytest.param(
            {"batch__size": 3},
            r"batch\.size is not a setting; choose from \['batch\.num_prompts'",
            id="in a section",
        ),
        pytest.param(
            {"batch__group_size": 3.5},
            r"batch\.group_size = 3\.5 is of type float; it must be of type int",
            id="float for int",
        ),
        pytest.param(
            {"batch__group_size": True},
            r"batch\.group_size = True is of type bool; it must be of type int",
            id="bool for int",
        ),
        pytest.param(
            {"batch__packing": 1},
            r"batch\.packing = 1 is of type int; it must be of type bool",
            id="int for bool",
        ),
        pytest.param(
            {"optimizer__learning_rate": True},
            r"learning_rate = True is of type bool; it must be of type float",
            id="bool for float",
        ),
        pytest.param(
            {"optimizer__learning_rate": "5e-7"},
            r"learning_rate = '5e-7' is of type str; it must be of type float",
            id="text for float",
        ),
        pytest.param(
            {"data__tasks": "chain_sum"},
            r"data\.tasks = 'chain_sum' must be a tuple",
            id="text for tuple",
        ),
        pytest.param(
            {"data__tasks": ("chain_sum", 3)},
            r"data\.tasks\[\] = 3 is of type int; it must be of type str",
            id="int in a tuple of texts",
        ),
        pytest.param(
            {"batch": 3}, r"batch = 3 must be a section", id="a value for a section"
        ),
        pytest.param(
            {"queue__mode": "async"},
            r"queue\.mode = 'async'; choose from \['batched', 'pipeline'\]",
            id="unknown choice",
        ),
        pytest.param(
            {"optimizer__learning_rate": float("nan")},
            r"optimizer\.learning_rate = nan must be a finite number",
            id="not a number",
        ),
        pytest.param(
            {"queue__batch_timeout_s": float("inf")},
            r"queue\.batch_timeout_s = inf must be a finite number",
            id="for ever",
        ),
    ],
)
def test_wrong_names_and_types_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(changed(**changes))


def test_a_whole_number_will_do_for_a_float():
    learning_rate = resolve(changed(optimizer__learning_rate=1)).optimizer.learning_rate
    assert learning_rate == 1.0 and type(learning_rate) is float


@pytest.mark.parametrize(
    "changes, message",
    [
        pytest.param(
            {"sampler__temperature": 0.0},
            r"sampler\.temperature = 0\.0 must be above 0",
            id="temperature",
        ),
        pytest.param(
            {"generators__versions": 1, "eval__concurrent": True},
            r"versions = 1 and eval\.concurrent = True contradict .* set",
            id="an evaluation's version without room",
        ),
        pytest.param(
            {"queue__max_waiting": -1},
            r"queue\.max_waiting = -1 must be 0 or more",
            id="a negative number of batches",
        ),
        pytest.param(
            {"queue__max_staleness": -1},
            r"queue\.max_staleness = -1 must be 0 or more",
            id="negative staleness",
        ),
        pytest.param(
            {"sampler__top_p": 1.5},
            r"sampler\.top_p = 1\.5 must be 1 at most",
            id="share",
        ),
        pytest.param(
            {"sampler__top_p": 0.0},
            r"sampler\.top_p = 0\.0 must be above 0",
            id="no share",
        ),
        pytest.param(
            {"optimizer__beta2": 1.0},
            r"optimizer\.beta2 = 1\.0 must be below 1",
            id="beta",
        ),
        pytest.param(
            {"batch__row_tokens": 100},
            r"batch\.row_tokens = 100 cannot hold sampler\.max_prompt_tokens \+ "
            r"sampler\.max_completion_tokens = 16384; raise",
            id="rows too short",
        ),
        pytest.param(
            {"interruption__max_tokens": 9000},
            r"interruption\.max_tokens = 9000 is below "
            r"interruption\.min_tokens = 10000; raise",
            id="empty interval",
        ),
        pytest.param(
            {"interruption__max_tokens": 14336},
            r"interruption\.max_tokens = 14336 leaves no room .* "
            r"sampler\.max_completion_tokens = 14336",
            id="no room for an answer",
        ),
        pytest.param(
            {"interruption__phrase": "time is up"},
            r"interruption\.phrase = 'time is up' must end with "
            r"interruption\.end_of_thinking = '</think>'",
            id="the phrase does not end thinking",
        ),
        pytest.param(
            {"batch__rows_per_microbatch": 6, "mesh__data": 2, "mesh__fsdp": 2},
            r"batch\.rows_per_microbatch = 6 cannot be cut into mesh\.data \* "
            r"mesh\.fsdp = 4 shards; make it a multiple",
            id="uneven rows",
        ),
        pytest.param(
            {"mesh__context": 3},
            r"batch\.row_tokens = 16384 cannot be cut into mesh\.context = 3 shards; "
            r"make it a multiple",
            id="uneven shards of a row",
        ),
        pytest.param(
            {"mesh__context": 0}, r"mesh\.context = 0 must be above 0", id="no shards"
        ),
        pytest.param(
            {"optimizer__stochastic_rounding": True},
            r"optimizer\.stochastic_rounding = True needs .* "
            r"model\.param_dtype = 'bfloat16'",
            id="nothing to round",
        ),
        pytest.param(
            {"batch__group_size": 1},
            r"batch\.group_size = 1 leaves every group without variance .* 2 or more",
            id="groups of one",
        ),
        pytest.param(
            {"reward__correct": -1.0},
            r"reward\.correct = -1\.0 must be above reward\.wrong = -1\.0",
            id="nothing to learn",
        ),
        pytest.param(
            {"queue__mode": "batched", "queue__max_staleness": 0},
            r"queue\.max_staleness = 0 with queue\.mode = 'batched' .* k >= 1",
            id="batched without staleness",
        ),
        pytest.param(
            {"batch__epochs": 4, "queue__max_staleness": 2},
            r"queue\.max_staleness = 2 is below batch\.epochs - 1 = 3, .* raise",
            id="the last epoch past the bound",
        ),
        pytest.param(
            {"queue__max_staleness": 8, "queue__max_waiting": 10},
            r"queue\.max_waiting = 10 can never .* at most 9 batches .* set 0 for no",
            id="more may wait than may start",
        ),
        pytest.param(
            {"queue__mode": "batched", "queue__max_waiting": 2},
            r"queue\.max_waiting = 2 is not read with queue\.mode = 'batched'",
            id="a window waits whole",
        ),
        pytest.param(
            {
                "batch__epochs": 3,
                "queue__max_staleness": 8,
                "queue__mode": "batched",
            },
            r"queue\.max_staleness = 8 .* into batch\.epochs = 3 passes; make it a mul",
            id="a window that is no number of epochs",
        ),
        pytest.param(
            {"batch__dynamic_sampling": True, "batch__max_refills": 0},
            r"batch\.dynamic_sampling = True with batch\.max_refills = 0 .* 1 or more",
            id="dynamic sampling without a refill",
        ),
        pytest.param(
            {
                "batch__dynamic_sampling": True,
                "objective__zero_variance_filter": False,
            },
            r"objective\.zero_variance_filter = False keeps them; choose one",
            id="refills for what is kept",
        ),
        pytest.param(
            {"tracking__profile_steps": (5, 4)},
            r"tracking\.profile_steps = \(5, 4\) must be the first and the last",
            id="a trace that ends before it begins",
        ),
        pytest.param(
            {"data__difficulty": "rates.jsonl"},
            r"data\.difficulty = 'rates\.jsonl' is not read with data\.order = 'shuf",
            id="difficulties of shuffled prompts",
        ),
        pytest.param(
            {"data__order": "progressive"},
            r"data\.open_steps = 0 with data\.order = 'progressive': .* above 0 with",
            id="progressive without steps",
        ),
        pytest.param(
            {"data__order": "easy_to_hard", "data__open_steps": 5},
            r"data\.open_steps = 5 with data\.order = 'easy_to_hard': .* 0 without",
            id="steps without progress",
        ),
        pytest.param(
            {"data__task_weights": (1.0, 2.0)},
            r"data\.task_weights = \(1\.0, 2\.0\) are 2 shares of the 1 tasks in data",
            id="weights of other tasks",
        ),
        pytest.param(
            {
                "data__tasks": ("chain_sum", "products"),
                "data__task_weights": (1.0, 0.0),
            },
            r"data\.task_weights = \(1\.0, 0\.0\) must be above 0; leave a task",
            id="a task without a share",
        ),
        pytest.param(
            {"eval__sets": ("math500", "math500")},
            r"eval\.sets = \('math500', 'math500'\) must hold each set once",
            id="a set twice",
        ),
        pytest.param(
            {"data__system_prompt": "Be brief."},
            r"data\.system_prompt = 'Be brief\.' is not read with data\.template = "
            r"'\{question\}<think>'; set data\.template = 'chat', or leave it at ''",
            id="a system prompt without a chat",
        ),
        pytest.param(
            {"data__user_template": "{question}!"},
            r"data\.user_template = '\{question\}!' is not read",
            id="a user's message without a chat",
        ),
        pytest.param(
            {"data__enable_thinking": False},
            r"data\.enable_thinking = False is not read",
            id="thinking without a chat",
        ),
        pytest.param(
            {"data__order": "easy_to_hard"},
            r"data\.order = 'easy_to_hard' needs data\.difficulty, .*: scalerl "
            r"data difficulty .* 'measured'",
            id="an order by nothing",
        ),
        pytest.param(
            {"model__float32_head": False},
            r"model\.float32_head = False .* float32 on both sides: nothing would .*"
            r"model\.sampler_dtype to 'bfloat16'",
            id="a head that is float32 in any case",
        ),
        pytest.param(
            {"data__open_share": 0.0},
            r"data\.open_share = 0\.0 must be above 0",
            id="nothing open",
        ),
        pytest.param(
            {
                "data__order": "progressive",
                "data__difficulty": "measured",
                "data__open_steps": 5,
                "data__open_share": 0.5,
                "data__train_prompts": 90,
            },
            r"= 45 prompts at the start are fewer than batch\.num_prompts = 48; raise",
            id="too few open prompts",
        ),
        pytest.param(
            {"sampler__length_stages": ((0, 8, 9),)},
            r"sampler\.length_stages = \(\(0, 8, 9\),\) must be pairs",
            id="stages of three",
        ),
        pytest.param(
            {"sampler__length_stages": ((5, 8),)},
            r"sampler\.length_stages = .* must begin at step 0, not 5",
            id="no first stage",
        ),
        pytest.param(
            {"sampler__length_stages": ((0, 8), (9, 16), (9, 32))},
            r"must have growing steps, not \(0, 9, 9\)",
            id="two stages at once",
        ),
        pytest.param(
            {"sampler__length_stages": ((0, 16), (9, 8))},
            r"must have growing completion tokens, not \(16, 8\)",
            id="a stage that shrinks",
        ),
        pytest.param(
            {"sampler__length_stages": ((0, 0), (9, 8))},
            r"must stay between 1 and sampler\.max_completion_tokens = 14336",
            id="a stage without tokens",
        ),
        pytest.param(
            {"sampler__length_stages": ((0, 14337),)},
            r"must stay between 1 and sampler\.max_completion_tokens = 14336; raise",
            id="a stage past the sampler's limit",
        ),
        pytest.param(
            {"optimizer__final_share": 1.5},
            r"optimizer\.final_share = 1\.5 must be 1 at most",
            id="a rate that grows",
        ),
        pytest.param(
            {"optimizer__decay_steps": 10},
            r"optimizer\.decay_steps = 10 is not read with .* 'constant'; .* 'cosine'",
            id="a constant that falls",
        ),
        pytest.param(
            {"optimizer__schedule": "cosine", "optimizer__decay_steps": 100},
            r"optimizer\.decay_steps = 100, where .* optimizer\.warmup_steps = 100",
            id="all of it warm-up",
        ),
        pytest.param(
            {"optimizer__schedule": "cosine", "train__num_steps": 99},
            r"train\.num_steps = 99, where .* optimizer\.warmup_steps = 100",
            id="a run of warm-up",
        ),
        pytest.param(
            {"batch__num_prompts": 48, "data__train_prompts": 47},
            r"batch\.num_prompts = 48 is more than data\.train_prompts = 47",
            id="too few prompts",
        ),
        pytest.param(
            {"model.architecture": "checkpoint"},
            r"model\.architecture = 'checkpoint' needs model\.checkpoint",
            id="no model",
        ),
    ],
)
def test_impossible_values_are_refused_by_name_value_and_limit(changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(changed(**changes))


def test_a_missing_package_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    match = r"tracking\.wandb_project = 'p' needs .* pip install 'scalerl_jax\[wandb\]'"
    with pytest.raises(ValueError, match=match):
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
            r"mesh\.fsdp = 0 finds no shards: the 2 devices .* at least .* = 4",
            id="too few devices",
        ),
        pytest.param(
            4,
            dict(generators__devices=2, generators__count=2, **APART),
            r"the 0 devices that generators\.count = 2 x generators\.devices = 2 leave",
            id="the samplers have them all",
        ),
        pytest.param(
            8,
            dict(mesh__data=2, batch__rows_per_microbatch=3),
            r"batch\.rows_per_microbatch = 3 cannot be cut into mesh\.data = 2 shards",
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
    assert re.search(r"^ *scalerl (train|warmstart) ", module.__doc__, re.MULTILINE)


SOURCES = "\n".join(
    path.read_text()
    for path in PACKAGE.rglob("*.py")
    if PACKAGE / "config" not in path.parents
)


@pytest.mark.parametrize("name", SETTINGS)
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
        assert not (each.values and each.holds(other.default)), "it always holds"


def test_the_page_of_settings_is_what_the_code_says():
    page = (PACKAGE.parent / "docs" / "settings.md").read_text()
    assert page == listing.settings_page(), "run: make settings"
