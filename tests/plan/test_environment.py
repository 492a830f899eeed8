"""What the environment says of this process's place."""

from __future__ import annotations

import pytest

from threed.base.errors import InputError
from threed.comm.environment import RankPlace, place_of_environment, torchrun_variables
from threed.launcher.agents import run
from threed.launcher.attend import Attendant
from threed.torchrun import parse

POD = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "1"}


@pytest.mark.parametrize(("env", "place"), [
    ({}, None),
    ({"WORLD_SIZE": "1"}, None),
    ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, RankPlace(5, 1, 4, 8)),
    ({"NNODES": "1", "GPUS_PER_NODE": "4"}, None),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
      "SLURM_NTASKS_PER_NODE": "2",
      "MASTER_ADDR": "a"}, RankPlace(3, 1, 2, 4)),
    # SLURM_NTASKS_PER_NODE is the job's, and not the step's
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "11", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
      "SLURM_NODEID": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
      "MASTER_ADDR": "a"},
     RankPlace(9, 1, 3, 11)),
])
def test_places(env, place, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "to be put back")
    assert place_of_environment(env) == place


@pytest.mark.parametrize(("env", "given"), [
    ({}, {"NNODES": "1"}),
    ({"NNODES": "1", "GPUS_PER_NODE": "4"}, {"NNODES": "1", "NPROC_PER_NODE": "4"}),
    ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "GPUS_PER_NODE": "4", "MASTER_PORT": "7",
      "LOCAL_ADDR": "b", "MAX_RESTARTS": "2"},
     {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "NPROC_PER_NODE": "4", "MASTER_PORT": "7",
      "LOCAL_ADDR": "b", "MAX_RESTARTS": "2"}),
    ({"NNODES": "2:4", "NODE_RANK": "3", "MASTER_ADDR": "a"},
     {"NNODES": "2:4", "NODE_RANK": "3", "MASTER_ADDR": "a"}),
    # PyTorchJob: WORLD_SIZE is the number of all ranks since v1.7, of pods before; RANK is the pod's number
    ({**POD, "WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"},
     {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "8", "MASTER_ADDR": "job-master-0",
      "MASTER_PORT": "23456"}),
    ({**POD, "WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto"},
     {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}),
    ({**POD, "WORLD_SIZE": "2"},
     {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}),
    ({"PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "2"},
     {"NNODES": "1:3", "NPROC_PER_NODE": "2", "MASTER_ADDR": "job-worker-0", "MASTER_PORT": "23456"}),
])
def test_torchruns_variables(env, given):
    assert torchrun_variables(env) == {f"PET_{name}": value for name, value in given.items()}


@pytest.mark.parametrize(("env", "words"), [
    ({**POD, "WORLD_SIZE": "2", "NNODES": "1"}, "WORLD_SIZE=2 and NNODES=1 contradict"),
    ({"NNODES": "1", "PET_NNODES": "2"}, "NNODES=1 and PET_NNODES=2 in the environment contradict"),
    ({**POD, "WORLD_SIZE": "2", "PET_NODE_RANK": "0"},
     "PET_NODE_RANK=0 and RANK=1 in the environment contradict"),
    ({"MAX_RESTARTS": "1", "PET_MAX_RESTARTS": "2"}, "MAX_RESTARTS=1 and PET_MAX_RESTARTS=2 in the env"),
    ({"MAX_RESTARTS": "many"}, "MAX_RESTARTS=many in the environment must be a whole number"),
    ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK=2 must be below the number of nodes"),
    ({"NNODES": "4:2", "NODE_RANK": "0", "MASTER_ADDR": "a"}, "least:most"),
    ({"NNODES": "two"}, "NNODES=two in the environment must be a whole number"),
    ({"NNODES": "1", "GPUS_PER_NODE": "0"}, "at least one rank"),
    ({"NNODES": "2", "MASTER_PORT": "0"}, "MASTER_PORT=0 in the environment must be a port"),
    ({"NNODES": "2", "MASTER_PORT": "70000"}, "MASTER_PORT=70000 in the environment must be a port"),
])
def test_contradictions(env, words):
    """A pod must never train alone and end with status 0."""
    with pytest.raises(InputError, match=words):
        torchrun_variables(env)


