#!/usr/bin/env bash
# A run on one TPU VM of one host, made again after a preemption.
#
#   launch/tpu_vm.sh --name=NAME --project=PROJECT --zone=ZONE --topology=v6e:2x4 \
#     --bucket=gs://BUCKET/runs --price-per-chip-hour=PRICE [--spot] \
#     --config=configs/smollm2.py:HuggingFaceTB/SmolLM2-135M-Instruct \
#     [-- FLAGS OF THE RUN ...]
#
# Makes:   the TPU VM NAME; objects under the bucket.
# Costs:   chips x price an hour while it is there; v6e:2x4 is 8 chips.
# Stopped: by itself when the run is over; before that by
#          python -m scalerl_jax.launch stop --place=tpu_vm, and these flags.
set -euo pipefail

exec "${PYTHON:-python}" -m scalerl_jax.launch run --place=tpu_vm --yes "$@"
