"""Low-rank factors as adapter files that `peft` loads and writes, for one base."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from scalerl_jax.config import LoraConfig
from scalerl_jax.formats.reading import read_json
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.hugging_face import TEXT
from scalerl_jax.model.lora import Factors, factor_table
from scalerl_jax.model.saving import ADAPTER_CONFIG, ADAPTER_TENSORS, whole_directory
from scalerl_jax.model.weights import SafeTensor, parameters, read_header
from scalerl_jax.types import PyTree

_WEIGHT = ".weight"
_MODEL = "base_model.model."  # of a tensor's name: before that of the base's module
# Fields of adapter_config.json by which factors mean something else, and what they
# must be where they are given.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_rslora": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    # Others, as "pissa", replace the base by what their first factors leave of it.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
# Those by which nothing else is computed.
_HARMLESS = {
    *("task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout"),
    *("inference_mode", "target_modules", "exclude_modules", "revision"),
    *("peft_version", "auto_mapping", "megatron_core", "eva_config"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
}


def save_factors(
    directory: str | Path,
    factors: PyTree,
    arch: Architecture,
    lora: LoraConfig,
    *,
    base: str,
    digest: str,
    base_dtype: str,
    revision: str = "",
    nested: bool = False,
) -> None:
    """Write factors as an adapter in `peft`'s layout, in float32.

    The directory is written under another name and renamed when complete; an earlier
    export in it is replaced.

    Args:
        directory: made with its parents.
        factors: in the tree of `lora.factor_table`.
        arch: architecture of the base.
        lora: the settings with which they were trained.
        base: directory or id of the base, from which the adapter's user loads it.
        digest: `publication.digest_of` the base, stored in the tensors' metadata.
        base_dtype: dtype of the base that has this digest.
        revision: of the base's id.
        nested: `hugging_face.is_below_language_model` of the base.

    Raises:
        ValueError: factors of experts have no such layout, or the directory holds
            other files.
        RuntimeError: it cannot be written; its earlier content is unchanged.
    """
    tensors = dict(_tensors(factors, arch))
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    if nested:  # by whole names: what reads images has modules of the same last names
        tensors = {_below(name): factor for name, factor in tensors.items()}
        paths = {name.split(".lora_")[0] for name in tensors}
        modules = {path.removeprefix(_MODEL) for path in paths}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "revision": revision or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
    }
    with whole_directory(Path(directory).absolute()) as partial:
        metadata = {"format": "pt", "base_digest": digest, "base_dtype": base_dtype}
        save_file(tensors, partial / ADAPTER_TENSORS, metadata=metadata)
        (partial / ADAPTER_TENSORS).chmod(0o644)
        text = json.dumps(config, indent=2) + "\n"
        (partial / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def _tensors(factors: PyTree, arch: Architecture) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each factor of each layer: A [rank, in] and B [out, rank]."""
    for name, modules in _modules(arch).items():
        pair = factors["layers"].get(name)
        if not isinstance(pair, Factors):
            continue
        if not modules:
            raise ValueError(
                f"layers/{name} has factors, and peft has no layout for factors of "
                f"experts; export the merged weights, without --adapter"
            )
        down, up = jax.device_get((pair.down, pair.up))
        for layer, module in enumerate(modules):
            up_matrix = up[layer].reshape(up.shape[1], -1)
            yield f"{module}.lora_A.weight", np.ascontiguousarray(down[layer].T)
            yield f"{module}.lora_B.weight", np.ascontiguousarray(up_matrix.T)


def _modules(arch: Architecture) -> dict[str, list[str]]:
    """Return what peft calls a layer's parameter, layer by layer; experts: nothing."""
    found: dict[str, list[str]] = {}
    for stored in parameters(arch):
        name = stored.name.removeprefix("layers/")
        if name != stored.name:
            parts = () if "experts" in stored.spec.axes else stored.parts
            found[name] = [
                f"{_MODEL}{part.tensor.removesuffix(_WEIGHT)}" for part in parts
            ]
    return found


