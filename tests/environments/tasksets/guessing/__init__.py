"""A package with an environment of its own, which speaks first and in turns."""

import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingTaskset"]


class GuessingData(vf.TaskData):
    number: int


class GuessingTask(vf.Task[GuessingData]):
    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(sum(each.role == "user" for each in trace.messages))


class GuessingEnvConfig(vf.EnvConfig):
    guesser: vf.AgentConfig = vf.AgentConfig(max_turns=4)
    most: int = 9


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def start(self):
        self.started = True

    async def run(self, task, agents):
        assert self.started
        opening = f"a number from 0 to {self.config.most}"
        async with agents.guesser.interaction(task) as talk:
            segment = await talk.turn(opening)
            while not segment.terminated and segment.last_reply != "stop":
                if segment.last_reply == str(task.data.number):
                    talk.trace.record_reward("found", 1.0)
                    break
                small = segment.last_reply < str(task.data.number)
                segment = await talk.turn("too small" if small else "too large")
        talk.trace.record_reward("tried", talk.trace.num_turns, weight=0.01)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        ended = trace.stop_condition == "user_closed"
        trace.record_metric("ended", float(ended))


class GuessingTaskset(vf.Taskset[GuessingTask, vf.TasksetConfig]):
    def load(self):
        for number in (3, 7):
            data = GuessingData(prompt=None, system_prompt="Guess.", number=number)
            yield GuessingTask(data, self.config.task)
