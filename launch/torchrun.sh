#!/usr/bin/env bash
# Start the ranks of one node under torchrun. Run it on every node, each with its own NODE_RANK:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=8 launch/torchrun.sh CONFIG [key=value ...]
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=8 launch/torchrun.sh CONFIG [key=value ...]
#
# CONFIG and the overrides are those of `threed train`.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: [NAME=value ...] launch/torchrun.sh CONFIG [key=value ...]

  NNODES         number of nodes (1)
  NODE_RANK      which of them this is, 0 .. NNODES-1 (0)
  MASTER_ADDR    an address of node 0 that every node reaches (127.0.0.1)
  MASTER_PORT    a free port on node 0 (29500; a run on one node takes any free port unless this is set)
  GPUS_PER_NODE  processes on each node: one a GPU, or one a rank on CPUs (8)
  LOCAL_ADDR     this node's own address, where its host name does not resolve
  MAX_RESTARTS   how often torchrun starts all ranks again after a failure; they resume
                 from the newest complete checkpoint (0)
  OMP_NUM_THREADS  threads of a process (its part of the node's processors)
  PYTHON         the interpreter (the repository's .venv/bin/python, else python3)
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
if [[ ! -f $1 ]]; then
  echo "torchrun.sh: no such config file: $1 (looked from $PWD)" >&2
  exit 2
fi

NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MAX_RESTARTS=${MAX_RESTARTS:-0}
for name in NNODES NODE_RANK GPUS_PER_NODE MAX_RESTARTS; do
  if [[ ! ${!name} =~ ^[0-9]+$ ]]; then
    echo "torchrun.sh: $name must be a whole number, not '${!name}'" >&2
    exit 2
  fi
done
if ((NODE_RANK >= NNODES)); then
  echo "torchrun.sh: NODE_RANK=$NODE_RANK must be below NNODES=$NNODES" >&2
  exit 2
fi
if ((NNODES > 1)) && [[ -z ${MASTER_ADDR:-} ]]; then
  echo "torchrun.sh: NNODES=$NNODES needs MASTER_ADDR, an address of node 0" >&2
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

options=(--nnodes="$NNODES" --nproc-per-node="$GPUS_PER_NODE" --max-restarts="$MAX_RESTARTS")
address=${MASTER_ADDR:-127.0.0.1}
port=${MASTER_PORT:-29500}
if ((NNODES == 1)) && [[ -z ${MASTER_PORT:-} ]]; then
  options+=(--standalone)
  LOCAL_ADDR=${LOCAL_ADDR:-127.0.0.1} # one node talks to itself: do not depend on its host name
elif ((MAX_RESTARTS == 0)); then
  # Static rendezvous: node 0 is where MASTER_ADDR says, whatever the nodes think their names are.
  options+=(--node-rank="$NODE_RANK" --master-addr="$address" --master-port="$port")
else
  # Static rendezvous hands the first start's store to a restart as well, which then fails: the c10d one makes a new round.
  # It numbers the nodes by itself, and they find each other by host name, or by LOCAL_ADDR.
  is_host=false
  if ((NODE_RANK == 0)); then is_host=true; fi
  options+=(--rdzv-backend=c10d --rdzv-id="threed-$port" --rdzv-endpoint="$address:$port" --rdzv-conf="is_host=$is_host")
fi
if [[ -n ${LOCAL_ADDR:-} ]]; then options+=(--local-addr="$LOCAL_ADDR"); fi

if ((MAX_RESTARTS > 0)); then
  # Without this, restarted gloo ranks read the addresses of the dead ones from the agent's store, and hang.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
fi
# A rank's part of the node's processors, as `threed train` alone gives it: an offloaded optimizer steps on them.
threads=$(($(getconf _NPROCESSORS_ONLN) / GPUS_PER_NODE))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}
# SIGTERM asks the ranks to save a checkpoint and end: leave them time before torchrun kills them (its default is 30 s).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}
# SIGUSR1 asks them to save and go on. Sent to the whole job, it must not end torchrun; the ranks set their own handler.
trap '' USR1

exec "$PYTHON" -m torch.distributed.run "${options[@]}" -m threed train "$@"
