"""Servers of the small base checkpoint, and of one with a poisoned token."""

import dataclasses

import jax.numpy as jnp
import pytest
from small_server import BASE, FLAGS, POISON, TEMPLATE, running

from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.saving import save_params
from scalerl_jax.model.weights import load_params


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The base checkpoint, and one where nothing finite follows a token of a prompt.

    Both have a head of their own, and so the same compiled programs; the first has a
    chat template.
    """
    arch = read_architecture(BASE)
    params = load_params(BASE, arch, dtype=jnp.float32)
    params["head"] = params["embedding"]
    poisoned = params["embedding"].at[POISON].set(jnp.nan)
    directory = tmp_path_factory.mktemp("models")
    for name, changes in {"sound": {}, "poisoned": {"embedding": poisoned}}.items():
        companions = {"tokenizer.json": (BASE / "tokenizer.json").read_bytes()}
        if name == "sound":
            companions["chat_template.jinja"] = TEMPLATE.encode()
        save_params(
            directory / name,
            params | changes,
            dataclasses.replace(arch, tied_embeddings=False),
            dtype=jnp.float32,
            companions=companions,
            eos_token_id=1,
        )
    return lambda name: directory / name


@pytest.fixture(scope="session")
def start_server(checkpoint):
    """Start servers with other flags, or another program."""

    def start(program=("-m", "scalerl_jax.serve"), *, model="sound", **changes):
        flags = FLAGS | {"checkpoint": checkpoint(model)} | changes
        command = [*program, *(f"--{name}={value}" for name, value in flags.items())]
        return running(command, flags["checkpoint"])

    return start


@pytest.fixture(scope="session")
def server(start_server):
    """One for every test that leaves it as it was."""
    with start_server() as server:
        yield server