@pytest.mark.parametrize(("env", "words"), [
    ({"LOCAL_RANK": "0"}, "not RANK and WORLD_SIZE"),
    ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK=x in the environment must be a whole number"),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "MASTER_ADDR must name the first node"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"},
     r"NNODES=2 is in the environment: .* launch/torchrun\.sh CONFIG"),
    ({"PET_NNODES": "1:2"}, "PET_NNODES=1:2 is in the environment"),
    ({**POD, "WORLD_SIZE": "2"}, "WORLD_SIZE=2 is in the environment: this process would train alone"),
])
def test_no_process_trains_alone_beside_others(env, words):
    with pytest.raises(InputError, match=words):
        place_of_environment(env)


@pytest.mark.parametrize(("argv", "words"), [
    (["--nnodes=2", "--node-rank=1"], "NNODES=2 needs MASTER_ADDR"),
    (["--nnodes=2", "--master-addr=127.0.0.1"], "NNODES=2 needs NODE_RANK, the number of this node: 0 to 1"),
    (["--nnodes=1:2", "--rdzv-backend=c10d"], "NNODES=1:2 needs MASTER_ADDR"),
    (["--nnodes=2", "--rdzv-backend=etcd"], "takes no --rdzv-backend=etcd: give static or c10d"),
    (["--nproc-per-node=some"], "--nproc-per-node=some .GPUS_PER_NODE. must be a number of ranks, or gpu"),
    (["--nproc-per-node=0"], "must be a number of ranks"),
    (["--start-method=forkserver"], "takes no --start-method=forkserver: it forks its ranks"),
    (["-m"], "takes no --module: it starts CONFIG"),
    (["--local-ranks-filter=x"], "torchrun refuses its options: .*local_ranks_filter"),
])
def test_what_torchrun_would_not_say(argv, words, monkeypatch, tmp_path):
    """Refused before anything waits. (torchrun takes 127.0.0.1 for an address, and 0 for a number, that are
    missing.)"""
    for name in ("PET_NNODES", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    size = [] if any("nproc" in word for word in argv) else ["--nproc-per-node=1"]
    with pytest.raises(InputError, match=words):
        run(parse([*size, *argv, "configs/toy.yaml", f"run.dir={tmp_path}", "parallel.dp=auto"]),
            Attendant.__new__(Attendant))


@pytest.mark.parametrize(("text", "host", "port"), [
    ("job-master-0:23456", "job-master-0", "23456"), ("[fd00::1]:29400", "fd00::1", "29400"),
    ("[fd00::1]", "fd00::1", None), ("fd00::1", "fd00::1", None), ("host", "host", None)])
def test_endpoints(text, host, port):
    given = torchrun_variables({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": text})
    assert (given["PET_MASTER_ADDR"], given.get("PET_MASTER_PORT")) == (host, port)


@pytest.mark.parametrize(("argv", "says"), [
    ([], "give a config file, or a script that trains"),
    (["--nproc-per-node=2"], "give a config file, or a script that trains"),
    (["--nproc-per-node=2", "parallel.tp=2"], "there is no config file before the override parallel.tp=2"),
    (["train", "configs/toy.yaml"], "without the word train"),
    (["--gpus", "2", "configs/toy.yaml"], "unrecognized arguments: --gpus; .* --help lists"),
    (["--max-restart=x", "configs/toy.yaml"], "invalid int value: 'x'; .* --help lists")])
def test_wrong_arguments_are_a_line(argv, says, capsys):
    """The reason, and not the list of torch's options before it."""
    with pytest.raises(InputError, match=says) as caught:
        run(parse(argv), Attendant.__new__(Attendant))
    assert "\n" not in str(caught.value) and not capsys.readouterr().err


@pytest.mark.parametrize("command", [["check"], ["show"]])
def test_an_override_in_place_of_a_config(command, monkeypatch, capsys):
    from threed.cli import main as cli

    monkeypatch.setattr("sys.argv", ["threed", *command, "parallel.tp=2"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == ("threed: there is no config file before the override parallel.tp=2: "
                                       "give one, as in CONFIG parallel.tp=2\n")
