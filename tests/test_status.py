"""How a run stands: what is no run's directory is told by a line."""

import json
import platform
import subprocess

import pytest
import small_bucket

from scalerl_jax.run.directory import keep_end
from scalerl_jax.status import main


@small_bucket.NEEDS_EXTRA
def test_a_run_in_a_bucket_is_looked_at_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket = small_bucket.empty()
    config = {"config": {"train": {"num_steps": 40}}}
    bucket.write("runs/x/config.json", json.dumps(config).encode())
    assert main(["gs://bucket/runs/x"]) == 0
    assert capsys.readouterr().out.startswith("step 0 of 40\nno step is finished\n")
    with pytest.raises(ValueError, match="^gs://bucket/runs/y: there is nothing of"):
        main(["gs://bucket/runs/y"])


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="config.json; .*--workdir"):
        main([str(tmp_path)])


def test_a_warm_start_is_told_by_what_its_rows_have(tmp_path, capsys):
    config = {"config": {"train": {"num_steps": 40}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    row = {"step": 7, "loss": 0.53125, "compute/train_tokens": 12345}
    row |= {"throughput/trained_tokens_per_s": 98.0, "idle/learner_share": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "step 7 of 40",
        "loss 0.5312, 12,345 tokens trained so far",
        "98 tokens/s trained",
        "idle: learner 25%",
    ]


def test_a_run_that_has_ended_early_or_was_killed_is_told_to_be_so(tmp_path, capsys):
    config = {"config": {"train": {"num_steps": 40}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with subprocess.Popen(["true"]) as gone:
        pass
    holders = {gone.pid: True, 1: False}  # 1 runs
    for pid, lacks in holders.items():
        (tmp_path / ".lock").write_text(f"{pid} on {platform.node()}")
        main([str(tmp_path)])
        said = capsys.readouterr().out
        assert (f"no process runs it: scalerl train {tmp_path} " in said) == lacks
    (tmp_path / ".lock").write_text(f"{gone.pid} on another machine")
    keep_end(tmp_path, "the disk is full")
    main([str(tmp_path)])
    assert capsys.readouterr().out.endswith("threads\nended: the disk is full\n")


@pytest.mark.parametrize("torn", [0, 5 * 2**20])
def test_a_last_row_of_any_length_is_read(tmp_path, capsys, torn):
    """And that before one of which a kill, or a look in its midst, left a part."""
    config = {"config": {"train": {"num_steps": 40}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    step = dict.fromkeys(
        ("staleness/mean", "staleness/in_flight_mean", "staleness/queued_mean"), 0.0
    )
    step |= dict.fromkeys(("staleness/max", "queue/dropped", "verifier/restarts"), 0)
    step |= {
        f"throughput/{kind}_tokens_per_s": 0.0 for kind in ("generated", "trained")
    }
    evaluation = {"pass_rate": 0.5, "compute_chip_hours": 2.0}
    for name, row in (("metrics.jsonl", step), ("evals.jsonl", evaluation)):
        rows = [
            {"step": i, **row, "text": "x" * size} for i, size in ((6, 1), (7, 10**7))
        ]
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (tmp_path / name).write_text(text + '{"step": 8, "text": "' + "y" * torn)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said == "step 7 of 40, pass rate 0.500 at step 7 after 2.0000 chip-hours"
    main([str(tmp_path), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["num_steps"], facts["processes"]) == (7, 40, None)
    assert facts["evaluation"]["pass_rate"] == 0.5
