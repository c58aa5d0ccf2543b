import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import scalerl_jax
from scalerl_jax.run import directory as run_directory
from scalerl_jax.run.directory import (
    end_kept,
    keep_environment,
    open_run_directory,
    why_ended,
)
from scalerl_jax.run.record import versions, with_own_assets
from scalerl_jax.run.writing import replace_file

SETTINGS = {
    "seed": 7,
    "data": {"tasks": ("chain_sum",)},
    "train": {"num_steps": 10, "max_skipped_steps": 3},
    "objective": {"loss": "cispo"},
}
FREE = ("train.num_steps", "checkpoint.every")


def changed(**sections):
    return {**SETTINGS, **sections}


def open_it(path, settings=SETTINGS):
    return open_run_directory(path, settings=settings, free_settings=FREE)


def test_a_new_run_says_what_it_is(tmp_path):
    with open_it(tmp_path / "runs" / "first") as run:
        record = json.loads((run.path / "config.json").read_text())
    assert record["config"] == json.loads(json.dumps(SETTINGS))
    assert record["seed"] == 7
    assert record["versions"]["python"] == sys.version.split()[0]
    assert record["versions"].keys() >= {
        *("scalerl_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"),
        *("numpy", "reasoning_gym"),
    }
    assert record["git_revision"] is None or len(record["git_revision"]) >= 40
    assert record["started"].endswith("+00:00")


def test_an_unchanged_resume_leaves_the_record_alone(tmp_path):
    open_it(tmp_path).close()
    before = (tmp_path / "config.json").read_bytes()
    open_it(tmp_path).close()
    assert (tmp_path / "config.json").read_bytes() == before


def test_free_settings_may_change_and_are_recorded(tmp_path):
    open_it(tmp_path).close()
    longer = {"num_steps": 20, "max_skipped_steps": 3}
    open_it(tmp_path, changed(train=longer, checkpoint={"every": 5})).close()
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["config"]["train"]["num_steps"] == 20
    assert record["resumes"][0]["changed"] == {
        "train.num_steps": [10, 20],
        "checkpoint.every": [50, 5],
    }


def test_other_settings_are_refused_with_both_values(tmp_path):
    open_it(tmp_path).close()
    (tmp_path / "metrics.jsonl").touch()
    other = changed(seed=8, objective={"loss": "gspo", "eps": 0.1})
    with pytest.raises(ValueError) as refusal:
        open_it(tmp_path, other)
    message = str(refusal.value)
    assert "objective.loss was 'cispo' and is now 'gspo'" in message
    assert "objective.eps was 'absent' and is now 0.1" in message
    assert "seed was 7 and is now 8" in message
    assert "another --workdir" in message
    open_it(tmp_path).close()  # the refusal let go of the lock and changed nothing


def test_the_file_that_judges_may_move_and_another_judge_is_refused(tmp_path):
    open_it(tmp_path, changed(environment="here/mine.py:score")).close()
    (tmp_path / "metrics.jsonl").touch()
    open_it(tmp_path, changed(environment="/there/mine.py:score")).close()
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["config"]["environment"] == "/there/mine.py:score"
    for other in ("", "tools", "mine.py:other", "/there/their.py:score", "env:mine"):
        with pytest.raises(ValueError, match=f"mine.py:score' and is now '{other}'"):
            open_it(tmp_path, changed(environment=other))


def test_a_failure_is_kept_as_the_end_until_a_run_goes_on(tmp_path):
    with pytest.raises(RuntimeError), end_kept(tmp_path, lambda: None):
        raise RuntimeError("no room\nof any kind")
    assert why_ended(tmp_path) == "no room"
    with end_kept(tmp_path, lambda: "scaling.stop"):
        assert why_ended(tmp_path) == ""
    assert why_ended(tmp_path) == "scaling.stop"


def test_a_setting_that_is_newer_than_the_run_has_its_default(tmp_path):
    open_it(tmp_path).close()
    (tmp_path / "metrics.jsonl").touch()
    same, other = (changed(sampler={"prefix_cache": on}) for on in (True, False))
    open_it(tmp_path, same).close()
    with pytest.raises(ValueError, match=r"settings: sampler.prefix_cache was True"):
        open_it(tmp_path, other)


def test_a_run_of_another_checkout_goes_on_with_the_files_of_this_one(tmp_path):
    assets = Path(scalerl_jax.__file__).resolve().parent / "assets"
    there = changed(model={"checkpoint": "/old/scalerl_jax/assets/tiny_base"})
    here = changed(model={"checkpoint": str(assets / "tiny_base")})
    open_it(tmp_path, there).close()
    (tmp_path / "metrics.jsonl").touch()
    open_it(tmp_path, here).close()
    for other in ("/old/scalerl_jax/assets/gone", "/old/scalerl_jax/assets/../tiny"):
        assert with_own_assets(other) == other
    with pytest.raises(ValueError, match=r"model\.checkpoint was .* and is now"):
        open_it(tmp_path, changed(model={"checkpoint": str(assets / "tiny_moe_base")}))


