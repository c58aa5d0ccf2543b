"""The command line: `python -m scalerl_jax.scaling {fit,compare,...} --help`.

Input that cannot be used ends with one message and exit status 2.
"""

import sys
from collections.abc import Sequence

from scalerl_jax.scaling import commands
from scalerl_jax.scaling.options import make_parser
from scalerl_jax.utils.failures import answer

COMMANDS = {
    "fit": commands.fit,
    "compare": commands.compare,
    "extrapolate": commands.extrapolate,
    "plan": commands.plan,
    "watch": commands.watch,
    "report": commands.report,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    flags = make_parser().parse_args(arguments)
    return answer(lambda: COMMANDS[flags.command](flags))


if __name__ == "__main__":
    sys.exit(main())
