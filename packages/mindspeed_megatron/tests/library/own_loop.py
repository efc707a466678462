"""A training loop that knows megatron-core and a session, and the standalone host to compare it with.

Both start from the same weights and see the same batches; what the loop is told of features are flags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

from mindspeed_core.activation import activate, prepare
from mindspeed_core.feature import hookimpl
from mindspeed_core.run import ChunkPlace, Run
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

STEPS = 3


@dataclass
class Recorded:
    """Record of a training of the standalone host, for a loop that does the same.

    Attributes:
        batches: the micro-batches of each chunk in order.
        weights: of each chunk at the start.
        losses: of each step.
        numbers: what was logged of each step.
    """

    batches: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def recorded(*flags: str, seed: int | None = None) -> Iterator[tuple[Recorded, Run]]:
    """A few steps of the standalone host; with ``seed`` the steps begin with these random numbers."""
    memory = Recorded()
    command = training_flags(flags, STEPS)
    with activate(command, host="standalone", platform="cpu", extra_plugins=[_Recorder(memory)]) as session:
        run = loop.setup(session)
        for chunk in unwrap_model(run.model):
            memory.weights.append({name: p.detach().clone() for name, p in chunk.named_parameters()})
        if seed is not None:
            draw_from(seed)
        for _ in range(STEPS):
            result = session.call("train_step", run=run)
            run.iteration += 1
            run.consumed_train_samples += run.args.global_batch_size
            memory.losses.append(result.losses["lm loss"])
            memory.numbers.append(session.call("log_step", run=run, result=result))
        yield memory, run


def draw_from(seed: int) -> None:
    """Let the random numbers of the next step be the same, whatever building the model has drawn."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


class _Recorder:
    """Sees the batch before any feature does: innermost of all wrappers."""

    def __init__(self, memory: Recorded) -> None:
        self.memory = memory

    @hookimpl(wrapper=True, trylast=True)
    def get_batch(self, vp_stage: int | None) -> Iterator[None]:
        batch = yield
        self.memory.batches[vp_stage or 0].append(batch)
        return batch


def described(*flags: str) -> tuple[Any, tuple[Any, Any, Any]]:
    """Arguments, and configurations of model, data parallelism and optimizer, as other programs have."""
    with prepare(training_flags(flags, STEPS), host="standalone", platform="cpu") as session:
        args = session.call("validate_arguments", args=session.args, plan=session.plan)
        return args, (
            session.call("build_transformer_config", args=args),
            DistributedDataParallelConfig(use_distributed_optimizer=args.use_distributed_optimizer),
            session.call("build_optimizer_config", args=args),
        )


@dataclass
class OwnLoop:
    """A loop of somebody's own: it builds everything itself and passes it through the session."""

    session: Any
    configs: tuple[Any, Any, Any]
    memory: Recorded
    model_flags: Any
    mean: bool = False

    def __post_init__(self) -> None:
        """Build model, optimizer and schedule."""
        session = self.session
        config, ddp_config, optimizer_config = self.configs
        self.config = config = session.config(config)
        model = session.model([self._chunk(place) for place in session.places(config)])
        if config.bf16:
            model = [Float16Module(config, chunk) for chunk in model]
        self.chunks = session.wrap_ddp(model, ddp_config)
        with torch.no_grad():
            for chunk, weights in zip(unwrap_model(self.chunks), self.memory.weights):
                for name, parameter in chunk.named_parameters():
                    parameter.copy_(weights[name])
        optimizer_config = session.optimizer_config(optimizer_config)
        gloo = self.model_flags.enable_gloo_process_groups
        self.optimizer = session.wrap_optimizer(
            get_megatron_optimizer(optimizer_config, self.chunks, use_gloo_process_groups=gloo)
        )
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = session.finalize_gradients()
        self.schedule = session.forward_backward(config)
        self.step = session.train_step(self._step)
        self.forward = session.forward_step(self._forward)

    def _chunk(self, place: ChunkPlace) -> GPTModel:
        """Build a chunk at its place in the model."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        args, config = self.model_flags, self.config
        layers = self.session.layer_spec(config, vp_stage=place.vp_stage)
        further = None
        if config.mtp_num_layers:
            further = get_gpt_mtp_block_spec(
                config, layers, use_transformer_engine=False, vp_stage=place.vp_stage
            )
        return GPTModel(
            config,
            layers,
            mtp_block_spec=further,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.seq_length,
            pre_process=place.pre_process,
            post_process=place.post_process,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            vp_stage=place.vp_stage,
        )

    def _forward(self, iterator: Iterator[Any], model: Any) -> Any:
        batch = self.session.batch(next(iterator))
        options = {} if batch.packed_seq_params is None else {"packed_seq_params": batch.packed_seq_params}
        output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels, **options)
        function = _mean_loss if self.mean else _loss
        return output, self.session.loss(partial(function, batch.loss_mask), batch, model)

    def _step(self, batches: Sequence[Sequence[Any]], args: Any) -> Mapping[str, float]:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self.schedule(
            forward_step_func=self.forward,
            data_iterator=[iter(of_chunk) for of_chunk in batches],
            model=self.chunks,
            num_microbatches=len(batches[0]),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        self.optimizer.step()
        return self.session.reduce_losses(reports)


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    mask = mask.reshape(-1).float()
    total = torch.sum(output.reshape(-1).float() * mask)
    return total, mask.sum().int(), {"lm loss": torch.stack([total.detach(), mask.sum()])}


def _mean_loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    total, tokens, report = _loss(mask, output)
    return total / tokens, report


def both(
    model_flags: Sequence[str], feature_flags: Sequence[str], *, mean: bool = False, seed: int | None = None
) -> tuple[Any, ...]:
    """The losses of the standalone host and of the own loop, what each logged, and the loop's report.

    With ``mean`` the loop's loss function returns a mean and no number of tokens; with ``seed`` the steps of
    both begin with these random numbers.
    """
    # The loop has no scheduler, which would be what excepts norms and biases from weight decay.
    model_flags = (*model_flags, "--weight-decay", "0")
    with recorded(*model_flags, *feature_flags, seed=seed) as (memory, run):
        args = run.args
        per_step = len(memory.batches[0]) // STEPS
    _, configs = described(*model_flags)
    flags = [*of_the_batches(args), *feature_flags]
    with activate(flags, platform="cpu", configs=configs) as session:
        own = OwnLoop(session, configs, memory, args, mean)
        if seed is not None:
            draw_from(seed)
        losses, numbers = [], []
        for index in range(STEPS):
            parts = [memory.batches[chunk] for chunk in range(len(own.chunks))]
            found = own.step([part[index * per_step : (index + 1) * per_step] for part in parts], args)
            losses.append(found["lm loss"])
            step = {"loss": found["lm loss"], "step": session.run.iteration}
            numbers.append(session.log_step({**found, **step}))
        report = session.report()
    destroy_megatron_state()
    return memory.losses, losses, memory.numbers, numbers, report


def of_the_batches(args: Any) -> list[str]:
    """Flags that say how large a batch is."""
    return ["--micro-batch-size", str(args.micro_batch_size), "--seq-length", str(args.seq_length)]
