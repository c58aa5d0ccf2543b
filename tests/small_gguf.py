"""GGUF files of small decoders, written as llama.cpp's converter writes them."""

import json

import gguf
import numpy as np

KIND = gguf.GGMLQuantizationType
_TOP = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}
_LAYER = {
    "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "output": "attn_output.weight",
    "query_bias": "attn_q.bias",
    "key_bias": "attn_k.bias",
    "value_bias": "attn_v.bias",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def tensors_of(arch, params):
    """Names and [out, in] matrices; rows of Llama's queries and keys in pairs."""
    found = {
        f"{_TOP[name]}.weight": np.asarray(leaf)
        for name, leaf in params.items()
        if name != "layers"
    }
    for name, leaf in params["layers"].items():
        for layer, tensor in enumerate(np.asarray(leaf)):
            tensor = tensor.T if tensor.ndim == 2 else tensor
            if arch.family == "llama" and name in ("query", "key"):
                tensor = in_pairs(tensor, arch.head_dim)
            found[f"blk.{layer}.{_LAYER[name]}"] = np.ascontiguousarray(tensor)
    return found


def in_pairs(matrix, head_dim):
    """Of each head, a row of the first half and one of the second, in turns."""
    rows = []
    for start in range(0, len(matrix), head_dim):
        for row in range(start, start + head_dim // 2):
            rows += [matrix[row], matrix[row + head_dim // 2]]
    return np.stack(rows)


def write_gguf(path, arch, tensors, *, kinds=None, metadata=None, family=None):
    """A file of these tensors; `kinds` has those that are not F32, by name.

    A tensor of bytes is written as it is, as blocks of its kind.
    """
    family = family or arch.family
    writer = gguf.GGUFWriter(path, family)
    writer.add_vocab_size(arch.vocab_size)
    writer.add_context_length(arch.max_positions)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_block_count(arch.num_layers)
    writer.add_feed_forward_length(arch.ffn_size)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_rope_freq_base(arch.rope_theta)
    writer.add_layer_norm_rms_eps(arch.rms_eps)
    for name, value in (metadata or {}).items():
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            bool: writer.add_bool,
            float: writer.add_float32,
            list: writer.add_array,
        }[type(value)]
        add(name.replace("{family}", family), value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name, KIND.F32)
        if tensor.dtype != np.uint8:
            tensor = gguf.quantize(tensor, kind)
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_fields(backend, special, **changes):
    """The metadata of a tokenizer of SmolLM's kind; a change of None drops a field."""
    names = range(backend.get_vocab_size())
    tokens = [backend.id_to_token(place) for place in names]
    merges = json.loads(backend.to_str())["model"]["merges"]
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eot_token_id": 0,
    } | changes
    return {
        f"tokenizer.ggml.{name}": value
        for name, value in fields.items()
        if value is not None
    }
