"""GGUF files: the same model as transformers reads, or refused with a name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model.architecture import Architecture, param_shardings
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.rope import Llama3Scaling, rope_frequencies
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh

gguf = pytest.importorskip("gguf")
from small_gguf import KIND, tensors_of, write_gguf  # noqa: E402

LLAMA = Architecture(
    family="llama",
    vocab_size=24,
    hidden_size=36,
    ffn_size=20,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=4,
    rope_theta=100_000.0,
    rms_eps=1e-5,
    tied_embeddings=True,
    max_positions=64,
)
QWEN2 = dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=False)
QWEN3 = dataclasses.replace(
    LLAMA, family="qwen3", qk_norm=True, head_dim=6, rms_eps=1e-6
)
# Rows of one block of 256 numbers, the longest there is.
WIDE = dataclasses.replace(
    QWEN2,
    hidden_size=256,
    ffn_size=256,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)


@pytest.fixture
def write(tmp_path, random_params):
    """Writes the random parameters of an architecture."""

    def write(arch, changes=None, **options):
        tensors = tensors_of(arch, random_params(arch)) | (changes or {})
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        write_gguf(tmp_path / "model.gguf", arch, kept, **options)
        return tmp_path / "model.gguf"

    return write


def assert_equal_trees(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("arch", [LLAMA, QWEN2, QWEN3], ids=lambda arch: arch.family)
def test_a_file_gives_its_architecture_and_its_weights(write, random_params, arch):
    path = write(arch)
    assert read_architecture(path) == arch
    loaded = load_params(path, arch, dtype=jnp.float32)
    assert_equal_trees(loaded, random_params(arch))


@pytest.mark.parametrize("arch", [LLAMA, QWEN2], ids=lambda arch: arch.family)
def test_transformers_reads_the_same_weights_from_a_file(write, arch):
    transformers = pytest.importorskip("transformers")
    path = write(arch)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name
    ).state_dict()
    ours = load_params(path, arch, dtype=jnp.float32)["layers"]
    for name, module in {"query": "q_proj", "key": "k_proj", "value": "v_proj"}.items():
        for layer in range(arch.num_layers):
            found = theirs[f"model.layers.{layer}.self_attn.{module}.weight"]
            np.testing.assert_array_equal(ours[name][layer].T, found.numpy())


QUANTISED = [KIND.F16, KIND.BF16, KIND.Q4_0, KIND.Q4_1, KIND.Q5_0, KIND.Q5_1, KIND.Q8_0]
K_QUANTS = [KIND.Q4_K, KIND.Q6_K]


@pytest.mark.parametrize("kind", [*QUANTISED, *K_QUANTS], ids=lambda kind: kind.name)
def test_shards_of_quantised_tensors_are_those_of_whole_ones(write, kind):
    name, shape = "blk.0.attn_output.weight", (256, 256)
    rng = np.random.default_rng(0)
    if kind in K_QUANTS:  # no quantizer of these is written in Python: any bytes do
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 60, (256, block_bytes)).astype(np.uint8)
    else:
        data = gguf.quantize(rng.normal(size=shape).astype(np.float32), kind)
    whole = gguf.dequantize(data.view(np.uint8), kind)
    assert np.isfinite(whole).all() and whole.std() > 0
    path = write(WIDE, {name: data.view(np.uint8)}, kinds={name: kind})
    mesh = make_mesh(jax.devices(), fsdp=4, tensor=2)
    shardings = param_shardings(WIDE, mesh)
    loaded = load_params(path, WIDE, dtype=jnp.float32, shardings=shardings)
    assert loaded["layers"]["output"].sharding == shardings["layers"]["output"]
    np.testing.assert_array_equal(loaded["layers"]["output"][0].T, whole)


SCALING = Llama3Scaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)


def test_the_scaling_of_llama_3_2_is_found_in_its_factors(write):
    arch = dataclasses.replace(
        LLAMA, head_dim=32, rope_theta=500_000.0, rope_scaling=SCALING
    )
    plain = dataclasses.replace(arch, rope_scaling=None)
    factors = np.array(
        rope_frequencies(plain.rope, plain.head_dim)
        / rope_frequencies(arch.rope, arch.head_dim)
    )
    assert factors[0] == 1.0 and factors[-1] == 32.0
    path = write(arch, {"rope_freqs.weight": factors})
    assert read_architecture(path) == arch
    load_params(path, arch, dtype=jnp.float32)
    factors[5] = 3.0
    write(arch, {"rope_freqs.weight": factors})
    with pytest.raises(ValueError, match=r"model\.gguf: tensor rope_freqs"):
        read_architecture(path)


# What cannot be used.
_, _Q8_1_BYTES = gguf.GGML_QUANT_SIZES[KIND.Q8_1]


@pytest.mark.parametrize(
    "options, message",
    [
        pytest.param(
            {"family": "olmo2"},
            r"general\.architecture = 'olmo2'",
            id="another architecture",
        ),
        pytest.param(
            {"metadata": {"{family}.expert_count": 8}},
            r"llama\.expert_count = 8 is not supported",
            id="experts",
        ),
        pytest.param(
            {"metadata": {"{family}.rope.scaling.type": "yarn"}},
            r"llama\.rope\.scaling\.type = 'yarn'",
            id="another rotary scaling",
        ),
        pytest.param(
            {"metadata": {"{family}.rope.scaling.factor": 4.0}},
            r"llama\.rope\.scaling\.factor = 4\.0 .*only 1\.0 is",
            id="a rotary scaling without a type",
        ),
        pytest.param(
            {"metadata": {"split.count": 3}},
            r"split\.count = 3 parts; join them",
            id="a part",
        ),
        pytest.param(
            {"changes": {"token_embd.weight": None}},
            r"lacks tensor token_embd\.weight",
            id="no embedding",
        ),
    ],
)
def test_a_model_that_the_forward_pass_does_not_know_is_refused(
    write, options, message
):
    path = write(LLAMA, **options)
    with pytest.raises(ValueError, match=rf"model\.gguf.*{message}"):
        read_architecture(path)


@pytest.mark.parametrize(
    "changes, kinds, message",
    [
        pytest.param(
            {"blk.1.attn_q.weight": None},
            {},
            r"lacks 1 of the 20 .*layers\.1\..*q_proj",
            id="missing",
        ),
        pytest.param(
            {"blk.2.attn_q.weight": np.zeros((36, 36), np.float32)},
            {},
            r"holds tensor blk\.2\.attn_q\.weight",
            id="unexpected",
        ),
        pytest.param(
            {"blk.1.attn_q.weight": np.zeros((12, 36), np.float32)},
            {},
            r"blk\.1\.attn_q\.weight .*\(12, 36\); ",
            id="another shape",
        ),
        pytest.param(
            {"blk.1.attn_q.weight": np.zeros((36, _Q8_1_BYTES), np.uint8)},
            {"blk.1.attn_q.weight": KIND.Q8_1},
            r"blk\.1\.attn_q\.weight is of kind Q8_1",
            id="another kind",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(write, changes, kinds, message):
    path = write(LLAMA, changes, kinds=kinds)
    with pytest.raises(ValueError, match=rf"model\.gguf.*{message}"):
        load_params(path, LLAMA, dtype=jnp.float32)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.05, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused_by_name(write, share):
    path = write(LLAMA)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=r"model\.gguf .*cut short"):
        read_architecture(path)


def test_other_files_and_none_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r"model\.gguf does not exist"):
        read_architecture(path)
    path.write_bytes(b"PK\3\4" + bytes(1000))
    with pytest.raises(ValueError, match=r"model\.gguf .* is no GGUF file"):
        read_architecture(path)
