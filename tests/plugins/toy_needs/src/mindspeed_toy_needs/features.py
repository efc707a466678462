"""Declarations of the toy features; importing this module imports no torch.

Each class says what a feature is and which stages it takes part in; what it does there is in the module named
after it, imported when the stage runs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.feature import (
    ExtensionPoint,
    Feature,
    Flag,
    Requirement,
    StageSpecs,
    TakeOver,
    hookimpl,
)
from mindspeed_core.megatron.group_options import OF_OWN_GROUPS

if TYPE_CHECKING:
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mindspeed_core.hooks import Done
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.run import (
        Batch,
        BoundarySchema,
        ChunkPlace,
        Datasets,
        DistInfo,
        LoadInfo,
        Loss,
        OptimizerStep,
        Run,
        SaveInfo,
        StepResult,
    )
    from mindspeed_core.session import Session
    from mindspeed_toy_needs.letters import LetterTokenizer
    from mindspeed_toy_needs.snapshot import Snapshot

FAMILY = "toys"


class Environment(Feature):
    """Before megatron is imported and the process group starts."""

    name = "toy-environment"
    family = FAMILY
    summary = "sets MINDSPEED_TOY until the session closes"
    flags = (Flag("--toy-environment", type=str, help="Value of the environment variable MINDSPEED_TOY."),)

    @hookimpl(wrapper=True)
    def prepare_process(self, session: Session, args: Namespace) -> Generator[None, Done, Done]:
        session.setenv("MINDSPEED_TOY", args.toy_environment)
        return (yield)


class NamedGroups(Feature):
    """Process groups of its own."""

    name = "toy-groups"
    family = FAMILY
    summary = "creates directed pairs of neighbours and halves of the data-parallel group"
    flags = (Flag("--toy-groups", help="Create the groups toy.forward, toy.backward and toy.halves."),)

    @hookimpl(wrapper=True)
    def build_process_groups(
        self, session: Session, dist_info: DistInfo
    ) -> Generator[None, ProcessGroupCollection, ProcessGroupCollection]:
        pg = yield
        from mindspeed_toy_needs.named_groups import create_groups

        create_groups(session, dist_info.world_size, pg)
        return pg


class GroupMarks(Feature):
    """Options of the backend for groups of features and of megatron-core."""

    name = "toy-group-marks"
    family = FAMILY
    summary = "gives every group options that carry its name"
    flags = (Flag("--toy-group-marks", help="Give every process group options with its name."),)
    patches = (OF_OWN_GROUPS,)

    @hookimpl(wrapper=True)
    def prepare_process(self, session: Session) -> Generator[None, Done, Done]:
        from mindspeed_toy_needs.named_groups import Mark

        session.groups.choose_options(Mark)
        return (yield)


class InitDepth(Feature):
    """A configuration built with other values than the final ones; the generators seeded again."""

    name = "toy-init-depth"
    family = FAMILY
    summary = "initializes output projections as in a deeper model"
    flags = (Flag("--toy-init-depth", type=int, help="Layers of the model whose initialization is used."),)

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        if args.num_layers and args.toy_init_depth < args.num_layers:
            return [f"--toy-init-depth {args.toy_init_depth} is below --num-layers {args.num_layers}"]
        return ()

    @hookimpl
    def build_transformer_config(self, session: Session, args: Namespace) -> TransformerConfig:
        deeper = Namespace(**{**vars(args), "num_layers": args.toy_init_depth})
        config: TransformerConfig = session.default("build_transformer_config", args=deeper)
        config.num_layers = args.num_layers
        return config

    @hookimpl(wrapper=True)
    def build_model(
        self, session: Session, args: Namespace, pg: ProcessGroupCollection
    ) -> Generator[None, list[MegatronModule], list[MegatronModule]]:
        model = yield
        session.call("seed_everything", args=args, pg=pg)
        return model


class AttentionScale(Feature):
    """Modules replaced by role, in layers counted over the whole model, with options and a group."""

    name = "toy-attention-scale"
    family = FAMILY
    summary = "scales the attention output of the last half of the layers, and of the final norm"
    flags = (Flag("--toy-attention-scale", type=float, help="The factor."),)
    slots = ("core-attention",)
    replaces_roles = ("final_layernorm",)
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {"flop": "num_layers // 2 * seq_length * hidden_size"}
    tuning = {"--toy-attention-scale": (0.5, 1.0, 2.0)}

    @hookimpl(wrapper=True)
    def build_layer_spec(
        self, session: Session, args: Namespace, config: TransformerConfig, vp_stage: int | None
    ) -> Generator[None, TransformerBlockSubmodules, TransformerBlockSubmodules]:
        spec = yield
        from mindspeed_toy_needs.attention_scale import replace_modules

        return replace_modules(spec, session, config, vp_stage, args.toy_attention_scale, owner=self.name)


class SequentialSchedule(Feature):
    """A pipeline schedule of its own, and a stage that other features may fill."""

    name = "toy-sequential-schedule"
    family = FAMILY
    summary = "runs all forward passes, then all backward passes, one pipeline stage at a time"
    flags = (Flag("--toy-sequential-schedule", help="Use the sequential schedule."),)
    slots = ("pipeline-schedule",)

    @hookimpl
    def get_forward_backward(
        self, session: Session, args: Namespace, config: TransformerConfig, pg: ProcessGroupCollection
    ) -> Callable[..., Any]:
        from mindspeed_toy_needs.sequential_schedule import schedule

        return schedule(session, args, config, pg)

    @hookimpl(trylast=True)
    def toy_route(self, pp_size: int, chunks: int) -> tuple[tuple[int, int], ...]:
        return tuple((stage % pp_size, stage // pp_size) for stage in range(pp_size * chunks))


class VShape(Feature):
    """Chunks built for other places in the model than the host's order gives them."""

    name = "toy-v-shape"
    family = FAMILY
    summary = "lets the stages of the model run down the ranks and up again"
    flags = (Flag("--toy-v-shape", help="Put the first and the last stage on rank 0."),)
    requires = (
        Requirement(
            feature="toy-sequential-schedule", reason="other schedules send to the next rank", implies=True
        ),
        Requirement(flag="--untie-embeddings-and-output-weights", reason="embedding and output share a rank"),
    )
    slots = ("layer-partition",)

    @hookimpl
    def place_chunks(self, args: Namespace, pp_rank: int, pp_size: int) -> tuple[ChunkPlace, ...]:
        from mindspeed_toy_needs.v_shape import places

        return places(pp_rank, pp_size, args.virtual_pipeline_model_parallel_size or 1)

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, TransformerConfig, TransformerConfig]:
        config = yield
        from mindspeed_toy_needs.v_shape import lay_out

        lay_out(config)
        return config

    @hookimpl
    def toy_route(self, pp_size: int, chunks: int) -> tuple[tuple[int, int], ...]:
        from mindspeed_toy_needs.v_shape import route

        return route(pp_size, chunks)


