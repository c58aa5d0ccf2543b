"""Checkpoints in and out: equal to transformers, whole or refused with a name."""

import dataclasses
import json
import resource
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scalerl_jax.model import weights
from scalerl_jax.model.architecture import Architecture, param_shardings
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.rope import Llama3Scaling
from scalerl_jax.model.saving import save_params
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh

LLAMA = Architecture(
    family="llama",
    vocab_size=24,
    hidden_size=16,
    ffn_size=20,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rope_theta=500_000.0,
    rms_eps=1e-5,
    tied_embeddings=False,
    max_positions=64,
    rope_scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32
    ),
)
QWEN2 = dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, rope_scaling=None)
QWEN3 = dataclasses.replace(
    LLAMA,
    family="qwen3",
    qk_norm=True,
    head_dim=6,
    tied_embeddings=True,
    rms_eps=1e-6,
    rope_scaling=None,
)
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
QUERY = "model.layers.1.self_attn.q_proj.weight"


def assert_equal_trees(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture(scope="module")
def llama_params(random_params):
    return random_params(LLAMA)


@pytest.fixture
def llama_directory(tmp_path, llama_params):
    save_params(tmp_path / "llama", llama_params, LLAMA, dtype=jnp.float32)
    return tmp_path / "llama"


def edit_tensors(directory, **changes):
    """Replace, add or (with None) drop tensors; keyword `query` is QUERY."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        name = {"query": QUERY}.get(name, name)
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path)


# Out and in, without transformers.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000], ids=["one file", "shards"])
def test_what_is_saved_is_loaded(random_params, tmp_path, family, max_shard_bytes):
    arch = FAMILIES[family]
    params = random_params(arch)
    directory = tmp_path / "export"
    save_params(
        directory, params, arch, dtype=jnp.float32, max_shard_bytes=max_shard_bytes
    )
    assert read_architecture(directory) == arch
    assert_equal_trees(load_params(directory, arch, dtype=jnp.float32), params)
    files = list(directory.glob("*.safetensors"))
    assert (directory / "model.safetensors.index.json").exists() == (len(files) > 1)
    if max_shard_bytes < 10**9:
        assert len(files) > 3
        contents = [load_file(file).values() for file in files]
        # A tensor above the limit has a file of its own; no other file passes it.
        sizes = [sum(tensor.nbytes for tensor in content) for content in contents]
        assert all(
            size <= max_shard_bytes or len(content) == 1
            for size, content in zip(sizes, contents, strict=True)
        )


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_every_file_dtype_is_cast_to_the_one_asked_for(
    tmp_path, llama_params, stored, wanted
):
    save_params(tmp_path / "export", llama_params, LLAMA, dtype=stored)
    loaded = load_params(tmp_path / "export", LLAMA, dtype=wanted)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["torch_dtype"] == stored
    assert_equal_trees(
        loaded,
        jax.tree.map(lambda leaf: leaf.astype(stored).astype(wanted), llama_params),
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded)} == {wanted}


def test_parameters_are_placed_where_their_shardings_say(llama_directory, llama_params):
    mesh = make_mesh(jax.devices()[:8], data=2, fsdp=2, tensor=2)
    shardings = param_shardings(LLAMA, mesh)
    loaded = load_params(llama_directory, LLAMA, dtype=jnp.float32, shardings=shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == shardings
    assert_equal_trees(loaded, llama_params)
    directory = llama_directory.with_name("from shards")
    save_params(directory, loaded, LLAMA, dtype=jnp.float32)
    assert (directory / "model.safetensors").read_bytes() == (
        llama_directory / "model.safetensors"
    ).read_bytes()


def test_the_host_holds_a_shard_and_not_all_layers(tmp_path, random_params):
    # The largest stack is 2 MiB, its shards 256 KiB, and "value" is read last.
    arch = dataclasses.replace(
        QWEN2, hidden_size=64, num_layers=8, num_heads=16, num_kv_heads=16, head_dim=64
    )
    save_params(tmp_path / "export", random_params(arch), arch, dtype=jnp.float32)
    shardings = param_shardings(arch, make_mesh(jax.devices(), fsdp=8))
    tracemalloc.start()
    loaded = load_params(
        tmp_path / "export", arch, dtype=jnp.float32, shardings=shardings
    )
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded["layers"]["value"].nbytes == 2 * 2**20
    # The devices' own memory is the host's here, and may be the arrays that were read.
    assert peak - after < 2**20


def test_rotary_buffers_are_ignored(random_params, tmp_path):
    params = random_params(QWEN3)
    save_params(tmp_path / "export", params, QWEN3, dtype=jnp.float32)
    edit_tensors(
        tmp_path / "export",
        **{
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32),
        },
    )
    loaded = load_params(tmp_path / "export", QWEN3, dtype=jnp.float32)
    assert_equal_trees(loaded, params)


# Against transformers.


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
def test_a_head_of_its_own_beside_tied_embeddings_is_refused(
    random_params, tmp_path, monkeypatch, place
):
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 2000)  # several pieces
    params, arch = random_params(QWEN3), QWEN3
    save_params(tmp_path / "export", params, arch, dtype=jnp.bfloat16)
    head = load_file(tmp_path / "export/model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path / "export", **{"lm_head.weight": head.astype(np.float32)})
    equal = load_params(tmp_path / "export", arch, dtype=jnp.bfloat16)
    assert_equal_trees(equal, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    head[place] += 1
    edit_tensors(tmp_path / "export", **{"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight differs"):
        load_params(tmp_path / "export", arch, dtype=jnp.bfloat16)
    config = tmp_path / "export/config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps(said | {"tie_word_embeddings": False}))
    untied = read_architecture(tmp_path / "export")
    loaded = load_params(tmp_path / "export", untied, dtype=jnp.bfloat16)
    assert_equal_trees(loaded["head"], jnp.asarray(head))
    edit_tensors(tmp_path / "export", **{"lm_head.weight": head[1:]})
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight differs"):
        load_params(tmp_path / "export", arch, dtype=jnp.bfloat16)


def test_an_export_is_the_same_model_in_transformers(hugging_face, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    arch = read_architecture(hugging_face.directory)
    params = load_params(hugging_face.directory, arch, dtype=jnp.float32)
    for name, max_shard_bytes in {"one": 10**9, "shards": 20_000}.items():
        directory = tmp_path / name
        save_params(
            directory, params, arch, dtype=jnp.float32, max_shard_bytes=max_shard_bytes
        )
        assert read_architecture(directory) == arch
        again, notes = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
        assert not any(notes.values()), notes
        tokens = list(range(40))
        with torch.no_grad():
            exported = again(torch.tensor([tokens])).logits[0].numpy()
        np.testing.assert_array_equal(exported, hugging_face.logits(tokens))


def test_shards_that_transformers_wrote_are_read(hugging_face, tmp_path):
    hugging_face.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    arch = read_architecture(tmp_path)
    assert_equal_trees(
        load_params(tmp_path, arch, dtype=jnp.float32),
        load_params(hugging_face.directory, arch, dtype=jnp.float32),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_of_transformers_are_read(random_params, dtype, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    save_params(tmp_path / "a", random_params(QWEN2), QWEN2, dtype=jnp.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", dtype=getattr(torch, dtype)
    )
    model.save_pretrained(tmp_path / "b")
    loaded = load_params(tmp_path / "b", QWEN2, dtype=jnp.float32)
    expected = jax.tree.map(
        lambda leaf: leaf.astype(dtype).astype(jnp.float32), random_params(QWEN2)
    )
    assert_equal_trees(loaded, expected)


# Tensor files.


@pytest.mark.parametrize(
    "changes, message",
    [
        pytest.param(
            {"query": None},
            rf"lacks 1 of the 30 .*{QUERY}; .*safetensors",
            id="missing",
        ),
        pytest.param(
            {"model.layers.3.mlp.up_proj.weight": np.zeros((20, 16), np.float32)},
            r"holds tensor .*\.3\.mlp\.up_proj\.weight",
            id="unexpected",
        ),
        pytest.param(
            {"query": np.zeros((8, 16), np.float32)},
            rf"tensor {QUERY} has shape \(8, 16\)",
            id="another shape",
        ),
        pytest.param(
            {"query": np.zeros((16, 16), np.int8)},
            rf"tensor {QUERY} has dtype I8",
            id="another dtype",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(llama_directory, changes, message):
    edit_tensors(llama_directory, **changes)
    with pytest.raises(ValueError, match=message):
        load_params(llama_directory, LLAMA, dtype=jnp.float32)


@pytest.mark.parametrize(
    "kept, message",
    [
        pytest.param(lambda data: data[:-4], "cut short: tensor model", id="data"),
        pytest.param(lambda data: data[:200], "within its header", id="header"),
        pytest.param(lambda data: data[:5], "within its header", id="length"),
        pytest.param(
            lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[  ', 1),
            "corrupt header",
            id="offsets",
        ),
        pytest.param(
            lambda data: data[:8] + b"?" + data[9:], "corrupt header", id="not JSON"
        ),
    ],
)
def test_a_truncated_file_is_refused_by_name(llama_directory, kept, message):
    path = llama_directory / "model.safetensors"
    path.write_bytes(kept(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"llama/model\.safetensors .*{message}"):
        load_params(llama_directory, LLAMA, dtype=jnp.float32)


def test_shards_that_are_absent_or_lack_a_tensor_are_refused(tmp_path, llama_params):
    directory = tmp_path / "export"
    save_params(directory, llama_params, LLAMA, dtype=jnp.float32, max_shard_bytes=3000)
    first, second, *_ = sorted(directory.glob("model-*.safetensors"))
    tensors = load_file(first)
    dropped = min(tensors)
    save_file({name: tensors[name] for name in tensors if name != dropped}, first)
    with pytest.raises(ValueError, match=rf"{first.name} lacks tensor {dropped}"):
        load_params(directory, LLAMA, dtype=jnp.float32)
    second.unlink()
    with pytest.raises(ValueError, match=rf"{second.name} does not exist; .* it holds"):
        load_params(directory, LLAMA, dtype=jnp.float32)


def test_a_directory_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    message = r"safetensors .*\['pytorch_model\.bin'\]"
    with pytest.raises(ValueError, match=message):
        load_params(tmp_path, LLAMA, dtype=jnp.float32)


# Exports are whole or absent.


def test_an_export_replaces_the_one_before_and_leaves_nothing_beside(
    tmp_path, llama_params
):
    directory = tmp_path / "export"
    save_params(directory, llama_params, LLAMA, dtype=jnp.float32, max_shard_bytes=3000)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, llama_params)
    save_params(
        directory,
        doubled,
        LLAMA,
        dtype=jnp.float32,
        companions={"tokenizer.json": b"{}"},
        eos_token_id=7,
    )
    assert sorted(file.name for file in directory.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert_equal_trees(load_params(directory, LLAMA, dtype=jnp.float32), doubled)
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == 7
    assert list(tmp_path.iterdir()) == [directory]


@pytest.fixture
def small_files():
    """Files may grow to 5000 bytes, as on a disk that is full."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("max_shard_bytes", [10**9, 2000], ids=["weights", "tokenizer"])
def test_an_export_without_room_leaves_the_one_before_untouched(
    tmp_path, llama_params, max_shard_bytes
):
    directory = tmp_path / "llama"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"before")
    with pytest.raises(RuntimeError, match="cannot write .*llama .*free space"):
        save_params(
            directory,
            llama_params,
            LLAMA,
            dtype=jnp.float32,
            max_shard_bytes=max_shard_bytes,
            companions={"tokenizer.json": bytes(6000)},
        )
    assert (directory / "model.safetensors").read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [directory]


