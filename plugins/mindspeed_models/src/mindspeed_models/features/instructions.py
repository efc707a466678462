"""The declaration of instruction data: flags, refusals, proofs. No torch."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from mindspeed_core.errors import CheckpointError
from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Scenario, hookimpl

_FLAG, _VARIABLE, _BUCKETS = "--is-instruction-dataset", "--variable-seq-lengths", "--seq-length-buckets"
_PACK, _GROUP, _ORDER = "--pack-samples", "--group-by-length", "--no-shuffle"
_PREFIXES = "Prefixes of instruction data, optionally 'weight prefix' pairs"
_FILES = tuple(
    Flag(name, type=str, nargs="*", per_rank=True, help=f"{_PREFIXES}, for {split}.")
    for name, split in (
        ("--data-path", "all splits"),
        ("--train-data-path", "training alone"),
        ("--valid-data-path", "validation alone"),
        ("--test-data-path", "the test alone"),
    )
)
_LISTS = (
    Flag("--data-args-path", type=str, per_rank=True, help="File that holds the values of --data-path."),
    Flag(
        "--per-split-data-args-path",
        type=str,
        per_rank=True,
        help="JSON file with the values of the three paths under train, valid and test.",
    ),
)


class InstructionData(Feature):
    """Samples of conversations, of their own lengths, of which answers are trained."""

    name = "instruction-data"
    family = "models"
    summary = "Finetune on conversations: samples of their own lengths, answers trained"
    level = 0
    flags: ClassVar[Sequence[Flag]] = (
        Flag(_FLAG, help="The files of --data-path hold instruction data (mindspeed-models preprocess)."),
        Flag(
            "--keep-last-token",
            help="Labels stand at the tokens that they are predicted from; nothing is shifted (Baichuan2).",
            changes_training=True,
        ),
        Flag(
            _GROUP,
            help="Samples of similar lengths come in the same step, so that less is filled up.",
            changes_training=True,
        ),
        Flag(
            _ORDER,
            help="Samples come in the order of their files, in every epoch (MindSpeed-LLM).",
            changes_training=True,
        ),
        Flag(
            _BUCKETS,
            type=str,
            metavar="N,N,...",
            help="Lengths that micro-batches are filled up to, in place of multiples of 32.",
        ),
        Flag(_VARIABLE, help="Fill a micro-batch up to its longest sample, and not to --seq-length."),
        *_FILES,
        *_LISTS,
    )
    conflicts: ClassVar[Sequence[Conflict]] = (
        Conflict(
            flag="--create-attention-mask-in-dataloader",
            reason="what fills up comes last, where a causal mask hides it; no dense mask is made",
        ),
    )
    hosts = ("standalone", "megatron-lm")
    slots = ("data-source",)
    docs = "mindspeed_models:docs/instruction-data.md"
    modes = ("train",)
    fake_tensors: ClassVar[bool | None] = True
    deterministic = True
    affects_checkpoint = False
    verify: ClassVar[Sequence[Scenario]] = Proofs("mindspeed_models.features.instruction_proofs:PROOFS")

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Let every trained token count the same, in however long a micro-batch it comes."""
        if not getattr(args, "is_instruction_dataset", False):
            return {}
        return {"calculate_per_token_loss": True, "create_attention_mask_in_dataloader": False}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Return which flags cannot work with samples of different lengths."""
        return [*_lengths(args), *_documents(args), *_experts(args)]

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say which kernel stands down."""
        if not getattr(args, "moe_permute_fusion", False):
            return []
        return [
            f"--moe-permute-fusion stands down: rows of {_FLAG} are filled up with positions that go to no "
            "expert, and the kernel expects experts of each; the same numbers come without it"
        ]

    @hookimpl
    def build_datasets(self, session: Any, args: Any, num_samples: Any) -> Any:
        """Build datasets out of three parallel pairs of files for each prefix."""
        from mindspeed_models.data.training import instruction_datasets

        return instruction_datasets(session, args, num_samples)

    @hookimpl(wrapper=True)
    def batch_fields(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Tell every pipeline stage which positions are tokens; in a script those whose routers ask."""
        fields = yield
        if session.host.name != "standalone" and not getattr(args, "num_experts", None):
            return fields
        return fields | {"padding_mask"}

    @hookimpl
    def checkpoint_state(self, run: Any) -> Mapping[str, Any]:
        """Remember in which order samples come."""
        return {self.name: {"order": _order(run.args)}}

    @hookimpl
    def restore_checkpoint_state(self, run: Any, state: Mapping[str, Any]) -> None:
        """Refuse to go on in another order, in which samples would be left out and come twice.

        Raises:
            CheckpointError: the checkpoint's samples came in another order.
        """
        before = state.get(self.name, {}).get("order")
        if before is not None and before != _order(run.args):
            raise CheckpointError(
                f"the samples of the checkpoint came {before}, and those of this run come "
                f"{_order(run.args)}: some would be left out and others come twice; use the former "
                "flags, or --finetune"
            )

    @hookimpl(wrapper=True)
    def validate_arguments_early(self) -> Generator[None, Any, Any]:
        """Leave out the fused permutation, which expects that every position has its experts."""
        args = yield
        if getattr(args, "moe_permute_fusion", False):
            args = copy.copy(args)
            args.moe_permute_fusion = False
        return args

    @hookimpl(wrapper=True)
    def validate_arguments(self) -> Generator[None, Any, Any]:
        """Read the buckets."""
        args = yield
        if isinstance(args.seq_length_buckets, str):
            args.seq_length_buckets = [int(word) for word in args.seq_length_buckets.split(",")]
        return args


def _order(args: Any) -> str:
    if getattr(args, "pack_samples", False):
        order = f", in the order of the files ({_ORDER})" if args.no_shuffle else ""
        return f"packed in rows of {args.seq_length} ({_PACK}){order}"
    if args.group_by_length:
        return f"in groups for steps of {args.global_batch_size} ({_GROUP})"
    return f"in the order of the files ({_ORDER})" if args.no_shuffle else "one by one"


def _lengths(args: Any) -> list[str]:
    found = []
    variable = getattr(args, "variable_seq_lengths", False)
    if variable and args.context_parallel_size > 1:
        found.append(
            f"{_VARIABLE} with --context-parallel-size {args.context_parallel_size}: ranks split a sequence "
            f"of one length; drop {_VARIABLE}, or use {_PACK}, which fills rows"
        )
    graphs = getattr(args, "cuda_graph_impl", None) not in (None, "none")
    if variable and (graphs or getattr(args, "enable_cuda_graph", False)):
        found.append(f"{_VARIABLE}: captured graphs have one length; drop the flag of CUDA graphs")
    packed = getattr(args, "pack_samples", False)
    if packed and variable:
        found.append(f"{_PACK} fills every row up to --seq-length; drop {_VARIABLE}")
    if packed and args.group_by_length:
        found.append(f"{_PACK} chooses the samples of a row by their lengths; drop {_GROUP}")
    if args.no_shuffle and args.group_by_length:
        found.append(f"{_ORDER} keeps the order of the files, which {_GROUP} changes; drop one of them")
    return [*found, *_buckets(args, variable)]


def _buckets(args: Any, variable: bool) -> list[str]:
    given = args.seq_length_buckets
    if given is None:
        return []
    words = given.split(",") if isinstance(given, str) else [str(each) for each in given]
    shown = f"{_BUCKETS} {','.join(words)}"
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        return [f"{shown}: is no list of lengths; write for example 512,1024,2048"]
    if not variable:
        return [f"{shown}: micro-batches are filled up to --seq-length without {_VARIABLE}; add it"]
    longest = max(map(int, words))
    length = getattr(args, "seq_length", None)
    if length and longest > length:
        return [f"{shown}: {longest} exceeds --seq-length {length}; leave it out"]
    ranks = args.tensor_model_parallel_size if getattr(args, "sequence_parallel", False) else 1
    uneven = [word for word in words if int(word) % ranks]
    if uneven:
        return [
            f"{shown}: {uneven[0]} is not divisible by the {ranks} ranks of --sequence-parallel; use "
            f"multiples of {ranks}"
        ]
    return []


def _documents(args: Any) -> list[str]:
    packed = getattr(args, "pack_samples", False)
    if packed:
        every = getattr(args, "fix_sub_seq_length", -1)
        if every != -1:
            return [f"--fix-sub-seq-length {every} cuts rows where no sample ends; drop it with {_PACK}"]
        return []
    return [
        f"{flag} is about rows of several documents, and a row of {_FLAG} holds one sample; drop it, or "
        f"add {_PACK}"
        for flag, name in (
            ("--reset-attention-mask", "reset_attention_mask"),
            ("--reset-position-ids", "reset_position_ids"),
            ("--eod-mask-loss", "eod_mask_loss"),
        )
        if getattr(args, name, False)
    ]


def _experts(args: Any) -> list[str]:
    """Return what would route positions that are no tokens, or count them."""
    if not getattr(args, "num_experts", None):
        return []
    why = f"rows of {_FLAG} are filled up with positions that are no tokens"
    found = []
    if getattr(args, "moe_expert_capacity_factor", None) is not None:
        found.append(f"--moe-expert-capacity-factor: {why}, which count for the capacity; drop it")
    if getattr(args, "mtp_num_layers", None):
        found.append(f"--mtp-num-layers: {why}, of which the layers of predictions do not know; drop it")
    gated = getattr(args, "moe_model_type", None) == "deepspeed_moe"
    if gated and not getattr(args, "moe_no_drop", False):
        found.append(
            f"--moe-model-type deepspeed_moe: {why}, which take places of experts; add --moe-no-drop"
        )
    if "global_aux_loss" in (getattr(args, "moe_router_load_balancing_type", None) or ()):
        found.append(
            "--moe-router-load-balancing-type global_aux_loss averages the tokens of micro-batches, which "
            f"differ in number with {_FLAG}; use aux_loss or seq_aux_loss"
        )
    return found
