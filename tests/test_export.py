"""Exports by the command: what other programs load is what was trained."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import small_run
from safetensors.numpy import load_file, save_file

from scalerl_jax import config as config_lib
from scalerl_jax import export
from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.learner.step import TrainState
from scalerl_jax.model.adapter_files import read_adapter, save_factors
from scalerl_jax.model.architecture import param_shardings
from scalerl_jax.model.hugging_face import is_below_language_model, read_architecture
from scalerl_jax.model.lora import join, merged
from scalerl_jax.model.saving import save_params
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.weights.publication import digest_of
from scalerl_jax.wiring import loading, make_architecture, make_checkpointer
from scalerl_jax.wiring.learning import (
    abstract_state,
    check_trained,
    split_params,
    start_frozen,
    start_params,
)
from scalerl_jax.wiring.loading import load_model

BASE = small_run.ROOT / "scalerl_jax" / "assets" / "tiny_base"
TEXT = "Spell this word backward (example: sun -> nus): mediacy<think>"
TEMPLATE = "{{ messages[0]['content'] }}<think>"


@pytest.fixture
def chat(tmp_path):
    """The base checkpoint with a chat template of its own."""
    directory = tmp_path / "base"
    shutil.copytree(BASE, directory)
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


def logits_of(transformers, directory, ids):
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    )
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy(), model


def test_transformers_finds_model_tokenizer_and_template_in_an_export(tmp_path, chat):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    export.export(chat, out)
    ids = load_tokenizer(chat).encode(TEXT)
    ours = transformers.AutoTokenizer.from_pretrained(out)
    assert ours.encode(TEXT, add_special_tokens=False) == ids
    text = ours.apply_chat_template(
        [{"role": "user", "content": "one + two"}], tokenize=False
    )
    assert text == "one + two<think>"
    exported, model = logits_of(transformers, out, ids)
    np.testing.assert_array_equal(exported, logits_of(transformers, chat, ids)[0])
    assert model.generation_config.eos_token_id in (1, [1])


def test_a_directory_without_a_tokenizers_class_is_given_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    export.export(BASE, tmp_path / "out", dtype="bfloat16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = load_tokenizer(BASE).encode(TEXT)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == expected
    assert tokenizer.eos_token == "<eos>"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_the_newest_checkpoint_of_a_run_is_exported(tmp_path):
    config = small_run.make_config({"data.train_prompts": 16})
    run = tmp_path / "run"
    run.mkdir()
    settings = {"config": config_lib.to_json(config)}
    (run / "config.json").write_text(json.dumps(settings))
    with small_run.built(config, run) as made:
        state = made.state
        made.learner.checkpointer.save(3, state=state, host={}, groups=())
        made.learner.checkpointer.wait()
        trained = jax.device_get(state.params)
    export.export(run, tmp_path / "out")
    arch = read_architecture(tmp_path / "out")
    found = load_params(tmp_path / "out", arch, dtype=np.float32)
    jax.tree.map(np.testing.assert_array_equal, found, trained)
    assert load_tokenizer(tmp_path / "out").eos_ids == load_tokenizer(BASE).eos_ids


@pytest.fixture
def adapted(tmp_path):
    """A run with low-rank factors, and these factors."""
    changes = {"model.lora.rank": 2, "model.lora.alpha": 6.0}
    config, run = small_run.make_config(changes), tmp_path / "run"
    run.mkdir()
    settings = {"config": config_lib.to_json(config)}
    (run / "config.json").write_text(json.dumps(settings))
    arch, mesh = make_architecture(config), make_mesh(jax.devices()[:1])
    rng = np.random.default_rng(0)
    factors = jax.tree.map(
        lambda leaf: jax.numpy.asarray(0.1 * rng.normal(size=leaf.shape), "float32"),
        abstract_state(config, arch, mesh).params,
    )
    state = TrainState(params=factors, opt_state={}, policy_version=jax.numpy.int32(3))
    saver = make_checkpointer(config, run)
    base = digest_of(start_frozen(config, arch, mesh))
    saver.save(3, state=state, host={}, groups=(), beside={"base": base})
    saver.close()
    return run, factors


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's of transformers
def test_factors_are_exported_as_peft_reads_them_and_merged(tmp_path, adapted):
    run, factors = adapted
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    assert export.main([f"--checkpoint={run}", f"--out={alone}", "--adapter"]) == 0
    assert export.main([f"--checkpoint={run}", f"--out={whole}"]) == 0
    parts = load_file(alone / "adapter_model.safetensors")
    merged = load_file(whole / "model.safetensors")
    assert len(parts) == 2 * 7 * 4  # of 7 matrices in 4 layers
    for name, before in load_file(BASE / "model.safetensors").items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if (low := parts.pop(f"{module}.lora_A.weight", None)) is not None:
            high = parts.pop(f"{module}.lora_B.weight")
            before = before.astype(np.float32) + 6.0 / 2 * high @ low
        np.testing.assert_allclose(merged[name], before, rtol=1e-6, atol=1e-6)
    assert not parts
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (2, 6.0, "none")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    ids = load_tokenizer(BASE).encode(TEXT)
    expected, _ = logits_of(transformers, whole, ids)
    _, model = logits_of(transformers, config["base_model_name_or_path"], ids)
    import torch

    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(model, alone)(torch.tensor([ids]))
    np.testing.assert_allclose(found.logits[0].numpy(), expected, atol=5e-5)


def test_an_adapter_names_its_base_for_users_elsewhere(tmp_path, monkeypatch, adapted):
    assert export.name_base("Qwen/Qwen3-8B") == ("Qwen/Qwen3-8B", "")
    assert export.name_base("Qwen/Qwen3-8B@v1.0") == ("Qwen/Qwen3-8B", "v1.0")
    assert export.name_base("") == ("", "")
    run, _ = adapted
    settings = json.loads((run / "config.json").read_text())
    settings["config"]["model"]["checkpoint"] = "tiny_base"  # as a user may write it
    (run / "config.json").write_text(json.dumps(settings))
    monkeypatch.chdir(BASE.parent)
    out = tmp_path / "alone"
    assert export.main([f"--checkpoint={run}", f"--out={out}", "--adapter"]) == 0
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(BASE)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's of transformers
def test_an_adapter_of_a_decoder_in_a_model_of_images_is_peft_s(tmp_path):
    torch, transformers, peft = map(
        pytest.importorskip, ("torch", "transformers", "peft")
    )
    sizes = dict(num_attention_heads=2, hidden_size=16, intermediate_size=24)
    config = transformers.Gemma3Config(
        text_config=sizes
        | dict(num_hidden_layers=2, num_key_value_heads=1, head_dim=8, vocab_size=64)
        | dict(query_pre_attn_scalar=8, pad_token_id=None),
        vision_config=sizes | dict(num_hidden_layers=1, image_size=28, patch_size=14),
        image_token_index=63,
        boi_token_index=61,
        eoi_token_index=62,
    )
    torch.manual_seed(0)
    base, ids = tmp_path / "base", list(range(20))
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(base)
    wrapped = peft.get_peft_model(
        whole, peft.LoraConfig(r=2, target_modules=r".*language_model.*(q|down)_proj")
    )
    with torch.no_grad():
        for name, factor in wrapped.named_parameters():
            if "lora_" in name:
                factor.normal_(std=0.3)
        expected = wrapped(torch.tensor([ids])).logits[0].numpy()
    wrapped.save_pretrained(tmp_path / "theirs")
    arch = read_architecture(base)
    theirs = read_adapter(tmp_path / "theirs", arch)
    factors = theirs.factors(arch)
    params = load_params(base, arch, dtype=np.float32)
    joined = merged(join(jax.tree.map(jax.numpy.asarray, factors), params))
    save_params(tmp_path / "merged", joined, arch, dtype="float32")
    found, _ = logits_of(transformers, tmp_path / "merged", ids)
    np.testing.assert_allclose(found, expected, atol=5e-5)
    save_factors(
        tmp_path / "ours",
        factors,
        arch,
        theirs.lora,
        base=str(base),
        digest="",
        base_dtype="float32",
        nested=is_below_language_model(base),
    )
    plain, model = logits_of(transformers, base, ids)
    assert np.abs(plain - expected).max() > 0.1
    again = peft.PeftModel.from_pretrained(model, tmp_path / "ours")
    with torch.no_grad():
        found = again(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=5e-5)
    names = [name for name, _ in again.named_parameters() if "lora_" in name]
    assert names and not [name for name in names if "vision" in name]


@pytest.fixture
def exported(tmp_path, adapted):
    """An adapter of that run, in a directory."""
    alone = tmp_path / "alone"
    assert (
        export.main([f"--checkpoint={adapted[0]}", f"--out={alone}", "--adapter"]) == 0
    )
    return alone


def test_an_adapter_is_served_on_its_base_and_goes_on_in_another_run(exported, adapted):
    run, factors = adapted
    served, whole = load_model(BASE, adapter=str(exported)), load_model(run)
    jax.tree.map(np.testing.assert_array_equal, served.params, whole.params)
    changes = {
        "model.lora.rank": 2,
        "model.lora.alpha": 6.0,
        "model.lora.adapter": str(exported),
    }
    config, mesh = small_run.make_config(changes), make_mesh(jax.devices()[:2], fsdp=2)
    arch = make_architecture(config)
    check_trained(config, arch)
    params = start_params(config, arch, param_shardings(arch, mesh))
    found, _ = split_params(config, arch, params, mesh)
    jax.tree.map(np.testing.assert_array_equal, found, factors)
    for changed, words in (
        ({"model.lora.rank": 4}, "has rank 2, alpha 6 .* model.lora.rank = 4"),
        ({"model.lora.targets": ("layers/query",)}, "has rank 2, .*query.* set those"),
        ({"model.param_dtype": "bfloat16"}, "base of float32, and model.param_dtype"),
    ):
        with pytest.raises(ValueError, match=rf"model\.lora\.adapter: .*{words}"):
            check_trained(small_run.make_config(changes | changed), arch)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's of transformers
def test_an_adapter_that_peft_wrote_gives_its_logits(tmp_path):
    torch, transformers, peft = map(
        pytest.importorskip, ("torch", "transformers", "peft")
    )
    ids = load_tokenizer(BASE).encode(TEXT)
    plain, model = logits_of(transformers, BASE, ids)
    settings = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, factor in adapted.named_parameters():
            if "lora_" in name:
                factor.normal_(std=0.1)
        expected = adapted(torch.tensor([ids])).logits[0].numpy()
    adapted.save_pretrained(tmp_path / "adapter")
    ours = load_model(BASE, adapter=str(tmp_path / "adapter"))
    save_params(tmp_path / "merged", ours.params, ours.arch, dtype="float32")
    found, _ = logits_of(transformers, tmp_path / "merged", ids)
    np.testing.assert_allclose(found, expected, atol=5e-5)
    assert np.abs(plain - expected).max() > 0.1


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[:-100])


def odd_base(path):
    save_file(load_file(path), path, metadata={"base_dtype": "float7"})


def changed_config(**values):
    def change(path):
        file = path.parent / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


@pytest.mark.parametrize(
    "spoil, words",
    [
        (cut, "adapter_model.safetensors is cut short: tensor"),
        (odd_base, "has base_dtype = 'float7', which is not read here; only 'float32'"),
        (lambda path: path.unlink(), "is no whole adapter: adapter_model.safetensors"),
        (lambda path: (path.parent / "adapter_config.json").unlink(), "no whole adapt"),
        (changed_config(use_dora=True), "use_dora = 'True', which is not read here"),
        (changed_config(tomorrow={"a": 1}), "has tomorrow = .*, which is not read"),
        (changed_config(bias="all"), "has bias = 'all', .* only 'none' is"),
        (changed_config(init_lora_weights="pissa_niter_4"), "init_lora_weights = 'pi"),
        (changed_config(loftq_config={"loftq_bits": 4}), "has loftq_config = .* not r"),
        (changed_config(r=3), "of shape .2, .*, and the base and r = 3 ask for"),
        (changed_config(r=0), "r = 0 and lora_alpha = 6.0, which must be numbers"),
    ],
)
def test_half_an_adapter_is_refused_before_anything_is_loaded(
    exported, monkeypatch, spoil, words
):
    spoil(exported / "adapter_model.safetensors")
    monkeypatch.setattr(loading, "load_params", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=f"--adapter={exported}: .*{words}"):
        load_model(BASE, adapter=str(exported))


def test_an_adapter_beside_another_base_is_refused_by_its_digest(tmp_path, exported):
    other = shutil.copytree(BASE, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    words = "trained beside a base of digest [0-9a-f]{16}, and this one has"
    with pytest.raises(ValueError, match=words):
        load_model(other, adapter=str(exported))
    config = small_run.make_config(
        {
            "model.checkpoint": str(other),
            "model.lora.rank": 2,
            "model.lora.alpha": 6.0,
            "model.lora.adapter": str(exported),
        }
    )
    arch, mesh = make_architecture(config), make_mesh(jax.devices()[:1])
    params = start_params(config, arch, param_shardings(arch, mesh))
    with pytest.raises(ValueError, match=rf"model\.lora\.adapter: .*{words}"):
        split_params(config, arch, params, mesh)


@pytest.mark.parametrize("more", [(), ("--adapter",)])
def test_an_export_does_not_replace_the_base_of_its_run(
    tmp_path, capsys, adapted, more
):
    """The base is as an earlier export, and a run with factors goes on beside it."""
    run, _ = adapted
    base = shutil.copytree(BASE, tmp_path / "base")
    settings = json.loads((run / "config.json").read_text())
    settings["config"]["model"]["checkpoint"] = str(base)
    (run / "config.json").write_text(json.dumps(settings))
    assert export.main([f"--checkpoint={run}", f"--out={base}", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--out={base} holds model.checkpoint = {str(base)!r}" in line
    assert (base / "model.safetensors").is_file()


def test_factors_of_another_base_or_of_no_run_are_one_line(tmp_path, capsys, adapted):
    run, _ = adapted
    other = shutil.copytree(BASE, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((run / "config.json").read_text())
    settings["config"]["model"]["checkpoint"] = str(other)
    (run / "config.json").write_text(json.dumps(settings))
    out = f"--out={tmp_path / 'out'}"
    for source, words in (
        (run, "was trained beside frozen params of digest"),
        (BASE, "it has no factors"),
    ):
        assert export.main([f"--checkpoint={source}", out, "--adapter"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and words in line


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (("--checkpoint=nowhere", "--out={out}"), 2, "--checkpoint=nowhere"),
        ((f"--checkpoint={BASE}", "--out={taken}"), 2, "holds notes.txt"),
        ((f"--checkpoint={BASE}", "--out={file}/out"), 1, "cannot write"),
    ],
    ids=["no checkpoint", "another's directory", "no directory"],
)
def test_what_cannot_be_exported_is_one_line(
    tmp_path, capsys, arguments, status, words
):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    places = {name: tmp_path / name for name in ("out", "taken")}
    places["file"] = tmp_path / "taken" / "notes.txt"
    assert export.main([each.format(**places) for each in arguments]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


@pytest.mark.slow
def test_the_command_writes_a_directory(tmp_path):
    command = [sys.executable, "-m", "scalerl_jax.export", f"--checkpoint={BASE}"]
    done = subprocess.run(
        [*command, f"--out={tmp_path / 'out'}"],
        cwd=small_run.ROOT,
        capture_output=True,
        text=True,
        env=small_run.os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
