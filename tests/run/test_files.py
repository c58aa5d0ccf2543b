import json
import threading
import time

import pytest
import small_bucket

from scalerl_jax.formats.reading import local_file
from scalerl_jax.formats.remote import origin_of
from scalerl_jax.run import files as run_files
from scalerl_jax.run.directory import local_directory, open_run_directory
from scalerl_jax.run.files import RunFiles
from scalerl_jax.run.metrics import MetricsWriter

pytestmark = small_bucket.NEEDS_EXTRA

URL = "gs://bucket/runs/x"


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    return small_bucket.empty()


def open_it(seed=7):
    return open_run_directory(
        URL, settings={"seed": seed, "train": {"num_steps": 3}}, free_settings=()
    )


def content(bucket, name):
    return bucket.objects[f"runs/x/{name}"][0]


def test_what_is_appended_is_in_the_bucket_after_a_flush(bucket):
    with RunFiles(URL) as files:
        assert files.path == local_directory(URL)
        with open(files.path / "metrics.jsonl", "ab", buffering=0) as file:
            file.write(b'{"step": 1}\n')
            files.flush()
            assert content(bucket, "metrics.jsonl") == b'{"step": 1}\n'
            file.write(b'{"step": 2}\n')
        (files.path / "tensorboard").mkdir()
        (files.path / "tensorboard" / "events").write_bytes(b"e")
        (files.path / ".metrics.jsonl.tmp").write_bytes(b"half")
        bucket.written.clear()
        files.flush()
        files.flush()
        assert bucket.written == ["runs/x/metrics.jsonl", "runs/x/tensorboard/events"]
    assert content(bucket, "metrics.jsonl") == b'{"step": 1}\n{"step": 2}\n'
    assert "runs/x/.lock" not in bucket.names()


def test_another_machine_goes_on_with_what_is_in_the_bucket(bucket):
    with open_it() as run, MetricsWriter(run.path, after=-1) as writer:
        for step in (1, 2):
            writer.write_step(step, {"loss": float(step)})
    bucket.write("runs/x/checkpoints/step_00000001/state/big", b"not fetched")
    bucket.write("runs/x/weights/rank0-v00000040-0-abc", b"not fetched, either")
    stale = local_directory(URL) / "left-behind"
    stale.write_text("of this machine")
    with open_it() as run:
        assert not stale.exists()
        assert not (run.path / "checkpoints").exists()
        assert not (run.path / "weights").exists()
        MetricsWriter(run.path, after=1).close()
    rows = content(bucket, "metrics.jsonl").splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1]


def test_of_runs_and_models_below_a_run_nothing_is_fetched(bucket):
    bucket.write("runs/x/tensorboard/events", b"own")
    bucket.write("runs/x/model/config.json", b"{}")
    bucket.write("runs/x/model/model.safetensors", b"not fetched")
    bucket.write("runs/x/seeds/0/config.json", b"{}")
    bucket.write("runs/x/seeds/0/checkpoints/step_00000001/state/big", b"not fetched")
    with RunFiles(URL) as files:
        there = [file for file in files.path.rglob("*") if file.is_file()]
        assert there == [files.path / "tensorboard" / "events"]


def test_other_settings_are_refused_by_the_bucket_s_name(bucket):
    with open_it() as run:
        (run.path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="^gs://bucket/runs/x "):
        open_it(seed=8)
    open_it().close()  # the refusal gave the lock back


def test_a_run_is_not_disturbed_by_a_reader_of_its_checkpoints_here(bucket):
    saved = "runs/x/checkpoints/step_00000001/state/big"
    bucket.write(saved, b"1")
    with open_it() as run:
        bucket.write("runs/x/metrics.jsonl", b"of the last upload")
        (run.path / "metrics.jsonl").write_bytes(b"newer")
        copy = local_file(URL)  # as `scalerl evaluate` does
        assert (copy / "checkpoints/step_00000001/state/big").read_bytes() == b"1"
        assert (run.path / "metrics.jsonl").read_bytes() == b"newer"
        assert not (run.path / "checkpoints").exists()
        assert origin_of(copy) == origin_of(run.path) == URL


def test_what_is_hidden_or_goes_to_the_bucket_directly_is_not_uploaded(
    bucket, monkeypatch
):
    with RunFiles(URL) as files:
        for name in ("checkpoints/a", "weights/b", ".part/c", "wandb/checkpoints/d"):
            file = files.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"1")
        version = run_files._version

        def vanished(file):
            if file.name == "gone":
                file.unlink(missing_ok=True)
            return version(file)

        monkeypatch.setattr(run_files, "_version", vanished)
        (files.path / "gone").touch()
        bucket.written.clear()
        files.flush()
        assert bucket.written == ["runs/x/wandb/checkpoints/d"]


def test_a_thread_uploads_what_has_changed(bucket, monkeypatch):
    monkeypatch.setattr(run_files, "UPLOAD_S", 0.01)
    with RunFiles(URL) as files:
        (files.path / "evals.jsonl").write_bytes(b"{}\n")
        deadline = time.monotonic() + 60.0
        while "runs/x/evals.jsonl" not in bucket.names():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_writer_does_not_wait_for_an_upload(bucket):
    with RunFiles(URL) as files:
        bucket.hold("runs/x/a")
        (files.path / "a").write_bytes(b"1")
        uploading = threading.Thread(target=files.flush)
        uploading.start()
        (files.path / "a").write_bytes(b"12")
        bucket.release()
        uploading.join(60.0)
        files.flush()
        assert content(bucket, "a") == b"12"


def test_a_bucket_that_takes_nothing_is_told_in_a_line(bucket):
    files = RunFiles(URL)
    (files.path / "a").write_bytes(b"1")
    bucket.denied = True
    with pytest.raises(RuntimeError) as failure:
        files.flush()
    message = str(failure.value)
    assert message.startswith("cannot use gs://bucket/runs/x (the caller does not")
    assert "\n" not in message
    bucket.denied = False
    files.close()
    assert content(bucket, "a") == b"1"


def test_nothing_is_uploaded_into_another_process_s_directory(bucket):
    files = RunFiles(URL)
    files.lock._lost = "process 5 on elsewhere has its lock"
    (files.path / "a").write_bytes(b"1")
    with pytest.raises(RuntimeError, match="may be another process's now: process 5"):
        files.close()
    assert bucket.names() == ["runs/x/.lock"]
