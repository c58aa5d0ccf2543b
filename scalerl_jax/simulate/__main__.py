"""Say what a run would cost, and who would wait for whom, before there is a machine:

    python -m scalerl_jax.simulate --config=configs/8b.py --topology=v5p:4x4x4

Exit status: 0 simulated, 2 a mistake in a setting or a flag.
"""

import sys

from scalerl_jax.simulate.command import run

if __name__ == "__main__":
    sys.exit(run(sys.argv))
