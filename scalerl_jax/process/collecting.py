"""The search of Python for garbage, in the process of a command.

Imports, and traces of programs, make many small objects that nearly all stay: to look
for garbage among them after every 700th is a fifth of the time of the imports, and two
seconds of a run of 60 steps.  A user's own program, which imports the library, keeps
the settings it has.
"""

import gc

_EVERY = 50_000  # objects more than there were


def collect_rarely() -> None:
    """Look for garbage less often; a command calls it before the imports of its own."""
    gc.set_threshold(_EVERY)
