"""The command line: `python -m scalerl_jax.scaling {fit,compare,...} --help`."""

import sys

from scalerl_jax.scaling.cli import main

if __name__ == "__main__":
    sys.exit(main())
