"""Kills of every role of a run over processes, which must lose nothing.

    python benchmarks/chaos.py [--kills=20] [--no-cut] [--no-hosts] [--seed=0]
        [--workdir=runs/chaos] [--set=NAME=VALUE ...]

Starts the tiny policy on Ray (two learner ranks, two replicas), and injects one fault
after the other: SIGKILL to a replica, a rank or the controller at a random moment, ten
seconds of silence of a replica, SIGTERM to a replica, a replica ten times slower, a
publication that is damaged on its way.  After each it waits until the run is complete
and has made another step.  Then the run continues over two nodes of Ray.  The node with
a replica seems to have no memory, so that Ray's monitor kills the replica; the next
node is lost by SIGKILL.  Then the run continues over two hosts, a network namespace
each, one of which has a replica, and the network between them is cut for ten seconds
(if this process may make namespaces).  At the end it checks, by the checkpoint and the
groups that the queue handed out, that every ticket was trained on once, and checks the
ledger.  Ends with status 1 if a prompt was lost or doubled, or the run did not survive.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scalerl_jax.formats.reading import parse_json
from scalerl_jax.machines.ray_access import make_token
from scalerl_jax.process.preemption import PREEMPTED

_ROOT = Path(__file__).resolve().parents[1]
_PATIENCE_S = 600.0  # until the run must be complete again
SETTINGS = {
    "queue.max_staleness": 4,
    "data.no_positive_resampling": False,  # so that ticket i has the i-th prompt
    "batch.num_prompts": 8,
    "batch.group_size": 4,
    "sampler.slots": 16,
    "eval.every": 10,
    "eval.num_prompts": 40,
    "eval.samples_per_prompt": 1,
    "checkpoint.every": 5,
    "checkpoint.keep": 2,
    "generators.silence_timeout_s": 30.0,
    "generators.losses": 8,
}
# The controller, which records the groups that its queue hands out.
CONTROLLER = """
import json, sys
from scalerl_jax import main
from scalerl_jax.controller.queue import RolloutQueue
from absl import app

take, record = RolloutQueue.take, open(sys.argv.pop(1), "a", buffering=1)

def recorded(self, version, timeout_s):
    groups = take(self, version, timeout_s)
    rows = {g.ticket: [g.prompt.epoch, g.prompt.prompt_id] for g in groups}
    record.write(json.dumps([version, list(rows.items())]) + "\\n")
    return groups

