"""The declarations of policies: what is computed again and what is swapped, decided by measured costs."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, hookimpl
from mindspeed_memory.features.swap import ENGINE_CONFLICTS, ENGINE_FLAGS, SwappingFeature

_SWITCH, _SIZE = "--adaptive-recompute-device-swap", "--adaptive-recompute-device-size"
_SHARE = "--adaptive-recompute-share"
_STEPS, _MEMORY = "--adaptive-recompute-profiling-step", "--adaptive-memory-optimization"
_SMART, _FILE = "--smart-swap", "--swap-policy"
_LEAST_STEPS = 5
BUDGET_FLAGS = (
    Flag(
        _SIZE,
        type=int,
        default=-1,
        aliases=("--auto-recompute-device-size",),
        help="Budget of a device in MiB; -1 for what it has.",
    ),
    Flag(
        _SHARE,
        type=float,
        default=None,
        help="Budget as a share, 0 to 1, of what lies between full recomputation and none, as measured.",
    ),
    Flag(
        _STEPS,
        type=int,
        default=10,
        aliases=("--auto-recompute-profiling-step",),
        help="Steps in which the costs of layers are measured, at least 5.",
    ),
)
"""Of both policies."""
POLICY_CONFLICTS = (
    Conflict(
        flag="--recompute-granularity",
        one_of=("full", "selective"),
        reason="both say what is computed again; drop one of the two",
    ),
    Conflict(
        feature="recompute-norm",
        reason="the plan says what of each layer is computed again; drop one of the two",
    ),
    Conflict(
        feature="swap-attention",
        reason="what is swapped would be counted for layers that are computed again; drop one of the two, or "
        f"use {_MEMORY}",
    ),
    Conflict(
        feature="swap-activation-plan",
        reason="what is swapped would be counted for layers that are computed again; drop one of the two, or "
        f"use {_MEMORY}",
    ),
    Conflict(
        feature="compress-activation",
        reason="layers that are computed again have nothing to compress; drop one of the two",
    ),
    Conflict(
        feature="moe-zero-memory",
        reason="it drops parts of the layers that the plan measures as a whole; drop one of the two",
    ),
    Conflict(
        feature="moe-adaptive-recompute",
        reason="it drops parts of the layers that the plan measures as a whole; drop one of the two",
    ),
    Conflict(
        flag="--overlap-moe-expert-parallel-comm",
        reason="two micro-batches pass a layer at once, in parts; drop one of the two",
    ),
    Conflict(
        feature="moe-fb-overlap",
        reason="two micro-batches pass a layer at once, in parts; drop one of the two",
    ),
    Conflict(
        flag="--use-torch-fsdp2",
        reason="parameters gathered for a layer would count as its activations; use --recompute-plan",
    ),
    Conflict(
        flag="--use-megatron-fsdp",
        reason="parameters gathered for a layer would count as its activations; use --recompute-plan",
    ),
    Conflict(
        flag="--fp8-format",
        reason="TransformerEngine's products have a state of their own; drop one of the two",
    ),
    *ENGINE_CONFLICTS,
)
"""Of the same."""


class _Budgeted(Feature):
    """Common part of both policies."""

    family = "memory"
    stability = "prototype"
    places_modules = True
    deterministic = True
    affects_checkpoint = False
    fake_tensors = True
    formulas: ClassVar[Mapping[str, str]] = {
        # Of a layer that is computed again as a whole, which every plan begins with.
        "least_bytes": "element_size * seq_length * micro_batch_size * hidden_size "
        "/ (context_parallel_size * (tensor_model_parallel_size if sequence_parallel else 1))"
    }
    conflicts: ClassVar[Sequence[Conflict]] = POLICY_CONFLICTS

    _policy: Any = None

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse too few steps, and a size that is none."""
        found = list(super().validate(args))
        steps, size = args.adaptive_recompute_profiling_step, args.adaptive_recompute_device_size
        if steps < _LEAST_STEPS:
            found.append(
                f"{_STEPS} {steps} is too short to measure the forms of a layer; use {_LEAST_STEPS} or more"
            )
        if size == 0 or size < -1:
            found.append(f"{_SIZE} {size} is no number of MiB; use 1 or more, or -1 for what the device has")
        share = args.adaptive_recompute_share
        if share is not None and not 0.0 <= share <= 1.0:
            found.append(f"{_SHARE} {share:g} is no share; use 0 (full recomputation) to 1 (none)")
        if share is not None and size > 0:
            found.append(f"{_SHARE} {share:g} and {_SIZE} {size} are both budgets; drop one of the two")
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that a run ends before its plan begins."""
        steps, length = args.adaptive_recompute_profiling_step, getattr(args, "train_iters", None)
        if length is None or length > steps:
            return ()
        return (
            f"{_STEPS} {steps}: the run ends after {length} steps, all of them with full recomputation; "
            "a plan begins behind the steps of measuring",
        )

    @hookimpl(wrapper=True)
    def finalize_gradients(self) -> Generator[None, Any, Any]:
        """Tell forward and backward from the update."""
        result = yield
        self._policy.end_backward()
        return result


class AdaptiveRecompute(_Budgeted):
    """Measured costs say what of each layer is computed again, within a budget."""

    name = "adaptive-recompute"
    summary = "Choose recomputation within a memory budget, by measured cost"
    flags = (
        Flag(_SWITCH, help="Choose by measured cost what layers recompute."),
        *BUDGET_FLAGS,
    )
    slots = ("recompute-policy", "mlp-forward")
    docs = "mindspeed_memory:docs/adaptive-recompute.md"
    verify = Proofs("mindspeed_memory.features.policy_proofs:RECOMPUTE_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether it is asked for, or a budget is given that nothing else uses."""
        if getattr(args, "adaptive_recompute_device_swap", False):
            return True
        return _has_budget(args) and not getattr(args, "adaptive_memory_optimization", False)

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change the layers."""
        chunks = yield
        from mindspeed_memory.policy.adaptive import AdaptiveRecompute as Policy

        self._policy = Policy(
            session,
            chunks,
            self.name,
            size=args.adaptive_recompute_device_size,
            share=args.adaptive_recompute_share,
            steps=args.adaptive_recompute_profiling_step,
        )
        return chunks

    @hookimpl(wrapper=True)
    def train_step(self, run: Any) -> Generator[None, Any, Any]:
        """Measure, plan, and record what the plan takes."""
        with _followed(run, self._policy):
            return (yield)

    @hookimpl(wrapper=True)
    def forward_step(self) -> Generator[None, Any, Any]:
        """Let hosts count micro-batches: the first of a step is measured."""
        return (yield)


class AdaptiveMemory(_Budgeted, SwappingFeature):
    """Measured costs say what of each layer is computed again and what is swapped, within a budget."""

    name = "adaptive-memory"
    summary = "Choose recomputation and swaps within a memory budget, by measured cost"
    flags = (
        Flag(_MEMORY, help="Choose by measured cost what layers recompute and what they swap."),
        *BUDGET_FLAGS,
        *ENGINE_FLAGS,
    )
    slots: ClassVar[Sequence[str]] = ("recompute-policy", "mlp-forward", "saved-tensors")
    conflicts = (
        *POLICY_CONFLICTS,
        Conflict(
            flag=_SWITCH,
            reason=f"{_MEMORY} makes the same choice with swapping besides; drop {_SWITCH}",
        ),
    )
    docs = "mindspeed_memory:docs/adaptive-memory.md"
    verify = Proofs("mindspeed_memory.features.policy_proofs:MEMORY_PROOFS")
    _from_first_step = False

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change the layers."""
        chunks = yield
        from mindspeed_memory.policy.adaptive import AdaptiveRecompute as Policy

        engine = self._start_engine(session, args)
        self._policy = Policy(
            session,
            chunks,
            self.name,
            size=args.adaptive_recompute_device_size,
            share=args.adaptive_recompute_share,
            steps=args.adaptive_recompute_profiling_step,
            engine=engine,
            copies=self._copies,
            depth=args.swap_prefetch_depth,
        )
        return chunks

    def _around_step(self, run: Any) -> AbstractContextManager[None]:
        return _followed(run, self._policy)


