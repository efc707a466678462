"""An operator: one definition, any number of backends, a contract; and the dispatch of its calls.

A call computes a small key (device, dtypes, ranks, options; never values of tensors), finds the backend that
was chosen for that key in a dictionary and calls it: about a microsecond. Only the first call of each kind
checks contracts and weighs backends. ``torch.compile`` sees through it without a graph break.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from mindspeed_core.discovery.extensions import installed_extensions
from mindspeed_kernels.call import Call, call_of, eager_key, trace_key, traced_call
from mindspeed_kernels.contract import Contract, ContractError, first_violation
from mindspeed_kernels.extension_points import BACKENDS
from mindspeed_kernels.ops.backend import Backend
from mindspeed_kernels.ops.choice import EVERY, STATE, BackendError, forced_backend
from mindspeed_megatron.planned_kernels import kernels_for

logger = logging.getLogger("mindspeed_kernels.ops")

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

REFERENCE = "reference"
OPERATORS: dict[str, Operator[..., Any]] = {}
"""Every operator of this process by name."""
_backends_loaded = False
_dynamo_compiling = torch.compiler.is_dynamo_compiling


@dataclass(frozen=True)
class Sample:
    """Arguments of an example call, for tests of backends.

    Attributes:
        args: positional arguments.
        options: the others.
        backward: whether gradients are compared too.
    """

    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = True


Make = Callable[..., torch.Tensor]
"""``make(*shape, dtype=None)``: a random tensor on the device under test; integer dtypes give zeros."""


class Operator(Generic[P, R]):
    """A function of tensors whose implementation is chosen per call; call it like its reference.

    Attributes are the constructor's arguments, and ``backends`` by name.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        *,
        contract: Contract = (),
        key: Callable[P, Hashable] | None = None,
        saved: str = "",
        samples: Callable[[Make], Sequence[Sample]] | None = None,
        comparable: Callable[[Any], Any] | None = None,
        differentiable: bool = True,
        dist: str = "mindspeed-kernels",
    ) -> None:
        """Make an operator with its reference as the only backend.

        Args:
            name: unique; flags and messages use it.
            reference: the definition, in differentiable torch operations; also the backend ``reference``.
            contract: rules for every call, whatever the backend.
            key: what may decide about the backend, from the arguments: devices, dtypes, ranks, options. By
                default all of that is taken from every argument, in twice the time. While a graph is traced
                it is not asked.
            saved: what backward keeps.
            samples: example calls for tests of backends.
            comparable: what of a result all backends agree on; by default everything.
            differentiable: whether the reference is.
            dist: the package that brings it.

        Raises:
            BackendError: there is an operator of this name.
        """
        if name in OPERATORS:
            raise BackendError(f"there is an operator {name!r} already, from {OPERATORS[name].dist}")
        self.name = name
        self.reference = reference
        self.contract = contract
        self.saved = saved
        self.samples = samples
        self.comparable = comparable
        self.dist: str = dist
        self.signature = inspect.signature(reference)
        self.backends: dict[str, Backend] = {}
        self._functions: dict[str, Callable[..., R]] = {}
        self._chosen: dict[Hashable, str] = {}
        self._key = key
        self._logged: set[tuple[str, str]] = set()
        self.__name__ = name
        self.__doc__ = reference.__doc__
        self.__signature__ = self.signature
        self.add(Backend(name, REFERENCE, reference, priority=-100, differentiable=differentiable))
        OPERATORS[name] = self

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        """Compute the operator with the backend that suits the arguments."""
        if _dynamo_compiling():
            return self._functions[choose_traced(self.name, STATE.token, trace_key(args, options))](
                *args, **options
            )
        # A plan for another device weighs other backends for the same tensors, and may not decide for a run.
        of_call = eager_key(args, options) if self._key is None else self._key(*args, **options)
        key: Hashable = (STATE.token, kernels_for(""), of_call)
        name = self._chosen.get(key)
        if name is None:
            name = self._first_call(key, args, options)
        try:
            return self._functions[name](*args, **options)
        except Exception as error:
            violation = self._violation(name, args, options)
            if violation:
                raise ContractError(violation) from error
            raise

    def backend(self, name: str, devices: Sequence[str], **facts: Any) -> Callable[[F], F]:
        """Decorate a function: it is a backend of this operator.

        Args:
            name: unique among the operator's backends.
            devices: types of devices.
            facts: further attributes of `Backend`.
        """

        def add(function: F) -> F:
            self.add(Backend(self.name, name, function, tuple(devices), **facts))
            return function

        return add

    def add(self, backend: Backend) -> None:
        """Add a backend.

        Raises:
            BackendError: there is one of this name, or it belongs to another operator.
        """
        if backend.operator != self.name:
            raise BackendError(f"backend {backend.name} is for {backend.operator}, not for {self.name}")
        if not backend.dist:
            backend = replace(backend, dist=self.dist)
        other = self.backends.get(backend.name)
        if other is not None:
            raise BackendError(
                f"{self.name} has a backend {backend.name!r} already, from {other.dist}; the one from "
                f"{backend.dist} needs another name"
            )
        self.backends[backend.name] = backend
        self._functions[backend.name] = (
            backend.function if backend.differentiable else _refusing_grad(backend)
        )
        self._chosen.clear()

    def remove(self, name: str) -> None:
        """Take a backend away again."""
        del self.backends[name], self._functions[name]
        self._chosen.clear()

    def call_of(self, *args: Any, **options: Any) -> Call:
        """Return what contracts and backends see of a call with these arguments."""
        return call_of(self.signature, args, options)

    def choose(self, call: Call) -> Backend:
        """Return the backend for a call.

        Raises:
            ContractError: the call is outside of what the operator computes.
            BackendError: the backend that was forced does not exist or cannot serve it.
        """
        load_backends()
        violation = first_violation(self.contract, call)
        if violation is not None:
            raise ContractError(violation.message(self.name, forced_backend(self.name)[0] or "any"))
        forced = self._forced(call)
        if forced is not None:
            return forced
        refusals: list[tuple[Backend, str]] = []
        for backend in self.candidates(call.device):
            reason = backend.refusal(call)
            if not reason:
                self._log_choice(backend, call.device, refusals)
                return backend
            refusals.append((backend, reason))
        reasons = "; ".join(f"{backend.name}: {reason}" for backend, reason in refusals)
        raise BackendError(f"{self.name}: no backend can serve this call on {call.device}: {reasons}")

    def candidates(self, device: str) -> list[Backend]:
        """Return the backends for a type of device, the preferred one first."""
        found = [backend for backend in self.backends.values() if backend.runs_on(device)]
        return sorted(found, key=lambda backend: (-backend.priority, backend.name))

    def _first_call(self, key: Hashable, args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
        name = self.choose(self.call_of(*args, **options)).name
        if not STATE.checking:
            self._chosen[key] = name
        return name

    def _violation(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
        """Return the rule that a failed call broke; only the first call of each kind was checked before."""
        contract = (*self.contract, *self.backends[name].contract)
        violation = first_violation(contract, self.call_of(*args, **options))
        return "" if violation is None else violation.message(self.name, name)

    def _forced(self, call: Call) -> Backend | None:
        name, source = forced_backend(self.name)
        if not name:
            return None
        backend = self.backends.get(name)
        if backend is None:
            if f"{EVERY}=" in source:
                return None
            raise BackendError(
                f"{self.name} has no backend {name!r} ({source}); it has {', '.join(sorted(self.backends))}"
            )
        reason = backend.refusal(call)
        if reason:
            raise BackendError(
                f"{self.name}: backend {name} was asked for ({source}) and cannot serve: {reason}"
            )
        return backend

    def _log_choice(self, backend: Backend, device: str, passed_over: Sequence[tuple[Backend, str]]) -> None:
        """Log once which backend serves; warn where a better one had to be passed over."""
        better = [(other.name, why) for other, why in passed_over if not other.available()]
        reason = "; ".join(f"{name} cannot: {why}" for name, why in better)
        if (device, backend.name + reason) in self._logged:
            return
        self._logged.add((device, backend.name + reason))
        if reason:
            logger.warning("%s on %s uses %s; %s", self.name, device, backend.name, reason)
        else:
            logger.info("%s on %s uses %s", self.name, device, backend.name)

    def __repr__(self) -> str:
        """Name and backends."""
        return f"Operator({self.name!r}, backends={sorted(self.backends)})"


def load_backends() -> None:
    """Add the backends of other packages to their operators, once per process; warn about unusable ones.

    They are the entry points of the group ``mindspeed_kernels.backends``, each an iterable of `Backend`.
    """
    global _backends_loaded
    if _backends_loaded:
        return
    # Before the imports, because a package may call an operator while it is imported.
    _backends_loaded = True
    extensions = installed_extensions(BACKENDS)
    for name, backends in extensions.sound().items():
        for backend in backends:
            try:
                OPERATORS[backend.operator].add(replace(backend, dist=extensions.distribution(name)))
            except BackendError as error:
                logger.warning("entry point %s of %s: %s", name, BACKENDS.group, error)
    for record in extensions.broken:
        logger.warning("%s", record)


def _refusing_grad(backend: Backend) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            for value in (*args, *options.values()):
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(item, torch.Tensor) and item.requires_grad:
                        raise ContractError(
                            f"{backend.operator}[{backend.name}]: it has no backward, and an argument "
                            "requires grad; nearest supported: call it under torch.no_grad(), or force "
                            "a backend that is differentiable"
                        )
        return backend.function(*args, **options)

    return call


@torch.compiler.assume_constant_result
def choose_traced(operator: str, token: str, key: tuple[Any, ...]) -> str:
    """Name of the backend for a call that is being traced; evaluated once per traced kind of call."""
    found = OPERATORS[operator]
    return found.choose(traced_call(found.signature, key)).name
