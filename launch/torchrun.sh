#!/usr/bin/env bash
# Start the ranks of one node. Run it on every node, each with its own NODE_RANK:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=8 launch/torchrun.sh CONFIG [key=value ...]
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=8 launch/torchrun.sh CONFIG [key=value ...]
#
# This is python -m threed.torchrun, which is torchrun with requests to stop passed on to the ranks: its options (before CONFIG) and
# its PET_* variables work, too. It adds an interpreter that has threed. More: docs/cluster.md.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: [NAME=value ...] launch/torchrun.sh [OPTION ...] CONFIG [key=value ...]

  NNODES         number of nodes (1); or least:most, such as 2:4, to go on with those that are left after a failure
  NODE_RANK      which of them this is, 0 .. NNODES-1
  MASTER_ADDR    an address of node 0 that every node reaches
  MASTER_PORT    a free port on node 0 (29500)
  GPUS_PER_NODE  ranks on each node: one a GPU, or any number on CPUs (as many as there are GPUs)
  LOCAL_ADDR     this node's address for the others, where not the one on the way to MASTER_ADDR
  MAX_RESTARTS   how often all ranks are started again after a failure, from the newest complete checkpoint (run.restarts)
  OMP_NUM_THREADS  threads of a process (its part of the node's processors)
  PYTHON         the interpreter (the repository's .venv/bin/python, else python3)

How long nodes wait for each other is a key of the config: run.connect_timeout_s. OPTIONs are torchrun's; the same
variables with PET_ before torchrun's names (PET_NNODES ...) say the same.
TEXT
}

case "${1:-}" in
  -h | --help)
    usage
    exit 0
    ;;
  "" | *=*)
    echo "torchrun.sh: give a config file" >&2
    usage >&2
    exit 2
    ;;
esac

if [[ -z ${PYTHON:-} ]]; then
  repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  PYTHON=python3
  if [[ -x $repo/.venv/bin/python ]]; then PYTHON=$repo/.venv/bin/python; fi
fi
if ! "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("threed") is None)'; then
  echo "torchrun.sh: threed is not installed for $PYTHON; run make install, or set PYTHON" >&2
  exit 2
fi
exec "$PYTHON" -m threed.torchrun "$@"
