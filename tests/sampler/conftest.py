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
from small_detokenizer import PIECES, marker_of
from small_model import small_architecture

from scalerl_jax.model.architecture import sampler_mesh
from scalerl_jax.model.transformer import (
    abstract_params,
    cached_hidden,
    head_logits,
    head_weights,
    unstack_layers,
)
from scalerl_jax.sampler.decoding import NEVER, EngineSettings
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.reference import (
    ReferenceSampler,
    next_token_logits,
    sample_completion,
)
from scalerl_jax.sampler.requests import Request, Samples
from scalerl_jax.sampler.sampling import (
    Sampling,
    SamplingRows,
    draw_tokens,
    interruption_lengths,
    sample_keys,
)
from scalerl_jax.sampler.scheduler import Scheduler

VOCABULARY, WIDTH = 13, 16
SETTINGS = EngineSettings(
    arch=small_architecture(vocab_size=VOCABULARY, hidden_size=WIDTH),
    slots=4,
    max_prompt_tokens=20,
    max_completion_tokens=18,
    tokens_per_call=4,
    dtype=jnp.float32,
    eos_ids=(3, 11),
    phrase=(7, 8, 5),  # a</t>x
    end_of_thinking=marker_of("</t>", PIECES),
    page_size=4,
    prefill_tokens=16,
)


