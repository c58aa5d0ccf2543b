"""The verifiers that a prompt's reference may name, and the pools that run them."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from scalerl_jax.config import Config
from scalerl_jax.data import tasks
from scalerl_jax.rewards import sandbox
from scalerl_jax.rewards.serving import Verifier
from scalerl_jax.rewards.verifier import VerifierPool, verifier_of
from scalerl_jax.types import Prompt

_SOLUTION_SHARE = 0.8  # of reward.timeout_s; the rest is for setting up sandboxes


def named_verifiers(config: Config) -> dict[str, Verifier]:
    """What a reference's "verifier" may be.

    By name: only processes that judge such prompts import what these need.
    """
    reward = config.reward
    return {
        "code": Verifier(
            "scalerl_jax.rewards.code:judge",
            {
                "cpu_s": reward.code_cpu_s,
                "wall_s": _SOLUTION_SHARE * reward.timeout_s,
                "memory_mib": reward.code_memory_mib,
                "packages": reward.code_packages,
                "float_tolerance": reward.code_float_tolerance,
            },
        ),
        "math": Verifier(
            "scalerl_jax.rewards.maths:judge", {"answer_from": reward.math_answer}
        ),
        "reasoning_gym": Verifier("scalerl_jax.data.tasks:score"),
    }


def make_verifier(config: Config, opened: contextlib.ExitStack) -> VerifierPool:
    """A pool of processes that judge, closed with `opened`."""
    pool = VerifierPool(
        score=tasks.score,
        named=named_verifiers(config),
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers,
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
    known = named_verifiers(config)
    packages = config.reward.code_packages
    if "code" in {verifier_of(prompt.reference, known) for prompt in prompts}:
        if packages and not Path(packages).is_dir():
            raise ValueError(
                f"reward.code_packages = {packages!r} is no directory; make one with "
                f"`pip install --target=DIRECTORY PACKAGE ...`, or leave it empty"
            )
        sandbox.check()
