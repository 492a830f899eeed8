#!/usr/bin/env bash
# The first ten minutes on a GPU: facts about the machine, short training runs, tests, the speed of models.
#
#   bench/gpu/first_call.sh [--seconds N] [--whole | --small] [PART...]
#
#   --seconds N   all is over by then (default: 590; with --whole 3600). A part that would have too little
#                 time is left out.
#   --whole       all tests of tests/gpu, all models and all settings of bench/gpu/models.py (what `make gpu` does)
#   --small       tiny models and few tests, to try this script; so it is without a GPU
#   PART...       these parts alone, of: wheels facts plain resume fused documents graphs offload verified own
#                 all_gpus losses tests calibrate offloaded bench
#
# It needs one GPU, Python 3.11 or newer with a CUDA build of torch, and either an installed checkout (PYTHON
# names its Python), or, on a bare machine with torch, numpy, fsspec, jinja2, psutil, pytest, pyyaml, rich,
# safetensors, tokenizers, triton and typer, the rest as wheels in the folder .whl:
#
#   pip download --no-deps --only-binary :all: -d .whl \
#     megatron-core==0.19.2 omegaconf==2.4.0 allpairspy==2.5.1
#
# (for another version of Python or another platform: --python-version, --platform and --implementation cp).
# wandb, hjson and plotly are not needed here. Nothing is fetched.
#
# What it finds is in $OUT (default: build/first_call), written as it comes, so that whoever is killed leaves
# what there was: summary.md (a row a part), log.txt (all output), hardware.yaml (of `threed calibrate`),
# offload.md (one model with and without offload), gpu.md and gpu.json (the models). No part ends the others. The exit status is 1 if a part failed. A part that is left
# out has not failed.
set -uo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
parts=(wheels facts plain resume fused documents graphs offload verified own all_gpus losses tests calibrate
  offloaded bench)
seconds="" whole="" small="" chosen=()
while (($#)); do
  case $1 in
    --seconds)
      seconds=${2-}
      [[ $seconds =~ ^[0-9]+$ ]] || { echo "--seconds wants a number of seconds" >&2; exit 2; }
      shift
      ;;
    --whole) whole=1 ;;
    --small) small=1 ;;
    -h | --help) usage; exit ;;
    -*) echo "there is no option $1; see $0 --help" >&2; exit 2 ;;
    *)
      [[ " ${parts[*]} " == *" $1 "* ]] || { echo "there is no part $1; there are ${parts[*]}" >&2; exit 2; }
      chosen+=("$1")
      ;;
  esac
  shift
done
seconds=${seconds:-$([[ $whole ]] && echo 3600 || echo 590)}

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
python=${PYTHON:-python3} out=${OUT:-build/first_call}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit
scratch=$(mktemp -d "${TMPDIR:-/tmp}/first-call-XXXXXX") || exit
child=""
trap 'rm -rf "$scratch"' EXIT
trap '[[ ! $child ]] || kill "$child"; exit 130' INT TERM HUP  # timeout passes it on to its part
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 WANDB_MODE=disabled
rm -f "$out"/{gpu.md,gpu.json,hardware.yaml,offload.md}
: >"$out/log.txt"
printf '# First call\n\n`%s`, %s, %s\n\n| part | status | seconds | says |\n|---|---:|---:|---|\n' \
  "bench/gpu/first_call.sh" "$(date +%F)" "$(uname -sr)" >"$out/summary.md"
failed=0

row() {  # name, status, seconds, text: in the summary, and on the console
  printf '%5s s  %-10s %-8s %4s s  %s\n' "$SECONDS" "$1" "$2" "$3" "${4:0:180}"
  printf '| %s | %s | %s | %s |\n' "$1" "$2" "$3" "${4//|/\\|}" >>"$out/summary.md"
}

