r"""The laptop default over processes: two learner processes, and two replicas.

scalerl train --config=configs/tiny_fleet.py --workdir=runs/fleet \
    --ray=local

`make fleet` runs it, kills a replica on the way, and fits the curve.
"""

import runpy
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Return only what differs from `configs/tiny.py`."""
    tiny = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
    config = tiny["get_config"]()
    config.mesh.fsdp = 2
    config.mesh.processes = 2
    config.generators.count = 2
    config.sampler.slots = 64  # of each replica
    return config
