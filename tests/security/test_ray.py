"""A cluster of Ray that is this machine alone, and another user of the machine."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import small_run
from small_intruder import NOBODY, as_another_user, listening, open_to_others

pytest.importorskip("ray")
CLUSTER = """
import os, sys
from scalerl_jax.machines import ray_access
with ray_access.prepared("local"):
    import ray
    from scalerl_jax.cluster.session import connected

    class Role:
        def ready(self):
            return True

    with connected("local", timeout_s=60.0):
        role = ray.remote(Role).options(num_cpus=1).remote()
        ray.get(role.ready.remote())
        address = ray.get_runtime_context().gcs_address
        print(address, os.environ["RAY_AUTH_TOKEN_PATH"], flush=True)
        sys.stdin.read()
"""
JOIN = """
import os, sys
import ray
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
user = ray.remote(num_cpus=0)(lambda: os.getuid())
print("ran as", ray.get(user.remote(), timeout=30))
"""
# Else Ray takes the address by which others see this machine.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
READ = """
import os, sys
for path in (sys.argv[1], os.path.dirname(sys.argv[1])):
    try:
        print(open(path).read() if os.path.isfile(path) else os.listdir(path))
    except PermissionError:
        print("closed")
"""


@pytest.fixture(scope="module")
def cluster():
    """The process of a cluster that is this machine alone, its address and token."""
    process = small_run.start("-c", CLUSTER, stdin=subprocess.PIPE)
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, *line.split()
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
        process.stderr.close()


@pytest.mark.slow
def test_it_listens_at_this_machines_own_addresses_only(cluster):
    process, address, _ = cluster
    assert address.startswith("127.0.0.1:")
    sockets = listening(process.pid)
    assert {"gcs_server", "raylet"} <= {name for name, _ in sockets}
    assert open_to_others(sockets) == set()


@pytest.mark.slow
def test_another_user_can_neither_read_its_token_nor_enter_its_directory(cluster):
    done = as_another_user(READ, cluster[2])
    assert done.stdout.split() == ["closed", "closed"], done.stderr


@pytest.mark.slow
def test_another_user_cannot_join_it_without_the_token(cluster, tmp_path):
    folder = folder_of(NOBODY, tmp_path)
    guesses = ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "0" * 64})

    def join(guess):
        told = {"RAY_AUTH_MODE": "token", "HOME": folder, "RAY_TMPDIR": folder}
        return as_another_user(
            JOIN,
            cluster[1],
            modules="ray,ray._private.runtime_env.uv_runtime_env_hook",
            environment=LOOPBACK | told | guess,
        )

    with ThreadPoolExecutor() as threads:  # Ray tries for twenty seconds
        for done in threads.map(join, guesses):
            assert done.returncode != 0 and "ran as" not in done.stdout
            assert "InvalidAuthToken" in done.stderr, done.stderr[-2000:]


@pytest.mark.slow
def test_its_own_user_joins_it_with_the_token(cluster):
    """Else the others might be refused for another reason."""
    _, address, token = cluster
    told = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}
    told |= LOOPBACK | {"RAY_TMPDIR": os.path.dirname(token)}
    done = subprocess.run(
        [sys.executable, "-c", JOIN, address],
        env=os.environ | told,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["ran", "as", str(os.getuid())], done.stderr


def folder_of(user, path):
    """A folder of another user's, below a path that leads there."""
    if os.geteuid() == 0:
        os.chown(path, user, user)
        for each in (path, *path.parents):
            if not os.stat(each).st_mode & 0o001:
                each.chmod(0o711)
    return str(path)
