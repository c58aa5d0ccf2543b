"""The table of metrics has every number that can be written, and no other."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import scalerl_jax
from scalerl_jax.batching.replay import load_metrics
from scalerl_jax.data.mixture import Levels, MixtureStream
from scalerl_jax.generation.evaluation import Evaluation
from scalerl_jax.run import ledger, metric_table
from scalerl_jax.run.directory import EVALS_FILE, METRICS_FILE
from scalerl_jax.sampler.requests import SamplerStats

LEVELS = Levels(pass_rate=0.5, num_prompts=1)
PACKAGE = Path(scalerl_jax.__file__).parent
SOURCE = "\n".join(
    path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "metric_table.py"
)


def test_the_page_of_metrics_is_what_the_code_says():
    page = (PACKAGE.parent / "docs" / "metrics.md").read_text()
    assert page == metric_table.metrics_page(), "run: make metrics-table"


def test_what_is_counted_is_in_the_table():
    books = ledger.Ledger(pools={"all": 1}, chip="cpu")
    names = {
        *books.report(),
        *(f"idle/{pool}_share" for pool in books.idle_shares()),
        *SamplerStats().metrics(),
        *load_metrics(np.ones((2, 3))),
        *MixtureStream([], weights=[], levels=LEVELS).figures,
    }
    found = {each.name for each in metric_table.TABLES[METRICS_FILE]}
    assert {name.replace("idle/all", "idle/POOL") for name in names} <= found
    hidden = {"rollouts", "details", "pass_rate_by_task", "rewards"}
    fields = {each.name for each in dataclasses.fields(Evaluation)} - hidden
    assert fields <= {each.name for each in metric_table.EVALS}


@pytest.mark.parametrize(
    "metric",
    [*metric_table.TABLES[METRICS_FILE], *metric_table.EVALS, *metric_table.LIVE],
    ids=lambda metric: metric.name,
)
def test_every_metric_of_the_table_is_somewhere_in_the_code(metric):
    parts = [re.split(r"_chip_s$|_share$", part)[0] for part in metric.name.split("/")]
    known = [part for part in parts if not re.fullmatch("[A-Z]+|", part)]
    assert all(re.search(rf"\b{re.escape(part)}", SOURCE) for part in known)
    assert metric.meaning and metric.meaning[-1] not in ".,"


@pytest.mark.parametrize(
    "name, file, found",
    [
        ("pass_rate/chain_sum", METRICS_FILE, "pass_rate/TASK"),
        ("pass_rate/jsonl:a/b.jsonl", EVALS_FILE, "pass_rate/TASK"),
        ("reward/short/unjudged_share", METRICS_FILE, "reward/NAME"),
        ("idle/learner_share", METRICS_FILE, "idle/POOL_share"),
        ("reward", METRICS_FILE, None),
        ("pass_rate/chain_sum", "rollouts", KeyError),
    ],
)
def test_a_name_is_looked_up_with_names_of_the_run_in_it(name, file, found):
    if found is KeyError:
        with pytest.raises(KeyError):
            metric_table.find(name, file)
    else:
        metric = metric_table.find(name, file)
        assert (metric and metric.name) == found