class EmbeddingScale(Feature):
    """A change of a built instance."""

    name = "toy-embedding-scale"
    family = FAMILY
    summary = "multiplies word embeddings by a factor"
    flags = (Flag("--toy-embedding-scale", type=float, help="The factor."),)
    places_modules = True

    @hookimpl(wrapper=True)
    def build_model(
        self, session: Session, args: Namespace
    ) -> Generator[None, list[MegatronModule], list[MegatronModule]]:
        model = yield
        from mindspeed_toy_needs.embedding_scale import scale_embeddings

        scale_embeddings(session, model, args.toy_embedding_scale, owner=self.name)
        return model


class Experts(Feature):
    """Another kind of model, with process groups that megatron-core makes for it."""

    name = "toy-experts"
    family = FAMILY
    summary = "makes a mixture of experts of every MLP"
    flags = (
        Flag("--toy-experts", type=int, help="Experts per layer."),
        Flag("--toy-expert-parallel", type=int, default=1, help="Ranks that share them."),
    )
    slots = ("mlp", "experts")
    affects_checkpoint = True

    @hookimpl(wrapper=True)
    def validate_arguments_early(self) -> Generator[None, Namespace, Namespace]:
        args = yield
        from mindspeed_toy_needs.experts import with_experts

        return with_experts(args)

    @hookimpl(wrapper=True)
    def build_process_groups(
        self, args: Namespace
    ) -> Generator[None, ProcessGroupCollection, ProcessGroupCollection]:
        from mindspeed_toy_needs.experts import initialize_groups

        initialize_groups(args)
        return (yield)


