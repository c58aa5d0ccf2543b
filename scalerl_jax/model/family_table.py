"""Print docs/checkpoints.md's table: `python -m scalerl_jax.model.family_table`."""

from scalerl_jax.model.families import FAMILIES, Family
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.process.printing import to_stdout


def _norms(family: Family) -> str:
    place = family.features.get("norms", "before")
    return f"{place}, 1 + weight" if family.features.get("norm_offset") else place


def _sees(family: Family) -> str:
    if "attention_chunk_size" in family.defaults:
        return "chunks, all where it has no positions"
    if family.windows is None:
        return "all, without positions in some layers" if family.some_rotated else "all"
    if family.windows == "all":
        return "a window, if `sliding_window` is set"
    return f"a window, the last of every {family.windows} all, or by `layer_types`"


def _heads(family: Family) -> str:
    features = family.features
    qk_norm = "q and k norm" + " over all heads" * features.get("whole_qk_norm", False)
    said = {
        qk_norm: features.get("qk_norm"),
        "biases": features.get("output_bias"),
        "q, k, v biases": features.get("qkv_bias") and not features.get("output_bias"),
        "biases if `attention_bias`": "attention_bias" in family.biases,
        "sinks": features.get("sinks"),
        "soft caps, of logits too": family.caps,
    }
    return ", ".join(name for name, there in said.items() if there)


def _feed_forward(family: Family) -> str:
    if family.read is None:
        activation = family.features.get("activation", "silu")
        name = {"silu": "SwiGLU", "gelu_tanh": "GeGLU"}[activation]
        return name + ", biases if `mlp_bias`" * ("mlp_bias" in family.biases)
    clamped = "swiglu_limit" in family.known
    return "experts, clamped, with biases" if clamped else "experts"


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| `model_type` | models | norms | layers see | heads | feed-forward | sizes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, family in sorted(FAMILIES.items()):
        own = ", ".join(
            f"`{size}`" for size, arch in ARCHITECTURES.items() if arch.family == name
        )
        cells = [f"`{name}`", family.models, _norms(family), _sees(family)]
        cells += [_heads(family), _feed_forward(family), own]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    to_stdout(table() + "\n")
