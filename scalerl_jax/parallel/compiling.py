"""Options of XLA's TPU compiler by role and chip, for runs and the preflight.

Each option improves the compiler's own estimate of an 8B program (`docs/preflight.md`
has the figures, and the options that were rejected).  Other platforms get no options.
"""

import functools
import logging
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_log = logging.getLogger(__name__)

Role = Literal["learner", "sampler"]
Options = dict[str, bool | int]

# Gather a weight before its product.  By default the compiler gathers it in pieces, in
# a loop of products whose sum is rounded to bfloat16 in each iteration.
_WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
# Role -> JAX's `device_kind` -> options; "" is any other TPU.
OPTIONS: dict[Role, dict[str, Options]] = {
    "learner": {"": _WHOLE_PRODUCTS},
    "sampler": {"": {}},
}


def tpu_options(role: Role, mesh: Mesh) -> Options:
    """Return the compiler options of programs on a mesh of TPUs.

    Options that the installed compiler does not support are left out, with a warning.
    """
    devices = list(mesh.devices.flat)
    # A program cannot be compiled for devices of another process only.
    own = [one for one in devices if one.process_index == jax.process_index()]
    by_kind = OPTIONS[role]
    wanted = by_kind.get(devices[0].device_kind, by_kind[""])
    return {
        name: value
        for name, value in wanted.items()
        if _is_known(name, value, (own or devices)[0])
    }


@functools.cache
def _is_known(name: str, value: bool | int, device: Any) -> bool:
    """Return True if the compiler accepts an option; it compiles a trivial program."""
    sharding = NamedSharding(Mesh([device], ("alone",)), PartitionSpec())
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        _log.warning(
            "this TPU compiler does not support %s = %s, which is left out: %s",
            *(name, value, " ".join(str(error).split())[:200]),
        )
        return False
    return True
