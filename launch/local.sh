#!/usr/bin/env bash
# A run on this machine as it would be in a cloud: a process in the machine's place, a
# directory in the bucket's, two preemptions on the way, and the fitted curve.
#
#   launch/local.sh [CONFIG [FLAGS OF THE RUN ...]]
#
# Makes:   runs/launch-NAME (the run) and runs/launch-NAME.machine (log, process).
# Costs:   nothing an hour but this machine's time.
# Stopped: python -m scalerl_jax.launch stop --place=local --bucket=runs --name=launch-NAME
set -euo pipefail

config="${1:-configs/tiny.py}"
shift || true
name="launch-$(basename "${config/.py/}" | tr '[:upper:]_.:' '[:lower:]-')"
python="${PYTHON:-python}"

if [[ "$config" == *fleet* ]]; then set -- --ray=local "$@"; fi
exec "$python" -m scalerl_jax.launch run --place=local --name="$name" --bucket=runs \
  --config="$config" --preemptions=2 -- "$@"
