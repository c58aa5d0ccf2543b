"""config.json: what is read, what is refused, and that exports are read back."""

import dataclasses
import json
from pathlib import Path

import pytest

from scalerl_jax.model import family_table
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.families import FAMILIES, known_fields
from scalerl_jax.model.hugging_face import config_values, read_architecture
from scalerl_jax.model.rope import LinearScaling, Rope
from scalerl_jax.model.sizes import ARCHITECTURES

LLAMA = ARCHITECTURES["llama3.1-8b"]
QWEN2 = Architecture(
    family="qwen2",
    qkv_bias=True,
    vocab_size=151_936,
    hidden_size=1536,
    ffn_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    rope_theta=1_000_000.0,
    rms_eps=1e-6,
    tied_embeddings=True,
    max_positions=32_768,
)


# Fields of published config.json files, in the layouts of their time.
PUBLISHED = {
    "llama3.1-8b": dict(
        architectures=["LlamaForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=128001,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=131072,
        mlp_bias=False,
        model_type="llama",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=dict(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
        rope_theta=500000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_cache=True,
        vocab_size=128256,
    ),
    "mistral-7b": dict(
        architectures=["MistralForCausalLM"],
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=32768,
        model_type="mistral",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.42.0.dev0",
        use_cache=True,
        vocab_size=32768,
    ),
    "olmo3-7b": dict(
        architectures=["Olmo3ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        eos_token_id=100257,
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=11008,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        max_position_embeddings=65536,
        model_type="olmo3",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=32,
        pad_token_id=100277,
        rms_norm_eps=1e-06,
        rope_scaling=dict(
            attention_factor=1.2079441541679836,
            beta_fast=32.0,
            beta_slow=1.0,
            factor=8.0,
            original_max_position_embeddings=8192,
            rope_type="yarn",
        ),
        rope_theta=500000,
        sliding_window=4096,
        tie_word_embeddings=False,
        use_cache=True,
        vocab_size=100278,
    ),
    "gemma2-2b": dict(
        architectures=["Gemma2ForCausalLM"],
        attention_bias=False,
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=2304,
        intermediate_size=9216,
        max_position_embeddings=8192,
        model_type="gemma2",
        num_attention_heads=8,
        num_hidden_layers=26,
        num_key_value_heads=4,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-06,
        rope_theta=10000.0,
        sliding_window=4096,
        vocab_size=256000,
    ),
    "gemma3-1b": dict(
        architectures=["Gemma3ForCausalLM"],
        attn_logit_softcapping=None,
        cache_implementation="hybrid",
        final_logit_softcapping=None,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=1152,
        intermediate_size=6912,
        max_position_embeddings=32768,
        model_type="gemma3_text",
        num_attention_heads=4,
        num_hidden_layers=26,
        num_key_value_heads=1,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-06,
        rope_local_base_freq=10000,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
        vocab_size=262144,
    ),
    "smollm3-3b": dict(
        hidden_act="silu",
        hidden_size=2048,
        intermediate_size=11008,
        layer_types=["full_attention"] * 36,
        max_position_embeddings=65536,
        max_window_layers=28,
        model_type="smollm3",
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        num_attention_heads=16,
        num_hidden_layers=36,
        num_key_value_heads=4,
        pretraining_tp=2,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=5000000.0,
        use_sliding_window=False,
        vocab_size=128256,
    ),
    "gpt-oss-20b": dict(
        attention_bias=True,
        experts_per_token=4,
        head_dim=64,
        hidden_size=2880,
        initial_context_length=4096,
        intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131072,
        model_type="gpt_oss",
        num_attention_heads=64,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=8,
        num_local_experts=32,
        output_router_logits=False,
        quantization_config=dict(
            modules_to_not_convert=["model.layers.*.self_attn"], quant_method="mxfp4"
        ),
        rms_norm_eps=1e-05,
        rope_scaling=dict(
            beta_fast=32.0,
            beta_slow=1.0,
            factor=32.0,
            original_max_position_embeddings=4096,
            rope_type="yarn",
            truncate=False,
        ),
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        vocab_size=201088,
    ),
}


def write_config(directory, arch, **changes):
    """The config.json of `arch`, with some fields changed or (with ...) left out."""
    values = config_values(arch, dtype="float32", eos_token_id=None) | changes
    values = {name: value for name, value in values.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("arch", [*ARCHITECTURES.values(), QWEN2])
def test_what_is_written_is_read_back(tmp_path, arch):
    write_config(tmp_path, arch)
    assert read_architecture(tmp_path) == arch


def test_old_and_new_rope_layouts_are_read_alike(tmp_path):
    values = config_values(LLAMA, dtype="float32", eos_token_id=None)
    theta, scaling = values["rope_theta"], values["rope_scaling"]
    new = {"rope_theta": ..., "rope_scaling": ...}
    write_config(
        tmp_path, LLAMA, **new, rope_parameters=scaling | {"rope_theta": theta}
    )
    assert read_architecture(tmp_path) == LLAMA
    del scaling["rope_type"]
    write_config(tmp_path, LLAMA, rope_scaling=scaling | {"type": "llama3"})
    assert read_architecture(tmp_path) == LLAMA
    plain = {"rope_type": "default", "rope_theta": theta}
    write_config(tmp_path, LLAMA, **new, rope_parameters=plain)
    assert read_architecture(tmp_path) == dataclasses.replace(LLAMA, rope_scaling=None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_the_named_architecture(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert read_architecture(tmp_path) == ARCHITECTURES[name]


def test_the_decoder_of_a_gemma_with_images_has_the_defaults_of_transformers(tmp_path):
    """The fields of google/gemma-3-4b-it's config.json."""
    text = dict(
        hidden_size=2560,
        intermediate_size=10240,
        model_type="gemma3_text",
        num_hidden_layers=34,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
        sliding_window=1024,
    )
    config = dict(model_type="gemma3", text_config=text, vision_config={})
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(tmp_path)
    assert arch.num_params == 3_880_263_168  # of the 4,300,079,472 with its images
    assert arch.rope == Rope(1_000_000.0, LinearScaling(8.0))
    assert arch.window_rope == Rope(10_000.0)
    assert arch.windows[:6] == (1024, 1024, 1024, 1024, 1024, 0)


# Sizes by which no field that is left out happens to have the value of another.
_ODD = dict(hidden_size=6144, num_attention_heads=64, num_hidden_layers=5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_that_is_left_out_has_transformers_default(tmp_path, name):
    """Each field that is read: left out, or null, it means what transformers reads."""
    transformers = pytest.importorskip("transformers")
    from huggingface_hub.errors import StrictDataclassError

    kind = getattr(transformers, FAMILIES[name].loader).config_class
    kind = getattr(kind, "sub_configs", {}).get("text_config", kind)
    assert kind.model_type == name

    def read(values):
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_architecture(tmp_path)

    whole, compared = kind(**_ODD).to_dict(), set()
    for field in sorted(known_fields(FAMILIES[name]) & whole.keys() - {"model_type"}):
        without = {each: value for each, value in whole.items() if each != field}
        for values in (without, without | {field: None}):
            try:
                theirs = kind(**values).to_dict()
            except (StrictDataclassError, AttributeError, TypeError):
                continue  # transformers refuses null
            if (name, field, values is without) == ("gpt_oss", "rope_parameters", 0):
                continue  # null is none, as in transformers 4; 5 takes its default
            try:
                found = read(values)
            except ValueError as error:
                assert str(error).count(" is missing"), error
                continue
            assert found == read(theirs), f"{field}: {values.get(field, 'left out')}"
            compared.add(field)
    assert len(compared) > 10


def test_a_pattern_of_windows_is_read_by_the_name_that_transformers_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        values = PUBLISHED["gemma3-1b"] | {"sliding_window_pattern": None, name: 2}
        values = {key: each for key, each in values.items() if each is not None}
        (tmp_path / "config.json").write_text(json.dumps(values))
        theirs = transformers.Gemma3TextConfig(**values).layer_types
        windows = read_architecture(tmp_path).windows
        assert [each == "sliding_attention" for each in theirs] == [*map(bool, windows)]


def test_transformers_reads_a_gpt_oss_without_a_scaling_as_it_was_written():
    transformers = pytest.importorskip("transformers")
    arch = dataclasses.replace(ARCHITECTURES["gpt-oss-20b"], rope_scaling=None)
    values = config_values(arch, dtype="float32", eos_token_id=None)
    theirs = transformers.GptOssConfig(**values).rope_parameters
    assert theirs == {"rope_type": "default", "rope_theta": 150_000.0}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="mixtral"), "model_type = 'mixtral'"),
        (dict(embedding_multiplier=12.0), "embedding_multiplier = 12.0 .*remove it"),
        (dict(sliding_window=64), "sliding_window = 64 .*no llama model"),
        (dict(model_type=...), "model_type is missing"),
        (dict(model_type=..., config={}), "that of a run; .* export --checkpoint=RUN"),
        (
            dict(rope_scaling={"rope_type": "longrope", "factor": 4.0}),
            r"rope_scaling\.rope_type = 'longrope' .*'yarn'",
        ),
        (
            dict(rope_scaling={"type": "linear", "factor": 2.0, "mscale": 1.0}),
            r"rope_scaling\.mscale = 1\.0",
        ),
        (
            dict(rope_scaling={"type": "yarn", "factor": 2.0}),
            r"rope_scaling\.original_max_position_embeddings is missing",
        ),
        (
            dict(rope_scaling={"rope_type": "llama3"}),
            r"rope_scaling\.factor is missing",
        ),
        (
            dict(rope_scaling={"rope_type": ["x"]}),
            r"rope_scaling\.rope_type = \['x'\] .*'yarn'",
        ),
        (
            dict(
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                }
            ),
            r"rope_scaling\.high_freq_factor = 1.0 .*low_freq_factor = 4.0, or more",
        ),
        (dict(rope_theta=...), "rope_theta is missing"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (dict(use_sliding_window=True), "use_sliding_window = True"),
        (
            dict(layer_types=["full_attention", "sliding_attention"]),
            "layer_types = .*'sliding_attention'",
        ),
        (dict(attention_bias="yes"), "attention_bias = 'yes'"),
        (dict(mlp_bias=2), "mlp_bias = 2"),
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0"),
        (dict(model_type="qwen3", attention_bias=True), "attention_bias = True"),
        (dict(hidden_act="gelu"), r"hidden_act = 'gelu' .*only \['silu'\]"),
        (
            dict(quantization_config={"quant_method": "fp8"}),
            "quantization_config = .*take the model's checkpoint in bfloat16",
        ),
        (dict(num_hidden_layers=...), "num_hidden_layers is missing"),
        (dict(vocab_size="24"), "vocab_size = '24' .*an integer from 1 to"),
        (dict(num_key_value_heads=3), "num_key_value_heads = 3 .* = 32"),
        (dict(rms_norm_eps=0), "rms_norm_eps = 0 .*a number above 0"),
        (dict(head_dim=5), "head_dim = 5 .*even"),
        (dict(model_type="qwen3", head_dim=...), "head_dim is missing"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_a_config_that_would_not_be_honoured_is_refused(tmp_path, changes, message):
    write_config(tmp_path, LLAMA, **changes)
    with pytest.raises(ValueError, match=rf"config\.json(:| is) {message}"):
        read_architecture(tmp_path)


def test_a_scale_that_transformers_would_not_take_is_refused(tmp_path):
    gemma = PUBLISHED["gemma3-1b"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(gemma))
    read_architecture(tmp_path)
    file.write_text(json.dumps(gemma | {"query_pre_attn_scalar": 168.75}))
    with pytest.raises(ValueError, match="scalar = 168.75 .*a whole number"):
        read_architecture(tmp_path)


def test_qwen2_may_name_a_window_that_is_not_in_use(tmp_path):
    write_config(tmp_path, QWEN2, sliding_window=32_768, use_sliding_window=False)
    assert read_architecture(tmp_path) == QWEN2


def test_a_broken_or_absent_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_architecture(tmp_path)


def test_the_table_of_families_is_what_the_script_prints():
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    assert f"\n{family_table.table()}\n" in page.read_text(), "make families-table"
