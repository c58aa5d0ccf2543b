"""The verifiers that a reference may name, and their pool, with a run's settings."""

import os
from pathlib import Path

from scalerl_jax.config import RewardConfig
from scalerl_jax.rewards.serving import Verifier
from scalerl_jax.rewards.verdict import ScoreFunction
from scalerl_jax.rewards.verifier import VerifierPool

_MAX_PROCESSES = 32  # of a machine; SymPy takes 100 MB in each
_SOLUTION_SHARE = 0.8  # of reward.timeout_s; the rest is for setting up sandboxes


def named_verifiers(reward: RewardConfig) -> dict[str, Verifier]:
    """Return the verifiers by the name that a reference has for them.

    Only processes that judge such prompts import what these need.
    """
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


def num_processes(num_workers: int) -> int:
    """Return how many processes reward.num_workers asks for; of 0 the machine says.

    Two cores are left to the run itself.
    """
    # Not all systems say which cores this process may use.
    own = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return num_workers or min(max(1, len(own) - 2), _MAX_PROCESSES)


def make_pool(reward: RewardConfig, score: str | ScoreFunction) -> VerifierPool:
    """Make a pool of processes under these settings.

    Args:
        reward: the settings.
        score: as `VerifierPool` takes it, for references that name no verifier.
    """
    return VerifierPool(
        score=score,
        named=named_verifiers(reward),
        timeout_s=reward.timeout_s,
        num_workers=num_processes(reward.num_workers),
        memory_mib=reward.memory_mib,
    )


def check_programs(reward: RewardConfig) -> None:
    """Check, before programs are judged, the packages that are set and the sandbox.

    Raises:
        ValueError: reward.code_packages is not there.
        SandboxError: no sandbox can be made.
    """
    packages = reward.code_packages
    if packages and not Path(packages).is_dir():
        raise ValueError(
            f"reward.code_packages = {packages!r} is no directory; make one with "
            f"`pip install --target=DIRECTORY PACKAGE ...`, or leave it empty"
        )
    from scalerl_jax.rewards import sandbox  # of runs that judge programs alone

    sandbox.check()
