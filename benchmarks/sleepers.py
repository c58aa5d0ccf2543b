"""A controller's side of a fleet whose replicas sleep, shared by two benchmarks."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from scalerl_jax.controller.dispatch import Dispatcher
from scalerl_jax.controller.fleet import Fleet
from scalerl_jax.controller.group_check import GroupCheck
from scalerl_jax.controller.orders import OrderBook
from scalerl_jax.controller.queue import Pacing, RolloutQueue
from scalerl_jax.controller.replicas import FleetLimits
from scalerl_jax.data.prompts import PromptStream
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.run.progress import Progress
from scalerl_jax.run.work_log import RemoteLedger
from scalerl_jax.types import Prompt


def pool_names(replicas: int) -> list[str]:
    """Return the ledger's pools, one per replica."""
    return [f"replica{number}" for number in range(replicas)]


class NoParams:
    """An empty publication: sleeping replicas need no params."""

    def for_replica(self, number: int, held_version: int) -> str:
        """Return a name instead of params."""
        return f"params for {number} after {held_version}"


def make_fleet(
    pools: Sequence[str],
    connect: Callable[[int], Future[Any]],
    *,
    prompt_tokens: int,
    group_shape: tuple[int, int],
    **queue_settings: Any,
) -> tuple[Fleet, RolloutQueue]:
    """Return a fleet with the links that `connect` makes, and its queue.

    Args:
        pools: of the ledger, one for each replica.
        connect: returns the link to a replica, by number, once it is up.
        prompt_tokens: of the one prompt.
        group_shape: rollouts of a group, and tokens of each at most.
        queue_settings: of the queue, except for its mode.
    """
    prompt = Prompt(
        prompt_id=0,
        epoch=0,
        task="none",
        text="",
        tokens=np.zeros(prompt_tokens, np.int32),
        reference={},
    )
    queue = RolloutQueue(Pacing(mode="pipeline", **queue_settings))
    ledger = RemoteLedger(pools=dict.fromkeys(pools, 1), chip="none", remote=pools)
    ledger.start()
    group_size, max_tokens = group_shape
    check = GroupCheck(
        arch=ARCHITECTURES["qwen3-8b"],
        group_size=group_size,
        length_limit=lambda version: max_tokens,
    )
    stream = PromptStream([prompt], seed=0, max_pass_rate=None)
    orders = OrderBook(queue, stream, check=check)
    fleet = Fleet(
        make_dispatcher=lambda wake: Dispatcher(
            orders=orders,
            ledger=ledger,
            connect=connect,
            pools=pools,
            limits=FleetLimits(
                start_timeout_s=600.0,
                silence_timeout_s=60.0,
                reissue_after_s=0.0,
                losses=5,
            ),
            wake=wake,
        ),
        orders=orders,
        summarize=lambda *_, **__: None,
        num_held_out=0,
        job_timeout_s=60.0,
        progress=Progress(),
    )
    return fleet, queue
