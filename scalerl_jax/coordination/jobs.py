"""Jobs for replicas: parts of evaluations and probes, each done by one of them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from scalerl_jax.coordination.members import Member
from scalerl_jax.exchange import Job, JobResult


@dataclasses.dataclass(kw_only=True)
class _Wanted:
    """A job that is to be done, by the replica of a number or by any."""

    job: Job
    number: int | None
    result: Future[Any]
    taken: bool = False  # a replica has it


class JobBoard:
    """The jobs that are not done yet; the caller sees to it that one thread is in."""

    def __init__(self) -> None:
        """Begin without any."""
        self._wanted: list[_Wanted] = []

    def submit(self, job: Job, number: int | None) -> Future[Any]:
        """Have a job done by the replica of a number, or by any."""
        wanted = _Wanted(job=job, number=number, result=Future())
        self._wanted.append(wanted)
        return wanted.result

    def withdraw(self, jobs: Iterable[Job], members: Iterable[Member]) -> None:
        """Have these jobs left undone, if they are not done yet."""
        numbers = {job.number for job in jobs}
        self._wanted = [each for each in self._wanted if each.job.number not in numbers]
        for member in members:
            gone = member.jobs & numbers
            member.jobs -= gone
            member.abandoned += sorted(numbers)  # who has done some may hold params

    def hand_out(
        self, members: Sequence[Member], address: Callable[[Any, int, int], Any]
    ) -> None:
        """Give each job that nobody has to a replica that has none."""
        for wanted in self._wanted:
            able = [
                each
                for each in members
                if each.up
                and not each.jobs
                and wanted.number in (None, each.number)
                and (each.used_version >= 0 or not wanted.job.beside)
            ]
            if not able or wanted.taken:
                continue
            job, held = wanted.job, able[0].sent_version
            own = address(job.publication, able[0].number, held)
            if own is not None:
                wanted.taken = True
                able[0].give_job(dataclasses.replace(job, publication=own))

    def give_back(self, numbers: Iterable[int]) -> None:
        """Have these done by another replica."""
        for wanted in self._wanted:
            if wanted.job.number in numbers:
                wanted.taken = False

    def is_beside(self, number: int) -> bool:
        """Return whether a job's params are pinned, whatever its replica samples with.

        That they cannot be had says nothing of the replica.
        """
        return any(
            wanted.job.number == number and wanted.job.beside for wanted in self._wanted
        )

    def end(self, result: JobResult) -> None:
        """Hand on what a job has come to; one without params is for any replica."""
        if result.without_params:
            self.give_back([result.number])
            return
        for wanted in [w for w in self._wanted if w.job.number == result.number]:
            self._wanted.remove(wanted)
            if result.error is not None:
                wanted.result.set_exception(result.error)
            else:
                wanted.result.set_result(result.value)
