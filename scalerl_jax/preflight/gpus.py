"""Compile programs for NVIDIA GPUs on a machine without one.

XLA's compiler for GPUs takes a description of the GPU in place of a GPU.  It cannot try
kernels there, so that matmuls are compiled without autotuning, and cuDNN's attention is
not asked for its workspace: `planning.memory.cudnn_bytes` has it.
"""

import importlib.util
from typing import Any

from scalerl_jax.machines.chips import Chip

# Of lowered programs, for `compile`.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}
# Multiprocessors, units of each, and bytes of L2 cache, shared memory per
# multiprocessor and per block; GHz.  From XLA's own descriptions of these GPUs:
# github.com/openxla/xla, xla/backends/gpu/target_config/specs.
_UNITS = {
    "a100": (108, 64, 41_943_040, 167_936, 166_912, 1.41),
    "h100": (132, 128, 52_428_800, 233_472, 232_448, 1.98),
    "h200": (132, 128, 52_428_800, 233_472, 232_448, 1.98),
}
_CUDNN = "major: 9 minor: 10 patch: 0"  # the oldest that JAX 0.10 takes is 9.8


def is_installed() -> bool:
    """Return True if JAX's plugin with XLA's compiler for NVIDIA GPUs is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    names = ("xla_cuda12", "xla_cuda13")
    return any(importlib.util.find_spec(f"jax_plugins.{name}") for name in names)


def description(chip: Chip) -> str:
    """Return XLA's description of a GPU, a GpuTargetConfigProto in text form."""
    cores, units, cache, shared, of_block, clock = _UNITS[chip.name]
    major, minor = chip.capability.split(".")
    values = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": shared,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": int(chip.hbm_bandwidth),
        "l2_cache_size": cache,
        "clock_rate_ghz": clock,
        "device_memory_size": chip.hbm_bytes,
        "shared_memory_per_block_optin": of_block,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
    }
    lines = [f"  {name}: {value}" for name, value in values.items()]
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ {_CUDNN} }}",
            f'device_description_str: "{chip.kind}"',
        ]
    )


def devices(chip: Chip, count: int) -> list[Any]:
    """Return `count` GPUs of one host; they cannot hold arrays.

    JAX looks at this process's GPUs for what cuDNN's attention can do.  Here there are
    none, so that from this call on it gets the capability of `chip`.
    """
    import jax
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental import topologies

    jax.devices()  # registers the plugins
    mine = tuple(map(int, chip.capability.split(".")))
    cudnn.check_compute_capability = lambda asked: (  # type: ignore[assignment]
        mine >= tuple(map(int, asked.split(".")))
    )
    found = topologies.get_topology_desc(
        "",
        "cuda",
        target_config=description(chip),
        topology=f"1x1x{count}",
    )
    return list(found.devices)
