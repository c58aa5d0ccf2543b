"""One rollout at its stops: what is printed, against the batch that is trained on."""

import contextlib
import dataclasses
import functools
import re
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import small_run
from test_assembly import assembler, make_group, make_rollout

import scalerl_jax
from scalerl_jax.algo.advantages import prompt_weights
from scalerl_jax.batching.window import Window
from scalerl_jax.controller.tracing import Tracer
from scalerl_jax.train import train

PACKAGE = Path(scalerl_jax.__file__).parent
# Beside a rollout's way: books, files, progress; what it began with; other samples.
BESIDE = {"config", "formats", "machines", "process", "run"}
BESIDE |= {"wiring", "evaluate", "parallel"}


@contextlib.contextmanager
def noting_files(passed):
    """Files of the package of which a function is called, by any thread."""

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            passed.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


pytestmark = pytest.mark.slow  # a whole run


@pytest.fixture(scope="module")
def traced_run(tmp_path_factory):
    """Texts of a run's traces, what each was made of, an oracle's norm; and the files.

    The files are those that the run passes through.
    """
    config = small_run.make_config(
        {
            "data.train_prompts": 12,
            "train.num_steps": 6,
            "eval.every": 100,
            "debug.trace_prompt": 0,
            "batch.row_tokens": 512,
            "batch.rows_per_microbatch": 1,
            "batch.short_rows": True,
        }
    )
    found, passed = [], set()
    with (
        noting_files(passed),
        small_run.built(config, tmp_path_factory.mktemp("run")) as run,
    ):
        tracer = run.trace

        def every_prompt(window, state):
            (batch,), version = window.batches, window.version
            for group in batch.groups:
                own = dataclasses.replace(tracer, prompt_id=group.prompt.prompt_id)
                texts = own(window, state)
                norm = own_norm(run, batch.groups, group.rollouts[0], state, version)
                found.append((texts, group, version, norm))
            return tracer(window, state)

        run.trace = every_prompt
        train(config, run, tmp_path_factory.mktemp("files"))
    return found, {Path(file).relative_to(PACKAGE) for file in passed}


@pytest.fixture
def traced(traced_run):
    return traced_run[0]


def own_norm(run, groups, rollout, state, version):
    """The norm of the gradient of the whole batch, all but a rollout's weights at 0."""
    assembled = run.assemble(groups, learner_version=version)
    batch = run.assemble.complete(assembled, {}).packed
    if batch is None:
        return None
    keep = np.zeros(batch.weights.shape, bool)
    sampled, length = batch.behavior_logprobs, len(rollout.completion_tokens)
    for place in np.ndindex(*sampled.shape[:2]):
        for start in range(sampled.shape[2] - length + 1):
            here = (*place, slice(start, start + length))
            same = np.array_equal(sampled[here], rollout.behavior_logprobs)
            same &= np.array_equal(batch.targets[here], rollout.completion_tokens)
            if same and not keep.any():  # others may be equal
                keep[here] = True
    if not keep.any():
        return None
    alone = dataclasses.replace(batch, weights=np.where(keep, batch.weights, 0.0))
    total = run.learner.train_step.total(state.params, alone)
    return float(optax.tree.norm(jax.device_get(total.grads)))


def number(text, pattern):
    return float(re.search(pattern, text)[1])


def test_every_group_of_the_prompt_is_told(traced):
    assert len(traced) >= 6
    for texts, group, version, _ in traced:
        assert len(texts) >= 1
        text = next(text for text in texts if f"ticket {group.ticket}," in text)
        assert f"rollout 1 of {len(group.rollouts)}" in text
        assert f"staleness {version - group.oldest_version} = " in text
        assert f"reward {group.rollouts[0].reward:g}" in text


def test_the_norm_is_that_of_the_rollouts_part_of_the_batch(traced):
    weighed = 0
    for texts, group, _, norm in traced:
        text = next(text for text in texts if f"ticket {group.ticket}," in text)
        if norm is None:
            assert "filtered" in text
            continue
        weighed += 1
        found = number(text, r"its own gradient ([-+.\de]+)")
        assert found == pytest.approx(norm, rel=2e-3)
    assert weighed, "no group had reward variance"


def test_at_its_own_version_sampler_and_learner_agree(traced):
    fresh = 0
    for texts, group, version, norm in traced:
        if norm is None or group.oldest_version != version:
            continue
        fresh += 1
        text = next(text for text in texts if f"ticket {group.ticket}," in text)
        low, mean, high = re.search(
            r"ratio +min ([\d.]+), mean ([\d.]+), max ([\d.]+)", text
        ).groups()
        assert {float(low), float(mean), float(high)} == {1.0}
        differences = re.findall(
            r" ([-+][\d.]+e[-+]\d+)(?:  not trained on)?$", text, re.M
        )
        assert differences and max(abs(float(each)) for each in differences) < 1e-4
    assert fresh, "no group was trained on by the version that sampled it"


def test_a_rollout_without_a_verdict_is_not_taken_for_one_with_the_same_tokens():
    unjudged = make_rollout(2, 0.0, first=10, judged=False)
    group = make_group(
        unjudged, make_rollout(2, 1.0, first=10), make_rollout(2, -1.0, first=20)
    )
    assemble = assembler(
        group_size=3,
        advantages=lambda rewards, judged, kept: rewards,
        weigh=functools.partial(prompt_weights, group_size=3),
    )
    batch = assemble.complete(assemble([group], learner_version=0), {})
    tracer = Tracer(
        prompt_id=0,
        learner=None,
        decode=str,
        row_tokens=12,
        rows_per_microbatch=1,
    )
    (text,) = tracer(Window(batches=[batch], version=0), None)
    assert "filtered: it has no weight" in text


def test_the_readme_follows_it_through_every_folder(traced_run):
    readme = (PACKAGE.parent / "README.md").read_text()
    section = readme.split("## Follow one rollout")[1].split("\n## ")[0]
    named = {Path(each) for each in re.findall(r"\(scalerl_jax/(\S+?)\)", section)}
    # What every sampler does, the slow one to read, and what is no rollout's way.
    aside = "sampler/protocol.py sampler/reference.py learner/checkpoint.py "
    aside += "weights/sending.py"
    named -= {Path(each) for each in aside.split()}
    _, passed = traced_run
    assert len(named) >= 8 and named <= passed, named - passed
    folders = {file.parts[0] for file in passed if len(file.parts) > 1} - BESIDE
    drawn = set(re.findall(r"(\w+)/", section.split("```")[1]))
    assert folders <= drawn | {file.parts[0] for file in named}
