#!/usr/bin/env bash
# A run on a slice of TPUs, one or more hosts, asked for as a queued resource: spot or
# on demand; waits for it, starts the run, makes the slice again after a preemption.
#
#   launch/queued_resource.sh --name=NAME --project=PROJECT --zone=ZONE \
#     --topology=v6e:4x4 --bucket=gs://BUCKET/runs --config=configs/8b.py [--spot] \
#     --price-per-chip-hour=PRICE -- --config.data.directory=gs://BUCKET/data \
#     --config.model.checkpoint=gs://BUCKET/models/Llama-3.1-8B [FLAGS OF THE RUN ...]
#
# Makes:   one queued resource NAME with its TPU VM NAME; objects under the bucket.
# Costs:   chips x price an hour while it is ACTIVE; v6e:4x4 is 16 chips.
# Stopped: by itself when the run is over; before that by
#          python -m scalerl_jax.launch stop --place=queued_resource, and these flags.
set -euo pipefail

exec "${PYTHON:-python}" -m scalerl_jax.launch run --place=queued_resource --yes "$@"
