"""The verifiers that a prompt's reference may name, and the pools that run them."""

import contextlib
from collections.abc import Iterable

from scalerl_jax.config import Config
from scalerl_jax.data import tasks
from scalerl_jax.rewards.named import check_programs, make_pool, named_verifiers
from scalerl_jax.rewards.verifier import VerifierPool, verifier_of
from scalerl_jax.types import Prompt


def make_verifier(config: Config, opened: contextlib.ExitStack) -> VerifierPool:
    """Make a pool of processes that judge, closed with `opened`."""
    pool = make_pool(config.reward, tasks.score)
    opened.callback(pool.close)
    return pool


def check_verifiers(config: Config, prompts: Iterable[Prompt]) -> None:
    """Check, before a run, that every verifier which a prompt names can work.

    Raises:
        ValueError: there is none of that name, or reward.code_packages is not there.
        SandboxError: there are programs to judge, and no sandbox for them.
    """
    known = named_verifiers(config.reward)
    if "code" in {verifier_of(prompt.reference, known) for prompt in prompts}:
        check_programs(config.reward)
