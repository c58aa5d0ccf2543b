"""What a run says when it is started in several processes."""

import pytest
import small_run
from absl.flags import FLAGS
from small_gang import SECRET, finish, free_port

from scalerl_jax import main
from scalerl_jax.parallel import rendezvous


def start(directory, *flags):
    return small_run.start(
        *("-m", "scalerl_jax.main", *small_run.arguments(directory), *flags),
        environment={rendezvous.SECRET: SECRET},
    )


def refusal(process):
    status, _, errors = finish(process)
    (line,) = [
        line for line in errors.splitlines() if not line.startswith(("[Gloo]", "W"))
    ]
    return status, line


@pytest.mark.slow
def test_two_processes_are_refused_before_anything_is_loaded(tmp_path):
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    shared = ("--distributed", coordinator, "--num_processes=2")
    started = [start(tmp_path / "run", *shared, f"--process_id={n}") for n in (0, 1)]
    for process in started:
        status, line = refusal(process)
        assert status == 2
        assert line.startswith("error: --distributed: 2 processes came, but ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_stays_away_is_one_line(tmp_path):
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    status, line = refusal(
        start(
            tmp_path / "run",
            *("--distributed", coordinator, "--num_processes=2", "--process_id=0"),
            "--start_timeout_s=0.5",
        )
    )
    assert status == 1
    assert line.startswith("error: process 1 of 2 did not come to the coordinator at ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num_processes=2"], "--num_processes=2 has no meaning without --distr"),
        (["--distributed", "--process_id=0"], "--distributed needs --coordinator="),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags, words, capfd):
    try:
        main.parse_flags(["main", *flags])
        with pytest.raises(SystemExit) as end:
            main._join()
    finally:
        FLAGS.unparse_flags()
    assert end.value.code == 2
    assert capfd.readouterr().err.startswith(f"error: {words}")
