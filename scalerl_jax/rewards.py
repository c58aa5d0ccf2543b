"""The former name of `scalerl judge`, for scripts that call it.

python -m scalerl_jax.rewards judge FILE.jsonl [--json]
"""

import sys

from scalerl_jax.data.judging import main

if __name__ == "__main__":
    sys.exit(main())
