"""Load a policy to sample from: a Hugging Face directory, a GGUF file, or a run."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
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
from scalerl_jax.model.adapter_files import read_adapter
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.lora import join, merged
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.run.files import CHECKPOINTS_FOLDER
from scalerl_jax.run.record import with_own_assets
from scalerl_jax.run.resume import find_settings
from scalerl_jax.types import PyTree
from scalerl_jax.weights.publication import digest_of
from scalerl_jax.wiring.learning import (
    abstract_state,
    make_architecture,
    start_frozen,
)
from scalerl_jax.wiring.sampling import make_tokenizer

# A sharding per parameter of an architecture; None: the first device.
Placement = Callable[[Architecture], PyTree] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A policy at one version, in the form that the sampler takes."""

    arch: Architecture
    tokenizer: Tokenizer
    config: Config  # of the run; without a run, the defaults
    params: PyTree
    policy_version: int  # optimizer steps; 0 without a run
    dtype: Any


def run_settings(directory: str | Path) -> Config | None:
    """Return the settings of the run to which a directory belongs; None: to none.

    Raises:
        ValueError: the settings, or the directory, cannot be read.
        TimeoutError: its bucket does not answer in time.
    """
    try:
        run = _run_of(_existing(directory))
        return None if run is None else read_settings(run / "config.json")
    except TimeoutError as error:
        raise TimeoutError(f"--checkpoint={directory}: {error}") from error
    except ValueError as error:
        raise ValueError(f"--checkpoint={directory}: {error}") from error


def load_model(
    directory: str | Path,
    *,
    dtype: str = "",
    placement: Placement = None,
    require_finite: bool = False,
    adapter: str = "",
) -> Model:
    """Return the policy in a directory, with each device's own shards.

    The directory is a Hugging Face directory (or hub id), a run's, the `checkpoints`
    in it, or one of these checkpoints; a GGUF file is accepted, too.  `dtype` is a
    name; empty: the dtype in which the policy was sampled or saved.  The low-rank
    factors in a directory `adapter` are merged into the weights.

    Raises:
        ValueError: it is missing, broken, or none of these; or it holds numbers that
            are not finite and is a run's checkpoint, or `require_finite` is set; or
            the adapter is incomplete or has another base.
        TimeoutError: its bucket does not answer in time.
    """
    try:
        path = _existing(directory, weights=True)
        return _load(path, dtype, placement, require_finite, adapter)
    except TimeoutError as error:
        raise TimeoutError(f"--checkpoint={directory}: {error}") from error
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"--checkpoint={directory}: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """The low-rank factors of a run at one version, and the digest of their base."""

    arch: Architecture
    config: Config
    factors: PyTree
    digest: str  # digest of the base


def load_adapter(directory: str | Path) -> Adapter:
    """Return the factors of a run's newest checkpoint, or of the named one.

    Raises:
        ValueError: it is no run with factors, is broken, or has another base.
    """
    try:
        path = _local(directory)
        run = _run_of(path)
        config = None if run is None else read_settings(run / "config.json")
        if run is None or config is None or not config.model.lora.rank:
            raise ValueError(
                "it has no factors, since it is no run with model.lora.rank; leave out "
                "--adapter"
            )
        assert isinstance(path, Path), "a run is a directory"
        arch = make_architecture(config)
        _, factors, frozen = _parts(run, path, config, arch)
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"--checkpoint={directory}: {error}") from error
    return Adapter(arch=arch, config=config, factors=factors, digest=digest_of(frozen))


def _local(name: str | Path, *, weights: bool = False) -> Directory:
    """Return the local path of a checkpoint; from a bucket, a copy without arrays."""
    if is_remote(name):
        run, found, _ = str(name).partition(f"/{CHECKPOINTS_FOLDER}")
        if found:  # the settings are in the directory above
            local_file(f"{run}/config.json")
    return local_path(name, weights=weights).absolute()


def _existing(name: str | Path, *, weights: bool = False) -> Directory:
    path = _local(name, weights=weights)
    if isinstance(path, Path) and not path.is_dir():
        raise ValueError(
            "there is no such directory; name a Hugging Face directory, a GGUF file, "
            "a run directory, or a checkpoint of a run"
        )
    return path


def _load(
    path: Directory,
    dtype: str,
    placement: Placement,
    require_finite: bool,
    adapter: str,
) -> Model:
    run = _run_of(path)
    if run is not None and adapter:
        raise ValueError(
            f"--adapter={adapter} goes with a base, and this is a run, which has its "
            f"own factors; name the base"
        )
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
        options = {"shardings": shardings, "require_finite": require_finite}
        if adapter:
            params = _adapted(str(path), arch, adapter, dtype=kind, **options)
        else:
            params = load_params(str(path), arch, dtype=kind, **options)
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


def _adapted(
    base: str, arch: Architecture, adapter: str, *, dtype: Any, **options: Any
) -> PyTree:
    """Return the params of a base with an adapter's factors merged into them."""
    with config_lib.naming(f"--adapter={adapter}"):
        files = read_adapter(adapter, arch)
        own = jnp.dtype(files.base_dtype or dtype)  # the digest is of these numbers
        params = load_params(base, arch, dtype=own, **options)
        files.check_base(digest_of(params) if files.digest else "")
        params = merged(join(files.factors(arch), params))
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return jax.device_put(params, options["shardings"])


