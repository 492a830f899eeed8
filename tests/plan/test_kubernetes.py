"""launch/kubernetes.yaml and launch/kubernetes-pytorchjob.yaml, and what their operators' schemas allow."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import yaml

from threed.comm.environment import torchrun_variables
from threed.config import load as configs

ROOT = Path(__file__).parents[2]

# The part of PyTorchJob's schema (kubeflow.org/v1, of training-operator 1.9) and of a pod's that we use.
# A dict: the keys that may be there; a set: the values; a list: what each item is. A key with * is required.
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
                 "PET_MASTER_ADDR": "threed-node-0-0.threed", "PET_MASTER_PORT": "29500"}
    assert torchrun_variables(variables) == variables


def starts_what_exists(container):
    """The command is a module of the image's Python, then comes a config, and no variable says what the
    operator says, or refuses."""
    python, option, module = container["command"]
    assert (python, option) == ("python", "-m") and find_spec(module) is not None
    config, *overrides = container["args"]
    assert (ROOT / config).is_file()
    configs.load(ROOT / config, overrides, 16)
    variables = {variable["name"] for variable in container["env"]}
    assert variables == {"MAX_RESTARTS"}
    image = (ROOT / "Containerfile").read_text()
    assert "WORKDIR /workspace/threed\n" in image and "PATH=/workspace/threed/.venv/bin:$PATH" in image
