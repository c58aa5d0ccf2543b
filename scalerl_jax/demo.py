"""The demo: train a small policy and fit its curve, in minutes on a laptop.

    scalerl demo
    scalerl demo --workdir=runs/short --config.train.num_steps=60

It prints and runs `scalerl train --config=tiny` and `scalerl fit`.  Started again, it
resumes where it was stopped.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from scalerl_jax.formats.reading import is_remote
from scalerl_jax.process.child_environment import own_python
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.printing import to_stdout
from scalerl_jax.run.directory import local_directory


def main(argv: list[str] | None = None) -> int:
    """Train and fit; return the exit status of the first command that fails, or 0."""
    parser = Parser(
        "python -m scalerl_jax.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workdir",
        default="runs/tiny",
        help="directory of the run (default: runs/tiny)",
    )
    flags, settings = parser.parse_known_args(argv)
    for word in settings:
        if not word.startswith("--config."):
            parser.error(f"unknown argument {word}; settings are --config.NAME=VALUE")
    workdir = flags.workdir
    here = local_directory(workdir) if is_remote(workdir) else Path(workdir)
    for words in (
        ["train", "--config=tiny", f"--workdir={workdir}", *settings],
        ["fit", str(here)],
    ):
        to_stdout(f"$ scalerl {shlex.join(words)}\n")
        sys.stdout.flush()
        done = subprocess.run([*own_python(), "-m", "scalerl_jax", *words], check=False)
        if done.returncode:
            return done.returncode
    to_stdout(f"the curve is in {here / 'fit.png'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(answer(main))
