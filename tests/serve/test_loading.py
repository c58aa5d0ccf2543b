"""What can be served: a Hugging Face directory, a run, a checkpoint of a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from small_checkpoints import rewrite_state, save_run
from small_server import BASE

from scalerl_jax.learner.step import init_state
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.saving import save_params
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.run.progress import Progress
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.serve import server
from scalerl_jax.serve.__main__ import read_flags
from scalerl_jax.wiring import loading
from scalerl_jax.wiring.learning import make_adamw
from scalerl_jax.wiring.loading import load_model


@functools.cache
def base_params():
    return load_params(BASE, read_architecture(BASE), dtype=jnp.float32)


def params_of(step):
    """Of a checkpoint after so many steps: they must not be those of another."""
    return jax.tree.map(lambda leaf: leaf + step, base_params())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with two checkpoints."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    save_run(directory, params_of(1), params_of(2))
    return directory


def assert_same(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_hugging_face_directory_is_served_as_it_was_saved():
    model = load_model(BASE)
    assert (model.policy_version, model.dtype) == (0, jnp.float32)
    assert_same(model.params, base_params())


@pytest.mark.parametrize(
    "inside, step",
    [
        pytest.param("", 2, id="a run: the newest"),
        pytest.param("checkpoints", 2, id="its checkpoints: the newest"),
        pytest.param("checkpoints/step_00000001", 1, id="one of them"),
    ],
)
def test_a_checkpoint_of_a_run_is_served(run, inside, step):
    model = load_model(run / inside)
    assert model.policy_version == step
    assert model.arch == read_architecture(BASE)
    assert_same(model.params, params_of(step))


def test_params_are_cast_on_demand(run):
    for directory in (BASE, run):
        leaves = jax.tree.leaves(load_model(directory, dtype="bfloat16").params)
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}


def with_final_norm(value):
    params = jax.tree.map(lambda leaf: leaf, base_params())
    params["final_norm"] = params["final_norm"].at[3].set(value)
    return params


def test_numbers_that_are_not_finite_are_refused_where_that_is_asked_for(tmp_path):
    arch, checkpoint = read_architecture(BASE), tmp_path / "model"
    tokenizer = {"tokenizer.json": (BASE / "tokenizer.json").read_bytes()}
    options = {"dtype": jnp.float32, "companions": tokenizer, "eos_token_id": 1}
    save_params(checkpoint, with_final_norm(jnp.nan), arch, **options)
    assert load_model(checkpoint).params is not None  # a server finds out by itself
    words = (
        f"{checkpoint / 'model.safetensors'}: tensor model.norm.weight holds numbers"
    )
    with pytest.raises(ValueError, match=f"--checkpoint={checkpoint}: {words} that"):
        load_model(checkpoint, require_finite=True)


def test_of_a_run_the_newest_checkpoint_that_is_finite_is_taken(tmp_path, caplog):
    save_run(tmp_path, params_of(1), params_of(2))
    first, second = small_run.checkpoints(tmp_path)
    optimizer = make_adamw(small_run.make_config())
    rewrite_state(second, init_state(with_final_norm(jnp.nan), optimizer))
    model = load_model(tmp_path)
    assert model.policy_version == 1
    assert_same(model.params, params_of(1))
    words = f"{second} is not used: params.final_norm holds numbers that are NaN"
    assert words in caplog.text
    rewrite_state(first, init_state(with_final_norm(jnp.inf), optimizer))
    with pytest.raises(ValueError, match="none of .* step 1: params.fi"):
        load_model(tmp_path)


def test_numbers_that_another_dtype_makes_infinite_are_refused(tmp_path):
    save_run(tmp_path, with_final_norm(3.4e38))  # bfloat16 ends at 3.39e38
    assert load_model(tmp_path, require_finite=True).params is not None
    with pytest.raises(ValueError, match="final_norm holds .* infinite in bfloat16"):
        load_model(tmp_path, dtype="bfloat16", require_finite=True)


@pytest.mark.parametrize(
    "make, words",
    [
        pytest.param(None, ("no such directory",), id="missing"),
        pytest.param({}, ("config.json does not exist",), id="empty"),
        pytest.param({"config.json": "{"}, ("is not valid JSON",), id="torn"),
        pytest.param(
            {"config.json": '{"config": {"seed": "x"}}'},
            ("does not give the settings", "seed = 'x'"),
            id="settings of another program",
        ),
        pytest.param(
            {"checkpoints/step_00000001/state": ""},
            ("config.json does not give the settings",),
            id="a run without settings",
        ),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path, make, words):
    directory = tmp_path / "there"
    for name, text in ({} if make is None else {".": None} | make).items():
        if text is None:
            directory.mkdir()
            continue
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    with pytest.raises(ValueError) as error:
        load_model(directory)
    for word in (f"--checkpoint={directory}: ", *words):
        assert word in str(error.value)


def test_a_run_without_a_good_checkpoint_is_named(tmp_path, run):
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_model(tmp_path)
    (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"manifest\.json is missing"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "flags, words",
    [
        pytest.param(
            {"cache_tokens": 10},
            # The model's 512 positions are 16 pages of 32, and one is copied.
            r"--cache_tokens=10 .* = 512 tokens; raise it to 544 or more",
            id="by the model",
        ),
        pytest.param(
            {
                "cache_tokens": 127,
                "max_prompt_tokens": 33,
                "max_completion_tokens": 63,
            },
            r"--cache_tokens=127 .* = 96 tokens; raise it to 128 or more",
            id="by flags",
        ),
        pytest.param(
            {"max_prompt_tokens": 500, "max_completion_tokens": 13},
            r"= 513 is more than the 512 positions",
            id="positions",
        ),
    ],
)
def test_sizes_that_the_model_does_not_allow_are_flags_named_before_it_is_loaded(
    monkeypatch, flags, words
):
    def load_now(*_, **__):
        raise AssertionError("the weights are read")

    monkeypatch.setattr(loading, "load_params", load_now)
    given = [f"--{name}={value}" for name, value in flags.items()]
    parsed = read_flags([f"--checkpoint={BASE}", "--tensor=1", *given])
    with Progress() as progress, pytest.raises(ValueError, match=words) as error:
        server._load(parsed, progress)
    assert "sampler." not in str(error.value)


def test_a_cache_beyond_the_memory_is_told_with_the_flags_that_set_it():
    given = {"port": 0, "compile_cache": "", "tensor": 1}
    flags = read_flags(
        [f"--checkpoint={BASE}", *(f"--{name}={given[name]}" for name in given)]
    )
    flags.cache_tokens = 10**12  # more than read_flags takes, and than there is
    with pytest.raises(RuntimeError, match=r"lower --slots=32, --cache_tokens=1000000"):
        server.serve(flags)


def test_the_least_cache_that_is_named_is_enough(monkeypatch):
    monkeypatch.setattr(server, "_LONGEST", 48)
    flags = read_flags([f"--checkpoint={BASE}", "--cache_tokens=128"])
    settings = server._settings(flags, read_architecture(BASE))
    Engine(settings, mesh=make_mesh(jax.devices()[:1]))


@pytest.mark.parametrize(
    "flags, cached",
    [([], True), (["--prefix_cache=on"], True), (["--prefix_cache=off"], False)],
)
def test_the_prefix_cache_is_that_of_the_flag(monkeypatch, flags, cached):
    done = []

    class Made(Exception):
        pass

    def make_now(engine, *, prefix_cache=True):
        done.append(prefix_cache)
        raise Made

    monkeypatch.setattr(server, "PagePool", make_now)
    parsed = read_flags([f"--checkpoint={BASE}", "--tensor=0", *flags])
    with Progress() as progress, pytest.raises(Made):
        server._load(parsed, progress)
    assert done and set(done) == {cached}


@pytest.mark.parametrize("flag, dtype", [("", "float32"), ("bfloat16", "bfloat16")])
def test_products_are_those_of_the_dtype_that_is_served(monkeypatch, flag, dtype):
    """Without --dtype it is the checkpoint's, known once that is read."""
    done = []

    class Compiled(Exception):
        pass

    def compile_now(*_, **__):
        raise Compiled

    monkeypatch.setattr(server, "exact_products", done.append)
    monkeypatch.setattr(server, "make_replicas", compile_now)
    flags = read_flags([f"--checkpoint={BASE}", f"--dtype={flag}", "--tensor=1"])
    with Progress() as progress, pytest.raises(Compiled):
        server._load(flags, progress)
    assert done == [dtype]
