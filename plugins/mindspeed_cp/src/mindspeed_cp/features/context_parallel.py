"""The declaration of context parallelism: flags, refusals, proofs. No torch."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Scenario, TakeOver, dest_of, hookimpl
from mindspeed_cp import attention_flags
from mindspeed_cp.algorithms import GATHER_ALGO, HYBRID_ALGO, RING_ALGO, ULYSSES_ALGO
from mindspeed_cp.checked_flag import ignored, problems
from mindspeed_cp.flags import FLAGS


class ContextParallel(Feature):
    """Attention over sequences that are split over ranks."""

    name = "context-parallel"
    family = "cp"
    summary = "Split sequences over ranks: Ulysses, ring, double ring, hybrid, KV all-gather"
    level = 2
    flags: ClassVar[Sequence[Flag]] = FLAGS
    conflicts: ClassVar[Sequence[Conflict]] = (
        Conflict(
            flag="--create-attention-mask-in-dataloader",
            reason="a rank makes the masks of its own part; a mask of the whole sequence is not split",
        ),
    )
    takes_over = (
        TakeOver("flash-attn", "attention over a split sequence is flash attention of its blocks"),
        TakeOver("fusion-attn-v2", "attention over a split sequence chooses the kernel of each block"),
        TakeOver("triangle-attn", "attention over a split sequence leaves out what is masked"),
        TakeOver("masked-softmax", "attention over a split sequence has no softmax of its own to replace"),
    )
    hosts = ("standalone", "megatron-lm", "library")
    slots: ClassVar[Sequence[str]] = ("context-parallel", "core-attention")
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_cp:docs/context-parallel.md"
    places_modules = True
    needs_open_session = True
    fake_tensors: ClassVar[bool | None] = True
    deterministic = True
    affects_checkpoint = False
    formulas: ClassVar[Mapping[str, str]] = {
        # The context, and one number per row and head, whichever ranks they were merged of.
        "activation_bytes": "num_attention_heads * (element_size * kv_channels + 4) * seq_length "
        "* micro_batch_size / (tensor_model_parallel_size * context_parallel_size)"
    }
    tuning: ClassVar[Mapping[str, Sequence[Any]]] = {
        "--context-parallel-size": (1, 2, 4, 8, 16, 32),
        "--context-parallel-algo": (RING_ALGO, ULYSSES_ALGO, HYBRID_ALGO, GATHER_ALGO),
        "--ulysses-degree-in-cp": (2, 4, 8),
    }
    verify: ClassVar[Sequence[Scenario]] = Proofs(
        "mindspeed_cp.features.proofs:PROOFS",
        "mindspeed_cp.features.document_proofs:DOCUMENT_PROOFS",
        "mindspeed_cp.features.model_proofs:MODEL_PROOFS",
    )

    _origin: Mapping[str, bytes] = {}

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a sequence is split, or an option is given that only split sequences have."""
        only_split = ("context_parallel_kv_cache_policy", "use_ulysses_allgather_kv")
        asked = any(getattr(args, name, None) for name in only_split)
        return asked or getattr(args, "context_parallel_size", 1) > 1

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Turn the data loader's mask off where it is the host's default."""
        masked = getattr(args, "create_attention_mask_in_dataloader", False)
        return {"create_attention_mask_in_dataloader": False} if cls.enabled(args) and masked else {}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Return which sizes and options do not go together."""
        found = [*problems(FLAGS, args), *attention_flags.problems(args)]
        if getattr(args, "position_embedding_type", "rope") in ("mrope", "relative"):
            found.append(
                f"--position-embedding-type {args.position_embedding_type} is not split over ranks; use "
                "rope, yarn, learned_absolute or none"
            )
        found += [
            f"{flag} packs samples of many lengths, and splits them by itself; leave one of the two out"
            for flag in ("--sft", "--hybrid-context-parallel")
            if getattr(args, dest_of(flag), False)
        ]
        if not found:
            from mindspeed_cp.cut_lengths import cut_problems

            found += cut_problems(args)
        return found

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return which flags have no effect with the chosen algorithm."""
        return ignored(FLAGS, args)

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that groups of two levels are left to another implementation, which computes the same."""
        if not getattr(args, "hierarchical_context_parallel_sizes", None):
            return ()
        return (
            "--hierarchical-context-parallel-sizes are groups of TransformerEngine's attention; the result "
            "is the same, and --ulysses-degree-in-cp makes groups of two levels",
        )

    @hookimpl(wrapper=True)
    def seed_everything(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Remember the digests of this rank's freshly seeded generators."""
        seeds = yield
        if args.cp_distinct_dropout:
            from mindspeed_cp.modules.dropout import digests

            self._origin = digests(session.platform)
        return seeds

    @hookimpl(wrapper=True)
    def train_step(self, run: Any) -> Generator[None, Any, Any]:
        """Let every rank of a sequence drop other hidden states; count what attention does."""
        if run.args.cp_distinct_dropout:
            from mindspeed_cp.modules.dropout import digests, own_states

            # Training loops that seed by themselves have done so by now.
            self._origin = self._origin or digests(run.session.platform)
            own_states(run, self._origin)
        if not run.args.cp_log_counters:
            return (yield)
        from mindspeed_cp.modules.counted import counted_step

        with counted_step(run):
            return (yield)

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Create sub-groups of the context-parallel groups."""
        pg = yield
        from mindspeed_cp.modules.members import create_groups

        create_groups(session, args, pg)
        return pg

    @hookimpl(wrapper=True)
    def build_transformer_config(self, args: Any) -> Generator[None, Any, Any]:
        """Exchange shapes where ranks may differ in length."""
        config = yield
        if args.variable_seq_lengths and args.pipeline_model_parallel_size > 1:
            config.variable_seq_lengths = True
        return config

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Replace the core attention of every layer."""
        spec = yield
        from mindspeed_cp.modules.core_attention import place_attention

        return place_attention(session, args, spec, self.name)

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Give rotary embeddings the positions of this rank."""
        model = yield
        from mindspeed_cp.modules.described_attention import keep_samples
        from mindspeed_cp.modules.rotary import follow_layout

        follow_layout(session, model)
        keep_samples(session, model)
        return model

    @hookimpl(wrapper=True)
    def validate_arguments(self, session: Any) -> Generator[None, Any, Any]:
        """Refuse a mask by plugin without a plugin that gives one, and inference that splits nothing."""
        args = yield
        if session.mode == "inference" and session.host.name == "standalone":
            size = getattr(args, "context_parallel_size", 1)
            if size > 1:
                raise ArgumentError(
                    "--context-parallel-size",
                    size,
                    "sequences are split where batches of training are read, and this session has none",
                    "use 1; a checkpoint loads under another layout",
                )
        if getattr(args, "adaptive_cp_manually_set_mask_list", False):
            from mindspeed_cp.modules.rules import check_answered

            check_answered(session)
        return args

    @hookimpl(wrapper=True)
    def batch_fields(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Add the fields that tell documents apart, on every pipeline stage."""
        fields = yield
        from mindspeed_cp.modules.rules import fields_for_rules

        return fields | fields_for_rules(session, args)

    @hookimpl(wrapper=True)
    def get_batch(self, run: Any, vp_stage: Any, microbatch: Any) -> Generator[None, Any, Any]:
        """Return this rank's part of the micro-batch, described on every pipeline stage."""
        batch = yield
        from mindspeed_cp.modules.batch import split_batch

        return split_batch(run, batch, microbatch)

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Any, batch: Any) -> Generator[None, Any, Any]:
        """Count tokens over all ranks of the sequence."""
        loss = yield
        from mindspeed_cp.modules.loss import over_the_sequence

        return over_the_sequence(run, loss, batch)
