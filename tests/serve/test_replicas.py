"""Every device of the machine: how they are shared, and that they give the same."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_architecture
from small_server import BASE

from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.model.architecture import Experts
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.transformer import init_params, unstack_layers
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.serve.fields import Sampled
from scalerl_jax.serve.orders import CompletionOrder, Served
from scalerl_jax.serve.replica import SamplingThread
from scalerl_jax.serve.server import make_meshes, make_replicas
from scalerl_jax.serve.service import Service

ARCH = read_architecture(BASE)  # 4 heads, 2 of keys and values


@pytest.mark.parametrize(
    "count, kv_heads, tensor, shape",
    [
        pytest.param(1, 2, 0, (1, 1), id="one device"),
        pytest.param(8, 2, 0, (4, 2), id="as many as share the heads"),
        pytest.param(8, 1, 0, (8, 1), id="one kv head"),
        pytest.param(6, 4, 0, (3, 2), id="a common divisor"),
        pytest.param(8, 4, 1, (8, 1), id="fewer than can"),
    ],
)
def test_all_devices_are_used_once(count, kv_heads, tensor, shape):
    arch = dataclasses.replace(ARCH, num_kv_heads=kv_heads)
    devices = jax.devices()[:count]
    meshes = make_meshes(arch, devices, tensor)
    assert (len(meshes), meshes[0].shape["tensor"]) == shape
    assert [each for mesh in meshes for each in mesh.devices.flat] == devices


def test_a_mixture_is_cut_between_its_experts():
    experts = Experts(2, 1, "softmax")
    arch = small_architecture(num_heads=8, num_kv_heads=8, experts=experts)
    assert make_meshes(arch, jax.devices()[:4], 0)[0].shape["tensor"] == 2
    with pytest.raises(ValueError, match="2 experts; choose a divisor of 2"):
        make_meshes(arch, jax.devices()[:4], 4)


LIMITS = {"max_prompt_tokens": 8, "max_completion_tokens": 8}


def sample(replicas, order):
    """Tokens of an order's completions, and how many requests each replica had."""
    served = Served(
        name="small",
        policy_version=0,
        tokenizer=load_tokenizer(BASE),
        template=None,
        enable_thinking=True,
        vocab_size=16,
        max_samples=9,
        max_body_bytes=1,
        **LIMITS,
        slots=2,
        max_waiting=9,
    )

    async def run():
        samplers = [
            SamplingThread(replica, on_death=lambda: None) for replica in replicas
        ]
        service = Service(served, samplers)
        for sampler in samplers:
            sampler.start()
        completions = {}
        async with service.placed(order) as placed:
            while len(completions) < order.num_choices:
                place, event = await placed.next()
                completions[place] = event.tokens.tolist()
        for sampler in samplers:
            sampler.stop()
        assert service.running == service.waiting == 0
        calls = [sampler.stats.calls for sampler in samplers]
        return [tokens for _, tokens in sorted(completions.items())], calls

    return asyncio.run(run())


@pytest.mark.slow
def test_replicas_share_the_samples_of_a_prompt():
    arch = small_architecture(num_layers=1, num_kv_heads=1)
    settings = EngineSettings(
        arch=arch,
        slots=2,
        tokens_per_call=4,
        dtype=jnp.float32,
        eos_ids=(1,),
        prefill_tokens=64,
        top_logprobs=0,
        **LIMITS,
    )
    params = unstack_layers(
        init_params(arch, jax.random.key(0), dtype=jnp.float32), arch
    )
    meshes = make_meshes(arch, jax.devices()[:2], 0)
    heard = []
    replicas = make_replicas(
        settings,
        params,
        meshes,
        load_tokenizer(BASE).shown,
        lambda number, total: heard.append((number, total)),
        version=0,
        prefix_cache=True,
    )
    assert len(replicas) == 2
    most = heard[0][1]
    assert sorted(heard) == [(number, most) for number in range(1, len(heard) + 1)]
    assert most / 2 < len(heard) <= most
    order = CompletionOrder(
        prompts=(np.array([3, 4, 5], np.int32), np.array([6, 7], np.int32)),
        fields=Sampled(n=5, seed=3),
        sampling=Sampling(),
        max_tokens=8,
        logprobs=None,
    )
    both, calls = sample(replicas, order)
    assert all(calls)
    alone, _ = sample(replicas[:1], order)
    assert both == alone
