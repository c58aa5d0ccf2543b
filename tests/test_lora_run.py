"""A run with low-rank factors: killed, it goes on bit for bit."""

import json
import shutil

import numpy as np
import pytest
import small_run
from safetensors.numpy import load_file, save_file

from scalerl_jax import main

BASE = small_run.ROOT / "scalerl_jax" / "assets" / "tiny_base"
LORA = {
    "model.lora.rank": 2,
    "queue.max_staleness": 0,
    "reward.timeout_s": 60.0,  # on a busy machine
    "objective.kl_coefficient": 0.01,
    "objective.kl_estimator": "k3",
}


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit_and_not_beside_another_base(
    tmp_path, shared_parts
):
    base = shutil.copytree(BASE, tmp_path / "base")
    changes = LORA | {"model.checkpoint": str(base)}
    main.run(small_run.make_config(changes), str(tmp_path / "whole"))
    process = small_run.start_main(tmp_path / "killed", changes)
    small_run.wait_for_rows(process, tmp_path / "killed", 3)  # 2 is saved
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate(timeout=60)
    main.run(small_run.make_config(changes), str(tmp_path / "killed"))
    whole, resumed = (
        small_run.saved_arrays(small_run.checkpoints(tmp_path / name)[-1])
        for name in ("whole", "killed")
    )
    assert whole.keys() == resumed.keys()
    for name, leaf in whole.items():
        np.testing.assert_array_equal(leaf, resumed[name], err_msg=name)
    # Two factors of 7 matrices as params, reference and two moments: no base.
    assert sum("['layers']" in name for name in whole) == 4 * 2 * 7
    assert not [name for name in whole if "embedding" in name or "frozen" in name]
    first, *_, last = (row["kl/mean"] for row in small_run.rows(tmp_path / "whole"))
    assert abs(first) < 1e-6 < last  # the reference is the base, as the policy at first

    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    more = changes | {"train.num_steps": 5}
    with pytest.raises(ValueError, match=r"frozen params of digest [0-9a-f]{16}, and"):
        main.run(small_run.make_config(more), str(tmp_path / "whole"))
    manifest = json.loads(
        (small_run.checkpoints(tmp_path / "whole")[-1] / "manifest.json").read_text()
    )
    assert len(manifest["manifest"]["base"]) == 64


def test_a_pattern_without_a_parameter_ends_the_run_before_it_begins(tmp_path):
    config = small_run.make_config({"model.frozen": ("embeding",)})
    with pytest.raises(ValueError, match=r"model\.frozen .*'embeding'"):
        main.run(config, str(tmp_path))
