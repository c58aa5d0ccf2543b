"""Parts that the whole runs of a module share: programs and verifier processes.

A program is made by the package's own function, once for all configs that agree in
what the function reads; tracing programs is most of what a small run takes.  A process
that a run is done with goes to the next.  States and threads are every run's own.
"""

import collections
import functools

from scalerl_jax import wiring
from scalerl_jax.wiring import learning, prompts, sampling

LONG = 60.0  # a wait that no test expects to see the end of


def share(patch, opened):
    """Let `wiring` keep these parts as long as `patch` lasts, processes in `opened`."""
    for module, name, key in (
        (wiring, "make_engine", _of_engine),
        (wiring, "make_forward", _of_learner),
        (wiring, "make_publish", _of_all),
        (wiring, "plain_scorer", _of_all),
        (learning, "make_train_step", _of_learner),
    ):
        patch.setattr(module, name, _remembered(getattr(module, name), key))
    patch.setattr(sampling, "make_verifier", Verifiers(opened).take)


class Verifiers:
    """Verifier pools by their settings, each of one run at a time."""

    def __init__(self, opened):
        self._opened, self._idle = opened, collections.defaultdict(list)

    def take(self, config, opened, *, own, count=0):
        """Return a pool that `opened` gives back; one for a user's file is closed."""
        if own:
            return prompts.make_verifier(config, opened, own=own, count=count)
        idle = self._idle[config.reward, count]
        pool = (
            idle.pop()
            if idle
            else prompts.make_verifier(config, self._opened, own=None, count=count)
        )
        opened.callback(self._give_back, pool, idle)
        return pool

    @staticmethod
    def _give_back(pool, idle):
        finish(pool)
        idle.append(pool)


def finish(pool):
    """Let a pool judge what it was given; nobody asks for the verdicts any more."""
    while pool.pending:
        pool.wait(LONG)
        assert pool.poll(), f"no verdict within {LONG} s"


def _remembered(make, key):
    made = {}

    @functools.wraps(make)
    def call(*arguments, **named):
        which = key(*arguments, **named)
        if which not in made:
            made[which] = make(*arguments, **named)
        return made[which]

    return call


def _of_engine(config, arch, tokenizer, mesh):
    return config.model, config.sampler, config.interruption, arch, mesh


def _of_learner(config, arch_or_forward, mesh):
    """All that the programs of the learner are made from."""
    sections = (
        config.model,
        config.batch,
        config.sampler,
        config.objective,
        config.critic,
        config.optimizer,
    )
    # A rate falls until the last step.
    last = config.train.num_steps if config.optimizer.schedule != "constant" else 0
    return (*sections, last, arch_or_forward, mesh)


def _of_all(*arguments, **named):
    return (*arguments, *sorted(named.items(), key=lambda each: each[0]))