class SmartSwap(SwappingFeature):
    """Saved tensors are chosen one by one, by a trace of a step, and wait on the host."""

    name = "smart-swap"
    summary = "Offload saved activations, chosen by size and lifetime in a traced step"
    stability = "prototype"
    flags = (
        Flag(_SMART, help="Choose by a traced step which saved tensors are offloaded."),
        Flag(
            _FILE,
            type=str,
            default="",
            metavar="FILE",
            help="Policy of --smart-swap as JSON: read where it exists, otherwise written.",
        ),
        *ENGINE_FLAGS,
    )
    slots: ClassVar[Sequence[str]] = ("saved-tensors", "recompute-policy")
    conflicts = (
        *ENGINE_CONFLICTS,
        Conflict(
            flag="--use-torch-fsdp2",
            reason="parameters gathered for a layer would count as saved tensors; use --swap-activation-plan",
        ),
        Conflict(
            flag="--use-megatron-fsdp",
            reason="parameters gathered for a layer would count as saved tensors; use --swap-activation-plan",
        ),
        Conflict(
            flag="--overlap-moe-expert-parallel-comm",
            reason="two micro-batches pass a chunk at once, in parts; drop one of the two",
        ),
        Conflict(
            feature="moe-fb-overlap",
            reason="two micro-batches pass a chunk at once, in parts; drop one of the two",
        ),
        Conflict(
            flag="--fp8-format",
            reason="TransformerEngine's products save no plain storages; drop one of the two",
        ),
    )
    # Around what recomputes.
    before = ("recompute-norm", "recompute-activation", "recompute-layers-per-pp-rank")
    docs = "mindspeed_memory:docs/smart-swap.md"
    verify = Proofs("mindspeed_memory.features.policy_proofs:SMART_PROOFS")
    _from_first_step = False

    _policy: Any = None

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether it is asked for, or a policy is given, which needs it."""
        return bool(getattr(args, "smart_swap", False) or getattr(args, "swap_policy", ""))

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse a policy without its switch."""
        found = list(super().validate(args))
        if args.swap_policy and not args.smart_swap:
            found.append(f"{_FILE} {args.swap_policy} needs {_SMART}; add it")
        return found

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any, pg: Any) -> Generator[None, Any, Any]:
        """Change the chunks, and read the policy."""
        chunks = yield
        from pathlib import Path

        from mindspeed_memory.policy.smart_swap import SmartSwap as Policy

        engine = self._start_engine(session, args)
        path = Path(args.swap_policy) if args.swap_policy else None
        self._policy = Policy(session, chunks, self.name, engine, stage=pg.pp.rank(), path=path)
        return chunks

    def _around_step(self, run: Any) -> AbstractContextManager[None]:
        steps: AbstractContextManager[None] = self._policy.step(run)
        return steps


@contextmanager
def _followed(run: Any, policy: Any) -> Iterator[None]:
    """Measure and plan beside a step, and record what the plan takes."""
    with policy.step(run):
        yield
    if policy.plan is not None:
        run.metrics.add("planned bytes", float(policy.planned_bytes), "max")
        run.metrics.add("planned bytes beyond the budget", float(policy.planned_bytes - policy.budget), "max")
        run.metrics.add("planned recompute seconds", float(policy.plan.seconds), "max")
    if policy.used:
        run.metrics.add("bytes of the plan's first step", float(policy.used), "max")
        beyond = float(policy.used - policy.budget)
        run.metrics.add("bytes of the plan's first step beyond the budget", beyond, "max")


def _has_budget(args: Any) -> bool:
    size = getattr(args, "adaptive_recompute_device_size", None) or 0
    return size > 0 or getattr(args, "adaptive_recompute_share", None) is not None