class WatchExperts(Feature):
    """A feature for modules that this model may not have."""

    name = "toy-watch-experts"
    family = FAMILY
    summary = "leaves experts as they are, but insists that there are some"
    flags = (Flag("--toy-watch-experts", help="Look for experts."),)
    places_modules = True

    @hookimpl(wrapper=True)
    def build_layer_spec(
        self, session: Session
    ) -> Generator[None, TransformerBlockSubmodules, TransformerBlockSubmodules]:
        spec = yield
        from mindspeed_core.layer_spec import SpecEditor

        editor = SpecEditor(spec, owner=self.name, session=session)
        editor.replace("experts", lambda site: site.spec)
        return editor.spec


class BucketSize(Feature):
    """Options of data parallelism."""

    name = "toy-bucket-size"
    family = FAMILY
    summary = "cuts gradients into small buckets that are averaged by the collective"
    flags = (Flag("--toy-bucket-size", type=int, help="Parameters per bucket."),)
    requires = (Requirement(flag="--overlap-grad-reduce", reason="without overlap there is one bucket"),)

    @hookimpl(wrapper=True)
    def build_ddp_config(
        self, args: Namespace
    ) -> Generator[None, DistributedDataParallelConfig, DistributedDataParallelConfig]:
        config = yield
        from dataclasses import replace

        return replace(config, bucket_size=args.toy_bucket_size)


class UpdateRules(Feature):
    """Other update rules inside megatron-core's optimizer, whose checkpoints Adam reads too."""

    name = "toy-update-rules"
    family = FAMILY
    summary = "updates parameters by other rules than Adam's (Lion and others)"
    flags = (
        Flag(
            "--optimizer",
            type=str,
            default="adam",
            choices=("toy-lion", "toy-sign", "toy-int8", "toy-averaged"),
            help="One of the toy rules.",
        ),
    )
    slots = ("optimizer",)
    affects_checkpoint = False

    @hookimpl(wrapper=True)
    def build_optimizer(
        self, session: Session, args: Namespace
    ) -> Generator[None, MegatronOptimizer, MegatronOptimizer]:
        optimizer = yield
        from mindspeed_core import put_inside
        from mindspeed_toy_needs.update_rules import RULES

        put_inside(session, optimizer, RULES[args.optimizer], owner=self.name)
        return optimizer


class Polynomial(Feature):
    """A schedule of the learning rate under a name of its own."""

    name = "toy-polynomial"
    family = FAMILY
    summary = "lets the learning rate fall along a power"
    flags = (
        Flag(
            "--lr-decay-style",
            type=str,
            default="linear",
            choices=("toy-polynomial",),
            help="Along --toy-power.",
        ),
        Flag("--toy-power", type=float, default=2.0, help="The power of --lr-decay-style toy-polynomial."),
    )

    @hookimpl(wrapper=True)
    def build_scheduler(
        self, session: Session, args: Namespace
    ) -> Generator[None, OptimizerParamScheduler, OptimizerParamScheduler]:
        scheduler = yield
        from functools import partial

        from mindspeed_core import follow_schedule
        from mindspeed_toy_needs.polynomial import polynomial

        schedules = {"toy-polynomial": partial(polynomial, power=args.toy_power)}
        return follow_schedule(session, scheduler, schedules, owner=self.name)


class Documents(Feature):
    """A description of the batch that attention needs on every pipeline stage."""

    name = "toy-documents"
    family = FAMILY
    summary = "keeps attention within documents, which end with a separator token"
    flags = (Flag("--toy-documents", type=int, help="The separator token."),)
    slots = ("core-attention", "attention-mask")
    requires = (
        Requirement(flag="--micro-batch-size", equals=1, reason="documents are packed into one sequence"),
    )
    places_modules = True

    @hookimpl(wrapper=True)
    def build_layer_spec(
        self, session: Session
    ) -> Generator[None, TransformerBlockSubmodules, TransformerBlockSubmodules]:
        spec = yield
        from mindspeed_toy_needs.documents import replace_attention

        return replace_attention(spec, session, owner=self.name)

    @hookimpl(wrapper=True)
    def batch_fields(self) -> Generator[None, frozenset[str], frozenset[str]]:
        return (yield) | {"tokens"}

    @hookimpl(wrapper=True)
    def get_batch(self, run: Run) -> Generator[None, Batch, Batch]:
        batch = yield
        from mindspeed_toy_needs.documents import describe

        return batch.with_(packed_seq_params=describe(batch.tokens, run.args.toy_documents))