def test_an_export_that_died_between_its_renames_is_recovered(
    tmp_path, llama_params, small_files
):
    (tmp_path / ".llama.replaced").mkdir()
    (tmp_path / ".llama.replaced" / "model.safetensors").write_bytes(b"before")
    (tmp_path / ".llama.partial").mkdir()
    with pytest.raises(RuntimeError, match="cannot write"):
        save_params(tmp_path / "llama", llama_params, LLAMA, dtype=jnp.float32)
    assert (tmp_path / "llama" / "model.safetensors").read_bytes() == b"before"


def test_a_directory_with_other_files_is_not_replaced(llama_directory, llama_params):
    (llama_directory / "notes.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"llama holds notes\.txt"):
        save_params(llama_directory, llama_params, LLAMA, dtype=jnp.float32)
    assert (llama_directory / "notes.txt").exists()


@pytest.mark.parametrize(
    "arch, message",
    [
        (
            dataclasses.replace(LLAMA, ffn_size=21),
            r"parameter layers/down .*\(3, 20, 16\)",
        ),
        (
            dataclasses.replace(LLAMA, tied_embeddings=True),
            r"parameter head .*\(24, 16\)",
        ),
    ],
)
def test_params_of_another_architecture_are_not_saved(
    tmp_path, llama_params, arch, message
):
    with pytest.raises(ValueError, match=message):
        save_params(tmp_path / "export", llama_params, arch, dtype=jnp.float32)
    assert not (tmp_path / "export").exists()


def test_a_dtype_that_no_reader_expects_is_not_saved(tmp_path, llama_params):
    with pytest.raises(ValueError, match="dtype = float64; choose from"):
        save_params(tmp_path / "export", llama_params, LLAMA, dtype=np.float64)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_numbers_that_are_not_finite_are_not_loaded(llama_directory, value, dtype):
    tensor = np.full((16, 16), 3.0).astype(dtype)
    tensor[7, 5] = value
    edit_tensors(llama_directory, query=tensor)
    with pytest.raises(ValueError, match=rf"{QUERY} holds numbers that are NaN"):
        load_params(llama_directory, LLAMA, dtype=jnp.float32)