def test_other_settings_are_taken_where_no_run_has_begun(tmp_path):
    open_it(tmp_path).close()
    other = changed(seed=8)
    open_it(tmp_path, other).close()
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["seed"] == record["config"]["seed"] == 8
    assert "resumes" not in record
    open_it(tmp_path, other).close()


def test_a_resume_with_other_code_is_recorded(tmp_path):
    open_it(tmp_path).close()
    record = json.loads((tmp_path / "config.json").read_text())
    record["versions"]["jax"] = "0.0.1"
    (tmp_path / "config.json").write_text(json.dumps(record))
    for _ in range(2):  # the second resume has nothing to add
        open_it(tmp_path).close()
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["versions"]["jax"] == "0.0.1"
    assert [resume["changed"] for resume in record["resumes"]] == [{}]
    assert record["resumes"][0]["versions"] == versions()


@pytest.mark.parametrize("text", ["", '{"config": ', "[]", '{"config": 3}', "\0\0"])
def test_a_broken_record_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json is broken.*--workdir"):
        open_it(tmp_path)


@pytest.mark.parametrize("name", run_directory.RUN_FILES)
def test_files_of_an_unknown_run_are_refused(tmp_path, name):
    (tmp_path / "notes.txt").write_text("not of a run")
    open_it(tmp_path).close()
    (tmp_path / "config.json").unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"holds {name} of a run but no config.json"):
        open_it(tmp_path)


def test_a_workdir_that_cannot_be_one_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="name a directory"):
            open_it(path)
    with pytest.raises(ValueError, match="write gs://BUCKET/PATH"):
        open_it("s3://bucket/run")


@pytest.fixture
def read_only(tmp_path):
    """A directory that may not be written, even if the tests run as root."""
    directory = tmp_path / "read_only"
    directory.mkdir()
    parents = [path for path in directory.parents if path.stat().st_uid == os.geteuid()]
    modes = {path: path.stat().st_mode for path in parents}
    root = os.geteuid() == 0
    if root:
        for path in modes:
            path.chmod(modes[path] | 0o755)
        os.seteuid(65534)
    else:
        directory.chmod(0o500)
    yield directory
    if root:
        os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)
    else:
        directory.chmod(0o700)


def test_a_read_only_place_is_named(read_only):
    for path in (read_only, read_only / "below"):
        with pytest.raises(RuntimeError, match=r"read_only.*Permission.*--workdir"):
            open_it(path)


def test_a_full_disk_is_named_and_leaves_no_half_record(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # room for the lock
    try:
        with pytest.raises(RuntimeError, match=r"config.json \(File too large"):
            open_it(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


HOLDER = """
import os, sys, time
from scalerl_jax.run.directory import keep_environment, open_run_directory
run = open_run_directory(sys.argv[1], settings={}, free_settings=())
reader, writer = os.pipe()
if os.fork() == 0:  # a child that outlives its parent must not keep the lock
    os.write(writer, b"!")
    time.sleep(60)
os.read(reader, 1)  # the child runs: it has closed what it inherited
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_one_process_at_a_time_and_death_unlocks(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(run_directory.__file__).parents[2],
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == f"{holder.pid}\n"
        with pytest.raises(RuntimeError, match=rf"\({holder.pid} on .*another --workd"):
            open_run_directory(tmp_path, settings={}, free_settings=())
        holder.kill()
        holder.wait(timeout=10)
        open_run_directory(tmp_path, settings={}, free_settings=()).close()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)  # the child
        holder.stdout.close()
        holder.wait(timeout=10)


def test_a_lock_holds_within_a_process_too(tmp_path):
    with open_it(tmp_path), pytest.raises(RuntimeError, match="another process"):
        open_it(tmp_path)
    open_it(tmp_path).close()


def test_a_changed_reward_file_is_kept_beside_the_one_that_a_run_began_with(tmp_path):
    file = tmp_path / "environment.py"
    assert keep_environment(tmp_path, "mine = 1") is None
    assert keep_environment(tmp_path, "mine = 2") is None, "no run has begun"
    (tmp_path / "metrics.jsonl").touch()
    assert keep_environment(tmp_path, "mine = 2") is None
    before = keep_environment(tmp_path, "mine = 3")
    # printf 'mine = 2' | sha256sum
    assert before == tmp_path / "environment-d0190e6b.py"
    assert (before.read_text(), file.read_text()) == ("mine = 2", "mine = 3")


def test_a_file_is_closed_before_it_takes_the_place_of_another(tmp_path, monkeypatch):
    """gcsfuse renames no file that is open for writing."""
    replace, opened = os.replace, []

    def replaced(partial, path):
        numbers = os.listdir("/proc/self/fd")
        paths = [os.path.realpath(f"/proc/self/fd/{number}") for number in numbers]
        opened.append(str(partial) in paths)
        replace(partial, path)

    monkeypatch.setattr(os, "replace", replaced)
    replace_file(tmp_path / "x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1" and opened == [False]
