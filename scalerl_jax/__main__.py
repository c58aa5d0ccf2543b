"""The command `scalerl`, or `python -m scalerl_jax`: every command by one name.

    scalerl train --config=configs/tiny.py --workdir=runs/x
    scalerl fit runs/x

Each is one of the modules below, with its flags: `scalerl COMMAND --help`.
"""

import difflib
import runpy
import sys

from scalerl_jax import __version__
from scalerl_jax.process.collecting import collect_rarely
from scalerl_jax.process.common_flags import be_quiet, rewritten
from scalerl_jax.process.completion import SHELLS, script, words_of
from scalerl_jax.process.ending import INTERRUPTED, MISTAKE
from scalerl_jax.process.preemption import end_at_signals
from scalerl_jax.process.printing import to_stderr, to_stdout

_SCALING = "scalerl_jax.scaling"
# Command -> (module, help).  A module of several commands also gets the command's name.
GROUPS = {
    "train": {
        "demo": ("scalerl_jax.demo", "train a small policy and fit its curve, at once"),
        "train": ("scalerl_jax.main", "train a policy, or resume a run"),
        "data": ("scalerl_jax.data", "prepare, inspect and list prompts"),
        "judge": ("scalerl_jax.environments", "judge the completions in a file"),
        "study": ("scalerl_jax.study", "run and compare arms and seeds of one base"),
        "warmstart": ("scalerl_jax.warmstart", "train a policy by SFT on answers"),
    },
    "look": {
        "status": ("scalerl_jax.status", "state of a run and its processes"),
        "watch": (_SCALING, "follow a run: its fit, its forecast, an alarm"),
        "report": (_SCALING, "one HTML page of runs and their fits"),
        "evaluate": (
            "scalerl_jax.evaluate",
            "pass rates of a checkpoint, and rollouts",
        ),
    },
    "fit": {
        "fit": (_SCALING, "fit a curve, with intervals and a picture"),
        "compare": (_SCALING, "compare recipes, and say which is better"),
        "extrapolate": (_SCALING, "hide the end of a curve, and predict it"),
    },
    "plan": {
        "plan": (_SCALING, "compute for a pass rate, its price, when to stop"),
        "preflight": ("scalerl_jax.preflight", "does a config fit a TPU topology"),
        "simulate": (
            "scalerl_jax.simulate",
            "cost of a run, and idle shares of its parts",
        ),
        "doctor": ("scalerl_jax.doctor", "what this machine has and lacks"),
    },
    "serve": {
        "serve": ("scalerl_jax.serve", "completions over HTTP, in OpenAI's form"),
        "export": ("scalerl_jax.export", "a policy as a Hugging Face directory"),
    },
    "ship": {
        "launch": ("scalerl_jax.launch", "create, keep and remove machines for a run"),
    },
}
COMMANDS = {name: row for group in GROUPS.values() for name, row in group.items()}
_SEVERAL = (_SCALING, "scalerl_jax.environments")
_USAGE = """usage: scalerl COMMAND [flags]
       scalerl help COMMAND, scalerl COMMAND --help
       scalerl completion bash|zsh|fish
       scalerl --version

Every command takes -q (no progress), and its run or checkpoint as its first word.
"""


def main() -> None:
    """Run the command that the first word names."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        to_stdout(_USAGE + "".join(map(_group_text, GROUPS)))
        return
    if name == "completion":
        _complete(rest)
        return
    if name == "--version":
        to_stdout(f"scalerl {__version__}\n")
        return
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        to_stderr(
            f"error: scalerl has no command {name!r}{meant}; scalerl --help lists all\n"
        )
        sys.exit(MISTAKE)
    module, _ = COMMANDS[name]
    rest, quiet = _words(name, rest)
    if quiet:
        be_quiet()
    if module in _SEVERAL:
        sys.argv = ["scalerl", name, *rest]
    else:
        sys.argv = [f"scalerl {name}", *rest]
    collect_rarely()
    # Their imports take seconds, and C code does not hear Ctrl-C.
    if name in ("train", "warmstart"):
        end_at_signals()
    try:
        runpy.run_module(module, run_name="__main__")
    except KeyboardInterrupt:  # before the command could handle it
        to_stderr("interrupted\n")
        sys.exit(INTERRUPTED)


def _words(name: str, given: list[str]) -> tuple[list[str], bool]:
    """Return the words for a command's parser, and whether to be quiet; or end."""
    try:
        return rewritten(name, given)
    except ValueError as error:
        to_stderr(f"error: {error}\n")
        sys.exit(MISTAKE)


def _group_text(group: str) -> str:
    rows = (f"  {name:<12} {says}\n" for name, (_, says) in GROUPS[group].items())
    return f"\n{group}\n{''.join(rows)}"


def _complete(words: list[str]) -> None:
    """Print the script by which a shell completes commands, flags and configs."""
    if len(words) != 1 or words[0] not in SHELLS:
        to_stderr(
            f"error: scalerl completion {' '.join(words)}: name one of {SHELLS}\n"
        )
        sys.exit(MISTAKE)
    from scalerl_jax.config.names import names  # ml_collections takes a while

    says = {name: text for name, (_, text) in COMMANDS.items()}
    to_stdout(script(words[0], says, words_of(list(COMMANDS)), names()))


if __name__ == "__main__":
    main()
