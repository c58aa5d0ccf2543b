"""A policy to sample from: a Hugging Face directory, a GGUF file, or a run."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config, ModelConfig
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.formats.model_files import local_path
from scalerl_jax.formats.reading import Directory, is_remote, local_file, read_json
from scalerl_jax.formats.remote import origin_of
from scalerl_jax.learner import fitness
from scalerl_jax.learner.checkpoint import CheckpointReader
from scalerl_jax.learner.places import BucketPlace, CheckpointPlace
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.lora import join, merged
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.run.record import with_own_assets
from scalerl_jax.types import PyTree
from scalerl_jax.weights.publication import digest_of
from scalerl_jax.wiring.learning import (
    abstract_state,
    make_architecture,
    start_frozen,
)
from scalerl_jax.wiring.sampling import make_tokenizer

_CHECKPOINTS = "checkpoints"  # of a run directory
# A sharding per parameter of an architecture; None: the first device.
Placement = Callable[[Architecture], PyTree] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A policy at one version, as the sampler takes it."""

    arch: Architecture
    tokenizer: Tokenizer
    config: Config  # of the run; without one, the defaults
    params: PyTree
    policy_version: int  # optimizer steps; 0 without a run
    dtype: Any


def run_settings(directory: str | Path) -> Config | None:
    """Return the settings of the run that a directory is of; None if of none.

    Raises:
        ValueError: they cannot be read.
    """
    run = _run_of(_local(directory))
    if run is None:
        return None
    try:
        return read_settings(run / "config.json")
    except ValueError as error:
        raise ValueError(f"--checkpoint={directory}: {error}") from error


def load_model(
    directory: str | Path,
    *,
    dtype: str = "",
    placement: Placement = None,
    require_finite: bool = False,
) -> Model:
    """Return the policy in a directory, each device with its own shards.

    The directory is a Hugging Face one (or an id of its hub), a run's, the
    `checkpoints` in it, or one of these checkpoints; a GGUF file will do, too.  `dtype`
    is a name, empty: as the policy was sampled or saved.

    Raises:
        ValueError: it is missing, broken, or none of these; or, in a run's checkpoint
            or where finite numbers are required, it holds others.
    """
    try:
        path = _local(directory, weights=True)
        if isinstance(path, Path) and not path.is_dir():
            raise ValueError(
                "there is no such directory; name a Hugging Face directory, a GGUF "
                "file, a run directory, or a checkpoint of a run"
            )
        return _load(path, dtype, placement, require_finite)
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"--checkpoint={directory}: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """The low-rank factors of a run at one version, and the digest of their base."""

    arch: Architecture
    config: Config
    factors: PyTree
    digest: str  # of the base


def load_adapter(directory: str | Path) -> Adapter:
    """Return the factors of a run's newest checkpoint, or of the one named.

    Raises:
        ValueError: it is no run with factors, broken, or beside another base.
    """
    try:
        path = _local(directory)
        run = _run_of(path)
        config = None if run is None else read_settings(run / "config.json")
        if run is None or config is None or not config.model.lora.rank:
            raise ValueError(
                "there are no factors: it is no run with model.lora.rank; leave out "
                "--adapter"
            )
        assert isinstance(path, Path), "a run is a directory"
        arch = make_architecture(config)
        _, factors, frozen = _parts(run, path, config, arch)
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"--checkpoint={directory}: {error}") from error
    return Adapter(arch=arch, config=config, factors=factors, digest=digest_of(frozen))


def _local(name: str | Path, *, weights: bool = False) -> Directory:
    """Return the local path of a checkpoint; of a bucket's, a copy without arrays."""
    if is_remote(name):
        run, found, _ = str(name).partition(f"/{_CHECKPOINTS}")
        if found:  # its settings lie above
            local_file(f"{run}/config.json")
    return local_path(name, weights=weights).absolute()