wanted() {  # name
  ((${#chosen[@]} == 0)) || [[ " ${chosen[*]} " == *" $1 "* ]]
}

part() {  # name, most seconds, least seconds, pattern of the line that tells most, command
  local name=$1 most=$2 least=$3 pattern=$4 left=$((seconds - SECONDS)) begin=$SECONDS status=0 from text
  shift 4
  wanted "$name" || return 0
  if ((left < least + 5)); then
    row "$name" "left out" 0 "$left s are left, and it wants $least"
    return 0
  fi
  ((most < left - 5)) || most=$((left - 5))
  printf '\n#### %s, at %s s, for %s s at most: %s\n' "$name" "$SECONDS" "$most" "$*" >>"$out/log.txt"
  from=$(wc -c <"$out/log.txt")
  # Into a file: what outlives its part cannot hold up this script, as a reader of its pipe would be.
  timeout -k 3 "$most" "$@" >>"$out/log.txt" 2>&1 </dev/null &
  child=$!
  wait "$child" || status=$?
  child=""
  text=$(tail -c "+$((from + 1))" "$out/log.txt" | tr -d '\0\r' | grep -v '^[[:space:]]*$')
  ((status == 0)) || failed=1 pattern="[Ee]rror|FAIL|Killed|$pattern"
  text=$(grep -E "$pattern" <<<"$text" || tail -n 1 <<<"$text")
  text=$(tail -n 1 <<<"$text" | cut -c 1-300)
  ((status != 124 && status != 137)) || text="stopped after $most s: $text"
  row "$name" "$status" $((SECONDS - begin)) "$text"
  return "$status"
}

# ---- what there is

wheels=(.whl/*.whl)
if [[ -e ${wheels[0]} ]]; then
  part wheels 60 5 . "$python" -m pip install -q --no-index --no-deps --no-cache-dir \
    --disable-pip-version-check --target "$scratch/site" "${wheels[@]}"
  export PYTHONPATH=$scratch/site:$PYTHONPATH
fi
gpus=$(timeout 60 "$python" -c 'import torch; print(torch.cuda.device_count())' 2>>"$out/log.txt" </dev/null)
[[ $gpus != 0 ]] || small=1
part facts 110 10 'facts, ' "$python" -m bench.gpu.facts ${small:+--small}
grep -E '^[a-z_0-9]+: .* \[[0-9.]+ s\]$' "$out/log.txt" | cut -c 1-300

# ---- training: the launcher's fork, checkpoints and a resume, then what a run can be asked for

steps=30 every=10 size=(model.hidden=512)
[[ $small ]] && steps=6 every=2 size=(model.hidden=64 model.layers=2 model.heads=4 train.global_batch_size=8)
run() {  # name, most seconds, config, settings
  local name=$1 most=$2 config=$3
  shift 3
  part "$name" "$most" 20 '^step ' "$python" -m threed train "$config" parallel.dp=1 parallel.pp=1 \
    "train.steps=$steps" run.device=auto monitor.wandb=disabled run.restarts=0 run.timeout_s=60 \
    "run.dir=$scratch/$name" "$@"
}
toy() {  # name, most seconds, settings
  local name=$1 most=$2
  shift 2
  run "$name" "$most" configs/toy.yaml parallel.tp=1 precision.dtype=bf16 model.family=llama \
    model.position=rotary model.activation=swiglu model.norm=rmsnorm model.bias=false model.fused=off \
    optimizer.schedule=constant "${size[@]}" "$@"
}
toy plain 90 "checkpoint.every=$every" "train.eval_every=$every"
if compgen -G "$scratch/plain/checkpoints/step-*" >/dev/null; then
  part resume 60 20 '^resumed' "$python" -m threed train "$scratch/plain" "train.steps=$((steps + 5))"
elif wanted resume; then
  row resume "left out" 0 "plain has saved no checkpoint"
fi
toy fused 90 model.fused=on
toy documents 60 data.document_mask=true data.packing=best-fit
if [[ $gpus != 0 ]]; then
  toy graphs 60 run.cuda_graphs=true "checkpoint.every=$every"
elif wanted graphs; then
  row graphs "left out" 0 "there is no GPU"
fi
toy offload 60 zero.stage=2 offload.optimizer=cpu
toy verified 60 zero.stage=2 offload.optimizer=cpu run.verify_every=2 train.steps=4
run own 60 examples/vit.yaml
[[ ${gpus:-0} -lt 2 ]] || toy all_gpus 90 parallel.dp=auto zero.stage=2
others=()
for name in fused graphs offload verified all_gpus; do
  [[ ! -e $scratch/$name/metrics.jsonl ]] || others+=("$scratch/$name")
done
if [[ -e $scratch/plain/metrics.jsonl ]] && ((${#others[@]})); then
  part losses 20 5 . "$python" -m bench.gpu.losses "$scratch/plain" "${others[@]}"
elif wanted losses; then
  row losses "left out" 0 "there are no two runs to compare"
fi

# ---- tests, and models beside torch's

left=$((seconds - SECONDS))
tests=(tests/gpu/test_{feed,attention,clock,lanes,contract}.py)
models=(--models 1.3B-2k 2.7B-4k 125M-2k --steps 4)
most=$((left > 410 ? left - 360 : 60))
[[ $small ]] && tests=(tests/gpu/test_feed.py) most=60 &&
  models=(--models tiny --settings loss_chunk --steps 2 --small)
[[ $whole ]] && tests=(tests/gpu) models=(${small:+--small}) most=1800
part tests "$most" 20 '(passed|skipped|failed)' "$python" -m pytest -m gpu -rs -p no:cacheprovider \
  --durations=5 "${tests[@]}"
hardware=()
[[ $small ]] || part calibrate 120 40 '^wrote' "$python" -m threed calibrate -o "$out/hardware.yaml" &&
  [[ -e $out/hardware.yaml ]] && hardware=(--hardware "$out/hardware.yaml")
most=$(($([[ $whole ]] && echo 240 || echo 150)))
((most < seconds - SECONDS - 10)) || most=$((seconds - SECONDS - 10))
part offloaded "$most" 40 '^ *[0-9]+ s  .*tokens/s' "$python" -m bench.gpu.offload ${small:+--quick} \
  "${hardware[@]}" --seconds "$((most - 5))" --markdown "$out/offload.md"
part bench "$((seconds - SECONDS))" 30 '^measured: ' "$python" -m bench.gpu.models "${models[@]}" "${hardware[@]}" \
  --seconds "$((seconds - SECONDS - 10))" --markdown "$out/gpu.md" --json "$out/gpu.json"

for tables in "$out"/{offload,gpu}.md; do
  [[ ! -e $tables ]] || { echo; cat "$tables"; }
done
echo; cat "$out/summary.md"
exit "$failed"
