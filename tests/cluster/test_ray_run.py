"""Runs over the processes of a Ray cluster on this machine."""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import small_run
from small_intruder import listening, open_to_others

from scalerl_jax.formats.reading import parse_json

pytest.importorskip("ray")
SEVERAL = {
    "queue.max_staleness": 0,
    "mesh.data": 2,
    "mesh.slices": 2,  # of a rank each
    "mesh.fsdp": 2,
    "mesh.processes": 2,
    "batch.row_tokens": 512,
    "batch.short_rows": True,
    "generators.count": 2,
    "generators.devices": 2,
    "optimizer.learning_rate": 1e-3,
    "eval.every": 1,
    **small_run.OF_STATE,
    "compile_cache": os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
}
STEPS = 9
KEPT_GIB = 6e-5
_LIMIT_S = 600
pytestmark = pytest.mark.timeout(2 * _LIMIT_S)  # a whole run begins, and one goes on
# Of the controller alone: gone before any replica, or the next one, could read it.
VANISHING = """
from pathlib import Path
Path(__file__).unlink(missing_ok=True)
def score(prompt, completion, reference):
    return len(completion) % 7 / 6
"""


def vanishing(directory):
    """Settings of a reward whose file is gone once the run has checked it."""
    file = directory / "mine.py"
    file.write_text(VANISHING)
    return {"environment": f"{file}:score"}


def start_on_ray(directory, changes):
    return small_run.start(
        "-m",
        "scalerl_jax.main",
        "--ray=local",
        *small_run.arguments(directory, changes),
    )


