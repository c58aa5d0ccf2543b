"""A taskset with tools: of each task, with a state, and of all of them together."""

import verifiers.v1 as vf

__all__ = ["LedgerTaskset"]


class Total(vf.State):
    added: int = 0


class LedgerData(vf.TaskData):
    start: int


class LedgerToolset(vf.Toolset[vf.ToolsetConfig, Total]):
    TOOL_PREFIX = "ledger"

    async def setup_task(self, data):
        self.start = data.start

    @vf.tool
    def add(self, amount: int) -> str:
        """Add an amount to the total."""
        if amount < 0:
            raise ValueError("nothing is taken away")
        self.state.added += amount
        return f"total {self.start + self.state.added}"


class WordsToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    async def setup(self):
        self.count = 0

    @vf.tool(name="reverse")
    async def backward(self, text: str) -> str:
        self.count += 1
        return f"{text[::-1]} ({self.count})"


class LedgerTask(vf.Task[LedgerData, Total]):
    @classmethod
    def toolsets(cls, config):
        return [LedgerToolset(vf.ToolsetConfig())]

    async def setup(self, trace):
        trace.state.added = 1

    @vf.stop
    async def rich(self, trace: vf.Trace) -> bool:
        return trace.state.added >= 100

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.start + trace.state.added))

    @vf.metric
    async def added(self, trace: vf.Trace) -> float:
        return float(trace.state.added)

    @vf.metric
    async def told(self, trace: vf.Trace) -> float:
        calls = [
            call
            for message in trace.assistant_messages
            for call in message.tool_calls or []
        ]
        answered = [each.tool_call_id for each in trace.tool_messages]
        assert [call.id for call in calls][: len(answered)] == answered
        return float(len(answered))


class LedgerTaskset(vf.Taskset[LedgerTask, vf.TasksetConfig]):
    def load(self):
        for start in (10, 20):
            data = LedgerData(prompt=f"total {start}", start=start)
            yield LedgerTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [WordsToolset(vf.SharedToolsetConfig())]
