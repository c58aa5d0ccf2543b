"""Low-rank factors as adapter files that `peft` loads with their base model."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from scalerl_jax.config import LoraConfig
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.lora import Factors
from scalerl_jax.model.saving import ADAPTER_CONFIG, ADAPTER_TENSORS, whole_directory
from scalerl_jax.model.weights import parameters
from scalerl_jax.types import PyTree

_WEIGHT = ".weight"


def save_factors(
    directory: str | Path,
    factors: PyTree,
    arch: Architecture,
    lora: LoraConfig,
    *,
    base: str,
    digest: str,
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

    Raises:
        ValueError: factors of experts have no such layout, or the directory holds
            other files.
        RuntimeError: it cannot be written; its earlier content is unchanged.
    """
    tensors = dict(_tensors(factors, arch))
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
    }
    with whole_directory(Path(directory).absolute()) as partial:
        metadata = {"format": "pt", "base_digest": digest}
        save_file(tensors, partial / ADAPTER_TENSORS, metadata=metadata)
        (partial / ADAPTER_TENSORS).chmod(0o644)
        text = json.dumps(config, indent=2) + "\n"
        (partial / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def _tensors(factors: PyTree, arch: Architecture) -> Any:
    """Yield each factor of each layer: A [rank, in] and B [out, rank]."""
    for stored in parameters(arch):
        pair = factors["layers"].get(stored.name.removeprefix("layers/"))
        if not isinstance(pair, Factors):
            continue
        if "experts" in stored.spec.axes:
            raise ValueError(
                f"{stored.name} has factors, and peft has no layout for factors of "
                f"experts; export the merged weights, without --adapter"
            )
        down, up = jax.device_get((pair.down, pair.up))
        for part in stored.parts:
            layer = part.place[0]
            module = f"base_model.model.{part.tensor.removesuffix(_WEIGHT)}"
            yield f"{module}.lora_A.weight", np.ascontiguousarray(down[layer].T)
            yield f"{module}.lora_B.weight", np.ascontiguousarray(up[layer].T)
