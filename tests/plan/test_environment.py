"""What the environment says of this process's place, and the job that sets it on Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from threed.environment import Nodes, Place, place_of_environment
from threed.errors import InputError

ROOT = Path(__file__).parents[2]
POD = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "1"}


@pytest.mark.parametrize(("env", "place"), [
    ({}, None),
    ({"WORLD_SIZE": "1"}, None),
    ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Place(5, 1, 4, 8)),
    ({"NNODES": "1", "GPUS_PER_NODE": "4"}, Nodes(1, 1, 0, 4, "127.0.0.1", 29500)),
    ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "GPUS_PER_NODE": "4", "MASTER_PORT": "7",
      "LOCAL_ADDR": "b"},
     Nodes(2, 2, 1, 4, "a", 7, "b")),
    ({"NNODES": "2:4", "NODE_RANK": "3", "MASTER_ADDR": "a"}, Nodes(2, 4, 3, None, "a", 29500)),
    # PyTorchJob: WORLD_SIZE is the number of all ranks since v1.7, of pods before; RANK is the pod's number
    ({**POD, "WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"},
     Nodes(2, 2, 1, 8, "job-master-0", 23456)),
    ({**POD, "WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto"},
     Nodes(2, 2, 1, None, "job-master-0", 23456)),
    ({**POD, "WORLD_SIZE": "2"}, Nodes(2, 2, 1, None, "job-master-0", 23456)),
    ({"PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "2"},
     Nodes(1, 3, None, 2, "job-worker-0", 23456)),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
      "SLURM_NTASKS_PER_NODE": "2",
      "MASTER_ADDR": "a"}, Place(3, 1, 2, 4)),
])
def test_places(env, place, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "to be put back")
    assert place_of_environment(env) == place


@pytest.mark.parametrize(("env", "words"), [
    ({**POD, "WORLD_SIZE": "2", "NNODES": "1"}, "WORLD_SIZE=2 and NNODES=1 contradict"),
    ({"NNODES": "1", "PET_NNODES": "2"}, "NNODES=1 and PET_NNODES=2 in the environment contradict"),
    ({**POD, "WORLD_SIZE": "2", "PET_NODE_RANK": "0"},
     "PET_NODE_RANK=0 and RANK=1 in the environment contradict"),
    ({"NNODES": "2", "NODE_RANK": "1"}, "NNODES=2 needs MASTER_ADDR"),
    ({"NNODES": "2", "MASTER_ADDR": "a"}, "NNODES=2 needs NODE_RANK"),
    ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK=2 must be below the number of nodes"),
    ({"NNODES": "4:2", "NODE_RANK": "0", "MASTER_ADDR": "a"}, "least:most"),
    ({"NNODES": "two"}, "NNODES=two in the environment must be a whole number"),
    ({"NNODES": "1", "GPUS_PER_NODE": "0"}, "at least one rank"),
    ({"LOCAL_RANK": "0"}, "not RANK and WORLD_SIZE"),
    ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK=x in the environment must be a whole number"),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "MASTER_ADDR must name the first node"),
])
def test_contradictions(env, words):
    """A pod must never train alone and end with status 0."""
    with pytest.raises(InputError, match=words):
        place_of_environment(env)


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
JOB = {"*apiVersion": {"kubeflow.org/v1"}, "*kind": {"PyTorchJob"}, "*metadata": {"*name": str},
       "*spec": {"nprocPerNode": str,
                 "runPolicy": {"cleanPodPolicy": {"None", "All", "Running"}, "backoffLimit": int},
                 "*pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS}}}


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


def test_kubernetes():
    job = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
    assert problems(job, JOB) == []
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    for spec in replicas.values():
        container = spec["template"]["spec"]["containers"][0]
        script, config = container["command"]
        assert (ROOT / script).is_file() and (ROOT / config).is_file()
        variables = {variable["name"] for variable in container["env"]}
        assert not {"NNODES", "NODE_RANK", "MASTER_ADDR"} & variables
    assert problems({**job, "kind": "Job", "sepc": {}}, JOB) == [".kind is 'Job'", ".sepc is not known"]


@pytest.mark.parametrize(("text", "host", "port"), [
    ("job-master-0:23456", "job-master-0", 23456), ("[fd00::1]:29400", "fd00::1", 29400),
    ("[fd00::1]", "fd00::1", 29500),
    ("fd00::1", "fd00::1", 29500), ("host", "host", 29500)])
def test_endpoints(text, host, port):
    nodes = place_of_environment({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": text})
    assert isinstance(nodes, Nodes) and (nodes.address, nodes.port) == (host, port)


@pytest.mark.parametrize("port", ["0", "70000"])
def test_ports(port):
    with pytest.raises(InputError, match=f"MASTER_PORT={port} in the environment must be a port"):
        place_of_environment({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host1", "MASTER_PORT": port})
