"""The verifiers and the pool of a run, from its settings."""

import os

from scalerl_jax.config import RewardConfig
from scalerl_jax.environments.own_file import check_variables
from scalerl_jax.environments.pool import UNNAMED, VerifierPool
from scalerl_jax.environments.verdict import (
    MAX_START_S,
    Loaded,
    OwnReward,
    Setup,
    Verifier,
    VerifierProcess,
)

_MAX_PROCESSES = 32  # per machine; SymPy takes 100 MB in each
_SOLUTION_SHARE = 0.8  # of reward.timeout_s; the rest is for setting up sandboxes


def named_verifiers(reward: RewardConfig) -> dict[str, Verifier]:
    """Return the verifiers by the name that a prompt's reference has for them.

    A process imports a verifier's module only when it first has to use it.
    """
    return {
        "code": Verifier(
            "scalerl_jax.environments.judges.code:judge",
            {
                "cpu_s": reward.code_cpu_s,
                "wall_s": _SOLUTION_SHARE * reward.timeout_s,
                "memory_mib": reward.code_memory_mib,
                "packages": reward.code_packages,
                "float_tolerance": reward.code_float_tolerance,
            },
        ),
        "math": Verifier(
            "scalerl_jax.environments.judges.maths:judge",
            {"answer_from": reward.math_answer},
        ),
        "reasoning_gym": Verifier("scalerl_jax.data.tasks:score"),
    }


def num_processes(num_workers: int) -> int:
    """Return the number of verifier processes: `num_workers`, or for 0 by the cores.

    With 0, two of the machine's cores are left to the run itself.
    """
    # Not all systems report which cores this process may use.
    own = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return num_workers or min(max(1, len(own) - 2), _MAX_PROCESSES)


def make_pool(
    reward: RewardConfig,
    *,
    unnamed: str,
    count: int = 0,
    own: OwnReward | None = None,
) -> VerifierPool:
    """Make a run's pool of `count` processes; `unnamed` judges if no verifier is named.

    `own`: a user's reward functions, which judge all answers.

    Raises:
        ValueError: this machine lacks an environment variable that `own` needs.
    """
    if own:
        check_variables(own.variables)
    named = named_verifiers(reward)
    return VerifierPool(
        score=named[unnamed].function,
        named=named,
        timeout_s=reward.timeout_s,
        num_workers=count or num_processes(reward.num_workers),
        memory_mib=reward.memory_mib,
        passed_at=reward.passed_at,
        own=own,
    )


def check_own(own: OwnReward, reward: RewardConfig) -> bool:
    """Execute a user's file in a verifier process, before a run, to check it.

    Return whether it is an environment, which answers turn by turn.

    Raises:
        ValueError: it raises, or lacks a function, or one takes other arguments, or
            does not read a setting.
    """
    by_turns = False
    worker = VerifierProcess(
        Setup(
            verifiers={},
            preload=UNNAMED,
            timeout_s=reward.timeout_s,
            memory_mib=reward.memory_mib,
            own=own,
        )
    )
    try:
        if worker.pipe.poll(MAX_START_S):
            loaded: Loaded = worker.pipe.recv()
            why_not, by_turns = loaded.failure, loaded.kind.by_turns
        else:
            why_not = f"it took more than {MAX_START_S} s to import"
    except (EOFError, OSError):
        why_not = f"it ended with exit code {worker.exit_code()} while it was imported"
    finally:
        worker.kill()
        worker.process.wait()
    if why_not:
        name = f"{own.file}:{','.join(own.functions)}"
        raise ValueError(f"environment = {name!r} cannot be used: {why_not}")
    if by_turns and reward.weights:
        raise ValueError(
            f"{reward.weights = } is of reward functions, and an environment of "
            f"several turns gives one reward; weigh it in its Done, and leave this out"
        )
    if reward.per_turn and not by_turns:
        raise ValueError(
            f"{reward.per_turn = } is of environments of several turns, and a reward "
            f"function judges one; leave it out"
        )
    return by_turns
