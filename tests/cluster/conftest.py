"""One cluster of Ray at a time: heads share a port, and the cores are few."""

import fcntl
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_at_a_time():
    """Wait until no other process tests clusters."""
    with (Path(tempfile.gettempdir()) / "scalerl_jax_cluster_tests").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