class Bench:
    """An engine, and what tests do to it."""

    def __init__(self, *, devices=None, **changes):
        self.settings = dataclasses.replace(SETTINGS, **changes)
        devices = devices or jax.devices()[:1]
        mesh = sampler_mesh(self.settings.arch, devices)
        self.engine = Engine(self.settings, mesh=mesh)

    def request(self, number, prompt, *, num_samples=3, limits=(4, 9), **options):
        """Request `number`, interrupted at lengths in `limits` (None: never).

        Options are those of `Sampling`, `max_tokens` of each sample, `stop` and
        `listener`.
        """
        keys = sample_keys(
            0, "train", prompt_id=number, epoch=0, num_samples=num_samples
        )
        thinking_limits = np.full(num_samples, NEVER, np.int32)
        if limits:
            thinking_limits = interruption_lengths(
                keys, min_tokens=limits[0], max_tokens=limits[1]
            )
        max_tokens = options.pop("max_tokens", None)
        if max_tokens is not None:
            max_tokens = np.broadcast_to(np.int32(max_tokens), num_samples)
        return Request(
            request_id=number,
            tokens=np.array(prompt, np.int32),
            samples=Samples(
                keys=keys,
                thinking_limits=thinking_limits,
                max_tokens=max_tokens,
            ),
            stop=options.pop("stop", ()),
            listener=options.pop("listener", None),
            sampling=Sampling(**options),
        )

    def scheduler(self, *requests, pool=None, **options):
        """A scheduler with these requests in line, and pages of its own or a pool's."""
        scheduler = Scheduler(pool or PagePool(self.engine), **options)
        for request in requests:
            scheduler.submit(request)
        return scheduler

    def step(self, scheduler, params, *, version=0):
        """What one step with these params has finished."""
        scheduler.load(params, version)
        return scheduler.step()

    def finish(self, scheduler, params, *, version=0):
        """Step until nothing is left; completions by (request, sample)."""
        found = {}
        while scheduler.busy:
            for each in self.step(scheduler, params, version=version):
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
                params, self.settings, request, sample
            )
            for request in requests
            for sample in range(request.num_samples)
        }

    def replay(self, request, each, params_of):
        """Tokens and logprobs of a completion drawn again, without any cache.

        `params_of` gives the params of a version; a token is drawn with those of its
        own version, which have made everything before it.
        """
        tokens, logprobs = [], []
        for place, (version, drawn) in enumerate(
            zip(each.versions.tolist(), each.mask.tolist(), strict=True)
        ):
            seen = [*request.tokens.tolist(), *each.tokens[:place].tolist()]
            logits = next_token_logits(params_of[version], self.settings, seen)
            token, logprob = _draw_alone(
                logits,
                SamplingRows.of(request.sampling, 1),
                request.samples.keys[each.sample],
                place,
            )
            tokens.append(int(token) if drawn else int(each.tokens[place]))
            logprobs.append(float(logprob) if drawn else 0.0)
        return tokens, logprobs

    def dense_replay(self, request, sample, params_of_token, *, warm_up):
        """Tokens and logprobs with one dense cache, and params chosen per token.

        What a token's params put into the cache stays there.  The prompt goes in
        token by token with the params `warm_up`.
        """
        arch = self.settings.arch
        cache = np.zeros(
            (arch.num_layers, 2, 40, arch.num_kv_heads, arch.head_dim), np.float32
        )
        key = request.samples.keys[sample]
        for position, token in enumerate(request.tokens[:-1]):
            _, cache = _decode_alone(warm_up, arch, token, cache, position)
        token, tokens, logprobs = request.tokens[-1], [], []
        for place, params in enumerate(params_of_token):
            position = len(request.tokens) - 1 + place
            logits, cache = _decode_alone(params, arch, token, cache, position)
            token, logprob = _draw_alone(
                logits, SamplingRows.of(request.sampling, 1), key, place
            )
            tokens.append(int(token))
            logprobs.append(float(logprob))
        return tokens, logprobs

    def assert_idle(self, scheduler):
        """Nothing runs or waits, and every slot and page is free, once."""
        slots, pages = self.settings.slots, self.settings.num_pages
        assert not scheduler.busy
        assert scheduler.free_slots == slots
        assert sorted(scheduler._free) == list(range(slots))
        assert scheduler.stats.pages_in_use == 0
        assert scheduler.stats.tokens_held == 0
        active = np.asarray(scheduler._state.rows.active)
        assert not active.any()  # on the device neither
        kinds = (scheduler.pages._rings, scheduler.pages._whole)
        taken = [each.take(each.free) for each in kinds]
        assert sorted(sum(taken, [])) == list(range(pages))
        for each, free in zip(kinds, taken, strict=True):
            each.release(free)

    def assert_same(self, found, expected):
        """The same tokens, and their log-probabilities but for rounding.

        In an int8 cache a number between two steps may go either way: the rounding of
        float32 decides about one in 50,000; then log-probabilities differ more.
        """
        assert found.keys() == expected.keys()
        if self.settings.kv_dtype == "int8":
            pairs = [(found[place], each) for place, each in expected.items()]
            off = np.concatenate([abs(a.logprobs - b.logprobs) for a, b in pairs])
            assert [a.tokens.tolist() for a, _ in pairs] == [
                b.tokens.tolist() for _, b in pairs
            ]
            assert np.quantile(off, 0.9) < 2e-5 and off.max() < 2e-2
            return
        for place, theirs in expected.items():
            ours, where = found[place], str(place)
            assert ours.tokens.tolist() == theirs.tokens.tolist(), where
            assert ours.mask.tolist() == theirs.mask.tolist(), where
            assert ours.cut_off == theirs.cut_off, where
            assert ours.interrupted == theirs.interrupted, where
            np.testing.assert_allclose(
                ours.logprobs, theirs.logprobs, atol=2e-5, err_msg=where
            )
            np.testing.assert_allclose(
                ours.full_logprobs, theirs.full_logprobs, atol=2e-5, err_msg=where
            )

    def assert_rounded(self, params, found, *requests):
        """Log-probabilities are not those with a cache of floats, but close to them.

        Those of the first token, before which the same tokens come.
        """
        plain = Bench(**vars(self.settings) | {"kv_dtype": "model"})
        off = [
            abs(found[at].full_logprobs[0] - each.full_logprobs[0])
            for at, each in plain.expected(params, *requests).items()
        ]
        assert 2e-5 < np.median(off) < 0.05


class ReferenceBench(Bench):
    """The slow sampler in the place of the fast one; the engine is not used."""

    def scheduler(self, *requests, detokenizer=None, kv_on_update="recompute"):
        """A slow sampler with these requests in line; it has nothing to keep."""
        del kv_on_update
        sampler = ReferenceSampler(self.settings, detokenizer=detokenizer)
        for request in requests:
            sampler.submit(request)
        return sampler

    def assert_idle(self, scheduler):
        """Nothing runs or waits."""
        assert not scheduler.busy
        assert scheduler.free_slots == self.settings.slots


