"""The environment of processes that run code of others: variables by name, no tokens.

What a library, a chat template or a program of the policy prints, logs or sends home
can then hold no key of the user's.  It is no wall: a process of the same user can look
for keys elsewhere, and what is not trusted at all runs in a sandbox besides.
"""

import os
import sys

# Name of a variable that is handed on -> what for.
HANDED_ON = {
    "PATH": "programs, bubblewrap among them",
    "HOME": "settings of git, and the folders of libraries",
    "TMPDIR": "files of sandboxes",
    "LANG": "how texts are encoded",
    "LC_ALL": "how texts are encoded",
    "LC_CTYPE": "how texts are encoded",
    "TZ": "the date that chat templates write",
    "LD_LIBRARY_PATH": "libraries of an interpreter that lies in a place of its own",
    "PYTHONHOME": "modules of such an interpreter",
    "PYTHONHASHSEED": "the order of sets, where the user fixes it",
    "PYTHONUTF8": "how texts are encoded",
    "PYTHONPYCACHEPREFIX": "compiled modules, where packages cannot be written",
    "OMP_NUM_THREADS": "threads of NumPy, of which each verifier process has its own",
    "OPENBLAS_NUM_THREADS": "the same",
    "MKL_NUM_THREADS": "the same",
}


def child_environment(**own: str) -> dict[str, str]:
    """Return the environment for a child process: what it needs, and its `own`.

    It imports from the folders of this process, and from no other.  If it imports JAX,
    it leaves this process's devices alone.
    """
    given = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    places = map(os.path.abspath, sys.path)  # "" is the current directory
    given |= {"PYTHONPATH": os.pathsep.join(places), "JAX_PLATFORMS": "cpu"}
    return given | own
