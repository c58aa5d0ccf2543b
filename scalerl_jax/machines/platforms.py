"""Which of JAX's platforms a process asks for, where nobody has said it."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path

PLATFORMS = "JAX_PLATFORMS"  # JAX's own setting
# With one of them somebody says that there is a TPU, whatever the files here say.
_TOLD = (
    "JAX_FORCE_TPU_INIT",
    "TPU_ACCELERATOR_TYPE",
    "TPU_NAME",
    "TPU_TOPOLOGY",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_WORKER_HOSTNAMES",
)
# As a maker of PCI devices; with network cards of its cloud libtpu is asked, too.
_GOOGLE = "0x1ae0"


def platforms(environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the value to give `JAX_PLATFORMS`; None: leave it as it is.

    With the extra [tpu] JAX asks libtpu for a TPU at every start, which writes half a
    screen of errors where there is none: there it is asked for the CPU alone, unless
    the user names platforms or JAX has another one installed.  It has to be said before
    JAX is imported.
    """
    if PLATFORMS in environment or importlib.util.find_spec("libtpu") is None:
        return None
    if has_tpu(environment, root) or _has_plugins():
        return None
    return "cpu"


def has_tpu(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether anything speaks of a TPU: environment, devices or the PCI bus.

    Nothing of it needs JAX or a network.  `root` is where the machine's files are.
    """
    if any(environment.get(name) for name in _TOLD):
        return True
    # Up to v4, and from v5e on; vfio/vfio is there without a device, too.
    devices = (*root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*"))
    makers = root.glob("sys/bus/pci/devices/*/vendor")
    return bool(devices) or any(_GOOGLE in each.read_text() for each in makers)


def _has_plugins() -> bool:
    """Return whether JAX finds another accelerator's package, such as CUDA's."""
    return importlib.util.find_spec("jax_plugins") is not None or bool(
        importlib.metadata.entry_points(group="jax_plugins")
    )
