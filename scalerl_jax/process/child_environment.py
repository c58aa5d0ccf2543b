"""The environment of child processes that run others' code: an allowlist, no tokens.

So output, logs or network traffic of a library, a chat template or a program of the
policy cannot contain the user's keys from the environment.  This is not isolation: a
process of the same user can find keys elsewhere.  Untrusted code also runs in a
sandbox.
"""

import os
import sys

# Name of an inherited variable -> its purpose.
HANDED_ON = {
    "PATH": "programs, bubblewrap among them",
    "HOME": "settings of git, and the folders of libraries",
    "TMPDIR": "files of sandboxes",
    "LANG": "how texts are encoded",
    "LC_ALL": "how texts are encoded",
    "LC_CTYPE": "how texts are encoded",
    "TZ": "the date that chat templates write",
    "LD_LIBRARY_PATH": "libraries of an interpreter in a directory of its own",
    "PYTHONHOME": "modules of such an interpreter",
    "PYTHONHASHSEED": "the order of sets, where the user fixes it",
    "PYTHONUTF8": "how texts are encoded",
    "PYTHONPYCACHEPREFIX": "compiled modules, where packages cannot be written",
    "OMP_NUM_THREADS": "threads of NumPy, of which each verifier process has its own",
    "OPENBLAS_NUM_THREADS": "the same",
    "MKL_NUM_THREADS": "the same",
}


def own_python() -> list[str]:
    """Return the start of a command of a module, which imports what this process would.

    Without -P, `python -m` also imports from the current directory, in which somebody
    else may have put a module of any name.
    """
    here = {"", os.getcwd()} & {*sys.path}  # as a user's own `python -m` has it
    return [sys.executable] if here else [sys.executable, "-P"]


def child_environment(**own: str) -> dict[str, str]:
    """Return the environment for a child process: inherited variables, and its `own`.

    The child imports only from the folders of this process's `sys.path`.  Its JAX uses
    the CPU, and not this process's devices.
    """
    given = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    places = map(os.path.abspath, sys.path)  # "" is the current directory
    given |= {"PYTHONPATH": os.pathsep.join(places), "JAX_PLATFORMS": "cpu"}
    return given | own