class TokenWeights(Feature):
    """A loss of its own, and a place where other packages extend it."""

    name = "toy-token-weights"
    family = FAMILY
    summary = "weights the loss of each token by a rule that packages contribute"
    flags = (Flag("--toy-token-weights", type=str, help="Name of the rule."),)
    slots = ("lm-loss",)

    @hookimpl
    def compute_loss(self, session: Session, run: Run, batch: Batch, output_tensor: torch.Tensor) -> Loss:
        from mindspeed_toy_needs.token_weights import weighted_loss

        weights = session.call("toy_token_weights", run=run, batch=batch)
        return weighted_loss(output_tensor, batch, weights)

    @hookimpl(trylast=True)
    def toy_token_weights(self, session: Session, run: Run, batch: Batch) -> torch.Tensor:
        from mindspeed_toy_needs.token_weights import rule

        assert batch.labels is not None
        return rule(session, run.args.toy_token_weights)(batch.labels)


class DoubleBoundary(Feature):
    """Another shape between pipeline stages."""

    name = "toy-double-boundary"
    family = FAMILY
    summary = "sends the hidden state as two halves that the next stage adds"
    flags = (Flag("--toy-double-boundary", help="Send two times the width."),)
    slots = ("pp-transport",)
    places_modules = True

    @hookimpl(wrapper=True)
    def boundary_schema(self) -> Generator[None, BoundarySchema, BoundarySchema]:
        schema = yield
        from mindspeed_toy_needs.double_boundary import doubled

        return doubled(schema)

    @hookimpl(wrapper=True)
    def build_model(self, session: Session) -> Generator[None, list[MegatronModule], list[MegatronModule]]:
        model = yield
        from mindspeed_toy_needs.double_boundary import split_and_join

        split_and_join(session, model, owner=self.name)
        return model


class NormGradients(Feature):
    """Gradients reduced over another group."""

    name = "toy-norm-gradients"
    family = FAMILY
    summary = "adds up the gradient of the final norm over a group of its own"
    flags = (Flag("--toy-norm-gradients", help="Add up the gradient of the final norm over all ranks."),)

    @hookimpl(wrapper=True)
    def build_process_groups(
        self, session: Session, dist_info: DistInfo
    ) -> Generator[None, ProcessGroupCollection, ProcessGroupCollection]:
        pg = yield
        session.groups.create("toy.norms", [list(range(dist_info.world_size))])
        return pg

    @hookimpl(wrapper=True)
    def finalize_gradients(
        self, session: Session, model: list[MegatronModule]
    ) -> Generator[None, Done, Done]:
        done = yield
        from mindspeed_toy_needs.norm_gradients import add_up

        add_up(model, session.groups["toy.norms"])
        return done


class ExchangeMlp(Feature):
    """Parameters and optimizer state moved between ranks after a step."""

    name = "toy-exchange-mlp"
    family = FAMILY
    summary = "swaps the tensor-parallel shards of every MLP after each update"
    flags = (Flag("--toy-exchange-mlp", help="Swap MLP shards with the mirrored tensor-parallel rank."),)

    def __init__(self) -> None:
        self._exchanged = False
        self._before_save = False

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Run) -> Generator[None, OptimizerStep, OptimizerStep]:
        result = yield
        self._exchange(run)
        return result

    @hookimpl(wrapper=True)
    def before_save_checkpoint(self, run: Run) -> Generator[None, Done, Done]:
        self._before_save = self._exchanged
        if self._exchanged:
            self._exchange(run)
        return (yield)

    @hookimpl(wrapper=True)
    def after_load_checkpoint(self, run: Run) -> Generator[None, Done, Done]:
        if self._before_save:
            self._exchange(run)
        self._before_save = False
        return (yield)

    def _exchange(self, run: Run) -> None:
        from mindspeed_toy_needs.exchange_mlp import exchange

        exchange(run)
        self._exchanged = not self._exchanged


class Numbers(Feature):
    """Numbers per micro-batch and per step, from the ranks that know them."""

    name = "toy-numbers"
    family = FAMILY
    summary = "logs the largest token loss, the micro-batches and the chunk they went through"
    flags = (Flag("--toy-numbers", help="Log the toy numbers."),)

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Run, output_tensor: torch.Tensor) -> Generator[None, Loss, Loss]:
        loss = yield
        run.metrics.add("toy largest token loss", output_tensor.max(), "max")
        run.metrics.add("toy last microbatch", run.context.microbatch, "max")
        return loss

    @hookimpl(wrapper=True)
    def train_step(self, run: Run) -> Generator[None, StepResult, StepResult]:
        result = yield
        run.metrics.add("toy steps", 1.0, "mean")
        return result

    @hookimpl(wrapper=True)
    def log_step(self) -> Generator[None, dict[str, Any], dict[str, Any]]:
        numbers = yield
        return {**numbers, "toy perplexity": 2.0 ** numbers["loss"]}


