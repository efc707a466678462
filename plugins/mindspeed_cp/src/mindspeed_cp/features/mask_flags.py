"""The flags that say what queries see, with the names that launch scripts use."""

from __future__ import annotations

from mindspeed_core.feature import Flag

DOCUMENT_FLAGS = (
    Flag("--reset-attention-mask", help="Tokens see their own document only, whose last token is its end."),
    Flag("--reset-position-ids", help="Positions begin again in every document."),
    Flag("--eod-mask-loss", help="No loss on the tokens that documents end with."),
    Flag(
        "--fix-sub-seq-length",
        type=int,
        default=-1,
        help="Documents of so many tokens each instead of those of the data; -1 leaves them.",
    ),
)
MASK_FLAGS = (
    *DOCUMENT_FLAGS,
    Flag(
        "--attention-mask-type",
        type=str,
        default="causal",
        choices=("causal", "general"),
        aliases=("--cp-attention-mask-type",),
        help="causal: parts of a sequence that balance a causal mask; general: consecutive parts, and masks "
        "that a script gives.",
    ),
    Flag(
        "--variable-seq-lengths",
        dest="cp_variable_lengths",
        help="Ranks of a sequence may hold different numbers of tokens across pipeline stages.",
    ),
    Flag(
        "--attention-mask-on-cpu",
        help="Masks that a script gives may be larger than 2 GiB; they stay on the host.",
    ),
    Flag(
        "--adaptive-cp-only-reschedule",
        help="Adaptive algorithms leave the order of tokens and deal out parts of it.",
    ),
    Flag(
        "--adaptive-cp-without-coarse",
        help="Adaptive algorithms count the scores of a given mask, not its tiles of 128 x 128.",
    ),
    Flag(
        "--adaptive-cp-dynamic-attn-mask",
        help="Adaptive algorithms ask for the mask of every micro-batch anew.",
    ),
    Flag(
        "--adaptive-cp-manually-set-mask-list",
        help="The mask of adaptive algorithms comes from a plugin that implements cp_mask_rule.",
    ),
)
