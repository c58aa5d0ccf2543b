#!/usr/bin/env bash
# A run on slices of a GKE cluster that xpk has made: a JobSet in Kueue's queue, a
# pod for each host, started again by Kubernetes when a node is taken away.
#
#   launch/gke_xpk.sh --name=NAME --project=PROJECT --zone=ZONE --cluster=CLUSTER \
#     --topology=v6e:4x4 --bucket=gs://BUCKET --storage=STORAGE --image=IMAGE \
#     --config=configs/8b.py --price-per-chip-hour=PRICE \
#     -- --config.data.directory=gs://BUCKET/data \
#     --config.model.checkpoint=gs://BUCKET/models/Llama-3.1-8B [FLAGS OF THE RUN ...]
#
# STORAGE is the bucket's name in `xpk storage attach`, at /mnt/scalerl_jax; IMAGE is
# what launch/Dockerfile makes.
#
# Makes:   the workload NAME; objects in the bucket.
# Costs:   chips x price an hour, as long as the cluster has the nodes: 16 for v6e:4x4.
# Stopped: by itself when the run is over; before that by
#          python -m scalerl_jax.launch stop --place=gke, and these flags.
set -euo pipefail

exec "${PYTHON:-python}" -m scalerl_jax.launch run --place=gke --yes "$@"
