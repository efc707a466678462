"""Earlier import paths of modules that belong to distributions of their own now.

``mindspeed_core.megatron.feature_state`` is the same module object as ``mindspeed_megatron.feature_state``,
so that plugins and scripts written for the earlier layout work unchanged. The table is data: nothing of it is
imported until somebody asks for an earlier name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED: dict[str, str] = {
    "mindspeed_core.backend_contracts": "mindspeed_megatron.backend_contracts",
    "mindspeed_core.cli.doctor": "mindspeed_megatron.doctor",
    "mindspeed_core.cli.feature_names": "mindspeed_core.terminal.feature_names",
    "mindspeed_core.cli.migrate_command": "mindspeed_megatron.migrate_command",
    "mindspeed_core.cli.new_command": "mindspeed_testing.new_command",
    "mindspeed_core.cli.scaffold": "mindspeed_testing.scaffold",
    "mindspeed_core.cli.train": "mindspeed_train.program",
    "mindspeed_core.cli.train_completion": "mindspeed_train.program_completion",
    "mindspeed_core.cli.train_help": "mindspeed_train.program_help",
    "mindspeed_core.cli.verify_command": "mindspeed_testing.verify_command",
    "mindspeed_core.flags.given": "mindspeed_megatron.upstream.given",
    "mindspeed_core.formulas": "mindspeed_megatron.formulas",
    "mindspeed_core.hosts": "mindspeed_megatron.hosts",
    "mindspeed_core.hosts.standalone": "mindspeed_train",
    "mindspeed_core.instruments": "mindspeed_megatron.instruments",
    "mindspeed_core.launch": "mindspeed_megatron.launch",
    "mindspeed_core.launch.commands": "mindspeed_train.launch.commands",
    "mindspeed_core.launch.last_save": "mindspeed_train.launch.last_save",
    "mindspeed_core.launch.start": "mindspeed_train.launch.start",
    "mindspeed_core.launch.supervisor": "mindspeed_train.launch.supervisor",
    "mindspeed_core.launch.torchx_component": "mindspeed_train.launch.torchx_component",
    "mindspeed_core.layer_spec": "mindspeed_megatron.layer_spec",
    "mindspeed_core.linear_layout": "mindspeed_megatron.linear_layout",
    "mindspeed_core.megatron": "mindspeed_megatron",
    "mindspeed_core.megatron.megatron_lm_flags": "mindspeed_megatron.upstream.megatron_lm_flags",
    "mindspeed_core.megatron_adaptor": "mindspeed_megatron.megatron_adaptor",
    "mindspeed_core.migrate": "mindspeed_megatron.migrate",
    "mindspeed_core.platforms.allocation_history": "mindspeed_megatron.instruments.allocation_history",
    "mindspeed_core.platforms.allocator_bytes": "mindspeed_megatron.instruments.allocator_bytes",
    "mindspeed_core.platforms.ascend_generations": "mindspeed_megatron.devices.ascend_generations",
    "mindspeed_core.platforms.broken_packages": "mindspeed_megatron.broken_packages",
    "mindspeed_core.platforms.cann": "mindspeed_megatron.devices.cann",
    "mindspeed_core.platforms.cuda": "mindspeed_megatron.devices.cuda",
    "mindspeed_core.platforms.equal_blocks": "mindspeed_megatron.equal_blocks",
    "mindspeed_core.platforms.fake": "mindspeed_megatron.fake",
    "mindspeed_core.platforms.memory": "mindspeed_megatron.instruments.memory",
    "mindspeed_core.platforms.npu": "mindspeed_megatron.devices.npu",
    "mindspeed_core.platforms.planned_kernels": "mindspeed_megatron.planned_kernels",
    "mindspeed_core.platforms.torch_npu_calls": "mindspeed_megatron.devices.torch_npu_calls",
    "mindspeed_core.platforms.torch_npu_uses": "mindspeed_megatron.devices.torch_npu_uses",
    "mindspeed_core.runtime.earlier_files": "mindspeed_megatron.earlier_files",
    "mindspeed_core.runtime.losses": "mindspeed_megatron.losses",
    "mindspeed_core.runtime.rank_check": "mindspeed_megatron.rank_check",
    "mindspeed_core.runtime.reports": "mindspeed_core.runtime.metrics",
    "mindspeed_core.runtime.spared_failures": "mindspeed_megatron.spared_failures",
    "mindspeed_core.terminal.failure": "mindspeed_megatron.launch.failure",
    "mindspeed_core.terminal.interrupts": "mindspeed_train.interrupts",
    "mindspeed_core.terminal.output": "mindspeed_train.output",
    "mindspeed_core.terminal.quiet": "mindspeed_megatron.quiet",
    "mindspeed_core.terminal.tables": "mindspeed_megatron.tables",
    "mindspeed_core.testing": "mindspeed_testing",
    "mindspeed_core.upstream": "mindspeed_megatron.upstream",
    "mindspeed_core.upstream.notes": "mindspeed_core.flags.notes",
}
"""Earlier name of a module or package: its name now. The longest prefix decides."""


def present_name(name: str) -> str:
    """Return the name that a module has now; empty where it did not move."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        new = MOVED.get(".".join(parts[:end]))
        if new is not None:
            return ".".join((new, *parts[end:]))
    return ""


class _Moved:
    """Finds modules under earlier names, and loads them as what they are now."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return how to import an earlier name.

        Raises:
            ModuleNotFoundError: it belongs to a distribution that is not installed; the message names it.
        """
        new = present_name(name) if name.startswith("mindspeed_core.") else ""
        if not new:
            return None
        from importlib.util import find_spec

        package = new.partition(".")[0]
        if find_spec(package) is None:
            dist = package.replace("_", "-")
            raise ModuleNotFoundError(
                f"{name} belongs to {dist}, which is not installed: pip install {dist}", name=package
            )
        found = find_spec(new)
        if found is None:
            return None
        loader: Any = self
        package_here = found.submodule_search_locations is not None
        spec = ModuleSpec(name, loader, origin=found.origin, is_package=package_here)
        spec.loader_state = new
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module as what it is now."""
        module = import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Let the module keep its own description; it was run when it was imported."""
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state

    def get_code(self, name: str) -> Any:
        """Return the code of a module, for ``python -m``."""
        from importlib.util import find_spec

        found: Any = find_spec(present_name(name))
        return found.loader.get_code(found.name)


def bridge_moved_modules() -> None:
    """Let earlier import paths work."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        finder: Any = _Moved()
        # Before the finder of files: below a package that moved it would load modules a second time.
        sys.meta_path.insert(0, finder)
