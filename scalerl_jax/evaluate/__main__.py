"""Evaluate a checkpoint:

    python -m scalerl_jax.evaluate --config=configs/tiny.py --checkpoint=runs/x \
        --sets=chain_sum,spell_backward --samples=16

or make a page of rollouts that are there already:

    python -m scalerl_jax.evaluate --rollouts=runs/x/rollouts.jsonl --out=rollouts.html

Exit status: 0 done, 1 a failure on the way, 2 a mistake in a setting or a flag, 130
interrupted; what was finished is kept then.
"""

import sys

from scalerl_jax.evaluate.command import run
from scalerl_jax.utils.progress import log_to_stderr

if __name__ == "__main__":
    log_to_stderr()
    sys.exit(run(sys.argv))