@jax.jit
def _draw_alone(logits, sampling, key, place):
    draw = draw_tokens(
        logits[None], sampling, keys=key[None], index=jnp.asarray(place)[None]
    )
    return draw.tokens[0], draw.logprobs[0]


@functools.partial(jax.jit, static_argnames="arch")
def _decode_alone(params, arch, token, cache, position):
    """Logits after one more token, and the cache [layer, k or v, T, kv, dim]."""

    def attend(layer, q, k, v):
        nonlocal cache
        cache = cache.at[layer, :, position].set(jnp.stack([k[0], v[0]]))
        keys, values = cache[layer]
        grouped = q[0].reshape(arch.num_kv_heads, -1, arch.head_dim)
        scores = jnp.einsum("kgd,tkd->kgt", grouped, keys) / arch.head_dim**0.5
        scores = jnp.where(jnp.arange(len(keys)) <= position, scores, -jnp.inf)
        mixed = jnp.einsum("kgt,tkd->kgd", jax.nn.softmax(scores, axis=-1), values)
        return mixed.reshape(q.shape)

    cache = jnp.asarray(cache)
    hidden, _ = cached_hidden(
        unstack_layers(params, arch),
        arch,
        jnp.asarray(token)[None],
        positions=jnp.asarray(position)[None],
        attend=attend,
        dtype=jnp.float32,
    )
    return head_logits(hidden[0], head_weights(params), float32_head=True), cache


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


@functools.cache
def _talkative_params(seed):
    params = _random_params(seed)
    # The first number of a token's vector is above 0, and speaks against EOS.
    head = params["head"].at[:, 0].set(0.0)
    return params | {
        "embedding": params["embedding"].at[:, 0].set(4.0),
        "head": head.at[np.array(SETTINGS.eos_ids), 0].set(-2.0),
        "final_norm": params["final_norm"].at[0].set(1.0),
    }


@pytest.fixture(scope="session")
def talkative_params():
    """Random params by seed, that seldom end a completion."""
    return _talkative_params


@pytest.fixture(scope="session")
def poisoned_params():
    """Random params by seed, in which token 12 is not a number."""

    @functools.cache
    def make(seed):
        params = _random_params(seed)
        return params | {"embedding": params["embedding"].at[12].set(jnp.nan)}

    return make


@pytest.fixture(scope="session")
def make_bench():
    """Benches with other settings."""
    return Bench


@pytest.fixture(scope="session")
def wide_bench():
    """Four slots, two EOS ids, a phrase of three tokens that ends thinking."""
    return Bench()


@pytest.fixture(scope="session")
def bench(wide_bench):
    """The same, unless a module has another."""
    return wide_bench


@pytest.fixture(scope="session")
def reference_bench():
    """The slow sampler with the settings of `bench`."""
    return ReferenceBench()


@pytest.fixture(scope="session")
def tight_bench():
    """Pages for one sequence at its full length, and one to copy."""
    return Bench(attention="gathered", cache_tokens=44, top_logprobs=2)


@pytest.fixture(scope="session")
def int8_bench():
    """As few pages, which hold integers."""
    return Bench(attention="gathered", cache_tokens=44, kv_dtype="int8")


@pytest.fixture(scope="session")
def paged_bench():
    """Attention straight on the pages, which do not last for four long sequences."""
    return Bench(attention="paged", cache_tokens=72)


@pytest.fixture(scope="session")
def ring_bench():
    """One layer of two sees three tokens; pages for one sequence, and a prompt's."""
    near = dataclasses.replace(SETTINGS.arch, windows=(3, 0))
    bench = Bench(
        arch=near,
        attention="gathered",
        page_size=2,
        prefill_tokens=8,
        cache_tokens=56,
    )
    assert (bench.settings.ring_pages, bench.settings.pages_in_rings) == (7, 14)
    return bench


@pytest.fixture(params=["wide_bench", "paged_bench", "tight_bench", "reference_bench"])
def any_bench(request):
    """The fast sampler with many pages and with few, and the slow one."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def ladder_bench():
    """Programs of several sizes: rows 8 and 10, tables of 16 and 25, chunks 64, 100."""
    return Bench(
        slots=10,
        max_prompt_tokens=60,
        max_completion_tokens=40,
        prefill_tokens=100,
        cache_tokens=160,
    )
