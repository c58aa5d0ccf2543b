"""The best number of completions per prompt on prompts that are rarely solved.

scalerl study run isocompute_hard && scalerl study export isocompute_hard

The sweep of `isocompute_easy.py`, whose text has the command of the analysis, on tasks
of which the base solves 10 to 14 %.

Result: small n climbs faster, and all end alike; docs/studies.md.
"""

import runpy
from pathlib import Path

from scalerl_jax.study.design import Study

HARD = ("chain_sum_long", "spell_backward")


def get_study() -> Study:
    """Return the sweep on hard prompts."""
    easy = runpy.run_path(str(Path(__file__).with_name("isocompute_easy.py")))
    return easy["sweep"](HARD)
