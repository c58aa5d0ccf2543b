"""The command line: `scalerl judge FILE.jsonl [--json]`.

Input that cannot be used ends with one message and exit status 2.
"""

import importlib
import sys

# Its rows are those of data sets, whose package stands above this one.
_JUDGE = "scalerl_jax.data.judging"

if __name__ == "__main__":
    sys.exit(importlib.import_module(_JUDGE).main())
