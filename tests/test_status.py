"""How a run stands: what is no run's directory is told by a line."""

import json

import pytest
import small_bucket

from scalerl_jax.status import main


@small_bucket.NEEDS_EXTRA
def test_a_run_in_a_bucket_is_looked_at_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket = small_bucket.empty()
    config = {"config": {"train": {"num_steps": 40}}}
    bucket.write("runs/x/config.json", json.dumps(config).encode())
    assert main(["gs://bucket/runs/x"]) == 0
    assert capsys.readouterr().out.startswith("step 0 of 40\nno step is done\n")
    with pytest.raises(ValueError, match="^gs://bucket/runs/y: there is nothing of"):
        main(["gs://bucket/runs/y"])


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="it has no config.json; give the --workdir"):
        main([str(tmp_path)])
