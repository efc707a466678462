"""The processes of the manifest for CPU when a pod is told to end, and when all pods are made anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_kubernetes import LABELS, container_of, read, variables_of

from mindspeed_testing.ports import free_port

SMALLER = {
    "--nproc-per-node": "1",
    "--master-addr": "127.0.0.1",
    "--train-iters": "200000",
    "--num-layers": "1",
    "--save-interval": "100000",
}


def start_pods(folder: Path, restart: int) -> list[subprocess.Popen[bytes]]:
    """Start torchrun of both pods, on this machine and with one process each."""
    manifest = read("cpu")
    port = str(free_port())
    variables = variables_of(manifest) | {"MINDSPEED_RESTART": str(restart)}
    pods = []
    for index in range(2):
        arguments = []
        for text in container_of(manifest)["args"]:
            name, equals, value = text.partition("=")
            value = {**SMALLER, "--master-port": port}.get(name, value).replace("/work", str(folder))
            arguments.append(f"{name}{equals}{value.replace('$(JOB_COMPLETION_INDEX)', str(index))}")
        with (folder / f"pod-{index}-{restart}.txt").open("wb") as output:
            pods.append(
                subprocess.Popen(
                    [str(Path(sys.executable).with_name("torchrun")), *arguments],
                    env={**os.environ, **variables},
                    stdout=output,
                    stderr=output,
                )
            )
    return pods


def wait_for(words: str, folder: Path, restart: int, pods: list[subprocess.Popen[bytes]]) -> str:
    end = time.monotonic() + 200
    output = folder / f"pod-0-{restart}.txt"
    while words not in (text := output.read_text()):
        assert time.monotonic() < end, text
        assert [pod.poll() for pod in pods] == [None, None], text
        time.sleep(0.05)
    return text


def evict_second_pod(pods: list[subprocess.Popen[bytes]]) -> int:
    """End the second pod and return its status; then end the other one, as the operator does."""
    pods[1].send_signal(signal.SIGTERM)
    status = pods[1].wait(120)
    # Its torchrun waits for that of the second pod, and hears no signal meanwhile.
    pods[0].kill()
    pods[0].wait(120)
    return status


@pytest.mark.thorough
def test_an_evicted_pod_saves_fails_and_comes_back_to_its_own_checkpoint(tmp_path):
    pods = start_pods(tmp_path, 0)
    try:
        wait_for("step      3/", tmp_path, 0, pods)
        # A pod that ended well would make the operator believe that the training has reached its end.
        assert evict_second_pod(pods) != 0
        saved = int((tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text())
        manifest = tmp_path / f"checkpoints/iter_{saved:07}/manifest.json"
        assert (
            json.loads(manifest.read_text())["job"] == f"mindspeed:{LABELS['jobset.sigs.k8s.io/jobset-uid']}"
        )
        pods = start_pods(tmp_path, 1)
        wait_for(f"training from step {saved} ", tmp_path, 1, pods)
        wait_for(f"step {saved + 2:>6}/", tmp_path, 1, pods)
        evict_second_pod(pods)
    finally:
        for pod in pods:
            pod.kill()
            pod.wait(120)
