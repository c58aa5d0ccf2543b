"""The extra is an extra: the package does without it, and says how to get it."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import scalerl_jax

PACKAGE = Path(scalerl_jax.__file__).parent
ADAPTER = "scalerl_jax.sampler.jetstream"


def test_without_the_extra_the_import_names_it(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "jetstream"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jetstream", None)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    with pytest.raises(ImportError, match="TensorFlow") as caught:
        importlib.import_module(ADAPTER)
    assert 'pip install "scalerl_jax[jetstream]"' in str(caught.value)
    assert ADAPTER not in sys.modules


def test_nothing_in_the_package_imports_the_adapter():
    wanted = re.compile(r"^\s*(from|import) .*\bjetstream\b", re.M)
    importers = [
        path.name for path in PACKAGE.rglob("*.py") if wanted.search(path.read_text())
    ]
    assert importers == ["jetstream.py"]
