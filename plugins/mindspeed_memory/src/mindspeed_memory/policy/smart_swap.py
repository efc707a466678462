"""Smart swap: trace what a step saves for backward, choose what waits on the host, and swap that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.policy.swap_policy_file import (
    FLAG,
    ChunkSwaps,
    SwapPolicy,
    read_policy,
    write_policy,
)
from mindspeed_memory.policy.tensor_swaps import by_chunk, chosen_swaps
from mindspeed_memory.policy.trace import TraceRecorder
from mindspeed_memory.recompute.layers import layers_of

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.run import Run
    from mindspeed_core.session import Session
    from mindspeed_memory.saved.engine import SavedTensors

_WARM_UP, _BYTES, _TIMES = range(3)
_STEPS = 3
_MOST_RENEWALS = 3
_FACTS = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "seq_length",
        "micro_batch_size",
    ),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_experts", "sequence_parallel", "bf16", "fp16"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "swap_min_bytes"),
)
logger = logging.getLogger(__name__)


class SmartSwap:
    """The policy of one rank.

    Attributes:
        policy: what each stage swaps; without stages before it is made.
        peaks: bytes of the step that was traced, as they were and as they are expected with the policy.
    """

    def __init__(
        self,
        session: Session,
        chunks: Sequence[Any],
        owner: str,
        engine: SavedTensors,
        *,
        stage: int,
        path: Path | None,
    ) -> None:
        """Change the chunks; read the policy where its file exists. Collective over all ranks.

        Args:
            session: takes the changes back when it closes.
            chunks: the model chunks of this rank.
            owner: the feature.
            engine: puts saved tensors on the host.
            stage: pipeline stage of the rank.
            path: of the policy's file; None keeps it in memory alone.

        Raises:
            ArgumentError: the file is none of this model, or damaged, or could not be written.
        """
        self.peaks = (0, 0)
        self._session, self._engine, self._stage, self._path = session, engine, stage, path
        self._models = [unwrap(chunk) for chunk in chunks]
        facts = _facts(session.args, self._models)
        self.policy = SwapPolicy(facts)
        if path is not None:
            self._read(path, facts)
        self._step = _STEPS if self.policy.stages else 0
        self._swapped: list[frozenset[int]] = [frozenset()] * len(chunks)
        self._take()
        self._recorder: TraceRecorder | None = None
        self._bytes: TraceRecorder | None = None
        self._seen = self._renewals = 0
        self._other_number = False
        for placed in layers_of(chunks):
            # Originals go as soon as the next module begins, not at the end of the pass.
            for module in (placed.layer, placed.layer.self_attention, placed.layer.mlp):
                session.instances.set(owner, module, "forward", self._letting_go(module.forward))
        for number, model in enumerate(self._models):
            session.instances.set(owner, model, "forward", self._switched(model, number))

    def _read(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Read the file, or see that it can be written."""
        if path.exists():
            self.policy = read_policy(path, facts)
            chunks = [len(stage) for stage in self.policy.stages]
            if chunks and (self._stage >= len(chunks) or chunks[self._stage] != len(self._models)):
                reason = f"is of another model: it has {chunks} chunks by stage"
                raise ArgumentError(FLAG, str(path), reason, "give another file")
        elif not path.resolve().parent.is_dir() or path.is_symlink():
            reason = "is to be written, and its folder does not exist"
            raise ArgumentError(FLAG, str(path), reason, "make the folder, or give another file")

    def _take(self) -> None:
        """Swap what the policy says."""
        if self.policy.stages:
            self._swapped = [frozenset(chunk.swapped) for chunk in self.policy.stages[self._stage]]

    @contextmanager
    def step(self, run: Run) -> Iterator[None]:
        """Trace the step of training inside the context, or choose behind it.

        Args:
            run: the run in progress.
        """
        # A dry run has no times to choose by.
        if self._step >= _STEPS or self._session.platform.dry_run:
            yield
            self._renew()
            return
        if self._step == _WARM_UP:
            yield
        else:
            follows = self._step == _BYTES
            self._recorder = TraceRecorder(self._session.platform, self._engine.may, follows=follows)
            try:
                with self._recorder:
                    yield
            finally:
                recorder, self._recorder = self._recorder, None
            if self._step == _TIMES:
                self._choose(recorder)
                return
            self._bytes = recorder
        self._step += 1

    def _choose(self, times: TraceRecorder) -> None:
        assert self._bytes is not None
        # A first policy is that of all ranks; later ones are each rank's own, at steps of its own.
        first = not self._renewals
        same = self._bytes.order == times.order
        if not all(all_gather_values(same) if first else [same]):
            logger.info("smart swap: two steps saved other tensors, tracing again")
            self._step = _BYTES if first else _STEPS
            return
        trace = self._bytes.trace(times)
        settings = self.policy.settings
        swaps = chosen_swaps(trace, bandwidth=settings.bandwidth, reduction=settings.reduction_bytes)
        numbers = by_chunk(swaps.places, self._bytes.groups)
        mine = tuple(
            ChunkSwaps(self._bytes.saved.get(chunk, 0), tuple(numbers.get(chunk, ())))
            for chunk in range(len(self._models))
        )
        self.peaks = (swaps.plain_peak, swaps.peak)
        stages = dict(enumerate(self.policy.stages))
        if first:
            # The same for all ranks of a stage: that of its first rank.
            found = all_gather_values((self._stage, mine, self._engine.small))
            if not any(small or any(chunk.saved for chunk in chosen) for _, chosen, small in found):
                raise UserError(
                    "--smart-swap: nothing is left to swap, since all that passes save is dropped and "
                    "computed again; drop one of the two"
                )
            for stage, chosen, _ in found:
                stages.setdefault(stage, chosen)
        else:
            stages[self._stage] = mine
        self.policy = SwapPolicy(
            self.policy.model, settings, tuple(stages[stage] for stage in sorted(stages))
        )
        self._take()
        self._step = _STEPS
        if first and self._path is not None and _is_first_rank():
            write_policy(self._path, self.policy)
        own = self.policy.stages[self._stage]
        if first and _is_first_rank() and not any(c.swapped for stage in self.policy.stages for c in stage):
            logger.warning("--smart-swap: no saved tensor can be copied in time, so nothing is swapped")
        logger.info(
            "smart swap: pipeline stage %d swaps %d of %d saved values; peak of %d MiB, %d expected",
            self._stage,
            sum(len(chunk.swapped) for chunk in own),
            sum(chunk.saved for chunk in own),
            swaps.plain_peak // 2**20,
            swaps.peak // 2**20,
        )

    def _renew(self) -> None:
        """Trace again after a pass that saved another number of tensors than the policy knows."""
        if self._session.platform.dry_run or not self._other_number:
            return
        self._other_number = False
        self._swapped = [frozenset()] * len(self._models)
        if self._renewals == _MOST_RENEWALS:
            logger.warning("smart swap: passes save ever other numbers of tensors; nothing is swapped now")
            return
        self._renewals += 1
        self._step = _BYTES

    def _switched(self, model: Any, number: int) -> Callable[..., Any]:
        plain = model.forward
        scoped = self._engine.scope(plain, accepts=lambda tensor: self._accepts(number), apart=True)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (model.training and torch.is_grad_enabled()):
                return plain(*args, **kwargs)
            if self._recorder is not None:
                with self._recorder.of_pass(number):
                    return plain(*args, **kwargs)
            if not self._swapped[number]:
                return plain(*args, **kwargs)
            self._seen = 0
            result = scoped(*args, **kwargs)
            expected = self.policy.stages[self._stage][number].saved
            self._other_number = self._other_number or self._seen != expected
            return result

        return forward

    def _letting_go(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._engine.release_originals()
            return plain(*args, **kwargs)

        return forward

    def _accepts(self, chunk: int) -> bool:
        number = self._seen
        self._seen += 1
        return number in self._swapped[chunk]


def _facts(args: Namespace, models: Sequence[Any]) -> dict[str, Any]:
    """Return facts by which a model is told from others. Collective over all ranks."""
    names = [
        (name, tuple(parameter.shape), str(parameter.dtype))
        for model in models
        for name, parameter in model.named_parameters()
    ]
    digest = sha256(repr(names).encode()).hexdigest()
    together = sha256("".join(all_gather_values(digest)).encode()).hexdigest()[:16]
    return {**{name: getattr(args, name, None) for name in _FACTS}, "parameters": together}


def _is_first_rank() -> bool:
    dist = torch.distributed
    return not dist.is_initialized() or dist.get_rank() == 0
