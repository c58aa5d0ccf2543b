"""A run over a mesh with frozen parameters: they stay, and it can go on."""

import numpy as np
import pytest
import small_run

from scalerl_jax import main

FROZEN = {"model.frozen": ("embedding", "layers/.*norm"), "train.num_steps": 1}
MESH = {"mesh.fsdp": 2, "mesh.tensor": 2}


def of(arrays, part):
    """Arrays of a part of the state, by the rest of their names."""
    return {name: leaf for name, leaf in arrays.items() if part in name}


@pytest.mark.slow
def test_a_resumed_run_over_a_mesh_leaves_what_is_frozen(tmp_path, shared_parts):
    main.run(small_run.make_config(FROZEN | MESH), str(tmp_path))
    more = FROZEN | MESH | {"train.num_steps": 2}
    main.run(small_run.make_config(more), str(tmp_path))
    first, last = map(small_run.saved_arrays, small_run.checkpoints(tmp_path))
    before, after = of(first, "['params']"), of(last, "['params']")
    assert len(before) == 13
    for name in before:
        kept = np.array_equal(before[name], after[name])
        frozen = "embedding" in name or ("layers" in name and "norm" in name)
        assert kept == frozen, name  # the final norm is trained
    moments = of(last, "['mu']")
    assert len(moments) == 8 and not [name for name in moments if "embedding" in name]


def test_a_pattern_without_a_parameter_ends_the_run_before_it_begins(tmp_path):
    config = small_run.make_config({"model.frozen": ("embeding",)})
    with pytest.raises(ValueError, match=r"model\.frozen .*'embeding'"):
        main.run(config, str(tmp_path))
