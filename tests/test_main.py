"""What a user can get wrong: one line that says what and how to go on, at once."""

import json
import os
import re
import shutil

import pytest
import small_run
from absl import flags

from scalerl_jax import main
from scalerl_jax.run.directory import open_run_directory
from scalerl_jax.run.record import flatten
from scalerl_jax.train import RunOutcome

# ml_collections loads config files in a way that Python means to drop.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
BASE = small_run.make_config().model.checkpoint


@pytest.fixture
def command(capfd, monkeypatch):
    """The command line in this process: exit status, and the lines of stderr."""
    values = flags.FLAGS

    def run(*arguments):
        line = ["main", *map(str, arguments)]
        monkeypatch.setattr("sys.argv", line)  # ml_collections looks there
        known = set(values)
        try:
            main.main(main.parse_flags(line))
        except SystemExit as end:
            status = end.code
        else:
            status = 0
        finally:
            # Each --config.name has become a flag; the next line has others.
            for name in set(values) - known:
                delattr(values, name)
            values.unparse_flags()
        return status, capfd.readouterr().err.splitlines()

    return run


def refused(result, *words, status=2):
    """One line that holds these words, and no word of compiling."""
    found, lines = result
    assert found == status, lines
    assert not [line for line in lines if "compiling" in line]
    (line,) = [line for line in lines if line != "loading"]
    assert line.startswith("error: ")
    for word in words:
        assert str(word) in line, line


CASES = [
    pytest.param(
        {"batch.group_sise": 8},
        ("--config", "'group_sise'", 'Did you mean "group_size"'),
        id="unknown setting",
    ),
    pytest.param(
        {"queue.nope": 8},
        ("--config", "'nope'", "'queue.mode'", "'queue.max_staleness'"),
        id="unknown setting, unlike any",
    ),
    pytest.param(
        {"queu.mode": "batched"},
        ("--config", "'queu'", "queue.mode"),
        id="unknown section",
    ),
    pytest.param(
        {"batch.group_size": 3.5},
        ("--config.batch.group_size=3.5", "int"),
        id="fraction for an integer",
    ),
    pytest.param(
        {"queue.mode": "pipelined"},
        ("queue.mode = 'pipelined'", "['batched', 'pipeline']"),
        id="unknown choice",
    ),
    pytest.param(
        {"model.architecture": "tiny2"},
        ("model.architecture = 'tiny2'", "'tiny'"),
        id="unknown architecture",
    ),
    pytest.param(
        {"batch.group_size": 1},
        ("batch.group_size = 1", "2 or more"),
        id="group without variance",
    ),
    pytest.param(
        {"queue.mode": "batched", "queue.max_staleness": 0},
        ("queue.max_staleness = 0", "queue.mode = 'batched'", "k >= 1"),
        id="batched without staleness",
    ),
    pytest.param(
        {"batch.row_tokens": 100},
        ("batch.row_tokens = 100", "= 112", "raise the first or lower"),
        id="row too short",
    ),
    pytest.param(
        {"batch.num_prompts": 61},
        ("batch.num_prompts = 61", "data.train_prompts = 60", "lower the first"),
        id="batch larger than the data",
    ),
    pytest.param(
        {"mesh.data": 16, "batch.rows_per_microbatch": 16},
        ("mesh.data", "16 learner devices", "there are 8", "lower one of the axes"),
        id="more devices than there are",
    ),
    pytest.param(
        {"interruption.phrase": "a" * 30 + "</think>"},
        ("interruption.phrase has 31 tokens", "= 24", "no room for an answer"),
        id="phrase without room",
    ),
    pytest.param(
        {"sampler.max_prompt_tokens": 8},
        ("tokens, more than sampler.max_prompt_tokens = 8", "raise the limit"),
        id="prompt too long",
    ),
    pytest.param(
        {"data.tasks": ("chain_sum", "sums")},
        ("data.tasks holds 'sums'", "'chain_sum'"),
        id="unknown task",
    ),
    pytest.param(
        {"data.tasks": ()}, ("data.tasks = ()", "must hold tasks"), id="no tasks"
    ),
    pytest.param(
        {"generators.versions": 1},
        ("generators.versions = 1", "start with --ray"),
        id="a version in place of another, in one process",
    ),
    pytest.param(
        {"data.template": "solve:"},
        ("data.template = 'solve:'", "'{question}'"),
        id="template without the question",
    ),
]


@pytest.mark.parametrize("changes, words", CASES)
def test_a_wrong_setting_is_one_line(tmp_path, command, changes, words):
    refused(command(*small_run.arguments(tmp_path / "run", changes)), *words)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.fixture
def broken(tmp_path):
    """A copy of the base checkpoint, to be spoiled."""
    directory = tmp_path / "base"
    shutil.copytree(BASE, directory)
    return directory


