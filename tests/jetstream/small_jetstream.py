"""A small engine for JetStream, and what the slow sampler makes of its prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from small_model import small_architecture

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler.decoding import NEVER, EngineSettings
from scalerl_jax.sampler.jetstream import JetStreamEngine
from scalerl_jax.sampler.reference import sample_completion
from scalerl_jax.sampler.requests import Request, Samples
from scalerl_jax.sampler.sampling import Sampling, sample_keys

VOCABULARY, SEED = 13, 5
SETTINGS = EngineSettings(
    arch=small_architecture(vocab_size=VOCABULARY),
    slots=3,
    max_prompt_tokens=16,
    max_completion_tokens=18,
    tokens_per_call=4,
    dtype=jnp.float32,
    eos_ids=(3, 11),
    page_size=4,
    prefill_tokens=8,
)


def make_tokenizer():
    """Token u is the word `tu`."""
    words = {f"t{number}": number for number in range(VOCABULARY)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(backend=backend, eos_ids=SETTINGS.eos_ids)


def make_engine(devices=None, **options):
    devices = devices or jax.devices()[:1]
    return JetStreamEngine(
        SETTINGS,
        mesh=make_mesh(devices, tensor=len(devices)),
        tokenizer=make_tokenizer(),
        seed=SEED,
        **options,
    )


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype),
        abstract_params(SETTINGS.arch, dtype=jnp.float32),
    )


def key_of(number):
    """The key of the prompt that an engine has prefilled as its `number`th."""
    return sample_keys(SEED, "serve", prompt_id=number, epoch=0, num_samples=1)[0]


def expected(params, prompt, key, *, sampling=None, max_tokens=None):
    """The slow sampler's completion."""
    limit = None if max_tokens is None else np.array([max_tokens], np.int32)
    request = Request(
        request_id=0,
        tokens=np.array(prompt, np.int32),
        samples=Samples(
            keys=key[None],
            thinking_limits=np.array([NEVER], np.int32),
            max_tokens=limit,
        ),
        sampling=sampling or Sampling(),
    )
    return sample_completion(params, SETTINGS, request, 0)
