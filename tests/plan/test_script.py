"""Scripts of bash are read as bash reads them, and of their commands the one that trains counts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from threed.base.errors import InputError
from threed.interop import convert as subject
from threed.interop.launchers import ranks, split
from threed.interop.shell.opaque import hide, show
from threed.interop.shell.programs import output
from threed.interop.shell.walk import ScriptWalk

BASH = shutil.which("bash")
RUN = 'run() { printf "%s\\0" "$@"; printf "\\n\\0"; }\n'  # prints its words
# A line each: what only a parser and an interpreter get right.
SNIPPETS = r"""
run ${A:-x} "${B:-y z}" ${C:-a b} "${D-}" ${E-}
A="1 2"; run $A "$A" ${A} "${A}"x$A
A=(1 "2 3" 4); run ${A[@]} "${A[@]}" "${A[*]}" ${A[1]} "${A[1]}" ${#A[@]} ${A} "x${A[@]}y"
A=(); run "${A[@]}" end ${#A[@]}
A=(a b); A+=(c "d e"); B=("${A[@]}" f); run "${B[@]}" "${B[@]:1}" "${B[@]:1:2}" ${B[-1]}
A=abc; A+=def; run $A ${A:1} ${A:1:2} ${A%f} ${A#a} ${A/b/X} ${A//[bc]/} ${A^^} ${#A}
P=/a/b/c.tar.gz; run ${P##*/} ${P%/*} ${P%%.*} ${P%.gz} $(basename $P .gz) $(dirname $P)
X=4; run $((X*2)) $(( X + 3 * 2 )) $((X/3)) $((X%3)) $((2**X)) $((X>3?1:0)) $(( (X+1)*2 )) $[X+1]
((N=2*3)); let M=N+1; ((N++)); i=5; ((i+=2)); run $N $M $i
: "${L:=2}" ${M:=3}; run $L $M ${L:+yes}
run 'a b' "c \"d\" \$e" f\ g $'x\ty' --n='1'"2" a#b x"#y" # z
if [ 1 -eq 1 ]; then run a; else run b; fi; if false; then run n; fi; if ! false; then run z; fi
S=7B; if [[ $S == "7B" ]]; then L=32; elif [[ $S == 13B ]]; then L=40; else L=2; fi; run $L
S=13B; if [ "$S" = "7B" ]; then L=32; elif [ "$S" = "13B" ]; then L=40; else L=2; fi; run $L
S=x; case $S in a|b) L=1;; x*) L=2;; *) L=3;; esac; run $L
S=ab; [[ $S == a* ]] && run y || run n; [[ $S =~ ^a.$ ]] && run m; [ -z "" ] && run z
S=ab; [ -n "$S" -a 1 = 1 ] && run k; [[ -z $S || $S != q ]] && run o
[[ ! ( 1 -gt 2 ) && 3 -le 3 ]] && run y; ! [ 1 = 2 ] && run q; test 3 -gt 2 && run t
until [ 1 = 1 ]; do run n; done; x=3; while [ $x -lt 3 ]; do run n; done; run done
for i in 1 2; do run $i; done; for j in {4..5}; do run $j; done; for f in a "b c"; do run "$f"; done
f() { local x=$1; shift; run "$x" "$#" "$@" "${2:-none}"; }; f 1 2 "3 4"; function g { f g "$@"; }; g a
pick() { case $1 in a) echo 1;; *) echo "--l 2";; esac; }; A=$(pick b); run $(pick a) $A "$A"
A="--x 1 --y 'a b'"; eval run $A; eval "run $A"; run $A
declare -A H=([a]=1 [b]="2 3"); H[c]=4; k=a; run ${H[a]} "${H[b]}" ${H[c]} "${H[$k]}"
declare -a L=(--x 1); declare N=3; readonly R=4; export E=5 F="6 7"; run "${L[@]}" $N $R $E "$F"
N=8; run $(echo "$N * 2" | bc) $(expr $N / 2) `echo hi` $(printf "%03d" 7)
run $(echo A | tr "[:upper:]" "[:lower:]") $(echo ab | tr b c) $(seq 3 | cat) $(pwd >/dev/null; echo x)
N=X; X=5; run ${!N}; set -- p q r; run $1 "$@" $# ; shift; run $1 $*
run b 2>&1; run c 2> /dev/null; run e < /dev/null; A=1 run f; run g | cat; (run h); { run i; }
X=1; (X=2; run $X); run $X; B="a  b"; C=$B; run $B; run "$C"
OPTS=""; OPTS+=" --a 1"; OPTS+=" --b"; run $OPTS "${OPTS:-d}" "${U[@]:-d}"
run "${A:-$(echo d)}" ${B:-$((1+2))} "${C:-"q r"}" ${D:-${E:-5}}
A=1; V="${A} ${A} $A"; run $V "$V" "${A}  ${A}"
ARR=($(echo 1 2)); for i in "${!ARR[@]}"; do run $i; done; a="x=1"; run ${a#*=} ${a%%=*} "${a/=/: }"
read -r X Y Z <<< "p q  r s "; run "$X" "$Y" "$Z"; IFS=, read -ra A <<< "1,2,3"; run "${A[@]}" $A
read -ra A <<< "1 2"; run "${A[1]}"; IFS=: read X Y <<< a:b; run $X $Y; read <<< "m n"; run $REPLY
mapfile -t A < <(echo "1 2"; echo 3); run "${A[@]}"; run $(printf "a\n# b\nc\n" | grep -v "^#" | xargs)
printf -v B "%s-%d" x 3; run $B; read -r X <<< "p q"; run "$X"; python() { run "$@"; }; python -u x.py
""".strip().splitlines()
TEXTS = [
    "run a \\\n  b \\\n  c # d\nrun e",
    "A=(\n --x 1 # c \\\n # --y 2 \\\n --z 3\n)\nrun \"${A[@]}\"",
    "run --a 1 \\\n  # c \\\nrun --b 2",
    "run --a 1 `# c` \\\n  `# d ` --b 2",
    "A=\" \\\n  --a 1 \\\n\"\nA=\"${A} \\\n  --b 2 \\\n  $A\"\nrun $A",
    "read -r -d '' V <<EOF || true\n a $((1+1))\n b\nEOF\nrun $V",
    "A=$(cat <<EOF\n--x 1\nEOF\n)\nB=$(cat <<'EOF'\n$Q\nEOF\n)\nrun $A \"$B\"",
    "run 'two\nlines' \"two\nlines\"",
    "S=8\nrun $(sed 's/S/8/' <<< 'S-S') $(echo x | sed -e \"s/x/$S/g\")",
]


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_words_are_those_of_bash():
    """Each command gets the words that bash gives it."""
    for text in [*SNIPPETS, *TEXTS]:
        done = subprocess.run([str(BASH), "-c", RUN + text], capture_output=True, text=True, check=False)
        expected = [words.split("\0")[:-1] for words in done.stdout.split("\n\0") if words]
        walk = ScriptWalk()
        walk.script(text)
        assert [command.words[1:] for command in walk.commands] == expected, text
        assert not walk.notes, text


@pytest.mark.parametrize("code, printed", [
    ("1e-3/10", "0.0001"), ("int(10*0.35)", "3"), ("7//2 + 4/2", "5.0"), ("max(1, 8//3) * (3+1)", "8"),
    ("-7//2", "-4")])
def test_sums_of_python_are_not_those_of_bash(code, printed):
    """A quotient is no whole number: a learning rate / 10 is not 0."""
    assert output(["python3", "-c", f"print({code})"], None, lambda _: None) == f"{printed}\n"


TINY = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 512 --lr 1e-3 "
        "--train-iters 10")
VALUES = {"model.layers": 2, "model.hidden": 64, "model.heads": 4, "model.seq_len": 32, "optimizer.lr": 1e-3,
          "train.steps": 10}


def convert(tmp_path: Path, text: str, *overrides: str, **files: str) -> subject.Converted:
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_text(content)
    (tmp_path / "train.sh").write_text(text)
    return subject.megatron(str(tmp_path / "train.sh"), list(overrides))


def check(done: subject.Converted, **others: object) -> None:
    expected = {**VALUES, **{key.replace("__", "."): value for key, value in others.items()}}
    assert {key: done.values.get(key) for key in expected} == expected
    assert not done.missing


@pytest.mark.parametrize("text, others", [
    (f"A=(\n {TINY}\n # --swiglu \\\n --bf16\n)\ntorchrun --nproc_per_node 4 pretrain_gpt.py ${{A[@]}}",
     {"precision__dtype": "bf16", "parallel__dp": 4, "model__activation": None}),
    (f"python mix.py --split valid --out v.txt\ntorchrun --nproc_per_node 4 pretrain_gpt.py {TINY}\n"
     "python evaluate.py --seq-length 64 --micro-batch-size 2\nrsync -a --exclude-from=.x a/ b/",
     {"parallel__dp": 4, "train__micro_batch_size": None}),
    (f"deepspeed --num_gpus=8 --num_nodes 2 --hostfile h pretrain_gpt.py {TINY} --zero-stage 2 &>> x.log",
     {"parallel__dp": 16, "zero__stage": 2}),
    (f"CMD=\"pretrain_gpt.py {TINY}\"\necho $CMD\nsrun -N 2 --ntasks-per-node=8 bash -c \"python $CMD | tee "
     "l\"", {"parallel__dp": 16}),
    ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8\nsrun bash -c 'torchrun --nproc_per_node "
     f"$SLURM_GPUS_ON_NODE --nnodes $SLURM_NNODES pretrain_gpt.py {TINY}'", {"parallel__dp": 32}),
    ("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\nsrun python pretrain_gpt.py " + TINY,
     {"parallel__dp": 32}),
    (f"#SBATCH -N 4\nsrun --ntasks-per-node=8 python t.py {TINY}", {"parallel__dp": 32}),
    (f"#SBATCH -n 16\nsrun python t.py {TINY}", {"parallel__dp": 16}),
    (f"cat > job.sh <<EOF\ntorchrun --nproc_per_node 8 pretrain_gpt.py {TINY}\nEOF\nsbatch -p x job.sh",
     {"parallel__dp": 8}),
    (f"go() {{ mpirun -np 6 --bind-to none python pretrain_gpt.py \"$@\"; }}\ngo {TINY}",
     {"parallel__dp": 6}),
    ("LR=1e-3\nwhile [[ $# -gt 0 ]]; do case $1 in --lr) LR=$2; shift 2;; esac; done\nif [ -n \"$1\" ]; then "
     f"LR=$1; fi\npython -m torch.distributed.run --nproc-per-node=2 t.py {TINY} --lr $LR",
     {"parallel__dp": 2}),
    (f"source ./env.sh\naccelerate launch --num_processes 3 pretrain_gpt.py {TINY} $MORE",
     {"parallel__dp": 3, "optimizer__weight_decay": 0.2}),
    (f"torchrun --nproc_per_node 4 $SCRIPT {TINY} \"--adam-beta2 0.98\"", {"optimizer__betas": [0.9, 0.98]}),
    (f"MODEL_ARGS=\" {TINY}\"\n", {}),
    (f"MODEL_ARGS=( {TINY} )\nexport MODEL_ARGS", {}),
    (f"main() {{\n  torchrun --nproc_per_node 2 pretrain_gpt.py {TINY}\n}}\n\"$@\"", {"parallel__dp": 2}),
    (TINY.replace(" --", "\n--") + "\n# --lr 5\n", {}),
    (f"torchrun pretrain_gpt.py {TINY}\r\n", {}),
])
def test_the_command_that_trains(text, others, tmp_path):
    """Options of other programs, of comments and of launchers that are taken for the trainer's; options that
    are lost on the way through variables, functions and files."""
    check(convert(tmp_path, text, env__sh="MORE='--weight-decay 0.2'"), **others)


@pytest.mark.parametrize("text, notes", [
    (f"torchrun pretrain_gpt.py {TINY} --swiglu $EXTRA --bf16 $@", [
        "what $EXTRA holds is not known: options in it are left out",
        "what $@ holds is not known: options in it are left out"]),
    (f"torchrun pretrain_gpt.py {TINY} \\\n  # a remark \\\n  --clip-grad 0.7", [
        "line 3: --clip-grad 0.7 begins a command of its own"]),
    (f"MORE='--clip-grad 3'\ntorchrun pretrain_gpt.py {TINY}", [
        "no command uses $MORE: --clip-grad in it are left out"]),
    (f"if [ -n \"$X\" ]; then A=--bf16; fi\ntorchrun pretrain_gpt.py {TINY} $A", [
        'line 1: whether [ -n "$X" ] holds is not known']),
    (f"python pretrain_gpt.py {TINY}\npython pretrain_gpt.py {TINY} --finetune --lr 9", [
        "2 commands train: line 1 (pretrain_gpt.py) is converted, and not line 2 (pretrain_gpt.py), which "
        "differ in --lr, --finetune"]),
    (f"for LR in 1e-3 5e-4; do\n sbatch --wrap \"srun python pretrain_gpt.py {TINY} --lr $LR\"\ndone", [
        "2 commands train: line 2 (pretrain_gpt.py) is converted", "which differ in --lr;"]),
    (f"source nowhere.sh\npython pretrain_gpt.py {TINY}", ["line 1: nowhere.sh is not there"]),
    (f"C= (e.g., /a)\npython pretrain_gpt.py {TINY}", ["line 1 cannot be read as bash"]),
])
def test_what_is_left_out_is_said(text, notes, tmp_path):
    done = convert(tmp_path, text)
    check(done)
    for note in notes:
        assert any(note in each for each in done.notes), done.notes


def test_what_is_not_found_is_said(tmp_path):
    """A config that looks whole, and trains by threed's rate for threed's steps."""
    done = convert(tmp_path, "python pretrain_gpt.py --num-layers 2 --lr $LR --seq-length 64")
    assert done.missing == ["optimizer.lr", "train.steps"]
    assert "# NOT FOUND in it, so the default counts: optimizer.lr 0.0003, train.steps 100" in (
        subject.show(done))
    assert done.refused["--lr"] == "its value, $LR, comes from outside the script"
    assert subject.document(done)["not_found"] == done.missing
    assert "--lr" not in convert(tmp_path, "python pretrain_gpt.py --num-layers 2 --lr $LR --seq-length 64",
                                 "optimizer.lr=1e-4").refused


def test_ranks_that_are_not_known_give_no_dp(tmp_path):
    done = convert(tmp_path, f"torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py {TINY}")
    assert "parallel.dp" not in done.values and "$NODES" in done.refused["--nnodes"]


@pytest.mark.parametrize("words, program", [
    ("torchrun --nproc_per_node 2 pretrain_gpt.py --lr 1", "pretrain_gpt.py"),
    ("python -m torch.distributed.launch --nnodes 2 a/train.py --lr 1", "a/train.py"),
    ("python -u -m megatron.train --lr 1", "megatron.train"),
    ("python launch.py --n 2 pretrain_gpt.py --config x.py", "pretrain_gpt.py")])
def test_split(words, program):
    assert split(words.split())[1] == program


@pytest.mark.parametrize("words, expected", [
    ("deepspeed --include localhost:0,1,2", {"num_gpus": 3}),
    ("deepspeed --include=a:0,1@b:0,1", {"num_gpus": 4}), ("srun -n 6 python", {"num_processes": 6}),
    ("srun -N2 --ntasks-per-node 4 python", {"nproc_per_node": 4, "nnodes": 2}), ("python", {}),
    ("torchrun --nproc_per_node auto", {}), ("torchrun --nnodes 1:4 --nproc_per_node=8", {})])
def test_ranks(words, expected):
    assert ranks(words.split())[0] == expected


def test_opaque_texts_are_shown_as_they_were():
    assert show("a" + hide("$(git log | head -n 1)")) == "a$(git log | head -n 1)"


DS = ('{"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8, "gradient_clipping": 0.3,\n'
      ' "zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 0, '
      '"initial_scale_power": 12}}')
DEEPSPEED = f"deepspeed pretrain_gpt.py {TINY} --fp16 --deepspeed --deepspeed_config "


@pytest.mark.parametrize("before, name", [
    (f"CONFIG=ds.json\ncat <<EOT > $CONFIG\n{DS}\nEOT\n", "$CONFIG"),
    ("", "beside.json"), (f"echo '{DS}' > ds.json\n", "ds.json"),
    ("sed 's/CLIP/0.3/' template.json | sed -e \"s/STAGE/2/\" > ds.json\n", "ds.json")])
def test_the_file_of_deepspeed_counts(before, name, tmp_path):
    """DeepSpeed shards, clips and scales by its file; the options alone say something else."""
    template = DS.replace("0.3", "CLIP").replace('"stage": 2', '"stage": STAGE')
    done = convert(tmp_path, before + DEEPSPEED + name, beside__json=DS, template__json=template)
    check(done, zero__stage=2, optimizer__clip_grad=0.3, precision__loss_scale="dynamic",
          precision__initial_loss_scale=4096.0, train__global_batch_size=8)
    assert done.config.zero.stage == 2 and "--deepspeed-config" in done.dropped


def test_contradictions_of_deepspeeds_file_are_said(tmp_path):
    done = convert(tmp_path, DEEPSPEED + "ds.json --loss-scale 12 --clip-grad 5 --zero-stage 1 --lr 1e-3",
                   ds__json=DS[:-1] + ', "optimizer": {"type": "Adam", "params": {"lr": 4}}, "amp": '
                                      '{"enabled": true}}')
    text = "\n".join(done.notes)
    for key, ours, theirs in (("precision.loss_scale", 12, "dynamic"), ("optimizer.clip_grad", 5, 0.3),
                              ("zero.stage", 1, 2), ("optimizer.lr", 0.001, 4)):
        assert f"{key} is {ours} by the options and {theirs} by ds.json" in text
    assert done.values["optimizer.lr"] == 1e-3 and done.values["optimizer.clip_grad"] == 0.3
    assert "apex" in done.refused["ds.json: amp"]


def test_a_file_of_deepspeed_that_is_not_there(tmp_path):
    done = convert(tmp_path, DEEPSPEED + "gone.json")
    assert "threed convert gone.json" in done.refused["--deepspeed-config"]
    assert "$F" in convert(tmp_path, DEEPSPEED + "$F").refused["--deepspeed-config"]
    done = convert(tmp_path, f"python t.py {TINY} --deepspeed_config gone.json")
    assert "without --deepspeed it is not read" in done.dropped["--deepspeed-config"]
    with pytest.raises(InputError, match=r"ds\.json is not JSON"):
        convert(tmp_path, DEEPSPEED + "ds.json", ds__json="{")
    text = f"cat > ds.json <<EOF\n{DS.replace('0.3', '$CLIP')}\nEOF\n"
    done = convert(tmp_path, f"{text}{DEEPSPEED}ds.json")
    assert "$CLIP" in done.refused["ds.json: gradient_clipping"]