CHECKPOINTS = [
    pytest.param(
        "config.json", None, ("config.json does not exist",), id="no config.json"
    ),
    pytest.param(
        "config.json",
        lambda data: data[:-20],
        ("config.json is not valid JSON",),
        id="torn config.json",
    ),
    pytest.param(
        "config.json",
        lambda data: data.replace(b'"qwen3"', b'"gpt2"'),
        ("model_type = 'gpt2' is not supported", "'qwen3'"),
        id="unknown architecture",
    ),
    pytest.param(
        "config.json",
        lambda data: data.replace(b'"vocab_size": 72', b'"vocab_size": 80'),
        ("embed_tokens", "80"),
        id="another shape",
    ),
    pytest.param(
        "model.safetensors",
        lambda data: data[:100_000],
        ("model.safetensors is cut short", "copy it again"),
        id="torn weights",
    ),
    pytest.param("model.safetensors", None, ("safetensors",), id="no weights"),
]


@pytest.mark.parametrize("name, spoil, words", CHECKPOINTS)
def test_an_unusable_checkpoint_is_named(tmp_path, command, broken, name, spoil, words):
    file = broken / name
    data = file.read_bytes()
    file.unlink()
    if spoil:
        assert spoil(data) != data
        file.write_bytes(spoil(data))
    settings = {"model.checkpoint": broken}
    result = command(*small_run.arguments(tmp_path / "run", settings))
    refused(result, "model.checkpoint", broken, *words)


TOKENIZERS = [
    pytest.param(None, ("no file", "name a tokenizer.json"), id="missing"),
    pytest.param(b"{}", ("is not a `tokenizers` file",), id="empty"),
    pytest.param(b"\0\xff", ("is not a `tokenizers` file",), id="not text"),
]


@pytest.mark.parametrize("content, words", TOKENIZERS)
def test_an_unusable_tokenizer_is_named(tmp_path, command, broken, content, words):
    (broken / "tokenizer.json").unlink()
    if content is not None:
        (broken / "tokenizer.json").write_bytes(content)
    settings = {"data.tokenizer": broken}
    result = command(*small_run.arguments(tmp_path / "run", settings))
    refused(result, "data.tokenizer", broken / "tokenizer.json", *words)


def test_a_tokenizer_without_an_end_is_refused(tmp_path, command, broken):
    for name in ("config.json", "generation_config.json"):
        values = json.loads((broken / name).read_text())
        (broken / name).write_text(json.dumps({**values, "eos_token_id": None}))
    file = broken / "tokenizer.json"
    file.write_text(file.read_text().replace("<eos>", "<stop>"))
    settings = {"data.tokenizer": broken}
    result = command(*small_run.arguments(tmp_path / "run", settings))
    refused(result, "data.tokenizer", "eos_token_id", "could never end")


def test_a_mistake_can_be_put_right_in_the_same_workdir(tmp_path, command):
    wrong = {"model.checkpoint": tmp_path / "nowhere"}
    for _ in range(2):
        result = command(*small_run.arguments(tmp_path / "run", wrong))
        refused(result, "model.checkpoint", "nowhere/config.json does not exist")
    other = {"data.tasks": ("sums",)}  # not: "the run of other settings"
    refused(command(*small_run.arguments(tmp_path / "run", other)), "data.tasks")


def test_a_workdir_of_another_run_is_refused(tmp_path, command):
    settings = small_run.make_config({"seed": 5})
    open_run_directory(
        tmp_path, settings=main.config_lib.to_json(settings), free_settings=()
    ).close()
    (tmp_path / "metrics.jsonl").touch()
    result = command(*small_run.arguments(tmp_path, {"batch.group_size": 8}))
    refused(
        result,
        *(tmp_path, "seed was 5 and is now 0", "batch.group_size was 4 and is now 8"),
        "another --workdir",
    )


def test_a_run_goes_on_with_its_own_settings(tmp_path, command):
    settings = small_run.make_config({"seed": 5, "sampler.length_stages": ((0, 9),)})
    record = main.config_lib.to_json(settings)
    open_run_directory(tmp_path, settings=record, free_settings=()).close()
    (tmp_path / "metrics.jsonl").touch()
    changed = ("--config.train.num_steps=9", "--config.batch.group_size=8")
    result = command(f"--workdir={tmp_path}", *changed)
    # The first may differ, and nothing else does.
    refused(result, "settings: batch.group_size was 4 and is now 8. Give")
    (tmp_path / "config.json").write_text("{}")
    result = command(*changed, "--workdir", tmp_path)
    refused(result, tmp_path / "config.json", "does not give the settings of the run")


def test_help_lists_every_setting(capfd):
    with pytest.raises(SystemExit) as end:
        main.parse_flags(["main", "--help"])
    assert end.value.code == 0
    settings = flatten(main.config_lib.to_json(main.config_lib.Config()))
    text = capfd.readouterr().out
    assert "\nflags:\n  --config: Settings: a name (tiny, " in text
    listed = re.findall(r"^  --config\.([\w.]+)=.*\n {6}\S", text, re.MULTILINE)
    assert set(listed) == set(settings), "each has a comment that says what it is"
    assert len(listed) == len(settings)


