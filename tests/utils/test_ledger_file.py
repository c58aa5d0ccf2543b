"""The ledger's file: there after a kill, and no reason to die."""

import json
import time

import pytest

from scalerl_jax.utils import ledger_file
from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.ledger_file import LEDGER_FILE, kept_on_disk, read_ledger


def counting():
    ledger = Ledger(pools={"shared": 1}, chip="abacus")
    ledger.start()
    return ledger


def until(condition):
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def train_tokens(directory):
    state = read_ledger(directory)
    return state and state["counts"]["train_tokens"]


def test_the_file_follows_the_ledger_and_has_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_file, "WRITE_EVERY_S", 0.01)
    ledger = counting()
    assert read_ledger(tmp_path) is None
    with kept_on_disk(ledger, tmp_path):
        for tokens in (1, 2):
            ledger.count(train_tokens=1)
            until(lambda tokens=tokens: train_tokens(tmp_path) == tokens)
        monkeypatch.setattr(ledger_file, "WRITE_EVERY_S", 1000.0)
        time.sleep(0.05)
        ledger.count(train_tokens=1)
    assert train_tokens(tmp_path) == 3
    assert [path.name for path in tmp_path.iterdir()] == [LEDGER_FILE]


def test_a_disk_that_takes_nothing_is_reported_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ledger_file, "WRITE_EVERY_S", 0.001)
    ledger, directory = counting(), tmp_path / "run"
    directory.mkdir()
    with kept_on_disk(ledger, directory):
        until(lambda: read_ledger(directory))
        directory.rename(tmp_path / "gone")
        until(lambda: caplog.records)
        time.sleep(0.05)
        directory.mkdir()
        ledger.count(train_tokens=5)
    assert train_tokens(directory) == 5  # there is room again
    (record,) = caplog.records
    assert f"cannot write {directory / LEDGER_FILE}" in record.getMessage()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"chip": "abacus"}'])
def test_a_broken_file_is_named_with_the_way_out(tmp_path, text):
    (tmp_path / LEDGER_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"ledger.json is broken .*; remove it to go"):
        read_ledger(tmp_path)


def test_the_file_is_for_people_too(tmp_path):
    with kept_on_disk(counting(), tmp_path):
        pass
    state = json.loads((tmp_path / LEDGER_FILE).read_text())
    assert state["chip"] == "abacus" and "lost" in state["chip_s"]
