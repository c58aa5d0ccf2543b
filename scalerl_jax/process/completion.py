"""Scripts that complete the command line in bash, zsh and fish.

A script contains all words, so that a shell need not start Python at each Tab.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from scalerl_jax.process.child_environment import own_python

SHELLS = ("bash", "zsh", "fish")
_FLAG = re.compile(r"(?<![\w-])--(?:\[no\])?[a-zA-Z][\w.-]*")
# Subcommands in a --help, and not the values of a flag.
_COMMANDS = re.compile(r"(?:^|\s)(?!\[?--)\S+\s+\{([a-z_]+(?:,[a-z_]+)+)\}")
_NEVER_MEANT = {
    "--flag",
    "--flagfile",
    "--undefok",
    "--config.NAME",
}  # flags of absl, and placeholders in texts
# Readline splits words at "=".
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

_ZSH = """#compdef scalerl
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
_scalerl() {{
  local word=$words[CURRENT] before=$words[CURRENT-1]
  local -a found
  if [[ $before == --config || $word == --config=* ]]; then
    compset -P '--config='
    found=({configs})
  elif compset -P '--*='; then
    _files; return
  elif (( CURRENT == 2 )); then
    found=(
{commands}
    )
    _describe command found; return
  else case $words[2] in
{cases}
  esac fi
  compadd -- $found || _files
}}
compdef _scalerl scalerl
"""


def words_of(commands: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags and subcommands in the --help of each command.

    Every command is run once, which takes seconds.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(commands, pool.map(_words, commands), strict=True))


def _words(command: str) -> list[str]:
    done = subprocess.run(
        [*own_python(), "-m", "scalerl_jax", command, "--help"],
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
    words = {**words, "help": list(commands), "completion": SHELLS}
    commands = {
        **commands,
        "help": "the flags of a command",
        "completion": "what a shell completes this by",
    }
    if shell == "fish":
        return _fish(commands, words, configs)
    if shell == "zsh":
        return _zsh(commands, words, configs)
    cases = "\n".join(
        f"    {name}) words='{' '.join(words[name])}' ;;" for name in commands
    )
    return _BASH.format(
        commands=" ".join(commands), cases=cases, configs=" ".join(configs)
    )


def _zsh(
    commands: Mapping[str, str],
    words: Mapping[str, Sequence[str]],
    configs: Sequence[str],
) -> str:
    quoted = (f"'{name}:{_twice(says)}'" for name, says in commands.items())
    cases = (f"    {name}) found=({' '.join(words[name])}) ;;" for name in commands)
    return _ZSH.format(
        configs=" ".join(configs),
        commands="\n".join(f"      {each}" for each in quoted),
        cases="\n".join(cases),
    )


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


def _twice(text: str) -> str:
    """Quote a text as zsh has it within single quotes: `'` ends them."""
    return text.replace("'", "'\\''")
