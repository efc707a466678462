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

_MOVED_INTO = {
    "mindspeed_core.flags": "upstream.notes",
    "mindspeed_core.terminal": "cli.feature_names",
    "mindspeed_megatron": (
        "backend_contracts cli.doctor cli.graph_command cli.migrate_command cli.patches_command formulas "
        "hosts instruments launch layer_spec linear_layout megatron_adaptor migrate "
        "platforms.broken_packages platforms.equal_blocks platforms.fake platforms.planned_kernels "
        "runtime.earlier_files runtime.losses runtime.rank_check runtime.spared_failures terminal.quiet "
        "terminal.tables upstream"
    ),
    "mindspeed_megatron.devices": (
        "platforms.accelerator platforms.ascend_generations platforms.cann platforms.cuda platforms.npu "
        "platforms.torch_npu_calls platforms.torch_npu_uses"
    ),
    "mindspeed_megatron.instruments": (
        "platforms.allocation_history platforms.allocator_bytes platforms.memory"
    ),
    "mindspeed_megatron.launch": "terminal.failure",
    "mindspeed_megatron.upstream": "flags.given megatron.megatron_lm_flags",
    "mindspeed_testing": "cli.new_command cli.scaffold cli.verify_command",
    "mindspeed_train": "terminal.interrupts terminal.output",
    "mindspeed_train.launch": (
        "launch.commands launch.last_save launch.start launch.supervisor launch.torchx_component"
    ),
}
"""Package: modules and packages below `mindspeed_core` that lie in it now, under their own names."""
_RENAMED = {
    "cli.train": "mindspeed_train.program",
    "cli.train_completion": "mindspeed_train.program_completion",
    "cli.train_help": "mindspeed_train.program_help",
    "hosts.standalone": "mindspeed_train",
    "megatron": "mindspeed_megatron",
    "megatron.batch_fields": "mindspeed_megatron.boundary",
    "megatron.batch_ramp": "mindspeed_train.arguments.run_length",
    "megatron.expert_reports": "mindspeed_megatron.layer_losses",
    "resolver.asking": "mindspeed_core.resolver.request",
    "runtime.reports": "mindspeed_core.runtime.metrics",
    "terminal.wrapped": "mindspeed_core.terminal.listing",
    "testing": "mindspeed_testing",
}
MOVED: dict[str, str] = {f"mindspeed_core.{old}": new for old, new in _RENAMED.items()} | {
    f"mindspeed_core.{old}": f"{package}.{old.rpartition('.')[2]}"
    for package, names in _MOVED_INTO.items()
    for old in names.split()
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
        present = find_spec(new)
        if present is None:
            return None
        loader: Any = self
        package_here = present.submodule_search_locations is not None
        spec = ModuleSpec(name, loader, origin=present.origin, is_package=package_here)
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

        present: Any = find_spec(present_name(name))
        return present.loader.get_code(present.name)


def bridge_moved_modules() -> None:
    """Let earlier import paths work."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        finder: Any = _Moved()
        # Before the finder of files: below a package that moved it would load modules a second time.
        sys.meta_path.insert(0, finder)
