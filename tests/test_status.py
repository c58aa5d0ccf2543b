"""How a run stands: what is no run's directory is told by a line."""

import pytest

from scalerl_jax.status import main


def test_a_path_in_a_bucket_is_answered_with_how_to_copy_it():
    with pytest.raises(ValueError, match="^gs://bucket/runs/x is in .*copy it"):
        main(["gs://bucket/runs/x"])


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="it has no config.json; give the --workdir"):
        main([str(tmp_path)])
