"""Which failures are answers to the user, and which are faults to be traced."""

import traceback

import jax


def is_explained(error: Exception) -> bool:
    """Whether this package raised it, with a message for the user."""
    if isinstance(error, jax.errors.JaxRuntimeError):  # its own frames are not there
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name = frame.f_globals["__name__"]
    return name == "__main__" or name.startswith("scalerl_jax.")