def finish(process):
    """What it said, once it has ended well."""
    try:
        _, errors = process.communicate(timeout=_LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return errors


def row_of(directory, role):
    """What the status file says of a role."""
    rows = parse_json((directory / "status.json").read_bytes())["roles"]
    (found,) = [row for row in rows if row["role"] == role]
    return found


def process_of(directory, role, *, follower=False):
    """The process of a role, or its second one."""
    where = str(row_of(directory, role)["where"])
    return int(re.findall(r"process (\d+)", where)[follower])


def wait_for_step(process, directory, step):
    deadline = time.monotonic() + _LIMIT_S
    while len(small_run.rows(directory)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_for_loss(process, directory, role):
    deadline = time.monotonic() + _LIMIT_S
    while not row_of(directory, role)["lost"]:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextlib.contextmanager
def standing_still(directory, *roles):
    """Stop processes; go on once the loop has nothing to do but wait for them."""
    stopped = [process_of(directory, role) for role in roles]
    for each in stopped:
        os.kill(each, signal.SIGSTOP)
    time.sleep(3.0)
    yield
    for each in stopped:
        with contextlib.suppress(ProcessLookupError):  # replaced, as it was silent
            os.kill(each, signal.SIGCONT)


def secret_of(process):
    """The token of the cluster that a run has started, and who shows it or has it."""
    below = psutil.Process(process.pid).children(recursive=True)
    commands, told, token = [], {}, None
    for each in below:
        try:
            command, environment = each.cmdline(), each.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended meanwhile
        commands.append(" ".join(command))
        told[" ".join(command)] = environment
        if each.name() == "gcs_server":
            file = Path(environment["RAY_AUTH_TOKEN_PATH"])
            token, mode = file.read_text(), stat.S_IMODE(file.stat().st_mode)
            assert mode == 0o600
            assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
            assert "RAY_AUTH_TOKEN" not in environment
    assert token is not None, commands
    return token, commands, told


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run in which a rank and a replica are killed, then others get a SIGTERM.

    The learner has two slices of a rank with two devices; the second one is killed.
    A replica is two processes, and what is killed of it the one that follows.
    Evaluations are made beside it, and params come by way of the object store.  The
    rewards are a user's, whose file no replica finds.  Checkpoints come early, as three
    batches are more than may be kept.  The rank is killed while the loop waits for
    replicas, which stand still until the learner is back.
    """
    directory = tmp_path_factory.mktemp("killed")
    own = vanishing(tmp_path_factory.mktemp("own"))
    beside = {"eval.concurrent": "on", "generators.channel": "objects"}
    beside |= {"generators.processes": 2, "train.num_steps": STEPS}
    beside |= {"checkpoint.every": 100, "generators.kept_gib": KEPT_GIB}
    process = start_on_ray(directory, SEVERAL | beside | own)
    wait_for_step(process, directory, 3)
    sockets, secret = listening(process.pid), secret_of(process)
    with standing_still(directory, "replica 0", "replica 1"):
        os.kill(process_of(directory, "learner 1"), signal.SIGKILL)
        wait_for_loss(process, directory, "learner 1")
    wait_for_step(process, directory, 5)
    os.kill(process_of(directory, "replica 0", follower=True), signal.SIGKILL)
    wait_for_step(process, directory, 6)
    assert list((directory / "weights").iterdir()) == []  # the store has room
    sockets |= listening(process.pid)  # those of ranks that have started again, too
    os.kill(process_of(directory, "replica 1"), signal.SIGTERM)
    os.kill(process_of(directory, "learner 0"), signal.SIGTERM)
    return directory, finish(process), sockets, secret


@pytest.mark.slow
def test_ranks_and_replicas_that_are_killed_or_leave_change_no_bit(killed, tmp_path):
    directory, said, *_ = killed
    # Ranks that start again are not asked for params that they do not have yet.
    assert "AttributeError" not in said and "Traceback" not in said
    assert "warning: the learner is lost (rank 1 on" in said
    assert "batches that were kept" in said
    assert f"half of generators.kept_gib = {KEPT_GIB:g} is taken" in said
    assert len(small_run.checkpoints(directory)) == 3  # as many as are kept
    assert "warning: replica 0 on" in said
    assert re.search(r"warning: replica 1 on .* leaves \(SIGTERM\)", said)
    assert re.search(r"warning: rank 0 on .* of the learner got a SIGTERM", said)
    # Beside one whose replicas are a process each and hold one version.
    undisturbed = {"train.num_steps": STEPS, "generators.versions": 1}
    alone = tmp_path / "alone"
    finish(start_on_ray(alone, SEVERAL | undisturbed | vanishing(tmp_path)))
    expected, found = (
        small_run.saved_arrays(small_run.checkpoints(at)[-1])
        for at in (alone, directory)
    )
    assert expected.keys() == found.keys()
    for name, leaf in expected.items():
        assert leaf.tobytes() == found[name].tobytes(), name
    expected, found = (small_run.books(at)["assembler"] for at in (alone, directory))
    assert found == expected and expected["count"] > 0
    names = ("step", "policy_version", "pass_rate")
    expected, found = (
        [[row[name] for name in names] for row in small_run.rows(at, "evals.jsonl")]
        for at in (alone, directory)
    )
    assert [step for step, *_ in expected] == [*range(STEPS + 1)]
    assert found == expected
    assert not any((at / "weights").exists() for at in (alone, directory))
    rows = small_run.rows(directory)
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert rows[-1]["learner/restarts"] == 2 and rows[-1]["replicas/left"] == 1
    assert rows[-1]["publish/bytes"] > 0
    assert rows[-1]["learner/batch_bytes"] > 0
    assert 0 < max(row["learner/kept_bytes"] for row in rows) <= KEPT_GIB * 2**30
    assert not any(row["verifier/error_share"] for row in rows)
    assert any(0.0 < row["reward/mean"] < 1.0 for row in rows)
    assert (directory / "environment.py").read_text() == VANISHING


@pytest.mark.slow
def test_all_of_it_listens_at_this_machines_own_addresses_only(killed):
    _, _, sockets, _ = killed
    assert len({name for name, _ in sockets} & {"raylet", "gcs_server"}) == 2
    assert open_to_others(sockets) == set()


@pytest.mark.slow
def test_its_token_is_in_no_command_line_and_in_no_file_of_the_run(killed):
    directory, said, _, (token, commands, told) = killed
    assert len(bytes.fromhex(token)) == 32
    assert len(commands) > 10 and not [each for each in commands if token in each]
    assert token not in said
    files = [file for file in directory.rglob("*") if file.is_file()]
    assert directory / "config.json" in files
    assert not [file for file in files if token.encode() in file.read_bytes()]
    judges = [each for name, each in told.items() if "environments.process" in name]
    assert judges, "the verifiers of a replica"
    assert not [each for each in judges if any("RAY_AUTH" in name for name in each)]


@pytest.mark.slow
def test_status_says_how_it_stood(killed):
    directory, *_ = killed
    done = subprocess.run(
        [sys.executable, "-m", "scalerl_jax", "status", str(directory)],
        capture_output=True,
        text=True,
        cwd=small_run.ROOT,
    )
    assert done.returncode == 0, done.stderr
    for words in ("learner 0", "learner 1", "replica 0", "replica 1", "pass rate"):
        assert words in done.stdout
    assert "replicas lost" in done.stdout and "learner restarted 2" in done.stdout


@pytest.mark.slow
def test_its_checkpoint_goes_on_in_one_process_without_slices(killed, tmp_path):
    directory, *_ = killed
    before = small_run.books(directory)["assembler"]
    changes = SEVERAL | {"train.num_steps": STEPS + 1, "generators.count": 1}
    changes |= vanishing(tmp_path)  # the same reward, in another folder
    changes |= {"mesh.slices": 1, "mesh.processes": 1}
    process = small_run.start(
        "-m",
        "scalerl_jax.main",
        *small_run.arguments(directory, changes),
        environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )
    assert f"resumed after step {STEPS}" in finish(process)
    assert [row["step"] for row in small_run.rows(directory)][-1] == STEPS + 1
    # Its scale goes on too: a batch has 16 rollouts at most.
    after = small_run.books(directory)["assembler"]
    assert before["count"] < after["count"] <= before["count"] + 16


@pytest.mark.parametrize(
    "arguments, words",
    [
        pytest.param(
            ["--ray=127.0.0.1:1"], "does not answer within 10 s", id="nobody there"
        ),
        pytest.param(
            ["--ray=somewhere"], "must be local, auto, slice or HOST:PORT", id="word"
        ),
        pytest.param(
            ["--ray=local", "--ray_without_token"],
            "--ray_without_token",
            id="no token on this machine",
        ),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(tmp_path, arguments, words):
    process = small_run.start(
        *("-m", "scalerl_jax.main", *arguments, *small_run.arguments(tmp_path / "x")),
        environment={"RAY_AUTH_TOKEN": "0" * 64},
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert words in errors and len(errors.splitlines()) == 1, errors
    assert not (tmp_path / "x").exists()
