"""The further processes of a replica, and how its first one reaches them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from scalerl_jax.exchange import Report
from scalerl_jax.sampler.lockstep import Call
from scalerl_jax.utils.ending import first_line
from scalerl_jax.utils.xla import is_broken_off

_PARAMS_TIMEOUT_S = 900.0  # a fetch gives up after 600


class FollowerLost(Exception):  # noqa: N818  what happened to it, in one line
    """A process without which the replica cannot go on."""


class RayFollowers:
    """The `generation.weights.Followers` of a replica's first process."""

    def __init__(self, actors: Sequence[Any], leave: Callable[[], None]) -> None:
        """Watch these; `leave` is called when one is to end soon."""
        self._actors = actors
        self._leave = leave
        self._lost: FollowerLost | None = None
        for number, actor in enumerate(actors, 1):
            threading.Thread(
                target=self._watch, args=(number, actor), daemon=True
            ).start()

    def tell(self, call: Call) -> None:
        """Have each make a call of the engine, after those before it."""
        call = ray.put(call) if len(self._actors) > 1 else call  # type: ignore
        for actor in self._actors:
            actor.obey.remote(call)

    def ask(
        self, method: str, *arguments: Any, in_order: bool = False
    ) -> Callable[[], None]:
        """Have each do something; return what waits for all, and raises their error."""
        group = {} if in_order else {"concurrency_group": "params"}
        answers = [
            getattr(actor, method).options(**group).remote(*arguments)
            for actor in self._actors
        ]

        def wait() -> None:
            try:
                ray.get(answers, timeout=_PARAMS_TIMEOUT_S)
            except RayTaskError as error:
                raise error.cause from None

        return wait

    def check(self, report: Report) -> None:
        """Refuse to go on without one of them, or with a program that lacked one.

        Raises:
            FollowerLost: says which, and why.
        """
        if self._lost is not None:
            raise self._lost
        for error in (report.failure, *(each.error for each in report.results)):
            if error is not None and is_broken_off(error):
                raise FollowerLost(f"one of its processes: {first_line(error)}")

    def _watch(self, number: int, actor: Any) -> None:
        """Wait for the end of one of them."""
        try:
            ray.get(actor.watch.options(concurrency_group="watch").remote())
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            self._lost = FollowerLost(f"its process {number}: {first_line(cause)}")
        else:
            self._leave()
