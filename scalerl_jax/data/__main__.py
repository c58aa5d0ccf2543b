"""The command line: `python -m scalerl_jax.data {prepare,inspect,list,difficulty}`.

Input that cannot be used ends with one message and exit status 2.
"""

import importlib
import sys
from collections.abc import Sequence

from scalerl_jax.data import commands
from scalerl_jax.utils.failures import answer

# Its part stands above this package, and is imported when it is asked for.
_DIFFICULTY = "scalerl_jax.evaluate.difficulty"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["difficulty"]:
        return importlib.import_module(_DIFFICULTY).main(arguments[1:])
    flags = commands.make_parser().parse_args(arguments)
    return answer(lambda: commands.COMMANDS[flags.command](flags))


if __name__ == "__main__":
    sys.exit(main())
