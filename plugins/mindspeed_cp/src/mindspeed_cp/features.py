"""The declaration of context parallelism: flags, refusals, proofs. No torch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Scenario, hookimpl
from mindspeed_cp.options import ALGORITHMS, GATHER_ALGO, LAYOUTS, RING_ALGO, problems

# Adam divides by the root of the second moment: with its usual epsilon the sign of a gradient that is zero
# but for rounding decides about a whole step.
_MODEL = (
    *("--adam-eps", "1e-3", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--swiglu", "--disable-bias-linear", "--group-query-attention", "--num-query-groups", "2"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
)
_PACKED = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")


def _split(size: int, algorithm: str, *more: str) -> tuple[str, ...]:
    return ("--context-parallel-size", str(size), "--context-parallel-algo", algorithm, *more)


def _proof(
    name: str, world: int, flags: tuple[str, ...], more: tuple[str, ...] = (), size: int = 2
) -> Scenario:
    """The same model, with the sequence split and whole, on as many processes as each needs."""
    return Scenario(
        name,
        flags=(*_MODEL, *more, *flags),
        baseline=(*_MODEL, *more),
        world_size=world,
        baseline_world_size=world // size,
        tolerance=2e-5,
    )


class ContextParallel(Feature):
    """Attention over sequences that are split over ranks."""

    name = "context-parallel"
    family = "cp"
    summary = "Sequences split over ranks: Ulysses, ring, double ring, hybrid, fetched keys, balanced layouts"
    stability = "prototype"
    level = 2
    flags = (
        Flag("--context-parallel-size", type=int, default=1, help="Ranks that a sequence is split over."),
        Flag(
            "--context-parallel-algo",
            type=str,
            default=RING_ALGO,
            choices=ALGORITHMS,
            help="How attention reaches the keys of other ranks.",
        ),
        Flag("--ulysses-degree-in-cp", type=int, help="Ranks that exchange heads in the hybrid algorithms."),
        Flag("--cp-window-size", type=int, default=1, help="Ranks of an inner ring of a double ring."),
        Flag(
            "--attention-mask-type",
            type=str,
            default="causal",
            choices=("causal", "general"),
            aliases=("--cp-attention-mask-type",),
            help="causal: a query sees no later key; general: it sees every key.",
        ),
        Flag(
            "--reset-attention-mask",
            help="Tokens see their own document only; documents are found by --reset-position-ids.",
        ),
        Flag(
            "--context-parallel-kv-cache-policy",
            type=str,
            choices=("full", "half"),
            help="Keep what a ring receives for backward: keys and values, or keys.",
        ),
        Flag(
            "--context-parallel-cache-interval",
            type=int,
            default=0,
            help="Layers between those that keep what their ring receives.",
        ),
        Flag(
            "--cp-layout",
            type=str,
            default="auto",
            choices=LAYOUTS,
            help="Which tokens a rank owns; auto suits the mask.",
        ),
        Flag(
            "--cp-chunks-per-rank",
            type=int,
            default=0,
            help="Chunks of each rank in a balanced layout; 0 takes the fewest that balance.",
        ),
        Flag(
            "--cp-grad-comm-dtype",
            type=str,
            default="fp32",
            choices=("fp32", "model"),
            help="Dtype in which gradients of keys and values travel.",
        ),
    )
    conflicts = (
        Conflict(
            flag="--create-attention-mask-in-dataloader",
            reason="a rank makes the masks of its own part; a mask of the whole sequence is not split",
        ),
        Conflict(flag="--mtp-num-layers", reason="predicted tokens are not shifted across ranks"),
        Conflict(flag="--multi-latent-attention", reason="its rotary embedding is not split over ranks"),
    )
    hosts = ("standalone",)
    slots = ("context-parallel", "core-attention")
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_cp:docs/context-parallel.md"
    places_modules = True
    deterministic = True
    affects_checkpoint = False
    verify = (
        _proof("ring", 2, _split(2, RING_ALGO)),
        _proof("ulysses", 2, _split(2, "ulysses_cp_algo")),
        _proof("fetched", 2, _split(2, GATHER_ALGO)),
        _proof("balanced", 2, _split(2, "adaptive_cp_algo")),
        _proof("general", 2, _split(2, RING_ALGO, "--attention-mask-type", "general")),
        _proof("kept-keys", 2, _split(2, RING_ALGO, "--context-parallel-kv-cache-policy", "full")),
        _proof("double-ring", 4, _split(4, RING_ALGO, "--cp-window-size", "2"), size=4),
        _proof("hybrid", 4, _split(4, "hybrid_cp_algo", "--ulysses-degree-in-cp", "2"), size=4),
        _proof(
            "hybrid-balanced", 4, _split(4, "hybrid_adaptive_cp_algo", "--ulysses-degree-in-cp", "2"), size=4
        ),
        *(
            Scenario(
                f"documents-{name}",
                flags=(*_MODEL, *_PACKED, *_split(2, algorithm), *more),
                baseline=(*_MODEL, *_PACKED, "--create-attention-mask-in-dataloader", *more),
                world_size=2 * (2 if more else 1),
                baseline_world_size=2 if more else 1,
                tolerance=2e-5,
            )
            for name, algorithm, more in (
                ("ring", RING_ALGO, ()),
                ("ulysses", "ulysses_cp_algo", ()),
                ("fetched", GATHER_ALGO, ()),
                ("pp2", GATHER_ALGO, ("--pipeline-model-parallel-size", "2")),
            )
        ),
        _proof(
            "tp2-sp", 4, _split(2, RING_ALGO), ("--tensor-model-parallel-size", "2", "--sequence-parallel")
        ),
        _proof("pp2", 4, _split(2, "ulysses_cp_algo"), ("--pipeline-model-parallel-size", "2")),
        _proof("dp2-distributed-optimizer", 4, _split(2, GATHER_ALGO), ("--use-distributed-optimizer",)),
        _proof(
            "recompute",
            2,
            _split(2, RING_ALGO),
            (
                *("--recompute-granularity", "full", "--recompute-method", "uniform"),
                *("--recompute-num-layers", "1"),
            ),
        ),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Where a sequence is split."""
        return bool(getattr(args, "context_parallel_size", 1) > 1)

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Sizes and options that do not go together."""
        found = problems(args)
        if args.reset_attention_mask and not getattr(args, "reset_position_ids", False):
            found.append(
                "--reset-attention-mask finds documents by their positions when a sequence is split; add "
                "--reset-position-ids"
            )
        if getattr(args, "hidden_dropout", 0.0):
            found.append(
                f"--hidden-dropout {args.hidden_dropout} would drop the same positions on every rank of "
                "context parallelism; use 0"
            )
        if getattr(args, "position_embedding_type", "rope") in ("mrope", "relative"):
            found.append(
                f"--position-embedding-type {args.position_embedding_type} is not split over ranks; use "
                "rope, yarn, learned_absolute or none"
            )
        return found

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Sub-groups of the context-parallel groups."""
        pg = yield
        from mindspeed_cp.modules.members import create_groups

        create_groups(session, args, pg)
        return pg

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Replace the core attention of every layer."""
        spec = yield
        from mindspeed_cp.modules.core_attention import place_attention

        return place_attention(session, args, spec)

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Give rotary embeddings the positions of this rank."""
        model = yield
        from mindspeed_cp.modules.rotary import follow_layout

        follow_layout(session, model)
        return model

    @hookimpl(wrapper=True)
    def batch_fields(self, args: Any) -> Generator[None, Any, Any]:
        """Positions on every stage, where they tell documents apart."""
        fields = yield
        return fields | {"position_ids"} if args.reset_attention_mask else fields

    @hookimpl(wrapper=True)
    def get_batch(self, run: Any, vp_stage: Any, microbatch: Any) -> Generator[None, Any, Any]:
        """This rank's part of the micro-batch, and its description on every stage."""
        batch = yield
        from mindspeed_cp.modules.batch import split_batch

        return split_batch(run, batch, microbatch)

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Any) -> Generator[None, Any, Any]:
        """Count tokens over all ranks of the sequence."""
        loss = yield
        from mindspeed_cp.modules.loss import over_the_sequence

        return over_the_sequence(run, loss)


DECLARATIONS = (ContextParallel,)
