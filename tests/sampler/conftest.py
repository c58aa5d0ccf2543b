"""Two small policies, and a bench on which an engine is run against the reference.

The random policy is far from uniform.  The counting policy says u + 1 after u, with
a probability of 1 but for 1e-16, so that its completions can be written by hand.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_architecture

from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.parallel.mesh import make_learner_mesh
from scalerl_jax.sampler.engine import NEVER, Engine, EngineSettings, Samples
from scalerl_jax.sampler.reference import sample_completion
from scalerl_jax.sampler.sampling import interruption_lengths, sample_keys
from scalerl_jax.sampler.scheduler import Request, Scheduler

VOCABULARY, WIDTH = 13, 16
SETTINGS = EngineSettings(
    arch=small_architecture(vocab_size=VOCABULARY, hidden_size=WIDTH),
    slots=4,
    max_prompt_tokens=20,
    max_completion_tokens=18,
    tokens_per_call=4,
    dtype=jnp.float32,
    eos_ids=(3, 11),
    phrase=(7, 8, 5),
    end_of_thinking=(8, 5),
)


class Bench:
    """An engine, and what tests do to it."""

    def __init__(self, *, devices=None, **changes):
        self.settings = dataclasses.replace(SETTINGS, **changes)
        devices = devices or jax.devices()[:1]
        mesh = make_learner_mesh(devices, 1, 1, len(devices))
        self.engine = Engine(self.settings, mesh=mesh)

    def request(self, number, prompt, *, num_samples=3, limits=(4, 9)):
        """Request `number`, interrupted at lengths in `limits` (None: never)."""
        keys = sample_keys(
            0, "train", prompt_id=number, epoch=0, num_samples=num_samples
        )
        thinking_limits = np.full(num_samples, NEVER, np.int32)
        if limits:
            thinking_limits = interruption_lengths(
                keys, min_tokens=limits[0], max_tokens=limits[1]
            )
        return Request(
            request_id=number,
            tokens=np.array(prompt, np.int32),
            samples=Samples(keys=keys, thinking_limits=thinking_limits),
        )

    def scheduler(self, *requests):
        """A scheduler with these requests in line."""
        scheduler = Scheduler(self.engine)
        for request in requests:
            scheduler.submit(request)
        return scheduler

    def finish(self, scheduler, params, *, version=0):
        """Step until nothing is left; completions by (request, sample)."""
        found = {}
        while scheduler.busy:
            for each in scheduler.step(params, version=version):
                assert (each.request_id, each.sample) not in found
                found[each.request_id, each.sample] = each
        return found

    def complete(self, params, *requests):
        """All completions, by (request, sample)."""
        return self.finish(self.scheduler(*requests), params)

    def expected(self, params, *requests):
        """What the slow sampler makes of the same requests."""
        return {
            (request.request_id, sample): sample_completion(
                params, self.settings, request.tokens, request.samples, sample
            )
            for request in requests
            for sample in range(request.num_samples)
        }

    def assert_same(self, found, expected):
        """The same tokens, and their log-probabilities but for rounding."""
        assert found.keys() == expected.keys()
        for place, theirs in expected.items():
            ours, where = found[place], str(place)
            assert ours.tokens.tolist() == theirs.tokens.tolist(), where
            assert ours.mask.tolist() == theirs.mask.tolist(), where
            assert ours.cut_off == theirs.cut_off, where
            assert ours.interrupted == theirs.interrupted, where
            np.testing.assert_allclose(
                ours.logprobs, theirs.logprobs, atol=2e-5, err_msg=where
            )


@functools.cache
def _random_params(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype),
        abstract_params(SETTINGS.arch, dtype=jnp.float32),
    )


@pytest.fixture(scope="session")
def random_params():
    """Random params by seed."""
    return _random_params


@pytest.fixture(scope="session")
def counting_params():
    """Layers that add nothing; a head that answers u with u + 1."""
    params = jax.tree.map(jnp.zeros_like, _random_params(0))
    names = np.eye(VOCABULARY, WIDTH, dtype=np.float32)
    # The norm makes 4 of a 1 (rms over 16): logits are 40 for u + 1 and 0 else.
    return params | {
        "embedding": jnp.asarray(names),
        "head": jnp.asarray(10.0 * np.roll(names, 1, axis=0)),
        "final_norm": jnp.ones(WIDTH),
    }


@pytest.fixture(scope="session")
def make_bench():
    """Benches with other settings."""
    return Bench


@pytest.fixture(scope="session")
def bench():
    """Four slots, two EOS ids, a phrase of three tokens that ends in two."""
    return Bench()
