"""What the environment says of this process's place, and the jobs that set it on Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from threed.agents import run
from threed.attend import Attendant
from threed.environment import Place, place_of_environment, torchrun_variables
from threed.errors import InputError
from threed.torchrun import parse

ROOT = Path(__file__).parents[2]
IN_IMAGE = "/workspace/threed"  # where the Containerfile puts the repository
POD = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "1"}


@pytest.mark.parametrize(("env", "place"), [
    ({}, None),
    ({"WORLD_SIZE": "1"}, None),
    ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Place(5, 1, 4, 8)),
    ({"NNODES": "1", "GPUS_PER_NODE": "4"}, None),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
      "SLURM_NTASKS_PER_NODE": "2",
      "MASTER_ADDR": "a"}, Place(3, 1, 2, 4)),
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


# The part of PyTorchJob's schema (kubeflow.org/v1) and of a pod's that the file uses. A dict: the keys that
# may be there; a set: the values; a list: what each item is. A key with * is required.
CONTAINER = {"*name": {"pytorch"}, "*image": str, "workingDir": str, "command": [str], "args": [str],
             "env": [{"*name": str, "*value": str}], "ports": [{"name": str, "*containerPort": int}],
             "resources": {"limits": {"nvidia.com/gpu": int}},
             "volumeMounts": [{"*name": str, "*mountPath": str}]}
VOLUME = {"*name": str, "persistentVolumeClaim": {"*claimName": str}, "emptyDir": {"medium": {"Memory"}}}
REPLICAS = {"replicas": int, "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
            "template": {"spec": {"terminationGracePeriodSeconds": int, "*containers": [CONTAINER],
                                  "volumes": [VOLUME]}}}
PYTORCHJOB = {"*apiVersion": {"kubeflow.org/v1"}, "*kind": {"PyTorchJob"}, "*metadata": {"*name": str},
              "*spec": {"nprocPerNode": str,
                        "runPolicy": {"cleanPodPolicy": {"None", "All", "Running"}, "backoffLimit": int},
                        "*pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS}}}
# The same of TrainJob (trainer.kubeflow.org/v1alpha1, of Kubeflow Trainer 2.3). What trains is the container
# `node` of the replicated job `node` of the runtime; its image, command and variables belong to `trainer`.
PATCHED = {"terminationGracePeriodSeconds": int, "volumes": [VOLUME],
       "containers": [{"*name": {"node"}, "volumeMounts": CONTAINER["volumeMounts"]}]}
JOBS = [{"*name": {"node"}, "template": {"spec": {"template": {"spec": PATCHED}}}}]
RUNTIME = {"apiGroup": {"trainer.kubeflow.org"}, "kind": {"ClusterTrainingRuntime"},
           "*name": {"torch-distributed"}}
TRAINJOB = {"*apiVersion": {"trainer.kubeflow.org/v1alpha1"}, "*kind": {"TrainJob"},
            "*metadata": {"*name": str},
            "*spec": {"*runtimeRef": RUNTIME,
                      "trainer": {**{key: CONTAINER[key] for key in ("command", "args", "env")}, "image": str,
                                  "numNodes": int, "numProcPerNode": int,
                                  "resourcesPerNode": CONTAINER["resources"]},
                      "runtimePatches": [{"*manager": str, "trainingRuntimeSpec": {
                          "template": {"spec": {"replicatedJobs": JOBS}}}}]}}


def problems(value, schema, where="") -> list[str]:
    if isinstance(schema, dict):
        known = {key.lstrip("*"): inner for key, inner in schema.items()}
        missing = [f"{where}.{key} is missing" for key in schema if key[0] == "*" and key[1:] not in value]
        return missing + [problem for key, inner in value.items() for problem in
                        (problems(inner, known[key], f"{where}.{key}") if key in known
                         else [f"{where}.{key} is not known"])]
    if isinstance(schema, list):
        return [problem for n, item in enumerate(value)
                for problem in problems(item, schema[0], f"{where}[{n}]")]
    fits = value in schema if isinstance(schema, set) else isinstance(value, schema)
    return [] if fits else [f"{where} is {value!r}"]


def test_pytorchjob():
    job = yaml.safe_load((ROOT / "launch" / "kubernetes-pytorchjob.yaml").read_text())
    assert problems(job, PYTORCHJOB) == []
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    for spec in replicas.values():
        starts_what_exists(spec["template"]["spec"]["containers"][0])
    assert problems({**job, "kind": "Job", "sepc": {}}, PYTORCHJOB) == [".kind is 'Job'",
                                                                        ".sepc is not known"]


def test_trainjob():
    job = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
    assert problems(job, TRAINJOB) == []
    trainer = job["spec"]["trainer"]
    starts_what_exists(trainer)
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    pod, = (part["template"]["spec"]["template"]["spec"] for patch in job["spec"]["runtimePatches"]
            for part in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"])
    assert ({mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
            == {volume["name"] for volume in pod["volumes"]})
    # What the operator sets in each pod is torchrun's.
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1",
                 "PET_MASTER_ADDR": "threed-node-0-0.threed", "PET_MASTER_PORT": "29400"}
    assert torchrun_variables(variables) == variables


def starts_what_exists(container):
    """The command is the launch script and a config, and no variable says what the operator says."""
    script, config = container["command"]
    assert (ROOT / script.removeprefix(f"{IN_IMAGE}/")).is_file() and (ROOT / config).is_file()
    variables = {variable["name"] for variable in container["env"]}
    assert not {"NNODES", "NODE_RANK", "MASTER_ADDR"} & variables
    assert f"WORKDIR {IN_IMAGE}\n" in (ROOT / "Containerfile").read_text()


@pytest.mark.parametrize(("text", "host", "port"), [
    ("job-master-0:23456", "job-master-0", "23456"), ("[fd00::1]:29400", "fd00::1", "29400"),
    ("[fd00::1]", "fd00::1", None), ("fd00::1", "fd00::1", None), ("host", "host", None)])
def test_endpoints(text, host, port):
    given = torchrun_variables({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": text})
    assert (given["PET_MASTER_ADDR"], given.get("PET_MASTER_PORT")) == (host, port)
