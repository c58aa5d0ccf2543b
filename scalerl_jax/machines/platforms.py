"""Choose `JAX_PLATFORMS` for a process if the user has not set it."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path

PLATFORMS = "JAX_PLATFORMS"  # JAX's own setting
# Each of these variables declares a TPU, whatever the machine's files contain.
_TOLD = (
    "JAX_FORCE_TPU_INIT",
    "TPU_ACCELERATOR_TYPE",
    "TPU_NAME",
    "TPU_TOPOLOGY",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_WORKER_HOSTNAMES",
)
# PCI vendor id.  Network cards of Google's cloud use it too; then JAX asks libtpu.
_GOOGLE = "0x1ae0"


def platforms(environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the value for `JAX_PLATFORMS`; None: leave it unchanged.

    With the extra [tpu] JAX asks libtpu for a TPU at every start, which prints half a
    screen of errors on a machine without one.  There the value is "cpu", unless the
    user has set platforms or another JAX plugin is installed.  It must be set before
    JAX is imported.
    """
    if PLATFORMS in environment or importlib.util.find_spec("libtpu") is None:
        return None
    if has_tpu(environment, root) or _has_plugins():
        return None
    return "cpu"


def has_tpu(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return True if environment, device files or the PCI bus indicate a TPU.

    It needs neither JAX nor a network.  `root` is the root of the file system.
    """
    if any(environment.get(name) for name in _TOLD):
        return True
    # Device files up to v4, and from v5e on; vfio/vfio exists without a device too.
    devices = (*root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*"))
    makers = root.glob("sys/bus/pci/devices/*/vendor")
    return bool(devices) or any(_GOOGLE in each.read_text() for each in makers)


def _has_plugins() -> bool:
    """Return True if a JAX plugin for another accelerator (CUDA) is installed."""
    return importlib.util.find_spec("jax_plugins") is not None or bool(
        importlib.metadata.entry_points(group="jax_plugins")
    )
