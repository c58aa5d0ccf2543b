"""Meshes of the first devices, by the sizes of their axes."""

import math

import jax

from scalerl_jax.parallel.mesh import make_mesh


def mesh_of(shape, devices=None):
    """A mesh (data, fsdp, context, tensor), or with the parts of experts as a fifth."""
    data, fsdp, context, tensor, expert = (*shape, 1)[:5]
    devices = devices or jax.devices()[: math.prod(shape[:4])]
    return make_mesh(
        devices, data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor
    )
