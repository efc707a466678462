"""Uses of torch_npu that a test run reached.

Every call of torch_npu in the watched sources notes itself: modules are compiled from a syntax tree in which
``f(x)`` is ``watched(n, f)(x)``. That costs nothing elsewhere, as a trace function of the interpreter would.
A call counts as run when it returned, or when the stand-in runtime refused what it asked for: then its
arguments were understood. Any other exception proves nothing.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

from mindspeed_megatron.devices.torch_npu_uses import ApiUse, used_nodes
from mindspeed_testing.lagging.planting import function_of, functions_of

_REFUSED = "507899"
"""Answer of the stand-in runtime; torch_npu puts it into its exceptions."""
_NAME = "__watched_use_of_torch_npu__"


class ReachedUses:
    """A watch on the ``uses`` that run in modules between `start` and `stop`.

    Attributes:
        uses: the calls that are watched.
        reached: those that returned, or that the stand-in runtime refused.
    """

    def __init__(self, uses: Iterable[ApiUse]) -> None:
        """Watch the calls among ``uses``; mentions are not executed as such."""
        self.uses = tuple(use for use in uses if use.is_call)
        self.reached: set[ApiUse] = set()
        self.files: dict[str, list[int]] = defaultdict(list)
        for number, use in enumerate(self.uses):
            self.files[os.path.realpath(use.path)].append(number)
        self._finder = RewritingFinder(self)
        self._changed: list[tuple[FunctionType, CodeType]] = []

    def start(self) -> None:
        """Begin to watch: modules that are imported from now on, and functions of those that are there."""
        if not self.files:
            return
        sys.meta_path.insert(0, self._finder)
        for module in list(sys.modules.values()):
            path = os.path.realpath(getattr(module, "__file__", None) or "")
            if path in self.files:
                self._watch_loaded(module, path)

    def stop(self) -> None:
        """Leave modules that are imported from now on alone, and functions as they were."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self._changed:
            function, code = self._changed.pop()
            function.__code__ = code

    def missed(self) -> list[ApiUse]:
        """Return the calls that did not run and have no excuse."""
        return [use for use in self.uses if use not in self.reached and not use.excuse]

    def code(self, path: str) -> CodeType:
        """Return the code of a file in which every watched call notes itself."""
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        numbers = {
            (self.uses[n].line, self.uses[n].last_line, self.uses[n].name): n for n in self.files[path]
        }
        for node, name in list(used_nodes(tree)):
            number = numbers.get((node.lineno, node.end_lineno or node.lineno, name))
            if number is not None and isinstance(node, ast.Call):
                given: list[ast.expr] = [ast.Constant(number), node.func]
                node.func = ast.copy_location(ast.Call(ast.Name(_NAME, ast.Load()), given, []), node.func)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def run(self, module: ModuleType, path: str) -> None:
        """Execute a module that is imported."""
        vars(module)[_NAME] = self._watched
        exec(self.code(path), vars(module))  # noqa: S102 - the module's own source

    def _watch_loaded(self, module: ModuleType, path: str) -> None:
        vars(module)[_NAME] = self._watched
        for names, code in functions_of(self.code(path)).items():
            function = function_of(module, names)
            if function is not None and len(function.__code__.co_freevars) == len(code.co_freevars):
                self._changed.append((function, function.__code__))
                function.__code__ = code

    def _watched(self, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        use = self.uses[number]

        def call(*args: Any, **options: Any) -> Any:
            try:
                result = function(*args, **options)
            except Exception as error:
                if _REFUSED in str(error):
                    self.reached.add(use)
                raise
            self.reached.add(use)
            return result

        return call


class Rewriting(Protocol):
    """Executes the changed source of some files when they are imported."""

    @property
    def files(self) -> Container[str]:
        """Return the paths of the files."""

    def run(self, module: ModuleType, path: str) -> None:
        """Execute a module of such a file."""


class RewritingFinder(MetaPathFinder):
    """Finds what the others find, with a loader for files that somebody rewrites."""

    def __init__(self, watch: Rewriting) -> None:
        """Leave all other files alone."""
        self._watch = watch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                origin = os.path.realpath(spec.origin or "")
                if origin in self._watch.files and spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._watch, origin)
                return spec
        return None


class _Loader(Loader):
    def __init__(self, loader: Loader, watch: Rewriting, path: str) -> None:
        self._loader, self._watch, self._path = loader, watch, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._watch.run(module, self._path)
