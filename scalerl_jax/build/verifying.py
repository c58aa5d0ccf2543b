"""The verifiers that a prompt's reference may name, and the pools that run them."""

import contextlib
from collections.abc import Iterable

from scalerl_jax.config import Config
from scalerl_jax.data import tasks
from scalerl_jax.rewards.named import check_programs, named_verifiers, num_processes
from scalerl_jax.rewards.verifier import VerifierPool, verifier_of
from scalerl_jax.types import Prompt


def make_verifier(config: Config, opened: contextlib.ExitStack) -> VerifierPool:
    """A pool of processes that judge, closed with `opened`."""
    pool = VerifierPool(
        score=tasks.score,
        named=named_verifiers(config.reward),
        timeout_s=config.reward.timeout_s,
        num_workers=num_processes(config.reward.num_workers),
        memory_mib=config.reward.memory_mib,
    )
    opened.callback(pool.close)
    return pool


def check_verifiers(config: Config, prompts: Iterable[Prompt]) -> None:
    """Before a run: every verifier that a prompt names is there and can work.

    Raises:
        ValueError: there is none of that name, or reward.code_packages is not there.
        SandboxError: there are programs to judge, and no sandbox for them.
    """
    known = named_verifiers(config.reward)
    if "code" in {verifier_of(prompt.reference, known) for prompt in prompts}:
        check_programs(config.reward)
