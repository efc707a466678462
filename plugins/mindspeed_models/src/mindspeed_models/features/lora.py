"""The declaration of low-rank adapters."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, hookimpl
from mindspeed_models.lora.options import (
    ADAPTER,
    ALPHA,
    DROPOUT,
    DTYPE,
    FP32,
    HOOKS,
    LOAD,
    MODEL,
    NAME,
    RANK,
    SAVED,
    TARGETS,
    LoraOptions,
)

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

_WHOLE = "a base that is frozen and adapters that train share no shard; use --use-distributed-optimizer"
_EIGHT_BITS = "adapters beside weights of 8 bits or fewer are not computed; use --bf16"


class Lora(Feature):
    """Low-rank updates of linears, beside a frozen base."""

    name = NAME
    family = "finetuning"
    summary = "Train low-rank adapters beside frozen weights (LoRA)"
    flags = (
        Flag(
            TARGETS,
            type=str,
            nargs="+",
            changes_training=True,
            help="Linears that get an adapter, by the seed's, megatron-core's or Hugging Face's names.",
        ),
        Flag(
            LOAD,
            type=str,
            per_rank=True,
            help="Adapters to go on with: a --save folder, or a peft directory.",
        ),
        Flag(RANK, type=int, default=16, help="Rank of the updates."),
        Flag(ALPHA, type=float, default=32.0, help="The updates count alpha / r times."),
        Flag(DROPOUT, type=float, default=0.0, help="Dropout of the adapters' inputs."),
        Flag(
            SAVED, type=str, nargs="+", help="Modules that are trained and saved whole beside the adapters."
        ),
        Flag(
            HOOKS,
            type=str,
            nargs="+",
            default=["word_embeddings", "input_layernorm"],
            help="Modules whose outputs ask for a gradient; embeddings always do.",
        ),
        Flag(ADAPTER, type=str, default="default", help="Name of the adapter in peft directories."),
        Flag(DTYPE, type=str, default=MODEL, choices=(MODEL, FP32), help="Dtype of the adapters' weights."),
    )
    conflicts = (
        Conflict(flag="--fp8-format", reason=_EIGHT_BITS),
        Conflict(flag="--fp4-format", reason=_EIGHT_BITS),
        Conflict(flag="--use-torch-fsdp2", reason=_WHOLE),
        Conflict(flag="--use-megatron-fsdp", reason=_WHOLE),
        Conflict(
            flag="--moe-shared-expert-overlap",
            reason="linears of shared experts leave communication to their layer there; drop it",
        ),
    )
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = True
    docs = "mindspeed_models:docs/lora.md"
    verify = Proofs("mindspeed_models.features.lora_proofs:LORA_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether linears are named, or adapters."""
        return bool(getattr(args, "lora_target_modules", None) or getattr(args, "lora_load", None))

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse names, sizes and linears that adapters cannot have."""
        from mindspeed_models.lora.targets import lacking, modules_of

        if not args.lora_target_modules:
            return (f"{LOAD} {args.lora_load}: name the linears of its adapters with {TARGETS}",)
        found = []
        roles: tuple[str, ...] = ()
        try:
            roles = LoraOptions.of(args).roles
        except ValueError as error:
            # One of the two lists of names is wrong.
            flag = TARGETS
            try:
                modules_of(args.lora_modules_to_save or ())
            except ValueError:
                flag = SAVED
            found.append(f"{flag}: {error}")
        if args.lora_r < 1:
            found.append(f"{RANK} {args.lora_r}: a rank is at least 1")
        if args.lora_alpha <= 0:
            found.append(f"{ALPHA} {args.lora_alpha}: with it nothing is updated; give a number above 0")
        if not 0.0 <= args.lora_dropout < 1.0:
            found.append(f"{DROPOUT} {args.lora_dropout:g}: it is at least 0 and below 1")
        if getattr(args, "multi_latent_attention", False):
            low_rank = getattr(args, "q_lora_rank", None) is not None
            if absent := lacking(roles, low_rank=low_rank):
                there = "linear_q_down_proj linear_q_up_proj" if low_rank else "linear_q_proj"
                given = "is given" if low_rank else "is not given"
                found.append(
                    f"{TARGETS} {absent}: --q-lora-rank {given}, so that queries have {there}; name them"
                )
        if getattr(args, "num_experts", None) and {"fc1", "fc2"}.intersection(roles):
            names = [name for name in args.lora_target_modules if _is_of_experts(name)]
            found.append(
                f"{TARGETS} {' '.join(names)} with --num-experts {args.num_experts}: routed experts get no "
                "adapters; name linears of attention (linear_qkv linear_proj)"
            )
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say what a name of a part stands for."""
        from mindspeed_models.lora.targets import fused

        return [
            f"{TARGETS} {' '.join(parts)}: megatron-core computes it with others in {whole}, whose "
            "adapter updates them together"
            for whole, parts in fused(args.lora_target_modules or ()).items()
        ]

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return what an adapter computes."""
        options = LoraOptions.of(args)
        return {
            "lora_target_modules": list(options.roles),
            "lora_r": options.rank,
            "lora_alpha": options.alpha,
        }

    @hookimpl(wrapper=True, tryfirst=True)
    def validate_arguments_early(self, session: Session) -> Generator[None, Any, Any]:
        """Tell the folders of base and adapters apart."""
        args: Namespace = yield
        from mindspeed_models.lora.checkpoints import refuse_in_library, separate

        refuse_in_library(session, args)
        return separate(session, args) if hasattr(args, "load") else args

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, Any, Any]:
        """Leave the biases of routers, which are part of the base, as they are."""
        config = yield
        if getattr(config, "moe_router_enable_expert_bias", False):
            config.moe_router_bias_update_rate = 0.0
        return config

    @hookimpl(wrapper=True, tryfirst=True)
    def build_layer_spec(
        self, session: Session, args: Any, config: Any, vp_stage: int | None
    ) -> Generator[None, Any, Any]:
        """Put adapters around the linears that every other feature has left there."""
        spec = yield
        from mindspeed_models.lora.place import place_adapters

        return place_adapters(session, spec, _options(session, args), config, vp_stage, _seed(args))

    @hookimpl(wrapper=True, tryfirst=True)
    def build_model(self, session: Session, args: Any) -> Generator[None, Any, Any]:
        """Freeze the base."""
        chunks = yield
        from mindspeed_megatron.partial_training import TrainedParts
        from mindspeed_megatron.unwrap import chunks_of, unwrap
        from mindspeed_models.lora.place import adapt_compressing, adapt_output_layers
        from mindspeed_models.lora.trained import freeze, let_inputs_learn
        from mindspeed_models.lora.work import partial_training

        options = _options(session, args)
        built = chunks_of(chunks)
        adapt_compressing(session, built, options, _seed(args))
        adapt_output_layers(session, built, options, _seed(args))
        freeze(session, built, options.modules, in_fp32=options.in_fp32)
        let_inputs_learn(built, args.lora_register_forward_hook or ())
        model = unwrap(built[0])
        session.state(TrainedParts).partial = partial_training(
            options, model.config, model.vocab_size, tied=model.share_embeddings_and_output_weights
        )
        return chunks

    @hookimpl(wrapper=True, tryfirst=True)
    def load_checkpoint(self, session: Session, run: Run, source: str | None) -> Generator[None, Any, Any]:
        """Load the base before the adapters."""
        if source is None:
            from mindspeed_models.lora.checkpoints import check_finetuned, fill_from_peft, load_base

            load_base(run)
            check_finetuned(run)
            fill_from_peft(run)
        return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def model_state(self, run: Run, source: str | None) -> Generator[None, Any, Any]:
        """Keep what is trained in checkpoints of the run, and look for the rest in a base."""
        state = yield
        from mindspeed_models.lora.checkpoints import choose_weights

        return choose_weights(run, state, source)

    @hookimpl
    def checkpoint_state(self, session: Session, run: Run) -> Mapping[str, Any]:
        """Save the digest of the base."""
        from mindspeed_models.lora.checkpoints import state_of

        return {NAME: state_of(run, _options(session, run.args))}

    @hookimpl
    def restore_checkpoint_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Refuse another base."""
        if NAME in state:
            from mindspeed_models.lora.checkpoints import check_base

            check_base(run, state[NAME])

    @hookimpl(wrapper=True)
    def optimizer_step(self, session: Session, run: Run) -> Generator[None, Any, Any]:
        """See that a gradient arrives, once."""
        first = session.state(FirstStep)
        if not first.seen:
            first.seen = True
            from mindspeed_models.lora.trained import check_gradients

            check_gradients(run)
        return (yield)


class FirstStep:
    """Remembers whether the gradients of a session's first step were looked at."""

    seen = False


def _options(session: Session, args: Any) -> LoraOptions:
    from mindspeed_models.lora.checkpoints import options_of

    return options_of(session, args)


def _seed(args: Any) -> int:
    return int(getattr(args, "seed", None) or 0)


def _is_of_experts(name: str) -> bool:
    from mindspeed_models.lora.targets import roles_of

    try:
        return bool({"fc1", "fc2"}.intersection(roles_of([name])))
    except ValueError:
        return False
