"""Access to a Ray cluster by flags and its token.  Nothing here imports Ray.

Ray reads environment variables when it is imported, so they are set before.  A token is
never an argument of a command; it is in a file that only its owner can read.
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from absl import flags

_log = logging.getLogger(__name__)
_MODE, _TOKEN, _FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_PLACE = "RAY_TMPDIR"  # directory of Ray's sockets, logs and files
# Ray appends up to 70 characters for a socket's path, which may have 107.
_LONGEST_PLACE = 36
_TOKEN_FILE = "token"
_PREFIX = "rl-ray-"  # of directories that are locked as long as their processes live
_MOST_BYTES = 4096  # of a token's file
_ALWAYS = {
    # Without it any call of Ray, by a thread that the end of a run leaves behind, would
    # start another cluster, which other machines can reach and enter without a token.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Without it Ray writes a traceback for each further rank of a lost learner.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}
# Ray's own switch for systems whose firewall asks about each port.  With the value 0
# all that Ray starts listens at 127.0.0.1.  Otherwise Ray replaces a loopback address
# by the one at which other machines reach this one.
_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayFlags:
    """Flags of a command that can run over the processes of a cluster."""

    address: flags.FlagHolder[str | None]
    without_token: flags.FlagHolder[bool]
    start_timeout_s: flags.FlagHolder[float]

    def check(self) -> None:
        """Refuse flags that contradict each other.

        Raises:
            ValueError: says which to leave out.
        """
        if self.without_token.value and self.address.value in (None, "local"):
            raise ValueError(
                "--ray_without_token is for --ray=auto, slice or HOST:PORT; leave it "
                "out"
            )


def define_flags(roles: str, values: flags.FlagValues = flags.FLAGS) -> RayFlags:
    """Define --ray and its two companions; `roles` are what runs over processes."""
    return RayFlags(
        address=flags.DEFINE_string(
            "ray",
            None,
            f"Run {roles} as processes of a Ray cluster: local starts one on this "
            f"machine, auto uses the one that runs here, HOST:PORT another; slice, "
            f"given on every host of TPU slices, forms one of them; needs the extra "
            f"[ray].",
            flag_values=values,
        ),
        without_token=flags.DEFINE_bool(
            "ray_without_token",
            False,
            "Use a cluster without a token: anyone who reaches its ports can run "
            "programs as its user.  Without this flag, auto, HOST:PORT and slice need "
            "a token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, with mode 0600.",
            flag_values=values,
        ),
        start_timeout_s=flags.DEFINE_float(
            "start_timeout_s",
            300.0,
            "Seconds for all processes to connect.",
            lower_bound=0.0,
            flag_values=values,
        ),
    )


def make_token() -> str:
    """Return a new token, of 256 bits."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def prepared(
    address: str,
    *,
    without_token: bool = False,
    environment: MutableMapping[str, str] = os.environ,
) -> Iterator[None]:
    """Set the environment for a cluster during the block; import Ray inside it.

    "local" gets a token, a directory and addresses that no other user can reach.  Any
    other cluster needs a token from the environment or from Ray's own file.

    Args:
        address: the value of --ray.
        without_token: the cluster requires no token.
        environment: the variables to set; restored after the block.

    Raises:
        ValueError: the token is missing or readable by others, or the address invalid.
    """
    if address not in ("local", "auto", "slice"):
        parse_address(address)
    before = dict(environment)
    with contextlib.ExitStack() as opened:
        opened.callback(_put_back, environment, before)
        environment.update(_ALWAYS)
        if address == "local":
            place = opened.enter_context(own_directory())
            environment.update(_LOOPBACK | {_PLACE: str(place)})
            use_token(environment, write_token(place, make_token()))
        elif without_token:
            _log.warning(
                "warning: --ray_without_token: anyone who reaches the ports of the "
                "cluster at --ray=%s can run programs as its user",
                address,
            )
            environment[_MODE] = "disabled"
        else:
            _check_token(address, environment)
            environment[_MODE] = "token"
        yield


def parse_address(address: str) -> tuple[str, int]:
    """Parse HOST:PORT of a cluster.

    Raises:
        ValueError: the text is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"--ray={address} must be local, auto, slice or HOST:PORT, which `ray "
            f"start --head` prints"
        )
    return host, int(port)


def _put_back(environment: MutableMapping[str, str], before: dict[str, str]) -> None:
    environment.clear()
    environment.update(before)


@contextlib.contextmanager
def own_directory() -> Iterator[Path]:
    """Create a directory that only this user can enter; remove it after the block.

    Its path is short enough for the sockets in it.  Those of killed processes are
    removed, too.
    """
    given = os.environ.get(_PLACE) or tempfile.gettempdir()
    fits = len(given) + len(f"/{_PREFIX}12345678") <= _LONGEST_PLACE
    beside = Path(given if fits else "/tmp")
    for left in beside.glob(f"{_PREFIX}????????/{_TOKEN_FILE}"):
        with contextlib.suppress(OSError), _locked(left.parent):
            shutil.rmtree(left.parent, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=beside))
    try:
        with _locked(place):
            yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the lock of a directory of this user, until the block or the process ends.

    Raises:
        OSError: it is another user's, or another process holds the lock.
    """
    number = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(number).st_uid != os.geteuid():
            raise PermissionError(f"{place} is another user's")
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def write_token(directory: Path, token: str) -> Path:
    """Write a token to a new file that only this user can read."""
    path = directory / _TOKEN_FILE
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, mode=0o600), "w") as file:
        file.write(token)
    return path


def use_token(environment: MutableMapping[str, str], path: Path) -> None:
    """Set the variables with which Ray requires and presents the token of a file."""
    environment.pop(_TOKEN, None)  # it would override the file
    environment.update({_MODE: "token", _FILE: str(path)})


def read_token(path: Path) -> str:
    """Return the token of a file, without checking the file's permissions.

    Raises:
        ValueError: the file is missing, or does not hold a token.
    """
    try:
        if not path.is_file():
            raise ValueError(f"there is no token in {path}: it is no file")
        with path.open("rb") as file:
            token = file.read(_MOST_BYTES + 1).decode(errors="replace").strip()
    except OSError as error:
        raise ValueError(f"there is no token in {path}: {error.strerror}") from error
    if not token.isascii() or not 1 <= len(token) <= _MOST_BYTES or token.split()[1:]:
        raise ValueError(
            f"{path} holds no token: one word, as `openssl rand -hex 32` makes it"
        )
    return token


def _check_token(address: str, environment: MutableMapping[str, str]) -> None:
    """Raise ValueError unless Ray will find a token that other users cannot read."""
    if environment.get(_TOKEN):
        return
    given = environment.get(_FILE)
    path = Path(given) if given else Path.home() / ".ray" / "auth_token"
    try:
        read_token(path)
    except ValueError as error:
        raise ValueError(
            f"--ray={address} needs the token of the cluster, the same on all its "
            f"machines, and {error}; write one with `openssl rand -hex 32` to that "
            f"file, with chmod 600, or name a file in {_FILE}, or add "
            f"--ray_without_token if no other user reaches the cluster"
        ) from error
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(
            f"--ray={address}: the token in {path} has mode {mode:04o}, so that other "
            f"users can read it and join the cluster; chmod 600 {path}, after a new "
            f"token if anybody else has been on this machine"
        )
