"""Fields of the Kubernetes objects in examples/clusters/kubernetes, as far as they are used there.

Names and types are those of jobset.x-k8s.io/v1alpha2, batch/v1, core/v1 and networking.k8s.io/v1. An API
server drops a field that it does not know, so what is not listed here is a mistake until looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Required:
    """A field that has to be there."""

    kind: Any


@dataclass(frozen=True)
class Map:
    """An object whose keys are free."""

    kind: Any


NAMED = {"name": Required(str), "labels": Map(str), "annotations": Map(str)}
QUANTITY = (int, str)
ENV = {
    "name": Required(str),
    "value": str,
    "valueFrom": {"fieldRef": {"fieldPath": Required(str)}},
}
CONTAINER = {
    "name": Required(str),
    "image": str,
    "command": [str],
    "args": [str],
    "workingDir": str,
    "env": [ENV],
    "ports": [{"name": str, "containerPort": Required(int)}],
    "resources": {"requests": Map(QUANTITY), "limits": Map(QUANTITY)},
    "securityContext": {
        "allowPrivilegeEscalation": bool,
        "readOnlyRootFilesystem": bool,
        "capabilities": {"drop": [str]},
    },
    "volumeMounts": [{"name": Required(str), "mountPath": Required(str)}],
}
POD = {
    "restartPolicy": {"Never", "OnFailure", "Always"},
    "terminationGracePeriodSeconds": int,
    "automountServiceAccountToken": bool,
    "enableServiceLinks": bool,
    "securityContext": {
        "runAsNonRoot": bool,
        "runAsUser": int,
        "runAsGroup": int,
        "fsGroup": int,
        "fsGroupChangePolicy": {"Always", "OnRootMismatch"},
        "seccompProfile": {"type": Required({"RuntimeDefault", "Localhost", "Unconfined"})},
    },
    "containers": Required([CONTAINER]),
    "volumes": [
        {
            "name": Required(str),
            "persistentVolumeClaim": {"claimName": Required(str)},
            "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": QUANTITY},
        }
    ],
}
JOB = {
    "completionMode": {"Indexed", "NonIndexed"},
    "parallelism": int,
    "completions": int,
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules": Required(
            [
                {
                    "action": Required({"FailJob", "FailIndex", "Ignore", "Count"}),
                    "onPodConditions": [{"type": Required(str), "status": Required(str)}],
                }
            ]
        )
    },
    "template": Required({"spec": Required(POD)}),
}
RESTARTS = (
    *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
)
JOB_SET = {
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "failurePolicy": {
        "maxRestarts": int,
        "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
        "rules": [
            {"name": Required(str), "action": Required(set(RESTARTS)), "onJobFailureReasons": [str]},
        ],
    },
    "replicatedJobs": Required(
        [{"name": Required(str), "replicas": int, "template": Required({"spec": Required(JOB)})}]
    ),
}
SELECTOR = {"matchLabels": Map(str)}
SPECS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOB_SET,
    ("v1", "PersistentVolumeClaim"): {
        "accessModes": [{"ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"}],
        "resources": {"requests": Map(QUANTITY)},
        "storageClassName": str,
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "podSelector": Required(SELECTOR),
        "policyTypes": [{"Ingress", "Egress"}],
        "ingress": [{"from": [{"podSelector": SELECTOR}]}],
    },
}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Problems that an API server would refuse or drop, one line each."""
    kind = (manifest.get("apiVersion"), manifest.get("kind"))
    if kind not in SPECS:
        return [f"{kind}: no known kind"]
    whole = {"apiVersion": str, "kind": str, "metadata": Required(NAMED), "spec": Required(SPECS[kind])}
    return list(_problems(manifest, whole, ""))


def _problems(value: Any, kind: Any, path: str) -> Iterator[str]:
    if isinstance(kind, Required):
        kind = kind.kind
    if isinstance(kind, set):
        if value not in kind:
            yield f"{path}: {value!r} is none of {sorted(kind)}"
    elif isinstance(kind, (dict, Map)):
        if not isinstance(value, dict):
            yield f"{path}: an object is wanted"
            return
        for name, inner in value.items():
            below = f"{path}.{name}"
            if isinstance(kind, Map):
                yield from _problems(inner, kind.kind, below)
            elif name in kind:
                yield from _problems(inner, kind[name], below)
            else:
                yield f"{below}: no known field"
        if isinstance(kind, dict):
            yield from (
                f"{path}.{name}: is missing"
                for name, inner in kind.items()
                if isinstance(inner, Required) and name not in value
            )
    elif isinstance(kind, list):
        if not isinstance(value, list):
            yield f"{path}: a list is wanted"
            return
        for number, inner in enumerate(value):
            yield from _problems(inner, kind[0], f"{path}[{number}]")
    elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        yield f"{path}: {value!r} is no {kind}"
