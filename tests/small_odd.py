"""Odd run directories, GGUF files and checkpoints, below `odd/`, for `hostile.tsv`.

A run directory is called `FILE_KIND`: its file `FILE` is of that kind, the others are
as a run writes them.
"""

import json
import os
import shutil
import struct
from pathlib import Path

from small_commands import BASE, DEEP

_CONFIG = {"config": {"train": {"num_steps": 40}}}
_STEP = {
    "step": 3,
    "staleness/mean": 1.0,
    "staleness/in_flight_mean": 0.5,
    "staleness/queued_mean": 0.5,
    "staleness/max": 2,
    "throughput/generated_tokens_per_s": 10.0,
    "throughput/trained_tokens_per_s": 9.0,
    "queue/dropped": 0,
    "verifier/restarts": 0,
    "idle/learner_share": 0.25,
}
_EVAL = {"step": 2, "pass_rate": 0.5, "compute_chip_hours": 0.25}
_ROLES = {"at": 0.0, "state": "ended", "roles": [{"role": "learner"}]}
_LEDGER = {"chip": "cpu", "chip_s": {}, "counts": {}}
_RUN = {
    "config.json": _CONFIG,
    "metrics.jsonl": _STEP,
    "evals.jsonl": _EVAL,
    "status.json": _ROLES,
    "ledger.json": _LEDGER,
}
_HUGE = 10**400
_CONTENTS = {
    "null": b"null",
    "list": b"[]",
    "text": b'"x"',
    "number": b"5",
    "nan": b"NaN",
    "infinity": b"Infinity",
    "zeros": b"\0" * 64,
    "deep": DEEP.encode(),
    "deep_object": b'{"a":' * 50_000,
    "digits": b"1" * 5000,
    "binary": bytes(range(256)),
    "cut": '{"a": "é'.encode()[:-1],
    "latin": b'{"a": "\xe9"}',
    "torn": b'{"step": ',
    "two": b"{}{}",
    "object": b"{}",
}
_CHANGED = {
    "config.json": {
        "of_number": {"config": 5},
        "of_list": {"config": {"train": []}},
        "steps_text": {"config": {"train": {"num_steps": "x"}}},
        "steps_null": {"config": {"train": {"num_steps": None}}},
        "steps_nan": {"config": {"train": {"num_steps": float("nan")}}},
        "steps_infinite": {"config": {"train": {"num_steps": float("inf")}}},
    },
    "metrics.jsonl": {
        "step_only": {"step": 1},
        "step_text": _STEP | {"step": "x"},
        "step_list": _STEP | {"step": [1]},
        "step_infinite": _STEP | {"step": float("inf")},
        "mean_text": _STEP | {"staleness/mean": "x"},
        "mean_list": _STEP | {"staleness/mean": []},
        "mean_huge": _STEP | {"staleness/mean": _HUGE},
        "idle_object": _STEP | {"idle/learner_share": {}},
        "nulls": dict.fromkeys(_STEP) | {"step": 3},
    },
    "evals.jsonl": {
        "rate_text": _EVAL | {"pass_rate": "x"},
        "rate_list": _EVAL | {"pass_rate": [0.5]},
        "rate_huge": _EVAL | {"pass_rate": _HUGE},
        "step_null": _EVAL | {"step": None},
        "step_nan": _EVAL | {"step": float("nan")},
        "step_only": {"step": 1},
    },
    "status.json": {
        "at_null": _ROLES | {"at": None},
        "at_text": _ROLES | {"at": "now"},
        "at_huge": _ROLES | {"at": _HUGE, "state": "running"},
        "roles_number": _ROLES | {"roles": 5},
        "roles_numbers": _ROLES | {"roles": [5]},
        "roles_none": {"at": 0.0, "state": "ended"},
        "state_list": _ROLES | {"state": ["ended"]},
    },
    "ledger.json": {"chip_list": _LEDGER | {"chip": ["cpu"]}},
}


def make_odd():
    """Write them all below the current directory."""
    os.mkdir("odd")
    for file in _RUN:
        for kind, content in _CONTENTS.items():
            _run(file, kind).write_bytes(content + b"\n")
        for kind, values in _CHANGED[file].items():
            _run(file, kind).write_text(json.dumps(values) + "\n")
        _run(file, "empty").write_bytes(b"")
        os.mkfifo(_run(file, "pipe"))
        _run(file, "folder").mkdir()
        _run(file, "zero").symlink_to("/dev/zero")
        _run(file, "loop").symlink_to(file)
        _run(file, "pages").symlink_to("/proc/self/pagemap")
        with open(_run(file, "sparse"), "wb") as sparse:
            sparse.truncate(20 << 30)
    _make_gguf_files()
    _make_weights()
    _make_configs()
    _make_tokenizers()


def _run(file, kind):
    """A run directory whose `file` is still to be made: its path."""
    folder = Path("odd", f"{file.partition('.')[0]}_{kind}")
    folder.mkdir()
    for name, values in _RUN.items():
        if name != file:
            Path(folder, name).write_text(json.dumps(values) + "\n")
    return Path(folder, file)


