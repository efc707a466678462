"""The schedule as a library session returns it: megatron-core's signature, with the stages around it kept."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.hosts.library.session import LibrarySession


@dataclass
class MicroBatches:
    """Which micro-batch of a step each chunk is at."""

    counts: dict[int | None, int] = field(default_factory=dict)

    def next(self, vp_stage: int | None) -> int:
        """The index of the micro-batch that a chunk begins."""
        index = self.counts.get(vp_stage, 0)
        self.counts[vp_stage] = index + 1
        return index


class Schedule:
    """A forward-backward function; called with megatron-core's keyword arguments."""

    def __init__(
        self,
        session: LibrarySession,
        function: Callable[..., Any],
        args: Namespace,
        config: TransformerConfig | None,
    ) -> None:
        """Keep what the stage returned, and for which arguments."""
        self._session = session
        self._function = function
        self._args = args
        self._config = config

    def __call__(self, **options: Any) -> Any:
        """Run the schedule over the micro-batches of one step.

        Args:
            options: megatron-core's: ``forward_step_func``, ``data_iterator``, ``model``,
                ``num_microbatches``, ``seq_length``, ``micro_batch_size``, ``forward_only``, ….
        """
        session, context = self._session, self._session.run.context
        session.microbatches.counts.clear()
        context.training = not options.get("forward_only", False)
        session.sized(**{name: options.get(name) for name in ("seq_length", "micro_batch_size")})
        if "adjust_tensor_shapes_fn" not in options and self._config is not None:
            options = {**options, **self._shapes(options)}
        try:
            result = self._function(**options)
            if context.training:
                session.used(options.get("num_microbatches", 1))
            return result
        finally:
            context.microbatch, context.vp_stage, context.training = -1, None, True

    def _shapes(self, options: dict[str, Any]) -> dict[str, Any]:
        """What tells the schedule that features send other tensors between pipeline stages."""
        session, pg = self._session, self._session.run.pg
        stage = "boundary_schema"
        if pg is None or pg.pp.size() == 1 or not session.features_in(stage):
            return {}
        sizes = {name: options[name] for name in ("seq_length", "micro_batch_size") if name in options}
        args = Namespace(**(vars(self._args) | sizes))
        wanted = [spec.shape for spec in session.call(stage, args=args, config=self._config).tensors]
        usual = [spec.shape for spec in session.default(stage, args=args, config=self._config).tensors]
        if wanted == usual:
            return {}
        if args.virtual_pipeline_model_parallel_size is not None:
            raise SessionError(
                f"{', '.join(session.features_in(stage))} changes the tensors between pipeline stages, which "
                "megatron-core's interleaved schedule cannot; build the model without virtual stages"
            )
        return {"adjust_tensor_shapes_fn": lambda receive, send: (list(wanted), list(wanted))}
