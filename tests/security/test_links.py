"""Links where a command writes, put there by somebody: their targets stay as is."""

import json
import os
import re
import stat

import pytest
import small_commands
import small_run

from scalerl_jax.launch.outcome import Outcome, write_outcome
from scalerl_jax.run.directory import keep_data_report, open_run_directory
from scalerl_jax.run.events import EventFile
from scalerl_jax.run.ledger import Ledger, kept_on_disk
from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.run.writing import open_to_append, replace_file, replacing

MINE = '{"step": -1}\n'  # a whole row, so that a run would go on with it
ROLLOUT = {
    **{"step": 1, "task": "sums", "prompt": "1 + 1?", "reference": "2"},
    **{"completion": "2", "status": "correct", "tokens": 1},
    **{"cut_off": False, "interrupted": False},
}


@pytest.fixture
def victim(tmp_path):
    """A file elsewhere, which still says what it said at the end."""
    file = tmp_path / "victim"
    file.write_text(MINE)
    yield file
    assert file.read_text() == MINE


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A directory that others may write into, where the commands run."""
    directory = tmp_path / "run"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def test_a_file_is_replaced_and_not_written_through_its_link(run, victim):
    (run / "file").symlink_to(victim)
    replace_file(run / "file", b"new")
    assert not (run / "file").is_symlink() and (run / "file").read_bytes() == b"new"
    before = os.umask(0o027)
    try:
        replace_file(run / "other", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((run / "other").stat().st_mode) == 0o640


def test_a_name_beside_the_file_cannot_be_foreseen(run):
    names = set()
    for _ in range(2):
        with replacing(run / "file") as file:
            file.write(b"half")
            (beside,) = [each for each in run.iterdir() if each.name != "file"]
            names.add(beside.name)
    assert len(names) == 2 and [each.name for each in run.iterdir()] == ["file"]


def test_what_fails_half_way_leaves_the_file_as_it_was(run):
    replace_file(run / "file", b"old")
    with pytest.raises(KeyboardInterrupt), replacing(run / "file") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert [each.name for each in run.iterdir()] == ["file"]
    assert (run / "file").read_bytes() == b"old"
    with pytest.raises(NotADirectoryError, match=r"file/below'$"):
        replace_file(run / "file" / "below", b"")


def test_a_file_that_is_added_to_is_not_opened_through_a_link(run, victim):
    (run / "link").symlink_to(victim)
    (run / "dangling").symlink_to(run / "nothing")
    os.mkfifo(run / "pipe")
    for name, why in (
        *(("link", "is a symbolic link"), ("dangling", "is a symbolic link")),
        ("pipe", "no regular file"),
    ):
        with pytest.raises(OSError, match=rf"{why}.*run/{name}'$"):
            open_to_append(run / name)
    with open_to_append(run / "rows") as file:
        file.write(b"1")
    with open_to_append(run / "rows") as file:
        file.write(b"2")
    assert (run / "rows").read_bytes() == b"12" and not (run / "nothing").exists()
    with pytest.raises(FileExistsError):
        open_to_append(run / "rows", new=True)


def test_the_lock_of_a_run_is_no_link(run, victim):
    (run / ".lock").symlink_to(victim)
    with pytest.raises(RuntimeError, match=r"\.lock \(it is a symbolic link.*remove i"):
        open_run_directory(run, settings={}, free_settings=())


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "evals.jsonl", "rollouts.jsonl", "tensorboard"]
)
def test_rows_are_not_added_through_links(run, victim, name, monkeypatch):
    target = run / name
    if name == "tensorboard":
        monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
        target.mkdir()
        target /= f"events.out.tfevents.1800000001.{os.getpid()}"
        (target.parent / "events.out.tfevents.1800000000").touch()
        (target.parent / "events.out.tfevents.odd").touch()
    target.symlink_to(victim)
    if name == "tensorboard":  # a number that is taken is passed over
        EventFile(target.parent).close()
        return
    with pytest.raises(RuntimeError, match="is a symbolic link"):
        MetricsWriter(run, after=-1)


def test_whole_files_of_a_run_replace_links(run, victim):
    names = ("config.json", "data.json", "ledger.json", "launch.json")
    with open_run_directory(run, settings={"seed": 1}, free_settings=()):
        for name in names[1:]:
            (run / name).symlink_to(victim)
        (run / "data.json").unlink()
        (run / "data.json").symlink_to(run / "nothing")
        keep_data_report(run, {"training": {}})
        with kept_on_disk(Ledger(pools={"all": 1}, chip="v5e"), run):
            pass
    write_outcome(str(run), Outcome(state="done", command=(), at="now"))
    assert not any((run / name).is_symlink() for name in names)


@pytest.mark.parametrize(
    "line, names",
    [
        ("scaling fit . --out=curve.svg", "fit.json fit.png curve.svg"),
        ("scaling report . --out=page.html", "page.html"),
    ],
)
def test_the_fitter_replaces_links(run, victim, line, names):
    rows = [
        {"step": n, "compute_chip_hours": n / 10, "pass_rate": 0.2 + 0.6 * n / (n + 4)}
        for n in range(12)
    ]
    (run / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in names.split():
        (run / name).symlink_to(victim)
    assert small_commands.run(line)[0] == 0
    assert not any((run / name).is_symlink() for name in names.split())


def test_a_page_of_rollouts_is_not_written_through_a_link(run, victim):
    (run / "rollouts.jsonl").write_text(json.dumps(ROLLOUT) + "\n")
    (run / ".page.html.partial").symlink_to(victim)
    (run / "page.html").symlink_to(run / "nothing")
    line = "evaluate --rollouts=rollouts.jsonl --out=page.html"
    assert small_commands.run(line)[0] == 0
    assert not (run / "page.html").is_symlink() and not (run / "nothing").exists()


# What may write plainly: into a directory that it has just made under a name of its
# own, into a sandbox, or into a file that it refuses to find there.
PLAIN = {
    "data/records.py": "a directory made by TemporaryDirectory",
    "data/sources.py": "a directory made by TemporaryDirectory",
    "evaluate/results.py": "a directory made by mkdir, which no link can be",
    "launch/cloud.py": "a directory made by TemporaryDirectory",
    "learner/checkpoint.py": "a directory made under a name that is new each time",
    "learner/contents.py": "a directory made under a name that is new each time",
    "learner/places.py": "a directory made under a name that is new each time",
    "model/adapter_files.py": "a directory made by mkdir, which no link can be",
    "model/saving.py": "a directory made by mkdir, which no link can be",
    "weights/channels.py": "a new file of a random name",
    "environments/harness.py": "a sandbox",
    "environments/packages.py": "a directory made by TemporaryDirectory",
    "environments/process.py": "/dev/null",
    "run/writing.py": "the one place",
}
WRITES = re.compile(
    r"\.write_text\(|\.write_bytes\(|\.savefig\(\w*path|\.touch\("
    r"""|(?<!tarfile\.)open\([^)]*["'](?:[wax]b?\+?|rb?\+)["']|save_file\("""
)


def test_nothing_else_writes_plainly():
    package = small_run.ROOT / "scalerl_jax"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if WRITES.search(path.read_text())
    }
    assert found == {*PLAIN}
