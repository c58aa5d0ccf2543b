#!/usr/bin/env bash
# A run over one or more slices of TPUs under one Ray cluster: learner and replicas on
# the slices, the controller on a CPU machine of its own, which is not spot.
#
#   launch/ray_tpu.sh --name=NAME --project=PROJECT --zone=ZONE \
#     --topology='2*v6e:4x4' --bucket=gs://BUCKET/runs --config=configs/8b.py [--spot] \
#     --price-per-chip-hour=PRICE -- --config.data.directory=gs://BUCKET/data \
#     --config.model.checkpoint=gs://BUCKET/models/Llama-3.1-8B [FLAGS OF THE RUN ...]
#
# Makes:   the machine NAME-head, queued resources NAME-0, NAME-1, ...; objects.
# Costs:   chips x price an hour while slices are ACTIVE, 32 chips for 2*v6e:4x4, and
#          the head's machine (--head-machine, n2-standard-16).
# Stopped: by itself when the run is over; before that by
#          python -m scalerl_jax.launch stop --place=ray_tpu, and these flags.
set -euo pipefail

exec "${PYTHON:-python}" -m scalerl_jax.launch run --place=ray_tpu --yes "$@"
