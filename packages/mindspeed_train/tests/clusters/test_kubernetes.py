"""The manifests for Kubernetes: known fields, flags that exist, and names that lead to each other."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_fields import problems
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

from mindspeed_core.activation import prepare
from mindspeed_megatron.launch.environment import Job, current_job

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "clusters" / "kubernetes"
JOB_SETS = ("cuda", "npu", "cpu")
DEVICE = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910", "cpu": None}
LABELS = {"jobset.sigs.k8s.io/jobset-uid": "a1-b2", "jobset.sigs.k8s.io/restart-attempt": "2"}
"""Set by the operator: the job, and how often it was started again."""


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return job_of(manifest)["template"]["spec"]


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod_of(manifest)["containers"]
    return container


def launch_of(manifest: dict[str, Any], index: int = 0):
    """The arguments of torchrun in the pod with an index, as Kubernetes completes them."""
    arguments = [
        text.replace("$(JOB_COMPLETION_INDEX)", str(index)) for text in container_of(manifest)["args"]
    ]
    assert not [text for text in arguments if "$(" in text]
    return get_args_parser().parse_args(arguments)


def variables_of(manifest: dict[str, Any]) -> dict[str, str]:
    """The environment of the container in a pod with `LABELS`."""
    found = {}
    for entry in container_of(manifest)["env"]:
        if "value" in entry:
            found[entry["name"]] = entry["value"]
        else:
            (label,) = re.findall(
                r"^metadata\.labels\['(.+)'\]$", entry["valueFrom"]["fieldRef"]["fieldPath"]
            )
            found[entry["name"]] = LABELS[label]
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_field_of_a_manifest_is_known(path):
    assert [
        problem for manifest in yaml.safe_load_all(path.read_text()) for problem in problems(manifest)
    ] == []


def test_a_misspelt_field_a_wrong_type_and_a_missing_name_are_found():
    manifest = copy.deepcopy(read("cuda"))
    pod_of(manifest)["terminationGracePeriod"] = 600
    job_of(manifest)["backoffLimit"] = "0"
    del container_of(manifest)["name"]
    assert [problem.rpartition(".")[2].partition(":")[0] for problem in problems(manifest)] == [
        "backoffLimit",
        "name",
        "terminationGracePeriod",
    ]


@pytest.mark.parametrize("name", JOB_SETS)
def test_the_flags_of_a_manifest_are_valid_in_its_world(name, monkeypatch):
    manifest = read(name)
    launch = launch_of(manifest)
    assert (launch.module, launch.training_script) == (True, "mindspeed_core.train")
    world = int(launch.nnodes) * int(launch.nproc_per_node)
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": launch.nproc_per_node,
    }
    for variable, value in ranks.items():
        monkeypatch.setenv(variable, value)
    flags = launch.training_script_args
    assert f"--platform={name}" in flags
    # Neither the devices of the cluster are here nor its volume.
    flags = [text for text in flags if not text.startswith(("--data-path=/work", "--tokenizer-model=/work"))]
    here = ["--platform=cpu", "--mock-data", "--vocab-size=256"]
    with prepare([*flags, *here], host="standalone") as session:
        args = session.call("validate_arguments_early", args=session.args, plan=session.plan)
        args = session.call("validate_arguments", args=args, plan=session.plan)
    assert args.save == args.load
    assert args.save_interval


@pytest.mark.parametrize("name", JOB_SETS)
def test_the_processes_of_a_manifest_fit_its_pods_and_devices(name):
    manifest = read(name)
    job, launch = job_of(manifest), launch_of(manifest, 1)
    assert int(launch.nnodes) == job["parallelism"] == job["completions"]
    assert (job["completionMode"], launch.node_rank) == ("Indexed", 1)
    devices = {k: v for k, v in container_of(manifest)["resources"]["limits"].items() if "/" in k}
    assert devices == ({DEVICE[name]: int(launch.nproc_per_node)} if DEVICE[name] else {})


@pytest.mark.parametrize("name", JOB_SETS)
def test_the_ranks_meet_at_the_first_pod_inside_the_cluster(name):
    manifest = read(name)
    launch, job_set = launch_of(manifest), manifest["metadata"]["name"]
    (replicated,) = manifest["spec"]["replicatedJobs"]
    network = manifest["spec"]["network"]
    assert launch.master_addr == f"{job_set}-{replicated['name']}-0-0.{network['subdomain']}"
    assert [port["containerPort"] for port in container_of(manifest)["ports"]] == [launch.master_port]
    policy = read("network")["spec"]
    mine = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job_set}}
    assert policy["podSelector"] == mine
    assert policy["ingress"] == [{"from": [{"podSelector": mine}]}]
    assert not re.search("hostNetwork|hostPort|LoadBalancer|NodePort", (FOLDER / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", JOB_SETS)
def test_a_recreated_pod_works_for_the_same_job(name):
    assert current_job(variables_of(read(name))) == Job("mindspeed:a1-b2", 2)


@pytest.mark.parametrize("name", JOB_SETS)
def test_a_pod_that_is_told_to_end_has_time_for_a_save(name, monkeypatch):
    manifest = read(name)
    (torchrun,) = container_of(manifest)["command"]
    assert torchrun == "torchrun", "a shell would keep the signal to itself"
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    text = variables_of(manifest)[variable]
    monkeypatch.setenv(variable, text)
    waits = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout
    assert 60 <= waits == int(text) < pod_of(manifest)["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", JOB_SETS)
def test_one_lost_pod_restarts_all_of_them_once_the_old_ones_are_gone(name):
    manifest = read(name)
    policy, job = manifest["spec"]["failurePolicy"], job_of(manifest)
    assert policy["restartStrategy"] == "BlockingRecreate"
    assert policy["maxRestarts"] > 0
    assert (job["backoffLimit"], pod_of(manifest)["restartPolicy"]) == (0, "Never")


@pytest.mark.parametrize("name", JOB_SETS)
def test_a_pod_has_no_more_rights_than_it_needs(name):
    manifest = read(name)
    pod, container = pod_of(manifest), container_of(manifest)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("name", JOB_SETS)
def test_what_a_job_writes_lies_on_the_shared_volume(name):
    manifest, claim = read(name), read("storage")
    volumes = {volume["name"]: volume for volume in pod_of(manifest)["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container_of(manifest)["volumeMounts"]}
    assert mounts["/work"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    flags = dict(text.split("=", 1) for text in launch_of(manifest).training_script_args if "=" in text)
    assert all(flags[name].startswith("/work/") for name in ("--save", "--load", "--run-dir"))


def test_the_manifests_of_the_devices_differ_in_nothing_else():
    text = (FOLDER / "cuda.yaml").read_text()
    for old, new in (
        ("CUDA devices", "NPUs"),
        ("=cuda", "=npu"),
        (":cuda", ":npu"),
        (DEVICE["cuda"], DEVICE["npu"]),
    ):
        text = text.replace(old, new)
    assert text == (FOLDER / "npu.yaml").read_text()