def _below(name: str) -> str:
    """Return a tensor's name where the decoder's modules are in `language_model`."""
    inner = f"{_MODEL}model."
    return f"{inner}{TEXT}{name.removeprefix(inner)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """An adapter in a directory, whole and fitting, whose numbers are not read yet."""

    directory: Path
    lora: LoraConfig
    digest: str  # of its base; "": peft's own adapters do not say
    base_dtype: str  # of the base with this digest
    tensors: Mapping[str, SafeTensor]

    def check_base(self, digest: str) -> None:
        """Refuse another base, which has this digest.

        Raises:
            ValueError: it is another one.
        """
        if self.digest and self.digest != digest:
            raise ValueError(
                f"{self.directory} was trained beside a base of digest "
                f"{self.digest[:16]}, and this one has {digest[:16]}; name the base "
                f"that it belongs to"
            )

    def factors(self, arch: Architecture) -> PyTree:
        """Read the factors, float32, on the host."""
        layers = {}
        modules = _modules(arch)
        for name, table in factor_table(arch, self.lora)["layers"].items():
            pair: list[Any] = [
                np.stack([self._read(f"{module}.{part}") for module in modules[name]])
                for part in ("lora_A.weight", "lora_B.weight")
            ]
            down, up = pair
            layers[name] = Factors(
                down=down, up=up.reshape(table.up.shape), scale=table.scale
            )
        return {"layers": layers}

    def _read(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        numbers = tensor.read(tuple((0, size) for size in tensor.shape))
        if not np.isfinite(numbers.astype(np.float32)).all():
            raise ValueError(
                f"{tensor.file}: tensor {name} holds numbers that are NaN or infinite"
            )
        return np.asarray(numbers, np.float32).T


def read_adapter(directory: str | Path, arch: Architecture) -> AdapterFiles:
    """Return the adapter in a directory, of our own export or of peft's.

    Raises:
        ValueError: a file is missing, cut short or broken, or it is not of plain low-
            rank factors, or none of this architecture's.
    """
    directory = Path(directory).expanduser()
    for name in (ADAPTER_CONFIG, ADAPTER_TENSORS):
        if not (directory / name).is_file():
            raise ValueError(
                f"{directory} is no whole adapter: {name} is missing; export it again"
            )
    values = read_json(directory / ADAPTER_CONFIG)
    for name, value in values.items():
        off = _PLAIN[name] if name in _PLAIN else (None, False, [], {})
        if name not in _HARMLESS and value not in off:
            raise ValueError(
                f"{directory / ADAPTER_CONFIG} has {name} = {str(value)[:80]!r}, which "
                f"is not read here; only {' or '.join(map(repr, off))} is"
            )
    tensors, metadata = read_header(directory / ADAPTER_TENSORS)
    prefix = f"{_MODEL}model."
    tensors = {
        name.replace(f"{prefix}{TEXT}", prefix, 1): tensor
        for name, tensor in tensors.items()
    }
    base_dtype = str(metadata.get("base_dtype", ""))
    if base_dtype not in ("", "float32", "bfloat16"):
        raise ValueError(
            f"{directory / ADAPTER_TENSORS} has base_dtype = {base_dtype[:80]!r}, "
            f"which is not read here; only 'float32' or 'bfloat16' is"
        )
    lora = _lora_of(values, tensors, arch, directory)
    return AdapterFiles(
        directory=directory,
        lora=lora,
        digest=str(metadata.get("base_digest", "")),
        base_dtype=base_dtype,
        tensors=tensors,
    )


def _lora_of(
    values: dict[str, Any],
    tensors: Mapping[str, SafeTensor],
    arch: Architecture,
    directory: Path,
) -> LoraConfig:
    """Return rank, alpha and targets of an adapter whose tensors are all there."""
    rank: Any = values.get("r")
    alpha: Any = values.get("lora_alpha")
    numbers = type(rank) is int and type(alpha) in (int, float)
    if not numbers or rank < 1 or not 0 < alpha < float("inf"):
        raise ValueError(
            f"{directory / ADAPTER_CONFIG} has r = {rank!r} and lora_alpha = "
            f"{alpha!r}, which must be numbers above 0"
        )
    modules = _modules(arch)
    adapted = {name.rpartition(".lora_")[0] for name in tensors}
    targets = [name for name in modules if adapted.intersection(modules[name])]
    if not targets:
        example = min(tensors, default="none")
        raise ValueError(
            f"{directory} adapts no matrix of this {arch.family} model: its tensors "
            f"are {example} and others"
        )
    lora = LoraConfig(
        rank=rank,
        alpha=float(alpha),
        targets=tuple(re.escape(f"layers/{name}") for name in targets),
    )
    table, left = factor_table(arch, lora)["layers"], dict(tensors)
    for target in targets:
        down, up = table[target].down.shape, table[target].up.shape
        shapes = {
            "lora_A.weight": (down[2], down[1]),
            "lora_B.weight": (int(np.prod(up[2:])), up[1]),
        }
        for module in modules[target]:
            for part, shape in shapes.items():
                tensor = left.pop(f"{module}.{part}", None)
                if tensor is None or tensor.shape != shape:
                    found = "missing" if tensor is None else f"of shape {tensor.shape}"
                    raise ValueError(
                        f"{directory / ADAPTER_TENSORS}: {module}.{part} is {found}, "
                        f"and the base and r = {rank} ask for {shape}; take the "
                        f"adapter's own base, export it again, or make it for all "
                        f"layers: one for some of them is not read"
                    )
    if left:
        raise ValueError(
            f"{directory / ADAPTER_TENSORS} holds {min(left)}, which is no factor of "
            f"this {arch.family} model"
        )
    return lora
