"""What a run says when it is started in several processes."""

import pytest
from absl.flags import FLAGS

from scalerl_jax import main

SHARED = ("--distributed", "--coordinator=127.0.0.1:4321", "--num_processes=2")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num_processes=2"], "--num_processes=2 has no meaning without --distr"),
        (["--distributed", "--process_id=0"], "--distributed needs --coordinator="),
        ([*SHARED, "--process_id=0"], "--distributed: this is one of 2 processes, but"),
        ([*SHARED, "--process_id=1"], "--distributed: this is one of 2 processes, but"),
        ([*SHARED, "--process_id=2"], "--process_id=2 must be from 0 to --num_proc"),
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
