"""The declaration of DeepSpeed's mixture of experts: gating with a capacity, equal parts exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, dest_of
from mindspeed_megatron.expert_notes import routes_by_sinkhorn
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.options import JITTER, RESAMPLE

_FLAG, _OURS, _MEGATRONS = "--moe-model-type", "deepspeed_moe", "megatron_moe"
_INTERVAL, _FACTOR, _NOISE = "--expert-interval", "--moe-train-capacity-factor", "--noisy-gate-policy"
_ORDERLY, _SINKHORN = "--no-use-rts", "--moe-use-sinkhorn"
_NO_DROP, _PADDING, _TABLES = "--moe-no-drop", "--moe-dynamic-padding", "--enable-token-rearrange-opt"
_OTHER_ROUTES = "this model type has a router of its own; drop one of the two"


def _other(flag: str, reason: str = _OTHER_ROUTES) -> Conflict:
    return Conflict(flag=flag, reason=reason)


class DeepSpeedExperts(Feature):
    """Experts that take so many tokens of a rank, of one or two choices each."""

    name = "moe-deepspeed"
    family = "moe"
    summary = "Train DeepSpeed's MoE: top-1 or top-2 gating with a capacity"
    flags = (
        Flag(
            _FLAG,
            type=str,
            default=_MEGATRONS,
            choices=(_MEGATRONS, _OURS),
            help="deepspeed_moe: top-1 or top-2 gating, experts with a capacity.",
        ),
        Flag(_INTERVAL, type=int, help="Interval of layers with experts, as --moe-layer-freq."),
        Flag(
            _FACTOR,
            type=float,
            default=1.0,
            help="Capacity of an expert over its even share of tokens.",
        ),
        Flag(
            _NOISE,
            type=str,
            choices=(JITTER, RESAMPLE, "None"),
            help="Noise of the router in training: on its input, or on the scores that choose.",
        ),
        Flag(
            _ORDERLY,
            inverts="use_rts",
            help="With top-1 gating, keep an expert's first tokens instead of random ones.",
        ),
        Flag(_SINKHORN, help="Choose experts by Sinkhorn-balanced scores."),
        Flag(_NO_DROP, help="Drop no token: exchange as many rows as each expert gets."),
        Flag(
            _PADDING, help="With --moe-no-drop, exchange equal parts, as large as the fullest expert needs."
        ),
        Flag(_TABLES, help="Accepted without effect: tokens are always rearranged by index tables."),
    )
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="without experts there is nothing to route to"),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("alltoall", "alltoall_seq"),
            reason="places of experts are exchanged by an all-to-all",
        ),
    )
    conflicts = (
        ORDERS_COMMUNICATION,
        _other("--moe-expert-capacity-factor", "the capacity is --moe-train-capacity-factor here; drop it"),
        _other("--moe-pad-expert-input-to-capacity", "experts are always padded to their capacity; drop it"),
        _other("--moe-router-enable-expert-bias"),
        _other("--moe-router-num-groups"),
        _other("--moe-router-topk-scaling-factor"),
        _other("--moe-router-force-load-balancing"),
        _other("--moe-router-fusion"),
        _other("--moe-enable-routing-replay"),
        _other("--moe-input-jitter-eps", f"noise on the router's input is {_NOISE} {JITTER} here; drop it"),
        _other(
            "--moe-router-padding-for-quantization", "an expert's rows are its capacity; drop one of the two"
        ),
        _other("--moe-apply-probs-on-input", "weights multiply the results of experts; drop one of the two"),
        Conflict(
            flag="--moe-router-score-function",
            equals="sigmoid",
            reason="scores are a softmax over all experts; drop one of the two",
        ),
        _other(
            "--moe-permute-fusion",
            "tokens take their places by tables of indices already; drop one of the two",
        ),
        _other(
            "--use-fused-moe-token-permute-and-unpermute",
            "tokens take their places by tables of indices already; drop one of the two",
        ),
    )
    slots = ("router",)
    packages = ("megatron-core>=0.16",)
    docs = "mindspeed_moe:docs/moe-deepspeed.md"
    deterministic = True
    fake_tensors = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.deepspeed_proofs:DEEPSPEED_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether the model type is given, or a flag that needs it."""
        return getattr(args, "moe_model_type", None) == _OURS or bool(_given(args))

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Set the frequency of layers with experts, the dispatcher, and what one choice needs."""
        if getattr(args, "moe_model_type", None) != _OURS:
            return {}
        found: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
        interval = getattr(args, "expert_interval", None)
        if interval is not None and interval > 0:
            found["moe_layer_freq"] = interval
        if getattr(args, "moe_router_topk", None) == 1:
            # Otherwise megatron-core expects a softmax over the one chosen expert.
            found["moe_router_pre_softmax"] = True
        return found

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return how tokens come to experts, and which of them an expert leaves out."""
        facts: dict[str, Any] = {"moe_model_type": _OURS}
        if args.moe_use_sinkhorn:
            facts["moe_use_sinkhorn"] = True
        if args.moe_no_drop:
            return {**facts, "moe_no_drop": True}
        facts["moe_train_capacity_factor"] = args.moe_train_capacity_factor
        if args.moe_router_topk == 1 and not args.use_rts:
            facts["use_rts"] = "no: the first tokens are kept"
        return facts

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse flags without the model type, capacities that are none, and noise that has no effect."""
        given = _given(args)
        if args.moe_model_type != _OURS:
            way = f"add {_FLAG} {_OURS}, or drop it"
            found = [f"{flag} is one of another model type than {_MEGATRONS}; {way}" for flag in given]
            if _INTERVAL in given:
                found.append(f"without {_FLAG} {_OURS}, {_INTERVAL} is --moe-layer-freq; use that one")
            return found
        return [*_of_layers(args), *_of_routes(args), *_of_capacity(args, given)]

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return what has no effect with two choices, or where nothing is dropped."""
        found = {_TABLES: "tokens always take their places by tables of indices"}
        if args.moe_no_drop:
            found[_ORDERLY] = f"no token is dropped with {_NO_DROP}"
        elif getattr(args, "moe_router_topk", None) == 2:
            found[_ORDERLY] = "with two choices the first tokens are kept; it is for --moe-router-topk 1"
        if args.noisy_gate_policy == RESAMPLE and getattr(args, "moe_router_topk", None) == 2:
            found[_NOISE] = f"{RESAMPLE} draws one choice, and two are made without noise, as in MindSpeed"
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return what depends on the layout."""
        said = []
        if args.moe_no_drop and not args.moe_dynamic_padding:
            said.append(
                f"{_NO_DROP} is megatron-core's dropless layer but for the balance loss; rows are exchanged "
                "without padding"
            )
        if not args.moe_no_drop:
            said.append(
                f"{_FACTOR} {args.moe_train_capacity_factor:g} is decided by each rank on its tokens of a "
                "micro-batch, so that which are dropped depends on the layout"
            )
        if args.moe_use_sinkhorn:
            said.append(
                f"{_SINKHORN} balances the tokens of a rank, so that its choices depend on the layout"
            )
        return said


def _given(args: Any) -> list[str]:
    """Return the flags that mean something with the model type only."""
    at_rest = {
        _INTERVAL: None,
        _FACTOR: 1.0,
        _NOISE: None,
        _SINKHORN: False,
        _NO_DROP: False,
        _PADDING: False,
        _TABLES: False,
    }
    found = [flag for flag, value in at_rest.items() if getattr(args, dest_of(flag), value) != value]
    return found if getattr(args, "use_rts", True) else [*found, _ORDERLY]


def _of_layers(args: Any) -> Sequence[str]:
    found = list(shared_experts_on_a_stream(f"{_FLAG} {_OURS}", args))
    interval, frequency = args.expert_interval, getattr(args, "moe_layer_freq", 1)
    if interval is not None and interval < 1:
        found.append(f"{_INTERVAL} {interval} is no number of layers; use 1 or more")
    elif interval is not None and frequency != interval:
        found.append(
            f"{_INTERVAL} {interval} and --moe-layer-freq {frequency} say where experts are; drop one"
        )
    if (getattr(args, "moe_zero_memory", None) or "disable") != "disable" and not (
        args.moe_no_drop and not args.moe_dynamic_padding
    ):
        found.append(
            f"{_FLAG} {_OURS} with --moe-zero-memory {args.moe_zero_memory}: places of experts are not sent "
            f"again; drop one of the two, or add {_NO_DROP}"
        )
    return found


def _of_routes(args: Any) -> Sequence[str]:
    found = []
    choices = getattr(args, "moe_router_topk", None)
    if choices not in (1, 2):
        found.append(
            f"{_FLAG} {_OURS} with --moe-router-topk {choices}: a token has 1 or 2 choices; use 1 or 2"
        )
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if routes_by_sinkhorn(args):
        found.append(
            f"{_FLAG} {_OURS} with --moe-router-load-balancing-type sinkhorn: use {_SINKHORN} instead"
        )
    elif others := [kind for kind in kinds if kind not in ("aux_loss", "none")]:
        found.append(
            f"{_FLAG} {_OURS} with --moe-router-load-balancing-type {others[0]}: its loss balances first "
            "choices over the batch; use aux_loss or none"
        )
    return found


def _of_capacity(args: Any, given: Sequence[str]) -> Sequence[str]:
    found = []
    factor = args.moe_train_capacity_factor
    if not factor > 0:
        found.append(f"{_FACTOR} {factor:g} leaves no place; use a number above 0")
    if args.moe_no_drop and _FACTOR in given:
        found.append(
            f"{_FACTOR} {factor:g} with {_NO_DROP}: nothing is dropped at any factor; drop one of the two"
        )
    if args.moe_dynamic_padding and not args.moe_no_drop:
        found.append(f"{_PADDING} needs {_NO_DROP}: with drops the capacity is that of {_FACTOR}; add it")
    if not args.moe_no_drop and getattr(args, "variable_seq_lengths", False):
        found.append(
            f"{_FACTOR} {factor:g} with --variable-seq-lengths: ranks with other numbers of tokens would "
            f"exchange other capacities; add {_NO_DROP}"
        )
    return found


class FormerDropless(Feature):
    """A flag of older scripts that asked for what is the default."""

    name = "moe-dropless"
    family = "moe"
    summary = "Accept --moe-dropless of older scripts, megatron-core's default"
    level = 0
    flags = (Flag("--moe-dropless", help="Accepted without effect: no token is dropped without a capacity."),)
    requires = (Requirement(flag="--num-experts", reason="without experts no token could be dropped"),)
    conflicts = (
        Conflict(
            flag="--moe-expert-capacity-factor", reason="that one drops tokens; drop one of the two flags"
        ),
    )
    docs = "mindspeed_moe:docs/moe-dropless.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.deepspeed_proofs:DROPLESS_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse the model type that drops tokens."""
        if getattr(args, "moe_model_type", None) == _OURS and not getattr(args, "moe_no_drop", False):
            return (f"--moe-dropless with {_FLAG} {_OURS}, which drops tokens; use {_NO_DROP} instead",)
        return ()

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return that it is the default."""
        return {"--moe-dropless": "no token is dropped without a capacity"}
