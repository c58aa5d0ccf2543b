"""Evaluate a checkpoint:

    python -m scalerl_jax.evaluate --config=configs/tiny.py --checkpoint=runs/x \
        --sets=chain_sum,spell_backward --samples=16

or make a page of rollouts that are there already:

    python -m scalerl_jax.evaluate --rollouts=runs/x/rollouts.jsonl --out=rollouts.html

Exit status: 0 done, 1 a failure on the way, 2 a mistake in a setting or a flag, 130
interrupted; what was finished is kept then.
"""

import logging
import sys

from scalerl_jax.evaluate.command import run
from scalerl_jax.utils.progress import Stderr

if __name__ == "__main__":
    # Other libraries have set up logging when they were imported: `force`.
    logging.basicConfig(
        format="%(message)s", level=logging.WARNING, stream=Stderr(), force=True
    )
    logging.getLogger("scalerl_jax").setLevel(logging.INFO)
    sys.exit(run(sys.argv))
