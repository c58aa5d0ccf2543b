"""Checkpoints of mixtures: cut over devices, with images, or in a layout not theirs."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_model import small_architecture

from scalerl_jax.model.architecture import Experts, LocalLayers, param_shardings
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.saving import save_params
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh

QWEN3 = small_architecture(
    family="qwen3_moe", experts=Experts(count=3, top_k=2, gate="normalized")
)
LLAMA4 = small_architecture(
    family="llama4_text",
    experts=Experts(count=3, top_k=1, gate="sigmoid", gate_input=True, shared=True),
    local=LocalLayers((True, False), 16, True, 0.1, 8),
)


GPT_OSS = small_architecture(
    family="gpt_oss",
    hidden_size=32,
    ffn_size=64,
    num_layers=1,
    experts=Experts(count=3, top_k=1, gate="normalized", biased=True, clamp=7.0),
    windows=(4,),
)
BIASED = dataclasses.replace(
    QWEN3, experts=dataclasses.replace(QWEN3.experts, bias=True)
)


@pytest.fixture(
    scope="module",
    params=[QWEN3, LLAMA4, BIASED],
    ids=["qwen3", "llama4", "with a bias"],
)
def saved(request, random_params, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param.family) / "model"
    params = random_params(request.param)
    save_params(directory, params, request.param, dtype=jnp.float32)
    return directory, request.param, params


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the checkpoint, and a function that changes its tensors."""
    directory, arch, _ = saved
    to = tmp_path / "copy"
    shutil.copytree(directory, to)

    def change(edit):
        file = to / "model.safetensors"
        save_file(edit(load_file(file)), file)
        return to

    return arch, change


def test_every_shard_of_experts_is_read(saved):
    directory, arch, params = saved
    assert read_architecture(directory) == arch
    mesh = make_mesh(jax.devices()[:4], fsdp=2, tensor=2)
    shardings = param_shardings(arch, mesh)
    loaded = load_params(directory, arch, dtype=jnp.float32, shardings=shardings)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    experts = loaded["layers"]["expert_gate_up"]
    assert experts.addressable_shards[0].data.shape == (2, 3, 8, 2, 12)


def test_experts_are_read_by_the_devices_that_have_them(random_params, tmp_path):
    four = dataclasses.replace(QWEN3.experts, count=4)
    arch = dataclasses.replace(QWEN3, experts=four)
    params = random_params(arch)
    save_params(tmp_path / "model", params, arch, dtype=jnp.float32)
    mesh = make_mesh(jax.devices()[:8], fsdp=4, expert=2, tensor=2)
    shardings = param_shardings(arch, mesh)
    loaded = load_params(
        tmp_path / "model", arch, dtype=jnp.float32, shardings=shardings
    )
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    experts = loaded["layers"]["expert_gate_up"]
    assert experts.addressable_shards[0].data.shape == (2, 2, 8, 2, 12)