class GradientSnapshot(Feature):
    """The platform's streams, events, pinned buffers and generators."""

    name = "toy-snapshot"
    family = FAMILY
    summary = "copies a gradient to the host beside the update"
    flags = (Flag("--toy-snapshot", help="Copy the first gradient to the host each step."),)

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None

    @hookimpl(wrapper=True)
    def init_distributed(self, platform: Platform) -> Generator[None, DistInfo, DistInfo]:
        platform.set_memory_limit(1.0)
        platform.allocator_settings("")
        return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(self, session: Session, run: Run) -> Generator[None, OptimizerStep, OptimizerStep]:
        from mindspeed_toy_needs.snapshot import Snapshot

        if self._snapshot is None:
            self._snapshot = Snapshot(session.platform, run)
        self._snapshot.start()
        result = yield
        self._snapshot.finish()
        return result


class WeightsFile(Feature):
    """Weights from another source than a checkpoint."""

    name = "toy-weights-file"
    family = FAMILY
    summary = "starts from the weights in a NumPy archive"
    flags = (
        Flag("--toy-weights-file", type=str, per_rank=True, help="An .npz of full tensors by logical name."),
    )

    @hookimpl
    def load_checkpoint(self, run: Run) -> LoadInfo:
        from mindspeed_toy_needs.weights_file import load

        return load(run, run.args.toy_weights_file)


class ExportWeights(Feature):
    """A file beside the checkpoint, and state left out of it."""

    name = "toy-export-weights"
    family = FAMILY
    summary = "writes the final norm beside each checkpoint and saves no optimizer"
    flags = (Flag("--toy-export-weights", help="Write final_norm.npz into the folder of --save."),)

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        return {"no_save_optim": True} if args.toy_export_weights else {}

    @hookimpl(wrapper=True)
    def save_checkpoint(self, run: Run) -> Generator[None, SaveInfo, SaveInfo]:
        info = yield
        from mindspeed_toy_needs.weights_file import export_final_norm

        export_final_norm(run, info.path.parent / "final_norm.npz")
        return info


class Calm(Feature):
    """Aliases, inverted flags and presets."""

    name = "toy-calm"
    family = FAMILY
    summary = "stands for a set of careful values"
    flags = (
        Flag(
            "--toy-calm",
            type=str,
            choices=("mild", "strict"),
            aliases=("--toy-careful",),
            help="Preset of learning rate and clipping.",
        ),
        Flag("--no-toy-advice", inverts="toy_advice", help="Give no advice."),
    )

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        if args.toy_calm is None:
            return {}
        strict = args.toy_calm == "strict"
        return {"clip_grad": 0.1 if strict else 0.5, "lr": 1e-5 if strict else 1e-4}


class Sentences(Feature):
    """Data of its own: a dataset, how samples become a micro-batch, and which of them."""

    name = "toy-sentences"
    family = FAMILY
    summary = "trains on sentences of different lengths, in micro-batches of as many tokens each"
    flags = (
        Flag("--toy-sentences", type=int, help="Number of sentences; the data has no other source then."),
        Flag("--toy-tokens", type=int, default=0, help="Tokens of a micro-batch; 0 fills up every sentence."),
    )
    slots = ("data-source",)

    @hookimpl
    def build_datasets(self, args: Namespace) -> Datasets:
        from mindspeed_toy_needs.sentences import datasets

        return datasets(args)

    @hookimpl(wrapper=True)
    def batch_fields(self, post_process: bool) -> Generator[None, frozenset[str], frozenset[str]]:
        fields = yield
        return fields | {"sentence_lengths"} if post_process else fields


class Letters(Feature):
    """A tokenizer of its own."""

    name = "toy-letters"
    family = FAMILY
    summary = "makes a token of every letter"
    flags = (Flag("--toy-letters", type=int, help="Number of letters."),)

    @hookimpl
    def build_tokenizer(self, args: Namespace) -> LetterTokenizer:
        from mindspeed_toy_needs.letters import LetterTokenizer

        return LetterTokenizer(args.toy_letters)