def _load(
    path: Directory, dtype: str, placement: Placement, require_finite: bool
) -> Model:
    run = _run_of(path)
    config = Config(model=ModelConfig(checkpoint=str(path)))
    if run is not None:
        config = read_settings(run / "config.json")
    arch = make_architecture(config)
    tokenizer = make_tokenizer(config, arch)
    saved = config.model.sampler_dtype if run is not None else _saved_dtype(path)
    kind = jnp.dtype(dtype or saved)
    shardings = placement and placement(arch)
    if run is None:
        version = 0
        params = load_params(
            str(path),
            arch,
            dtype=kind,
            shardings=shardings,
            require_finite=require_finite,
        )
    else:
        assert isinstance(path, Path), "a run is a directory"
        version, params = _policy(run, path, config, arch)
        params = jax.tree.map(lambda leaf: leaf.astype(kind), params)
        params = jax.device_put(params, shardings or jax.devices()[0])
        if require_finite and (unfit := fitness.unfit_leaf(params)):
            raise ValueError(
                f"parameter {unfit} holds numbers that are infinite in {kind}; take "
                f"another dtype or checkpoint"
            )
    return Model(
        arch=arch,
        tokenizer=tokenizer,
        config=config,
        params=params,
        policy_version=version,
        dtype=kind,
    )


def _saved_dtype(path: Directory) -> str:
    """Return the dtype of a Hugging Face directory; one that names none: float32."""
    values = read_json(path / "config.json")
    saved = values.get("dtype", values.get("torch_dtype"))
    return "bfloat16" if saved == "bfloat16" else "float32"


def _run_of(path: Directory) -> Path | None:
    """Return the run that a directory belongs to."""
    if not isinstance(path, Path) or not path.is_dir():
        return None
    for run in (path.parent, path.parent.parent):
        if path.relative_to(run).parts[0] == _CHECKPOINTS and _holds_settings(run):
            return run
    if (path / _CHECKPOINTS).is_dir() or _holds_settings(path):
        return path
    return None


def _holds_settings(path: Path) -> bool:
    """Return whether config.json in `path` is a run's; a checkpoint may be missing."""
    try:
        return "config" in read_json(path / "config.json")
    except (OSError, ValueError):  # none, or no JSON
        return False


def read_settings(file: Path) -> Config:
    """Return the settings of a run; those it does not name have their defaults."""
    try:
        return config_lib.build(Config, with_own_assets(read_json(file)["config"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} does not give the settings of the run ({error!r}), so its "
            f"architecture is unknown; put the file right"
        ) from error


def get_config(workdir: str) -> ml_collections.ConfigDict:
    """Return the settings of a run that goes on: `--config=loading.py:WORKDIR`."""
    config = read_settings(Path(workdir).expanduser() / "config.json")
    return ml_collections.ConfigDict(dataclasses.asdict(config))


def _policy(
    run: Path, path: Path, config: Config, arch: Architecture
) -> tuple[int, PyTree]:
    """Return step and all params of a run's policy on the host, where they are cast."""
    version, trained, frozen = _parts(run, path, config, arch)
    return version, merged(join(trained, frozen))


def _parts(
    run: Path, path: Path, config: Config, arch: Architecture
) -> tuple[int, PyTree, PyTree | None]:
    """Return step, trained and frozen params of a run, on the host.

    What the run does not train is read from where the run has it.
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        device = jax.devices()[0]
    # Restored to one device, and made there: init_params depends on no mesh.
    mesh = make_mesh([device])
    abstract = abstract_state(config, arch, mesh)
    frozen = start_frozen(config, arch, mesh)
    version, trained = _restore(run, path, abstract.params, base=digest_of(frozen))
    return version, trained, frozen


def _restore(
    run: Path, path: Path, abstract: PyTree, *, base: str = ""
) -> tuple[int, PyTree]:
    """Return step and params of the checkpoint at `path`, or the run's newest."""
    name = path.name if path.parent == run / _CHECKPOINTS else ""
    if origin := origin_of(run):
        place = BucketPlace(f"{origin}/{_CHECKPOINTS}")
    else:
        place = CheckpointPlace(run.absolute() / _CHECKPOINTS)
    restored = CheckpointReader(place).restore_params(abstract, name=name, base=base)
    if restored is None:
        raise ValueError(
            f"{path} holds no checkpoint; a run writes one every checkpoint.every "
            f"optimizer steps"
        )
    return restored
