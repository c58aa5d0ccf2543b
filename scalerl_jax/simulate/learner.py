"""The learner in simulated time: windows, steps, publications, checkpoints."""

from collections.abc import Callable
from typing import Any, Protocol

from scalerl_jax.simulate.outcome import Record
from scalerl_jax.simulate.rates import Rates
from scalerl_jax.simulate.replica import SimulatedGroup
from scalerl_jax.simulate.scenario import Scenario

_TAKE = "waiting"


class World(Protocol):
    """The rest of a simulation, as the learner sees it."""

    queue: Any  # a `RolloutQueue`, or one that answers like it
    record: Record
    now_s: float

    def at(self, time_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Have something done at a time."""
        ...

    def publish(self, version: int) -> None:
        """Hand over params."""
        ...

    def evaluate(self, then: Callable[[], None]) -> None:
        """Have an evaluation made."""
        ...

    def note_step(self) -> None:
        """Write down how all stands after a step."""
        ...


class SimulatedLearner:
    """The loop of `scalerl_jax.train`, line by line, each of which takes its time."""

    def __init__(self, simulation: World, scenario: Scenario, rates: Rates) -> None:
        """Begin before the first publication."""
        self._simulation = simulation
        self._scenario, self._rates = scenario, rates
        self.over = False
        self.activity = "startup"
        self.since_s = 0.0  # when it began
        self.seconds: dict[str, float] = {}  # by activity
        self._passes: list[
            list[SimulatedGroup]
        ] = []  # of the window, the next one last
        self._batch: list[SimulatedGroup] = []  # in hand
        self._saved = 0  # version
        self._plan: tuple[float, Callable[[], None]] | None = None
        self._token = 0
        self._train_s = 0.0  # of the last step

    def begin(self) -> None:
        """Publish version 0, and evaluate it if evaluations are made."""
        self._simulation.publish(0)
        if self._scenario.eval_every and self._scenario.eval_completions:
            self._evaluate(self._wait, beside=self._scenario.eval_beside)
        else:
            self._wait()

    def look(self) -> None:
        """Take a window if the learner waits for one and may."""
        if self.activity != _TAKE:
            return
        queue = self._simulation.queue
        if queue.buffered < self._scenario.num_prompts:
            return
        try:
            groups = queue.take(queue.version, 0.0)
        except TimeoutError:
            return
        # As `batching.assembly` chooses: those without a gradient are left over first.
        groups = sorted(groups, key=lambda group: not group.has_reward_variance)
        chosen = sorted(groups[: queue.taken], key=lambda group: group.ticket)
        self._simulation.record.waste(groups[queue.taken :])
        size = self._scenario.num_prompts
        batches = [chosen[at : at + size] for at in range(0, len(chosen), size)]
        self._passes = [each for _ in range(self._scenario.epochs) for each in batches]
        self._passes.reverse()
        self._train()

    def _train(self) -> None:
        """One pass over a batch; groups without variance have no gradient."""
        self._batch = self._passes.pop()
        useful = [group for group in self._batch if group.has_reward_variance]
        rates, prompt = self._rates, self._scenario.prompt_tokens
        tokens = sum(each.total + prompt * len(each.tokens) for each in useful)
        self._train_s = rates.train_s + rates.train_token_s * tokens
        if not useful:
            self._simulation.queue.skipped(last=not self._passes)
            self._train() if self._passes else self._wait()
            return
        if rates.assemble_s:
            self._do("assemble", rates.assemble_s, self._step)
        else:
            self._step()

    def _step(self) -> None:
        self._do("train", self._train_s, self._applied)

    def _applied(self) -> None:
        queue, record = self._simulation.queue, self._simulation.record
        version = queue.version + 1
        record.used(queue.version, self._batch)
        last = not self._passes or version == self._scenario.num_steps
        queue.applied(last=last)
        self._do("publish", self._rates.publish_s, self._published)

    def _published(self) -> None:
        simulation, scenario = self._simulation, self._scenario
        version = simulation.queue.version
        simulation.publish(version)
        simulation.note_step()
        last = version == scenario.num_steps
        due = scenario.eval_every and (last or version % scenario.eval_every == 0)
        if due and scenario.eval_completions:
            beside = scenario.eval_beside and not last
            self._evaluate(self._evaluated, beside=beside)
        else:
            self._evaluated()

    def _evaluate(self, then: Callable[[], None], *, beside: bool) -> None:
        """Have an evaluation made, and wait for it unless it is beside the run."""
        if beside:
            self._simulation.evaluate(lambda: None)
            then()
        else:
            self._enter("eval")
            self._simulation.evaluate(then)

    def _evaluated(self) -> None:
        scenario = self._scenario
        version = self._simulation.queue.version
        if version == scenario.num_steps:
            self._enter("over")
            self.over = True
            return
        if self._passes:
            self._train()
            return
        every = scenario.checkpoint_every
        if every and version // every > self._saved // every:
            self._saved = version
            self._do("checkpoint", self._rates.checkpoint_s, self._wait)
        else:
            self._wait()

    def _wait(self) -> None:
        self._enter(_TAKE)
        self.look()

    def lose(self) -> None:
        """A machine of the learner is gone: restart, and do the steps since the save.

        Their batches are kept, so that no group is sampled again.
        """
        simulation = self._simulation
        self._simulation.record.lost_learners += 1
        behind = simulation.queue.version - self._saved
        delay_s = self._scenario.failures.learner_start_s + behind * self._train_s
        then, left_s = self._wait, 0.0
        if self._plan is not None:
            done_s, then = self._plan
            left_s = max(0.0, done_s - simulation.now_s)
        elif self.activity not in (_TAKE, "down"):
            return  # an evaluation goes on without it
        self._do("down", delay_s + left_s, then)

    def _do(self, activity: str, seconds: float, then: Callable[[], None]) -> None:
        self._enter(activity)
        self._token += 1
        self._plan = (self._simulation.now_s + seconds, then)
        self._simulation.at(self._plan[0], self._done, self._token)

    def _done(self, token: int) -> None:
        if token == self._token and self._plan is not None:
            _, then = self._plan
            self._plan = None
            then()

    def _enter(self, activity: str) -> None:
        self.seconds = self.spent()
        self.activity, self.since_s = activity, self._simulation.now_s

    def spent(self) -> dict[str, float]:
        """Return the seconds of each activity so far."""
        passed = self._simulation.now_s - self.since_s
        spent = dict(self.seconds)
        spent[self.activity] = spent.get(self.activity, 0.0) + passed
        return spent
