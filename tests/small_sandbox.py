"""Whether this machine can run programs, for tests that do."""

import pytest

from scalerl_jax.environments import sandbox
from scalerl_jax.environments.sandbox import SandboxError


def _why_not():
    try:
        sandbox.check()
    except SandboxError as error:
        return str(error)
    return ""


WHY_NOT = _why_not()
sandboxed = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
