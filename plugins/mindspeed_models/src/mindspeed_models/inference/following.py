"""Commands of rank 0 to all other ranks, as JSON, over a group that waits as long as it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_models.inference.requests import GenerationRequest, GenerationSettings

_PATIENCE = timedelta(days=365)
"""A conversation may pause; a rank that died is noticed by its closed connection."""


class Commands:
    """Commands from rank 0, each received by every rank."""

    def __init__(self) -> None:
        """Open the group where there are several ranks. Collective."""
        self._group: Any = None
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def leads(self) -> bool:
        """Return whether this rank is the one that tells."""
        return dist.get_rank() == 0

    @property
    def alone(self) -> bool:
        """Return whether there is no other rank."""
        return self._group is None

    def share(self, command: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return rank 0's command on every rank. Collective.

        Args:
            command: JSON types; what other ranks than 0 give is not looked at.
        """
        if self._group is None:
            return dict(command or {})
        text = json.dumps(command).encode() if self.leads else b""
        size = torch.tensor([len(text)], dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._group)
        content = torch.empty(int(size), dtype=torch.uint8)
        if self.leads:
            content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(content, src=0, group=self._group)
        found: dict[str, Any] = json.loads(content.numpy().tobytes())
        return found

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def requests_of(command: Mapping[str, Any]) -> list[GenerationRequest]:
    """Return the requests of a command, as `dataclasses.asdict` and JSON have written them."""
    found = []
    for each in command["requests"]:
        settings = dict(each["settings"])
        for name in ("eos_token_ids", "stop"):
            if settings[name] is not None:
                settings[name] = tuple(settings[name])
        found.append(
            GenerationRequest(
                each["prompt"], GenerationSettings(**settings), each["request_id"], each["adapter"]
            )
        )
    return found