RolloutQueue.take = recorded
app.run(main.main, flags_parser=main.parse_flags)
"""


# Of every node and of the controller; 15 is Ray's choice of niceness.
TOLD = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": make_token(),
    "RAY_worker_niceness": "0",
}
# Ray's monitor then kills whatever runs on the node, however much memory there is.
STARVED = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "250"}
_NAMESPACE, _HEAD, _NODE = "scalerl-chaos", "10.217.0.1", "10.217.0.2"
_PORT = 6397


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def rows(path: Path) -> list[Any]:
    """Return the complete rows of a file that another process may be writing."""
    text = path.read_text() if path.exists() else ""
    return [parse_json(line) for line in text.splitlines(True) if line[-1:] == "\n"]


class Run:
    """The run, its processes and the records of its controllers."""

    def __init__(
        self, directory: Path, num_steps: int, changes: Sequence[str] = ()
    ) -> None:
        """Start the run, with `changes` of settings; `num_steps` may grow."""
        self.changes = changes
        self.directory = directory
        self.record = directory.with_suffix(".record")
        self.record.unlink(missing_ok=True)
        self.taken: dict[int, list[Any]] = {}  # version -> tickets with prompts
        self.num_steps = num_steps
        self.start()

    def start(self, address: str = "local") -> None:
        """Start a controller, which resumes from the newest checkpoint."""
        settings = SETTINGS | {"train.num_steps": self.num_steps}
        self.log = self.directory.with_suffix(".log").open("a")
        self.controller = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-c",
                    CONTROLLER,
                    str(self.record),
                    f"--ray={address}",
                ),
                f"--config={_ROOT / 'configs' / 'tiny_fleet.py'}",
                f"--workdir={self.directory}",
                *(f"--config.{name}={value}" for name, value in settings.items()),
                *(f"--config.{change}" for change in self.changes),
            ],
            stderr=self.log,
            stdout=self.log,
            env=os.environ | TOLD,
        )

    def steps(self) -> int:
        """Return the number of steps that the run has made."""
        return len(rows(self.directory / "metrics.jsonl"))

    def processes(self) -> dict[str, int]:
        """Return the process of each role that is up and has params."""
        path, found = self.directory / "status.json", {}
        status = parse_json(path.read_bytes()) if path.exists() else {"roles": []}
        for row in status["roles"]:
            process = re.search(r"process (\d+)", row["where"])
            if process and row["version"] >= 0:
                found[row["role"]] = int(process.group(1))
        return found

    def whole(self, gone: set[int]) -> bool:
        """Return whether every role is up, in processes that were not killed."""
        up = self.processes()
        return len(up) == 4 and not gone & set(up.values())

    def wait(self, reached: Any, what: str) -> float:
        """Return the seconds until a condition holds."""
        began = time.monotonic()
        while not reached():
            if self.controller.poll() is not None:
                raise RuntimeError(f"the controller ended while waiting for {what}")
            if time.monotonic() - began > _PATIENCE_S:
                raise TimeoutError(f"no {what} within {_PATIENCE_S:g} s")
            time.sleep(0.2)
        return time.monotonic() - began

    def wait_for_step(self, what: str) -> float:
        """Return the seconds until the next step is made."""
        made = self.steps()
        return self.wait(lambda: self.steps() > made, what)

    def stop(self) -> int:
        """Make the run save and end; return its status, 0 if that is the right one."""
        self.controller.send_signal(signal.SIGTERM)
        status = self.controller.wait(_PATIENCE_S)
        (self.directory / "status.json").unlink(missing_ok=True)
        return 0 if status == PREEMPTED else status

    def resumed(self) -> None:
        """Drop the groups taken after the checkpoint that a controller resumes from."""
        saved = sorted((self.directory / "checkpoints").glob("step_*"))
        step = int(saved[-1].name.removeprefix("step_")) if saved else 0
        self.note_taken()
        self.taken = {at: groups for at, groups in self.taken.items() if at < step}

    def note_taken(self) -> None:
        """Read the records of the groups that the queue handed out."""
        for version, groups in rows(self.record):
            self.taken.setdefault(version, []).extend(groups)
        self.record.write_text("")


def kill(run: Run, role: str, number: int = signal.SIGKILL) -> float:
    """Signal a role; return the seconds until it is back and a step is made."""
    if role == "controller":
        run.controller.kill()
        run.controller.wait()
        run.resumed()
        made = run.steps()
        old = set(run.processes().values())
        (run.directory / "status.json").unlink(missing_ok=True)
        run.start()
        return run.wait(
            lambda: run.whole(old) and run.steps() != made, f"{role} in action"
        )
    run.wait(lambda: role in run.processes(), role)
    process = run.processes()[role]
    gone = {process}
    if role.startswith("learner"):  # all ranks are replaced
        gone |= {pid for name, pid in run.processes().items() if name[:7] == role[:7]}
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
    back = run.wait(lambda: run.whole(gone), f"new {role}")
    run.wait_for_step("step")
    return back


def terminate(run: Run, role: str) -> float:
    """Send SIGTERM to a replica or a rank; return the seconds as `kill` does."""
    return kill(run, role, signal.SIGTERM)


def silence(run: Run, role: str, seconds: float = 10.0) -> float:
    """Stop a process for a while, as if its network were cut."""
    process = run.processes()[role]
    os.kill(process, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process, signal.SIGCONT)
    return run.wait_for_step("step after a silence")


def slow(run: Run, role: str, seconds: float = 15.0) -> float:
    """Give a process a tenth of its time for a while."""
    process, ended = run.processes()[role], threading.Event()

    def brake() -> None:
        while not ended.wait(0.02):
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.18)
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=brake)
    thread.start()
    time.sleep(seconds)
    ended.set()
    thread.join()
    return run.wait_for_step("step beside a slow replica")


def damage(run: Run) -> float:
    """Change a byte of everything that is published, for a while."""
    made, seen, folder = run.steps(), set(), run.directory / "weights"
    deadline = time.monotonic() + 60.0
    while run.steps() < made + 2 and time.monotonic() < deadline:
        for path in set(folder.glob("rank*")) - seen:
            seen.add(path)
            with contextlib.suppress(OSError), path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
        time.sleep(0.001)
    return run.wait_for_step("step after a damaged publication")


def sh(*command: str, quiet: bool = False) -> None:
    """Run a command; it fails if the command does, unless `quiet`."""
    subprocess.run(command, check=not quiet, capture_output=True, env=os.environ | TOLD)


@contextlib.contextmanager
def two_networks() -> Iterator[bool]:
    """Make a second network namespace; yield whether that is permitted."""
    inside = ("ip", "netns", "exec", _NAMESPACE)
    try:
        sh("ip", "netns", "add", _NAMESPACE)
        sh("ip", "link", "add", "chaos0", "type", "veth", "peer", "name", "chaos1")
        sh("ip", "link", "set", "chaos1", "netns", _NAMESPACE)
        sh("ip", "addr", "add", f"{_HEAD}/24", "dev", "chaos0")
        sh("ip", "link", "set", "chaos0", "up")
        sh(*inside, "ip", "addr", "add", f"{_NODE}/24", "dev", "chaos1")
        sh(*inside, "ip", "link", "set", "chaos1", "up")
        sh(*inside, "ip", "link", "set", "lo", "up")
        yield True
    except (OSError, subprocess.CalledProcessError):
        yield False
    finally:
        sh("ip", "link", "del", "chaos0", quiet=True)
        sh("ip", "netns", "del", _NAMESPACE, quiet=True)


@contextlib.contextmanager
def ray_node(
    *arguments: str,
    inside: tuple[str, ...] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a node of Ray during the block; `inside` is the prefix of its command."""
    ray = str(Path(sys.executable).with_name("ray"))
    process = subprocess.Popen(
        [*inside, ray, "start", "--block", "--disable-usage-stats", *arguments],
        env=os.environ | TOLD | dict(environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()  # it ends what it has started
        process.wait(_PATIENCE_S)


def cut(run: Run, seconds: float = 10.0) -> float:
    """Continue over two hosts, cut the network between them; return as `silence`."""
    address, inside = f"{_HEAD}:{_PORT}", ("ip", "netns", "exec", _NAMESPACE)
    head = ("--head", f"--node-ip-address={_HEAD}", f"--port={_PORT}", "--num-cpus=3")
    node = (f"--address={address}", f"--node-ip-address={_NODE}", "--num-cpus=1")
    with contextlib.ExitStack() as opened:
        opened.enter_context(ray_node(*head, "--include-dashboard=false"))
        run.start(address)
        opened.callback(run.stop)
        run.wait(lambda: len(run.processes()) == 3, "all that the first host holds")
        opened.enter_context(ray_node(*node, inside=inside))
        run.wait(lambda: run.whole(set()), "the replica of the second host")
        run.wait_for_step("step over two hosts")
        sh("ip", "link", "set", "chaos0", "down")
        time.sleep(seconds)
        sh("ip", "link", "set", "chaos0", "up")
        made = run.steps()
        return run.wait(
            lambda: run.whole(set()) and run.steps() > made, "step after a cut"
        )


def starve(run: Run, *node: str) -> float:
    """Put a replica on a node without memory; return the seconds until it is killed."""
    said = run.directory.with_suffix(".log")
    before = said.read_text().count("OutOfMemoryError")
    with ray_node(*node, environment=STARVED):
        return run.wait(
            lambda: said.read_text().count("OutOfMemoryError") > before,
            "replica that is killed for its memory",
        )


def remove_node(run: Run, *node: str) -> float:
    """Kill the node of a replica; return the seconds until a new node runs it."""
    with ray_node(*node) as process:
        run.wait(lambda: run.whole(set()), "the replica of the second node")
        gone = {run.processes()["replica 1"], run.processes()["replica 0"]}
        sh("pkill", "-KILL", "-P", str(process.pid), "raylet")
        run.wait(lambda: len(run.processes()) == 3, "the loss of the second node")
    with ray_node(*node):
        gone -= set(run.processes().values())  # the other replica's
        back = run.wait(lambda: run.whole(gone), "the replica on another node")
        run.wait_for_step("step after a lost node")
        return back


def over_two_nodes(run: Run) -> Iterator[str]:
    """Continue over two nodes of this machine, and lose the second in two ways."""
    with socket.socket(type=socket.SOCK_DGRAM) as chosen:
        chosen.connect(("192.0.2.1", 9))  # nothing is sent; not this machine's loopback
        own = chosen.getsockname()[0]
    address = f"{own}:{_PORT}"
    head = ("--head", f"--node-ip-address={own}", f"--port={_PORT}", "--num-cpus=3")
    node = (f"--address={address}", f"--node-ip-address={own}", "--num-cpus=1")
    with contextlib.ExitStack() as opened:
        opened.enter_context(ray_node(*head, "--include-dashboard=false"))
        run.start(address)
        opened.callback(run.stop)
        run.wait(lambda: len(run.processes()) == 3, "all that the first node holds")
        for act in (starve, remove_node):
            yield f"{act.__name__:9} {'replica 1':12} after {act(run, *node):5.1f} s"


def over_two_hosts(run: Run) -> str:
    """Do `cut` if that is permitted; return a line about it."""
    with two_networks() as may:
        if not may:
            return "no cut: this process may not make network namespaces"
        run.resumed()
        seconds = cut(run)
    return f"{'cut':9} {'replica 1':12} whole again after {seconds:5.1f} s"


def audit(run: Run) -> Iterator[str]:
    """Yield the errors in the books of the last checkpoint."""
    run.note_taken()
    newest = sorted((run.directory / "checkpoints").glob("step_*"))[-1]
    # Of rank 0, which got the controller's books.
    files = (newest / "host.json", newest / "groups.json")
    host, groups = (parse_json(file.read_bytes()) for file in files)
    step = int(newest.name.removeprefix("step_"))
    trained = {at: taken for at, taken in run.taken.items() if at < step}
    pairs = [pair for taken in trained.values() for pair in taken]
    tickets = [ticket for ticket, _ in pairs]
    everywhere = [*tickets, *(row["ticket"] for row in groups)]
    everywhere += [entry["ticket"] for entry in host["in_flight"]]
    if len(set(everywhere)) != len(everywhere):
        yield "a ticket was doubled"
    lost = host["next_ticket"] - len(everywhere) - sum(host["dropped"].values())
    if lost:
        yield f"{lost} tickets are nowhere"
    prompts = [tuple(prompt) for _, prompt in sorted(pairs)]
    if len(set(prompts)) != len(prompts):
        yield "a prompt of an epoch was doubled"
    made = [row["step"] for row in rows(run.directory / "metrics.jsonl")]
    if made != list(range(1, run.num_steps + 1)):
        yield f"steps are missing or doubled: {made}"
    hours = [
        row["compute/charged_chip_hours"]
        for row in rows(run.directory / "metrics.jsonl")
    ]
    if hours != sorted(hours):
        yield "the charged chip-hours fall"


EVENTS: tuple[tuple[str, Callable[..., float]], ...] = (
    ("controller", kill),
    ("replica 0", kill),
    ("learner 1", kill),
    ("replica 1", silence),
    ("weights", damage),
    ("replica 1", kill),
    ("learner 0", kill),
    ("replica 0", slow),
    ("replica 0", terminate),
    ("learner 1", terminate),
)


def main() -> int:
    """Inject all faults, check the books, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", default="runs/chaos", type=Path)
    parser.add_argument("--kills", default=20, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--no-cut", dest="cut", action="store_false")
    parser.add_argument("--no-hosts", dest="hosts", action="store_false")
    parser.add_argument("--set", dest="changes", action="append", default=[])
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    arguments.workdir.parent.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.workdir, num_steps=10**5, changes=arguments.changes)
    kills = at = 0
    say(f"start: whole after {run.wait(lambda: run.whole(set()), 'start'):.0f} s")
    try:
        while kills < arguments.kills:
            role, act = EVENTS[at % len(EVENTS)]
            at += 1
            time.sleep(chance.uniform(0.5, 6.0))
            seconds = damage(run) if act is damage else act(run, role)
            kills += act is kill
            say(f"{act.__name__:9} {role:12} whole again after {seconds:5.1f} s")
        status = run.stop()
        if arguments.hosts:
            run.resumed()
            for line in over_two_nodes(run):
                say(line)
        if arguments.cut:
            say(over_two_hosts(run))
        # The same run, to an end: the newest checkpoint, and a few steps more.
        run.num_steps = run.steps() + 5
        run.resumed()
        run.start()
        status = run.controller.wait(_PATIENCE_S) or status
    finally:
        run.controller.kill()
    wrong = list(audit(run)) if status == 0 else [f"it ended with status {status}"]
    last = rows(run.directory / "metrics.jsonl")[-1]
    say(
        f"{kills} kills among {at} events; {run.num_steps} steps, "
        f"{sum(len(each) for each in run.taken.values())} groups trained on; "
        f"prompts lost or doubled: {'; '.join(wrong) or 'none'}; tokens lost with the "
        f"controller {last['compute/lost_tokens']:,.0f}, wasted "
        f"{last['compute/wasted_tokens']:,.0f} of "
        f"{last['compute/generated_tokens']:,.0f}"
    )
    (run.directory / "chaos.json").write_text(json.dumps({"wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