class Adapter(Feature):
    """Weights that a checkpoint leaves out, and that come from another one."""

    name = "toy-adapter"
    family = FAMILY
    summary = "trains low-rank updates of every fc1 and saves nothing else"
    flags = (
        Flag("--toy-adapter", type=int, help="Rank of the updates."),
        Flag("--toy-adapter-base", type=str, per_rank=True, help="Checkpoint that holds the other weights."),
    )
    places_modules = True
    affects_checkpoint = True

    @hookimpl(wrapper=True)
    def build_layer_spec(
        self, session: Session, args: Namespace
    ) -> Generator[None, TransformerBlockSubmodules, TransformerBlockSubmodules]:
        spec = yield
        from mindspeed_toy_needs.adapter import replace_fc1

        return replace_fc1(spec, session, args.toy_adapter, owner=self.name)

    @hookimpl(wrapper=True)
    def build_model(self) -> Generator[None, list[MegatronModule], list[MegatronModule]]:
        model = yield
        from mindspeed_toy_needs.adapter import freeze_base

        freeze_base(model)
        return model

    @hookimpl(wrapper=True)
    def load_checkpoint(
        self, session: Session, run: Run, source: str | None
    ) -> Generator[None, LoadInfo, LoadInfo]:
        if source is None and run.args.toy_adapter_base:
            session.call("load_checkpoint", run=run, source=run.args.toy_adapter_base)
        return (yield)

    @hookimpl(wrapper=True)
    def model_state(
        self, source: str | None
    ) -> Generator[None, dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        state = yield
        from mindspeed_toy_needs.adapter import is_adapter

        return {
            key: {name: entry for name, entry in part.items() if is_adapter(name) == (source is None)}
            for key, part in state.items()
        }


class Beside(Feature):
    """A product beside a linear that other features may change."""

    name = "toy-beside"
    family = FAMILY
    summary = "adds a low-rank product to the output of every fc1"
    flags = (Flag("--toy-beside", type=int, help="Rank of the product."),)
    before: ClassVar[Sequence[str]] = ("tp-linear", "pp-weight-gradients")
    places_modules = True
    affects_checkpoint = True

    @hookimpl(wrapper=True)
    def build_layer_spec(
        self, session: Session, args: Namespace
    ) -> Generator[None, TransformerBlockSubmodules, TransformerBlockSubmodules]:
        spec = yield
        from mindspeed_toy_needs.beside import place_beside

        return place_beside(spec, session, args.toy_beside, owner=self.name)


class BesideFirst(Beside):
    """The same, placed before what other features place."""

    name = "toy-beside-first"
    summary = "adds the product before others change the linear"
    flags = (
        Flag("--toy-beside-first", help="Place it first."),
        Flag("--toy-beside", type=int, help="Rank of the product."),
    )
    before = ()
    after = ("tp-linear", "pp-weight-gradients")
    takes_over = (TakeOver("toy-beside", "it is placed first"),)


class Uneven(Feature):
    """Dimensions that tensor parallelism does not divide."""

    name = "toy-uneven"
    family = FAMILY
    summary = "takes over how dimensions are distributed (and distributes none)"
    flags = (Flag("--toy-uneven", help="Let nobody check that dimensions divide."),)
    slots = ("tp-partition",)

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, TransformerConfig, TransformerConfig]:
        return (yield)


DECLARATIONS = (
    StageSpecs(
        module="mindspeed_toy_needs.stages",
        stages=("toy_route", "toy_token_weights"),
        summary="where pipeline stages live, and what a token's loss counts",
    ),
    ExtensionPoint(
        name="toy.weight-rules",
        group="mindspeed_toy_needs.weight_rules",
        summary="functions from labels to the weight of each token",
        check="mindspeed_toy_needs.token_weights:check_rule",
    ),
    Environment,
    NamedGroups,
    GroupMarks,
    InitDepth,
    AttentionScale,
    SequentialSchedule,
    VShape,
    EmbeddingScale,
    Experts,
    WatchExperts,
    BucketSize,
    UpdateRules,
    Polynomial,
    Documents,
    TokenWeights,
    DoubleBoundary,
    NormGradients,
    ExchangeMlp,
    Numbers,
    GradientSnapshot,
    WeightsFile,
    ExportWeights,
    Calm,
    Sentences,
    Letters,
    Adapter,
    Beside,
    BesideFirst,
    Uneven,
)
