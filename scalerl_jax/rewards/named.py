"""The verifiers that a reference may name, with the settings of a run."""

import os
from pathlib import Path

from scalerl_jax.config import RewardConfig
from scalerl_jax.rewards import sandbox
from scalerl_jax.rewards.serving import Verifier

_MAX_PROCESSES = 32  # of a machine; SymPy takes 100 MB in each
_SOLUTION_SHARE = 0.8  # of reward.timeout_s; the rest is for setting up sandboxes


def named_verifiers(reward: RewardConfig) -> dict[str, Verifier]:
    """What a reference's "verifier" may be.

    By name: only processes that judge such prompts import what these need.
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
    """The verifier processes that reward.num_workers asks for; of 0 the machine says.

    Two cores are left to the run itself.
    """
    # Not all systems say which cores this process may use.
    own = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return num_workers or min(max(1, len(own) - 2), _MAX_PROCESSES)


def check_programs(reward: RewardConfig) -> None:
    """Before programs are judged: there are packages, if they are set, and a sandbox.

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
    sandbox.check()
