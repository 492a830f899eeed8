#!/usr/bin/env bash
# Start the ranks of one node. Run it on every node, each with its own NODE_RANK:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=8 launch/torchrun.sh CONFIG [key=value ...]
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=8 launch/torchrun.sh CONFIG [key=value ...]
#
# CONFIG and the overrides are those of `threed train`, which this is, with the variables that torchrun's users know. (torchrun
# itself works, too: torchrun OPTIONS -m threed.cli train CONFIG.) PyTorchJob's variables are read as well. More: docs/cluster.md.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: [NAME=value ...] launch/torchrun.sh CONFIG [key=value ...]

  NNODES         number of nodes (1); or least:most, such as 2:4, to go on with those that are left after a failure
  NODE_RANK      which of them this is, 0 .. NNODES-1
  MASTER_ADDR    an address of node 0 that every node reaches
  MASTER_PORT    a free port on node 0 (29500)
  GPUS_PER_NODE  ranks on each node: one a GPU, or any number on CPUs (as many as there are GPUs)
  LOCAL_ADDR     this node's address for the others, where not the one on the way to MASTER_ADDR
  MAX_RESTARTS   how often all ranks are started again after a failure, from the newest complete checkpoint (0)
  OMP_NUM_THREADS  threads of a process (its part of the node's processors)
  PYTHON         the interpreter (the repository's .venv/bin/python, else python3)

How long nodes wait for each other is a key of the config: run.connect_timeout_s.
TEXT
}

case "${1:-}" in
  -h | --help)
    usage
    exit 0
    ;;
  "" | -* | *=*)
    echo "torchrun.sh: the first argument must be a config file" >&2
    usage >&2
    exit 2
    ;;
esac
config=$1
shift

restarts=${MAX_RESTARTS:-${PET_MAX_RESTARTS:-0}}
if [[ $restarts != "${PET_MAX_RESTARTS:-$restarts}" ]]; then
  echo "torchrun.sh: MAX_RESTARTS=$MAX_RESTARTS and PET_MAX_RESTARTS=$PET_MAX_RESTARTS contradict each other: unset one" >&2
  exit 2
fi
if [[ ! $restarts =~ ^[0-9]+$ ]]; then
  echo "torchrun.sh: MAX_RESTARTS must be a whole number, not '$restarts'" >&2
  exit 2
fi

if [[ -z ${PYTHON:-} ]]; then
  repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  PYTHON=python3
  if [[ -x $repo/.venv/bin/python ]]; then PYTHON=$repo/.venv/bin/python; fi
fi
if ! "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("threed") is None)'; then
  echo "torchrun.sh: threed is not installed for $PYTHON; run make install, or set PYTHON" >&2
  exit 2
fi

if [[ -z ${NNODES:-}${PET_NNODES:-}${WORLD_SIZE:-} ]]; then export NNODES=1; fi
exec "$PYTHON" -m threed train "$config" "run.restarts=$restarts" "$@"
