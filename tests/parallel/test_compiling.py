"""Which options programs are compiled with, and what becomes of unknown ones."""

import jax
import pytest

from scalerl_jax.parallel import compiling
from scalerl_jax.parallel.mesh import compiler_options, make_mesh


@pytest.mark.parametrize("role", compiling.OPTIONS)
def test_only_tpus_get_options(role):
    assert compiler_options(role, make_mesh(jax.devices()[:1])) == {}


@pytest.mark.parametrize(
    "name, value, known",
    [
        pytest.param("xla_cpu_enable_fast_math", False, True, id="one of the CPU's"),
        pytest.param("xla_of_a_later_version", True, False, id="no such option"),
        pytest.param("xla_cpu_enable_fast_math", "7 of 9", False, id="no such value"),
    ],
)
def test_an_option_that_the_compiler_does_not_take_is_left_out(
    name, value, known, caplog
):
    assert compiling._is_known(name, value, jax.devices()[0]) is known
    assert (name in caplog.text) != known
