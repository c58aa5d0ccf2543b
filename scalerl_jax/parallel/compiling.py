"""Options of XLA's TPU compiler: by role and chip, for runs and the preflight alike.

Each is here because the compiler's own estimate of an 8B program is better with it
(`docs/preflight.md` has the figures, and what was left out).  Other platforms
get none.
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

# A weight is gathered before its product.  By default it comes in pieces, in a loop of
# as many products, whose sum is rounded to bfloat16 at each turn.
_WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
# By the kind of device as JAX names it; "" is any other TPU.
OPTIONS: dict[Role, dict[str, Options]] = {
    "learner": {"": _WHOLE_PRODUCTS},
    "sampler": {"": {}},
}


def tpu_options(role: Role, mesh: Mesh) -> Options:
    """Return the options of programs on a mesh of TPUs.

    One that the installed compiler does not know is left out, with a warning.
    """
    devices = list(mesh.devices.flat)
    # No program can be compiled alone for devices of another process.
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
    """Return whether the compiler takes an option, as it says of a trivial program."""
    sharding = NamedSharding(Mesh([device], ("alone",)), PartitionSpec())
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        _log.warning(
            "this TPU compiler does not take %s = %s, programs go without: %s",
            *(name, value, " ".join(str(error).split())[:200]),
        )
        return False
    return True