def test_a_file_has_one_tensor_at_a_time_whatever_its_size(saved, tmp_path):
    _, arch, params = saved
    save_params(tmp_path / "cut", params, arch, dtype=jnp.float32, max_shard_bytes=4000)
    assert len([*(tmp_path / "cut").glob("*.safetensors")]) > 3
    loaded = load_params(tmp_path / "cut", arch, dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_an_expert_that_config_does_not_count_is_named(copy):
    arch, change = copy
    if arch.family == "llama4_text":
        directory = change(
            lambda tensors: {
                name: np.concatenate([tensor, tensor[:1]])
                if ".experts." in name
                else tensor
                for name, tensor in tensors.items()
            }
        )
        message = r"experts\.down_proj .*\(4, 24, 16\)"
    else:
        name = "model.layers.0.mlp.experts.{}.up_proj.weight"
        directory = change(lambda held: held | {name.format(3): held[name.format(2)]})
        message = r"experts\.3\.up_proj.* 3 experts"
    with pytest.raises(ValueError, match=message) as refused:
        load_params(directory, arch, dtype=jnp.float32)
    assert "\n" not in str(refused.value)


def test_an_expert_that_is_missing_is_named(copy):
    arch, change = copy
    if arch.family == "llama4_text":
        pytest.skip("its experts are one tensor")
    directory = change(
        lambda held: {name: held[name] for name in held if ".experts.2." not in name}
    )
    with pytest.raises(ValueError, match=r"lacks 6 of .*experts\.2\.down_proj"):
        load_params(directory, arch, dtype=jnp.float32)


def test_experts_in_the_other_layout_are_refused(copy):
    arch, change = copy
    if arch.family == "llama4_text":
        name = "model.layers.0.feed_forward.experts.0.gate_proj.weight"
        message = r"a tensor each \(.*experts\.0"
    else:
        name = "model.layers.0.mlp.experts.gate_up_proj"
        message = r"one tensor per layer \(.*gate_up_proj\)"
    directory = change(lambda held: held | {name: np.zeros((2, 2), np.float32)})
    with pytest.raises(ValueError, match=message) as refused:
        load_params(directory, arch, dtype=jnp.float32)
    assert "\n" not in str(refused.value)


def test_the_decoder_of_a_checkpoint_that_reads_images_is_read(random_params, tmp_path):
    """The names and the nesting of meta-llama/Llama-4-Scout-17B-16E."""
    params = random_params(LLAMA4)
    save_params(tmp_path / "model", params, LLAMA4, dtype=jnp.float32)
    config = tmp_path / "model" / "config.json"
    text = json.loads(config.read_text())
    config.write_text(
        json.dumps({"model_type": "llama4", "text_config": text, "vision_config": {}})
    )
    file = tmp_path / "model" / "model.safetensors"
    held = {f"language_model.{name}": each for name, each in load_file(file).items()}
    images = {"vision_model.class_embedding": np.zeros(3, np.float32)}
    save_file(held | images, file)
    arch = read_architecture(tmp_path / "model")
    assert arch == LLAMA4
    loaded = load_params(tmp_path / "model", arch, dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize(
    "arch, changes, message",
    [
        (
            QWEN3,
            dict(num_experts_per_tok=4),
            "num_experts_per_tok = 4 .*= 3",
        ),
        (QWEN3, dict(mlp_only_layers=[1]), r"mlp_only_layers = \[1\] .*only \[\[\]\]"),
        (QWEN3, dict(decoder_sparse_step=2), "decoder_sparse_step = 2"),
        (QWEN3, dict(num_experts=0), "num_experts = 0 .*an integer from 1"),
        (LLAMA4, dict(interleave_moe_layer_step=2), "interleave_moe_layer_step = 2"),
        (LLAMA4, dict(moe_layers=[1]), r"moe_layers = \[1\] .*only \[\[0, 1\]\]"),
        (LLAMA4, dict(no_rope_layers=[1]), r"no_rope_layers = \[1\] .*for each layer"),
        (LLAMA4, dict(layer_types=["full_attention"] * 2), "layer_types = "),
        (LLAMA4, dict(attention_chunk_size=0), "attention_chunk_size = 0"),
    ],
    ids=str,
)
def test_a_mixture_that_would_not_be_honoured_is_refused(
    random_params, tmp_path, arch, changes, message
):
    save_params(tmp_path / "model", random_params(arch), arch, dtype=jnp.float32)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path / "model")


@pytest.fixture
def packed(random_params, tmp_path):
    """A gpt-oss with experts of random 4-bit numbers, and these by transformers."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch = pytest.importorskip("torch")
    directory, expected = tmp_path / "packed", {}
    save_params(directory, random_params(GPT_OSS), GPT_OSS, dtype=jnp.bfloat16)
    held, rng = load_file(directory / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in held if name.endswith("_proj")]:
        if ".experts." not in name:
            continue
        experts, inputs, outputs = held.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = rng.integers(0, 256, shape, dtype=np.uint8)
        scales = rng.integers(120, 130, shape[:-1], dtype=np.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name.rpartition(".")[2]] = mxfp4.convert_moe_packed_tensors(
            torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
        ).numpy()
    save_file(held, directory / "model.safetensors")
    config = directory / "config.json"
    said = {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | said))
    return directory, expected


def test_experts_of_4_bit_numbers_are_those_of_transformers(packed):
    directory, expected = packed
    assert read_architecture(directory) == GPT_OSS
    mesh = make_mesh(jax.devices()[:8], fsdp=2, tensor=4)
    shardings = param_shardings(dataclasses.replace(GPT_OSS, num_kv_heads=4), mesh)
    loaded = load_params(directory, GPT_OSS, dtype=jnp.bfloat16, shardings=shardings)
    gate_up = np.asarray(loaded["layers"]["expert_gate_up"][0], np.float32)
    np.testing.assert_array_equal(gate_up[:, :, 0], expected["gate_up_proj"][..., ::2])
    np.testing.assert_array_equal(gate_up[:, :, 1], expected["gate_up_proj"][..., 1::2])
    down = np.asarray(loaded["layers"]["expert_down"][0], np.float32)
    np.testing.assert_array_equal(down, expected["down_proj"])


def test_half_a_tensor_of_4_bit_numbers_is_refused(packed):
    directory, _ = packed
    held = load_file(directory / "model.safetensors")
    held = {name: held[name] for name in held if not name.endswith("down_proj_scales")}
    save_file(held, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj_blocks has dtype U8 .*4-bit"):
        load_params(directory, GPT_OSS, dtype=jnp.bfloat16)
    (directory / "config.json").write_text(
        (directory / "config.json").read_text().replace("mxfp4", "fp8")
    )
    with pytest.raises(ValueError, match=r"quantization_config\.quant_method = 'fp8'"):
        read_architecture(directory)