def _text(value):
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def _value(value):
    """A value of a GGUF file with its kind; bytes are one already."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    kind, parts = 8, [_text(each) for each in value if isinstance(each, str)]
    if not parts:
        kind, parts = 4, [struct.pack("<I", each) for each in value]
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(parts)


def _gguf(fields, *tensors, version=3, num_keys=None, num_tensors=None):
    head = [
        b"GGUF",
        struct.pack("<I", version),
        struct.pack("<Q", len(tensors) if num_tensors is None else num_tensors),
        struct.pack("<Q", len(fields) if num_keys is None else num_keys),
        *(_text(name) + _value(value) for name, value in fields.items()),
    ]
    for name, shape, kind, start in tensors:
        head += [_text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        head += [struct.pack("<IQ", kind, start)]
    content = b"".join(head)
    return content + bytes(-len(content) % 32 + 512)


def _make_gguf_files():
    ggml = "tokenizer.ggml."
    good = {
        "general.architecture": "qwen3",
        f"{ggml}model": "gpt2",
        f"{ggml}pre": "qwen2",
        f"{ggml}tokens": ["a", "b", "ab", "<e>"],
        f"{ggml}token_type": [1, 1, 1, 3],
        f"{ggml}merges": ["a b"],
        f"{ggml}eos_token_id": 3,
    }
    matrix = ("token_embd.weight", (32, 4), 0, 0)

    def with_list(kind, count):
        raw = struct.pack("<IIQ", 9, kind, count)
        return _gguf(good | {"x": raw}, matrix)[:-512]

    many = {f"k{number}": b"\0\0\0\0\1" for number in range(10_001)}
    for name, content in {
        "keys_2_62": _gguf({}, num_keys=2**62),
        "tensors_2_62": _gguf({}, num_tensors=2**62),
        "49": _gguf({}, num_keys=1)[:24]
        + _text("k")
        + struct.pack("<IIQ", 9, 0, 2**62),
        "values_2_62": with_list(0, 2**62),
        "texts_2_62": with_list(8, 2**62),
        "lists": with_list(9, 1),
        "kind_99": with_list(99, 1),
        "text_2_63": _gguf({"x": struct.pack("<IQ", 8, 2**63)}),
        "keys_many": _gguf(many, matrix),
        "twice": _gguf(good, matrix, matrix),
        "version": _gguf(good, matrix, version=9),
        "swapped": _gguf(good, matrix, version=3 << 24),
        "dimensions": _gguf(good, ("token_embd.weight", (1,) * 5, 0, 0)),
        "shape_2_62": _gguf(good, ("token_embd.weight", (2**62, 4), 0, 0)),
        "start_2_63": _gguf(good, ("token_embd.weight", (32, 4), 0, 2**63)),
        "blocks": _gguf(good, ("token_embd.weight", (31, 4), 2, 0)),
        "kind": _gguf(good, ("token_embd.weight", (32, 4), 99, 0)),
        "vector": _gguf(good, ("token_embd.weight", (32,), 0, 0)),
        "no_shape": _gguf(good, ("token_embd.weight", (), 0, 0)),
        "alignment": _gguf(good | {"general.alignment": 0}, matrix),
        "parts": _gguf(good | {"split.count": "x"}, matrix),
        "latin": _gguf(good | {f"{ggml}pre": struct.pack("<I", 8) + _text(b"\xff")}),
        "tokens_number": _gguf(good | {f"{ggml}tokens": 5}, matrix),
        "tokens_numbers": _gguf(good | {f"{ggml}tokens": [1, 2]}, matrix),
        "types_number": _gguf(good | {f"{ggml}token_type": 5}, matrix),
        "types_few": _gguf(good | {f"{ggml}token_type": [1]}, matrix),
        "merges_number": _gguf(good | {f"{ggml}merges": 5}, matrix),
        "merges_one": _gguf(good | {f"{ggml}merges": ["a"]}, matrix),
        "merges_other": _gguf(good | {f"{ggml}merges": ["a z"]}, matrix),
        "pre_list": _gguf(good | {f"{ggml}pre": ["qwen2"]}, matrix),
        "eos_list": _gguf(good | {f"{ggml}eos_token_id": [3]}, matrix),
        "eos_2_31": _gguf(good | {f"{ggml}eos_token_id": 2**31}, matrix),
    }.items():
        Path("odd", f"{name}.gguf").write_bytes(content)
    Path("odd", "cut.gguf").write_bytes(_gguf(good, matrix)[:100])
    os.mkfifo("odd/pipe.gguf")
    with open("odd/sparse.gguf", "wb") as sparse:
        sparse.truncate(20 << 30)


def _link_checkpoint(name, *, less):
    """The base checkpoint with links to its files, all but one."""
    folder = Path("odd", name)
    folder.mkdir()
    for file in Path(BASE).iterdir():
        if file.name != less:
            (folder / file.name).symlink_to(file)
    return folder / less


def _make_weights():
    content = Path(BASE, "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    first = next(name for name in header if name != "__metadata__")
    entry = header[first]

    def write(name, text):
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        file = _link_checkpoint(f"st_{name}", less="model.safetensors")
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)

    for name, change in {
        "shape_text": {"shape": "32"},
        "shape_texts": {"shape": ["32", 4]},
        "shape_float": {"shape": [32.0]},
        "shape_true": {"shape": [True]},
        "shape_null": {"shape": None},
        "shape_nested": {"shape": [[1]]},
        "shape_2_62": {"shape": [2**62]},
        "shape_long": {"shape": [1] * 100_000},
        "dtype_null": {"dtype": None},
        "dtype_list": {"dtype": ["F32"]},
        "dtype_other": {"dtype": "F7"},
        "start_negative": {"data_offsets": [-4, 0]},
        "start_behind": {"data_offsets": [8, 4]},
        "start_2_62": {"data_offsets": [2**62, 2**62 + 4]},
        "start_text": {"data_offsets": ["0", "4"]},
        "start_nan": {"data_offsets": [float("nan"), 4]},
        "start_one": {"data_offsets": [0]},
        "start_three": {"data_offsets": [0, 4, 8]},
    }.items():
        write(name, header | {first: entry | change})
    write("entry_list", header | {first: []})
    write("entry_null", header | {first: None})
    write("list", [])
    write("null", b"null")
    write("name_long", header | {"x" * 10**6: entry})
    file = _link_checkpoint("st_header_2_62", less="model.safetensors")
    file.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with open(_link_checkpoint("st_sparse", less="model.safetensors"), "wb") as sparse:
        sparse.write(struct.pack("<Q", 2**33))
        sparse.truncate(20 << 30)
    os.mkfifo(_link_checkpoint("st_pipe", less="model.safetensors"))
    for name, weight_map in {
        "list": [],
        "null": None,
        "text": "x",
        "numbers": {first: 5},
        "lists": {first: ["a"]},
        "missing": {first: "no_such"},
        "zero": {first: "/dev/zero"},
        "long": {first: "x" * 5000},
    }.items():
        _index(name, json.dumps({"weight_map": weight_map}).encode())
    for name in ("list", "deep", "digits", "binary", "torn", "zeros"):
        _index(f"file_{name}", _CONTENTS[name])


def _make_configs():
    good = json.loads(Path(BASE, "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for name, change in {
        "field": {"logits_scaling": 8.0},
        "window": {"sliding_window": 64, "layer_types": ["sliding_attention"] * 4},
        "rope": {"rope_scaling": yarn | {"mscale": 0.7}},
        "family": {"model_type": "deepseek_v3"},
    }.items():
        file = _link_checkpoint(f"cfg_{name}", less="config.json")
        file.write_text(json.dumps(good | change))


def _index(name, content):
    folder = _link_checkpoint(f"index_{name}", less="model.safetensors").parent
    (folder / "model.safetensors.index.json").write_bytes(content)


def _make_tokenizers():
    good = json.loads(Path(BASE, "tokenizer.json").read_text())
    vocab = good["model"]["vocab"]
    first = next(iter(vocab))
    added = dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized", "special"), False
    )
    for name, change in {
        "id_2_31": {"model": good["model"] | {"vocab": vocab | {first: 2**31}}},
        "id_2_63": {"model": good["model"] | {"vocab": vocab | {first: 2**63}}},
        "id_negative": {"model": good["model"] | {"vocab": vocab | {first: -1}}},
        "added_text": {"added_tokens": "x"},
        "added_2_31": {"added_tokens": [added | {"id": 2**31, "content": "zz"}]},
        "decoder_deep": {"decoder": json.loads('{"a":' * 90 + "1" + "}" * 90)},
        "decoder_regex": {"decoder": {"type": "Fuse"}, "normalizer": {"type": "x"}},
    }.items():
        file = _link_checkpoint(f"tok_{name}", less="tokenizer.json")
        file.write_text(json.dumps(good | change))
    for name, content in {
        "eos_float": {"eos_token_id": 1.5},
        "eos_2_31": {"eos_token_id": 2**31},
        "eos_nested": {"eos_token_id": [[1]]},
        "eos_true": {"eos_token_id": True},
    }.items():
        file = _link_checkpoint(f"tok_{name}", less="generation_config.json")
        file.write_text(json.dumps(content))
    os.mkfifo(_link_checkpoint("tok_pipe", less="tokenizer.json"))
    with open(_link_checkpoint("tok_sparse", less="tokenizer.json"), "wb") as sparse:
        sparse.truncate(20 << 30)
    _link_checkpoint("tok_zero", less="generation_config.json").symlink_to("/dev/zero")
    shutil.copy("odd/tok_id_2_31/tokenizer.json", "odd/id_2_31.json")
