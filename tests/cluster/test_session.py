"""Clusters that cannot be joined are told apart."""

import os
import sys
import tempfile
import time

import pytest
import small_run
from small_processes import free_port

from scalerl_jax.cluster.parent_watch import watching_parent
from scalerl_jax.cluster.slice_hosts import answers

_LIMIT_S = 120


@pytest.mark.slow
def test_a_head_that_asks_for_a_token_is_told_as_such(tmp_path):
    pytest.importorskip("ray")
    port = free_port()
    words = ["start", "--head", f"--port={port}", "--include-dashboard=false"]
    command = [sys.executable, "-m", "ray.scripts.scripts", *words, "--block"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    with (
        tempfile.TemporaryFile() as said,
        watching_parent(command, environment=os.environ | token, output=said) as head,
    ):
        deadline = time.monotonic() + _LIMIT_S
        while not answers(f"localhost:{port}"):
            assert head.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)
        for told, flags, words in (
            ({}, [], "needs the token of the cluster, the same on all its machines"),
            ({}, ["--ray_without_token"], "asks for another token than this process"),
            ({"RAY_AUTH_TOKEN": "1" * 64}, [], "asks for another token than this"),
        ):
            process = small_run.start(
                *("-m", "scalerl_jax.main", f"--ray=localhost:{port}", *flags),
                *small_run.arguments(tmp_path / "x"),
                environment={"HOME": str(tmp_path)} | told,
            )
            _, errors = process.communicate(timeout=_LIMIT_S)
            assert process.returncode == 2
            *_, last = errors.splitlines()  # Ray's own come before
            assert last.startswith(f"error: --ray=localhost:{port} {words}"), errors
            assert not (tmp_path / "x").exists()
