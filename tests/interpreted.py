"""Pallas' TPU kernels on the CPU, by the interpreter that makes XLA operations."""

import contextlib

from jax._src.literals import TypedInt
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def interpreted():
    """Kernels that are traced in here run as XLA operations.

    `True` is `pallas_call`'s own interpreter: the one that simulates a TPU's memory
    (`pltpu.InterpretParams`) does not know the reshaped references of JAX's ragged
    paged attention (JAX 0.10 to 0.12).
    """
    # An index of that kernel is a Python integer, whose shape the interpreter asks.
    with_shape = hasattr(TypedInt, "shape")
    if not with_shape:
        TypedInt.shape = ()
    try:
        with pltpu.force_tpu_interpret_mode(True):
            yield
    finally:
        if not with_shape:
            del TypedInt.shape
