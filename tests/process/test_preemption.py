import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import scalerl_jax
from scalerl_jax.process.preemption import Preemption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_noticed_and_the_old_handler_comes_back(number):
    seen = []

    def old(*_):
        seen.append("old")

    # SIGHUP is noticed where it would end the process, and else left alone.
    before = signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else old)
    try:
        with Preemption() as preemption:
            assert not preemption.reached(1)
            os.kill(os.getpid(), number)
            assert preemption.requested
            assert preemption.interrupted == (number == signal.SIGINT)
            assert preemption.reached(2)
            assert preemption.reached(3)
        assert seen == []
        if number == signal.SIGHUP:
            assert signal.signal(number, old) is signal.SIG_DFL
            with Preemption() as preemption:
                os.kill(os.getpid(), number)
                assert not preemption.requested
        else:
            os.kill(os.getpid(), number)
        assert seen == ["old"]
    finally:
        signal.signal(number, before)


def test_a_thread_that_waits_is_not_broken_off_by_the_signal():
    done = threading.Event()
    with Preemption() as preemption:
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        timer.start()
        assert not done.wait(0.3)
        assert preemption.requested
        timer.join()


def test_it_belongs_to_the_main_thread():
    caught = []

    def work():
        try:
            with Preemption():
                pass
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


DISTRIBUTED = """
import os, signal, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[1], num_processes=1, process_id=0)
from scalerl_jax.process.preemption import Preemption, end_at_signals
end_at_signals()
with Preemption() as preemption:
    assert not preemption.reached(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.requested
print("noticed", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_jax_distributed_of_one_process_does_not_keep_sigterm_to_itself():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", DISTRIBUTED, f"127.0.0.1:{port}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(scalerl_jax.__file__).parents[1],
    )
    assert done.stdout == "noticed\nstopped by SIGTERM with nothing to save\n"
    assert done.returncode == 75


ENDING = """
import hashlib, os, signal
from scalerl_jax.process.preemption import Preemption, end_at_signals
end_at_signals()
with Preemption() as preemption:
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.requested
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as a compilation: all of it is C
"""


def test_with_nothing_to_save_sigterm_ends_a_program_in_the_midst_of_c():
    with subprocess.Popen(
        [sys.executable, "-c", ENDING],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(scalerl_jax.__file__).parents[1],
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert output == "stopped by SIGTERM with nothing to save\n"
    assert process.returncode == 75


INTERRUPTED_TWICE = """
import hashlib, os, signal
from scalerl_jax.process.preemption import Preemption, end_at_signals
end_at_signals()
with Preemption() as preemption:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # a step that goes on
"""


def test_a_second_ctrl_c_ends_at_once_in_the_midst_of_c():
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_TWICE],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(scalerl_jax.__file__).parents[1],
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)  # the first one waits for the step
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
    assert output == "interrupted again: ended without saving\n"
    assert process.returncode == 130


@pytest.mark.parametrize(
    "module", ["process.preemption", "run.directory", "run.ledger", "run.metrics"]
)
def test_modules_below_jax_are_imported_without_jax(module):
    code = f"import sys, scalerl_jax.{module}; assert 'jax' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        cwd=Path(scalerl_jax.__file__).parents[1],
    )
