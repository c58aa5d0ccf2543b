"""Scripts that complete the command line in bash, zsh and fish.

A script contains all words, so that a shell need not start Python at each Tab.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

SHELLS = ("bash", "zsh", "fish")
_FLAG = re.compile(r"(?<![\w-])--(?:\[no\])?[a-zA-Z][\w.-]*")
_COMMANDS = re.compile(r"\{([a-z_]+(?:,[a-z_]+)+)\}")  # subcommands in a --help
_NEVER_MEANT = {
    "--flag",
    "--flagfile",
    "--undefok",
    "--config.NAME",
}  # flags of absl, and placeholders in texts
# Readline splits words at "=", zsh does not.
_BASH = """_scalerl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local flag= start= words=
  if [[ $word == = ]]; then flag=$before word=
  elif [[ $before == = ]]; then flag=${{COMP_WORDS[COMP_CWORD-2]}}
  elif [[ $word == --*=* ]]; then flag=${{word%%=*}} start=$flag= word=${{word#*=}}
  fi
  if [[ $flag == --config ]]; then words='{configs}'
  elif [[ -n $flag ]]; then words=
  elif [[ $COMP_CWORD == 1 ]]; then words='{commands}'
  else case ${{COMP_WORDS[1]}} in
{cases}
  esac fi
  COMPREPLY=($(compgen -P "$start" -W "$words" -- "$word"))
  if [[ ${{#COMPREPLY[@]}} == 0 && $COMP_CWORD != 1 ]]; then
    COMPREPLY=($(compgen -P "$start" -f -- "$word"))
  fi
}}
complete -o filenames -F _scalerl scalerl
"""


def words_of(commands: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags and subcommands in the --help of each command.

    Every command is run once, which takes seconds.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(commands, pool.map(_words, commands), strict=True))


def _words(command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "scalerl_jax", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    flags = {
        each.replace("[no]", "").rstrip(".-") for each in _FLAG.findall(done.stdout)
    }
    more = _COMMANDS.search(done.stdout.partition("\n\n")[0])
    flags = flags - _NEVER_MEANT | {"--quiet"}
    return [*(more[1].split(",") if more else ()), *sorted(flags)]


def script(
    shell: str,
    commands: Mapping[str, str],
    words: Mapping[str, Sequence[str]],
    configs: Sequence[str],
) -> str:
    """Return the script for a shell.

    Args:
        shell: one of `SHELLS`.
        commands: name of each command -> what it does.
        words: name of each command -> its flags and subcommands.
        configs: names that --config accepts.
    """
    if shell == "fish":
        return _fish(commands, words, configs)
    cases = "\n".join(
        f"    {name}) words='{' '.join(words[name])}' ;;" for name in commands
    )
    text = _BASH.format(
        commands=" ".join(commands), cases=cases, configs=" ".join(configs)
    )
    if shell == "zsh":  # it can load bash's completion
        return f"autoload -U +X bashcompinit && bashcompinit\n{text}"
    return text


def _fish(
    commands: Mapping[str, str],
    words: Mapping[str, Sequence[str]],
    configs: Sequence[str],
) -> str:
    first = "complete -c scalerl -n __fish_use_subcommand -f"
    lines = [
        f"{first} -a {name} -d '{_quoted(says)}'" for name, says in commands.items()
    ]
    for name in commands:
        of = f"complete -c scalerl -n '__fish_seen_subcommand_from {name}'"
        for word in words[name]:
            if not word.startswith("--"):
                lines.append(f"{of} -a {word}")
                continue
            values = f" -x -a '{' '.join(configs)}'" if word == "--config" else ""
            lines.append(f"{of} -l '{word.removeprefix('--')}'{values}")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    return text.replace("'", r"\'")
