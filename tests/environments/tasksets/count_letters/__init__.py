"""A taskset without end: letters to be counted, in a chat, scored by several names."""

import itertools

import verifiers.v1 as vf

__all__ = ["CountTaskset"]


class CountData(vf.TaskData):
    count: int


class CountTask(vf.Task[CountData]):
    @vf.reward(priority=1)
    async def count(self, trace: vf.Trace) -> dict[str, float]:
        said = trace.last_reply
        if said == "broken":
            raise ZeroDivisionError("the scorer divides by 0\nin two lines")
        if said == "counted":
            return {"near": float(trace.num_output_tokens)}
        if said == "silent":
            return {}
        near = 1.0 / (1 + abs(int(said) - self.data.count)) if said.isdigit() else 0.0
        asked = [message.role for message in trace.messages]
        return {"near": near, "asked": float(asked == ["system", "user", "assistant"])}


class CountTaskset(vf.Taskset[CountTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count(1):
            prompt = [
                vf.SystemMessage(content="Count."),
                vf.UserMessage(content=f"How many a in {'ab' * number}?"),
            ]
            yield CountTask(CountData(prompt=prompt, count=number), self.config.task)
