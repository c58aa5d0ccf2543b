"""Slices as Ray lists their hosts, and a small config for them."""

import dataclasses

import small_run

from scalerl_jax.machines.slices import parse_slice


def nodes_of(text, name, *, chips=4, subnet=0):
    """The nodes that Ray lists for a slice, as Google's machines label them."""
    slice = parse_slice(text)
    topology = text.split(":")[1]
    return [
        {
            "NodeID": f"{name}-{worker}",
            "Alive": True,
            "NodeManagerAddress": f"10.0.{subnet}.{worker}",
            "Resources": {"CPU": 8.0, "TPU": float(chips), name: 1.0},
            "Labels": {
                "ray.io/node-id": f"{name}-{worker}",
                "ray.io/tpu-slice-name": name,
                "ray.io/tpu-worker-id": str(worker),
                "ray.io/tpu-topology": topology,
                "ray.io/tpu-pod-type": slice.type,
            },
        }
        for worker in range(slice.num_chips // chips)
    ]


def config_of(**changes):
    names = {name.replace("__", "."): value for name, value in changes.items()}
    config = small_run.make_config(
        {"batch.rows_per_microbatch": 0, "mesh.fsdp": 0, "generators.devices": 1}
        | names
    )
    generators = dataclasses.replace(config.generators, placement="apart")
    return dataclasses.replace(config, generators=generators)
