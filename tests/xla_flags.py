"""Flags of XLA, of those that the installed one knows."""

import os
import subprocess
import sys

# They make its compiler quick; a program whose code is made in parts, to be compiled by
# many threads, takes half as much again.
QUICK = (
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
_READ_FLAGS = "from jaxlib import xla_client; xla_client.CompileOptions()"


def known(*flags: str) -> str:
    """Return those that XLA knows, in one process or in one more for each of them."""
    return " ".join(flags if _takes(*flags) else filter(_takes, flags))


def _takes(*flags: str) -> bool:
    """Return whether XLA takes them all: with one that it does not know it aborts."""
    found = subprocess.run(
        [sys.executable, "-c", _READ_FLAGS],
        env=os.environ | {"XLA_FLAGS": " ".join(flags)},
        stderr=subprocess.DEVNULL,
    )
    return found.returncode == 0
