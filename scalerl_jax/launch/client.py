"""Run or print commands of Google's clients, and translate their error messages.

`_REFUSALS` matches the text that a client prints and gives one line that says what is
wrong and what helps.
"""

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from scalerl_jax.formats.reading import parse_json
from scalerl_jax.launch.place import Refused
from scalerl_jax.process.printing import to_stdout

_LIMIT_S = 1800.0  # timeout of one command; a host's installation takes minutes
_SSH_TRIES = 5
_SSH_FAILED = re.compile(
    r"ssh\] exited with return code \[255\]|Connection (refused|cl)"
)
_SECRET = re.compile(r"ya29\.[\w.-]+|hf_\w{8,}|(?i:bearer )\S+")


class NotFound(ValueError):
    """The cloud has nothing of this name."""


# (pattern in the client's output, exception, message); the first match counts.
_REFUSALS: tuple[tuple[str, type[Exception], str], ...] = (
    (
        r"(?i)no more capacity|RESOURCE_POOL_EXHAUSTED|stockout"
        r"|insufficient (reserved )?capacity",
        Refused,
        "there are no such machines just now",
    ),
    (
        r"Quota limit '(?P<a>[^']+)' has been exceeded\. Limit: 0\b",
        ValueError,
        "no quota: {a} is 0 here; ask for more at console.cloud.google.com/iam-admin/"
        "quotas, or take another --zone, or --spot, which has a quota of its own",
    ),
    (
        r"(?i)quota (limit )?'(?P<a>[^']+)'.* (exceeded|exhausted)"
        r"|quota exceeded(?P<b>)",
        Refused,
        "the quota {a} is used up by other machines of the project, or by queued "
        "resources that are suspended or failed",
    ),
    (
        r"(?i)SERVICE_DISABLED|API has not been used|API .*is disabled",
        ValueError,
        "an API of the project is off: gcloud services enable tpu.googleapis.com "
        "compute.googleapis.com storage.googleapis.com",
    ),
    (
        r"Max retries exceeded|ConnectionError|NameResolution|[Tt]imed out"
        r"|Unable to find the server|Network is unreachable"
        r"|(?is:refreshing your current auth tokens(?!.*(invalid_grant|reauth)))",
        Refused,
        "the cloud is not reached: {said}",
    ),
    (
        r"(?i)active account selected|reauthentication|credentials.*(expired|invalid)"
        r"|gcloud auth login",
        ValueError,
        "gcloud has no login here: gcloud auth login",
    ),
    (
        r"gke-gcloud-auth-plugin",
        ValueError,
        "kubectl cannot log in to GKE: gcloud components install "
        "gke-gcloud-auth-plugin",
    ),
    (
        r"the server doesn't have a resource type \"(?P<a>[^\"]+)\"",
        ValueError,
        "the cluster has no {a}: xpk cluster create installs JobSet and storages",
    ),
    (
        r"(?i)not found: .*bucket|gs://\S+ not found|bucket does not exist",
        NotFound,
        "there is no such bucket: gcloud storage buckets create makes one",
    ),
    (
        r"(?i)NOT_FOUND|\(NotFound\)|was not found|matched no objects|HTTPError 404",
        NotFound,
        "{said}",
    ),
    (
        r"(?i)Permission denied on 'locations/(?P<a>[\w-]+)'"
        r"|Location (?P<b>\S+) is not found",
        ValueError,
        "there is no zone {a}{b} with TPUs: gcloud compute tpus locations list",
    ),
    (
        r"(?i)PERMISSION_DENIED|does not have permission|HTTPError 403|access denied"
        r"|does not have storage\.|\(Forbidden\)",
        ValueError,
        "your account, or the machines' service account, lacks a right; docs/pods.md "
        "lists the roles: {said}",
    ),
    (
        r"Unable to connect to the server|connection to the server .* was refused",
        Refused,
        "the cluster does not answer: {said}",
    ),
    (r"(?i)ALREADY_EXISTS|already exists", ValueError, "the name is taken: {said}"),
    (
        r"(?i)UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|rate ?limit|HTTPError (5\d\d|429)"
        r"|'status': '?(5\d\d|429)",
        Refused,
        "the cloud cannot do this just now: {said}",
    ),
)


def refusal(said: str, *, command: Sequence[str]) -> Exception:
    """Turn a client's error text into an exception with a message of one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(?i)error|denied|not found", line)]
    last = _SECRET.sub("...", (errors or lines or ["it said nothing"])[-1])
    for pattern, kind, text in _REFUSALS:
        if found := re.search(pattern, said):
            groups = {"a": "", "b": ""} | {
                name: value or "" for name, value in found.groupdict().items()
            }
            return kind(text.format(said=last, **groups))
    return RuntimeError(f"{' '.join(command[:5])} fails: {last}")


class Client:
    """Runs commands; with `dry_run` it prints them and runs none."""

    def __init__(self, *, dry_run: bool = False, pause_s: float = 15.0) -> None:
        """Store the options; run nothing.

        Args:
            dry_run: print commands, one a line.
            pause_s: seconds between two attempts of `ssh` to connect.
        """
        self.dry_run, self._pause_s = dry_run, pause_s

    def run(self, command: Sequence[str]) -> str:
        """Run a command and return its output; "" in a dry run.

        Raises:
            NotFound, ValueError: the command cannot succeed unless something changes.
            Refused: the command may succeed at another time.
            RuntimeError: the command fails with an unknown error.
        """
        if self.dry_run:
            to_stdout(f"{shlex.join(command)}\n")
            return ""
        if shutil.which(command[0]) is None:
            raise ValueError(
                f"{command[0]} is not installed here; docs/pods.md says what each "
                f"place needs"
            )
        try:
            done = subprocess.run(
                list(command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise Refused(
                f"{' '.join(command[:5])} has not ended within {_LIMIT_S:g} s"
            ) from error
        if done.returncode:
            # xpk's errors are on stdout, and other programs' warnings on stderr.
            said = f"{done.stdout}\n{done.stderr}" if command[0] == "xpk" else ""
            raise refusal(said or done.stderr or done.stdout, command=command)
        return done.stdout

    def ssh(self, command: Sequence[str]) -> str:
        """Run an ssh command and return its output; retry if the connection fails.

        Raises:
            Refused: every attempt to connect failed.
            RuntimeError: the command on the host fails.
        """
        for tried in range(1, _SSH_TRIES + 1):
            try:
                return self.run(command)
            except (RuntimeError, Refused) as error:
                if not _SSH_FAILED.search(str(error)):
                    raise
                if tried == _SSH_TRIES:
                    raise Refused(
                        f"the hosts do not answer to ssh after {tried} tries: {error}"
                    ) from error
                time.sleep(self._pause_s)
        raise AssertionError("the last try returns or raises")

    def ask(self, command: Sequence[str]) -> Any:
        """Return the parsed JSON output of a command; None: no object of that name."""
        flag = "--format=json" if command[0] == "gcloud" else "--output=json"
        try:
            text = self.run([*command, flag])
        except NotFound:
            return None
        return parse_json(text) if text.strip() else None
