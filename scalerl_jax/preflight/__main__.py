"""Check whether a config fits TPUs or GPUs, on a machine without them:

    scalerl preflight --config=configs/8b.py --topology=v5p:4x4x4
    scalerl preflight --config=configs/8b_lora.py --topology=h100:1

Exit status: 0 fits, 1 does not fit, 2 a mistake in a setting or a flag.
"""

import os
import sys

from scalerl_jax.config import wants_help

# The compiler gets the topology by name and must not search for a TPU of this machine.
# These variables would hide a TPU VM's chips from JAX, so they are set for this process
# only, and before JAX is imported.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # cached programs lack memory statistics
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def main() -> int:
    """Run the check of the command line; return its exit status."""
    if not wants_help(sys.argv):
        os.environ.update(ENVIRONMENT)
    from scalerl_jax.preflight.command import run  # imports JAX

    return run(sys.argv)


if __name__ == "__main__":
    sys.exit(main())
