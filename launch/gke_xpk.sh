#!/usr/bin/env bash
# A run on one slice of a GKE cluster that xpk has made: a JobSet in Kueue's queue, a
# pod for each host, started again by Kubernetes when a node is taken away.
#
#   NAME=run-1 PROJECT=... ZONE=... CLUSTER=... IMAGE=... STORAGE=... TPU_TYPE=v6e-16 \
#     WORKDIR=/data/run-1 CONFIG=configs/8b.py launch/gke_xpk.sh [FLAGS OF XPK ...]
#
# STORAGE is a bucket that `xpk storage attach` has made known, mounted above WORKDIR;
# IMAGE is what launch/Dockerfile makes.  Look at it with `xpk workload list`.
#
# Makes:   the workload NAME.
# Costs:   chips x price an hour, as long as the cluster has the nodes: 16 for v6e-16.
# Stopped: xpk workload delete --workload=NAME, with project, zone and cluster.
set -euo pipefail

: "${NAME:?}" "${PROJECT:?}" "${ZONE:?}" "${CLUSTER:?}" "${IMAGE:?}" "${STORAGE:?}"
: "${TPU_TYPE:?}" "${WORKDIR:?}" "${CONFIG:?}"

run="python -m scalerl_jax.main --config=$CONFIG --workdir=$WORKDIR --ray=slice"
exec xpk workload create --project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" \
  --workload="$NAME" --tpu-type="$TPU_TYPE" --num-slices=1 --docker-image="$IMAGE" \
  --storage="$STORAGE" --max-restarts=50 --restart-on-exit-codes=75 \
  --termination-grace-period-seconds=60 \
  --command="python -m scalerl_jax.launch supervise --workdir=$WORKDIR -- $run" "$@"