def test_a_workdir_in_use_is_refused(tmp_path, command):
    with open_run_directory(tmp_path, settings={}, free_settings=()):
        result = command(*small_run.arguments(tmp_path))
    refused(result, "another process", tmp_path, "choose another", status=1)


def test_a_workdir_that_is_a_file_is_refused(tmp_path, command):
    (tmp_path / "file").touch()
    result = command(*small_run.arguments(tmp_path / "file"))
    refused(result, tmp_path / "file", "name a directory")


@pytest.mark.parametrize(
    "options, words",
    [
        pytest.param("ro,size=64k", ("Read-only file system",), id="read-only"),
        pytest.param("size=4k", ("config.json (No space left",), id="full"),
    ],
)
def test_a_workdir_that_cannot_be_written_is_named(tmp_path, command, options, words):
    with small_run.mounted(tmp_path / "disk", options) as disk:
        result = command(*small_run.arguments(disk / "run"))
    refused(result, disk / "run", *words, "choose another --workdir", status=1)


def test_a_workdir_where_the_system_makes_none_is_named(command):
    refused(
        command(*small_run.arguments("/proc/run")), "cannot use /proc/run", status=1
    )


def test_a_config_file_that_is_not_there_is_named(tmp_path, command):
    missing = tmp_path / "none.py"
    for more in ((), ("--config.seed=3",)):
        result = command(f"--config={missing}", f"--workdir={tmp_path}", *more)
        refused(result, f"--config={missing}: there is no such file")
    refused(command("--config=dapo"), "--config=dapo", "near: recipes/dapo, ")


def test_an_unknown_flag_is_named(tmp_path, command):
    result = command(*small_run.arguments(tmp_path), "--wrokdir=elsewhere")
    refused(result, "'wrokdir'", "Did you mean: workdir")


def test_an_error_of_another_package_keeps_its_traceback(
    tmp_path, command, monkeypatch
):
    def make_run(config, directory, ledger, progress, *, bucket):
        return int("three")

    monkeypatch.setattr(main.wiring, "make_run", make_run)
    with pytest.raises(ValueError, match="three"):
        command(*small_run.arguments(tmp_path))


def test_a_cache_that_no_memory_holds_is_one_line(tmp_path, command):
    settings = {"sampler.page_size": 1 << 24}
    status, lines = command(*small_run.arguments(tmp_path / "run", settings))
    assert status == 1
    *before, verifiers, line = lines
    programs = [each for each in before if each.startswith("compiling program ")]
    assert before == ["loading", "compiling the train step", *programs]
    assert verifiers.startswith("verifier processes: ")
    for words in (
        "not enough memory for the sampler",
        "sampler.slots = 16",
        "XLA: RES",
    ):
        assert words in line


@pytest.mark.slow
def test_the_program_ends_with_a_status_and_one_line(tmp_path):
    process = small_run.start(
        *("-m", "scalerl_jax.main"),
        *small_run.arguments(tmp_path / "run", {"train.num_steps": 0}),
    )
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (output, errors) == ("", "error: train.num_steps = 0 must be above 0\n")
    process = small_run.start("-m", "scalerl_jax.main")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    (line,) = errors.splitlines()
    assert line == "error: --config is missing: --config=configs/tiny.py"
    assert os.listdir(tmp_path) == []


PREEMPTED = """
import sys
from scalerl_jax import main
from scalerl_jax.train import RunOutcome

end = RunOutcome(policy_version=3, preempted=True, interrupted=False)
main.run = lambda *_: end
sys.argv = ["main", "--config=tiny", "--workdir=w"]
main.app.run(main.main, flags_parser=main.parse_flags)
"""


@pytest.mark.slow
def test_a_run_that_is_saved_keeps_its_status_though_its_reader_is_gone():
    with small_run.start("-c", PREEMPTED) as process:
        process.stdout.close()  # as that of a `tee` that was killed
        errors = process.stderr.read()
    assert process.returncode == 75 and "Traceback" not in errors, errors


def test_an_empty_workdir_is_missing(tmp_path, command, monkeypatch):
    """It is perhaps that of a shell's variable which is not set."""
    monkeypatch.chdir(tmp_path)
    result = command("--config=tiny", "--workdir=")
    refused(result, "--workdir is missing: --workdir=runs/NAME")
    assert not list(tmp_path.iterdir())


def test_the_command_that_goes_on_can_be_copied(capfd):
    outcome = RunOutcome(policy_version=3, preempted=True, interrupted=True)
    main._say(outcome, "runs/a b")
    assert capfd.readouterr().out.endswith("scalerl train --workdir='runs/a b'\n")
    main._say(outcome, "runs/x", ray="local")
    assert capfd.readouterr().out.endswith(" --workdir=runs/x --ray=local\n")