def _saved_dtype(path: Directory) -> str:
    """Return the dtype of a Hugging Face directory; float32 if it names none."""
    values = read_json(path / "config.json")
    saved = values.get("dtype", values.get("torch_dtype"))
    return "bfloat16" if saved == "bfloat16" else "float32"


def _run_of(path: Directory) -> Path | None:
    """Return the run that a directory belongs to."""
    if not isinstance(path, Path) or not path.is_dir():
        return None
    for run in (path.parent, path.parent.parent):
        folder = path.relative_to(run).parts[0]
        if folder == CHECKPOINTS_FOLDER and _holds_settings(run):
            return run
    if (path / CHECKPOINTS_FOLDER).is_dir() or _holds_settings(path):
        return path
    return None


def _holds_settings(path: Path) -> bool:
    """Return whether config.json in `path` is a run's; it needs no checkpoint."""
    try:
        return "config" in read_json(path / "config.json")
    except (OSError, ValueError):  # missing, or no JSON
        return False


def read_settings(file: Path) -> Config:
    """Return the settings of a run; a setting that the file lacks has its default."""
    try:
        return config_lib.build(Config, with_own_assets(read_json(file)["config"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} does not give the settings of the run ({error!r}), so its "
            f"architecture is unknown; repair the file"
        ) from error


def get_config(workdir: str) -> ml_collections.ConfigDict:
    """Return the settings of a run to resume: `--config=loading.py:WORKDIR`."""
    config = read_settings(Path(workdir).expanduser() / "config.json")
    return ml_collections.ConfigDict(dataclasses.asdict(config))


def with_settings(argv: Sequence[str]) -> Sequence[str]:
    """Return argv; without --config, add the config of the run in --workdir."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    given = {
        name.lstrip("-"): value
        for name, value in itertools.pairwise(words)
        if name.startswith("-")
    }
    if "config" in given:
        return argv

    settings = find_settings(given.get("workdir", ""))
    if settings is None:
        return argv

    return [argv[0], f"--config={__file__}:{settings.parent}", *argv[1:]]


def _policy(
    run: Path, path: Path, config: Config, arch: Architecture
) -> tuple[int, PyTree]:
    """Return step and all params of a run's policy, on the host."""
    version, trained, frozen = _parts(run, path, config, arch)
    return version, merged(join(trained, frozen))


def _parts(
    run: Path, path: Path, config: Config, arch: Architecture
) -> tuple[int, PyTree, PyTree | None]:
    """Return step, trained and frozen params of a run, on the host.

    Frozen params are read from the run's own source (model.checkpoint).
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        device = jax.devices()[0]
    # Restored or initialized on one device: init_params depends on no mesh.
    mesh = make_mesh([device])
    abstract = abstract_state(config, arch, mesh)
    frozen = start_frozen(config, arch, mesh)
    version, trained = _restore(run, path, abstract.params, base=digest_of(frozen))
    return version, trained, frozen


def _restore(
    run: Path, path: Path, abstract: PyTree, *, base: str = ""
) -> tuple[int, PyTree]:
    """Return step and params of the checkpoint at `path`, or of the run's newest."""
    name = path.name if path.parent == run / CHECKPOINTS_FOLDER else ""
    if origin := origin_of(run):
        place = BucketPlace(f"{origin}/{CHECKPOINTS_FOLDER}")
    else:
        place = CheckpointPlace(run.absolute() / CHECKPOINTS_FOLDER)
    restored = CheckpointReader(place).restore_params(abstract, name=name, base=base)
    if restored is None:
        raise ValueError(
            f"{path} holds no checkpoint; a run writes one every checkpoint.every "
            f"optimizer steps"
        )
    return restored
