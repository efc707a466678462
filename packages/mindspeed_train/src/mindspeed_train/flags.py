"""The flags of the standalone host, with Megatron-LM's spelling, defaults and meaning.

Data only: the command line is parsed, and a plan is made, without torch. `arguments` checks the values.
"""

from __future__ import annotations

from mindspeed_core.feature import Flag
from mindspeed_megatron.config_flags import generated_flags
from mindspeed_megatron.flags import BATCH_FLAGS, MODEL_FLAGS, TRAINING_FLAGS, grouped
from mindspeed_train.fault_tolerance.flags import FAULT_TOLERANCE_FLAGS
from mindspeed_train.monitoring.flags import MONITORING_FLAGS


def host_flags() -> tuple[Flag, ...]:
    """Return every flag of the host, in the order in which ``--help`` shows them."""
    written = (
        *TRAINING_FLAGS,
        *_PROCESS_GROUPS,
        *_DATA,
        *_CHECKPOINT,
        *_MONITORING,
        *_COLLECTIONS,
        *_FAULT_TOLERANCE,
        *MODEL_FLAGS,
    )
    return (*written, *generated_flags(written))


_PROCESS_GROUPS = grouped(
    "parallelism",
    Flag(
        "--disable-gloo-process-groups",
        aliases=("--disable-gloo-group",),
        inverts="enable_gloo_process_groups",
        help="Create no gloo groups beside those of the platform's backend.",
    ),
    Flag(
        "--use-tp-pp-dp-mapping",
        help="Number ranks tensor, context, pipeline, data parallel instead of data before pipeline.",
    ),
)

_DATA = grouped(
    "data",
    Flag(
        "--data-path",
        type=str,
        nargs="*",
        per_rank=True,
        help="Dataset prefixes, optionally 'weight prefix' pairs.",
    ),
    Flag("--train-data-path", type=str, nargs="*", per_rank=True, help="As --data-path, for training alone."),
    Flag(
        "--valid-data-path", type=str, nargs="*", per_rank=True, help="As --data-path, for validation alone."
    ),
    Flag("--test-data-path", type=str, nargs="*", per_rank=True, help="As --data-path, for the test alone."),
    Flag("--data-args-path", type=str, per_rank=True, help="File that holds the values of --data-path."),
    Flag(
        "--per-split-data-args-path",
        type=str,
        per_rank=True,
        help="JSON file with the values of the three paths under train, valid and test.",
    ),
    Flag("--split", type=str, default="969, 30, 1", help="Shares of train, validation and test."),
    Flag("--mock-data", help="Train on made-up samples."),
    Flag("--allow-other-data", help="Resume although the training data are others than the checkpoint's."),
    Flag("--data-cache-path", type=str, per_rank=True, help="Folder of the index cache."),
    Flag(
        "--tokenizer-type",
        type=str,
        choices=(
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "NullTokenizer",
        ),
        help="Type of the tokenizer; by default that of the file of --tokenizer-model.",
    ),
    Flag(
        "--tokenizer-model",
        type=str,
        per_rank=True,
        help="A tokenizer.json (prepare-text makes one), a SentencePiece .model, or a folder with one.",
    ),
    Flag(
        "--eod-token",
        type=str,
        help=("End-of-document token, where it is not a usual one and no tokenizer_config.json names it."),
    ),
    Flag("--vocab-file", type=str, per_rank=True, help="vocab.json of --tokenizer-type GPT2BPETokenizer."),
    Flag("--merge-file", type=str, per_rank=True, help="merges.txt of --tokenizer-type GPT2BPETokenizer."),
    Flag(
        "--padded-vocab-size",
        type=int,
        dest="asked_padded_vocab_size",
        help="Pad the vocabulary to this size, instead of to a multiple.",
    ),
    Flag(
        "--dataloader-type",
        type=str,
        choices=("single", "cyclic"),
        default="single",
        help="Order of samples: in sequence, or reshuffled in every epoch.",
    ),
    Flag(
        "--no-data-sharding",
        inverts="data_sharding",
        help=("With --dataloader-type cyclic, shuffle over all ranks instead of within each rank's part."),
    ),
    Flag("--num-workers", type=int, default=2, help="Data loading processes per rank."),
    *BATCH_FLAGS,
    Flag("--no-mmap-bin-files", inverts="mmap_bin_files", help="Read datasets without memory mapping."),
)

_CHECKPOINT = grouped(
    "checkpoints",
    Flag("--save", type=str, per_rank=True, help="Folder or URL that receives checkpoints."),
    Flag("--load", type=str, per_rank=True, help="Folder or URL whose latest checkpoint is loaded."),
    Flag(
        "--checkpoint-staging",
        type=str,
        per_rank=True,
        help="Folder for files on their way to and from a URL; by default one for temporary files.",
    ),
    Flag("--save-interval", type=int, help="Steps between checkpoints."),
    Flag("--keep-last-n", type=int, help="Delete older checkpoints after a newer one is published."),
    Flag(
        "--save-retain-interval",
        type=int,
        help="Delete the checkpoint before a newer one, unless this divides its step.",
    ),
    Flag(
        "--use-checkpoint-args",
        help="Take model arguments that are not given from the checkpoint of --load.",
    ),
    Flag("--no-save-optim", help="Save no optimizer state."),
    Flag("--no-save-rng", help="Save no random states."),
    Flag("--no-load-optim", help="Load no optimizer state."),
    Flag("--no-load-rng", help="Load no random states."),
    Flag(
        "--pretrained-checkpoint",
        type=str,
        per_rank=True,
        help="Checkpoint whose weights a run starts from while --load holds none.",
    ),
    Flag("--finetune", help="Load only weights and start at step 0."),
    Flag("--ckpt-step", type=int, help="Load this step instead of the latest."),
    Flag(
        "--exit-on-missing-checkpoint", help="Stop when --load names no checkpoint, instead of starting new."
    ),
    Flag(
        "--start-over",
        help="Allow a start before the last step that --save or --run-dir holds.",
    ),
    Flag(
        "--ckpt-format",
        type=str,
        default="torch_dist",
        choices=("torch_dist",),
        help="Format of checkpoints.",
    ),
    Flag(
        "--dist-ckpt-optim-fully-reshardable",
        help="Accepted; optimizer state is always saved so that any other layout can load it.",
    ),
    Flag("--async-save", help="Write checkpoints while training goes on."),
    Flag(
        "--verify-checkpoint",
        type=str,
        default="hash",
        choices=("hash", "size", "off"),
        help="Check files against the manifest before loading: how thoroughly.",
    ),
    Flag(
        "--trust-checkpoint",
        help="Read unknown pickled classes as inert records instead of refusing the checkpoint.",
    ),
)

_MONITORING = grouped("logging and monitoring", *MONITORING_FLAGS)

_COLLECTIONS = grouped(
    "garbage collection",
    Flag("--manual-gc", help="Run Python's garbage collection at the same steps on all ranks only."),
    Flag(
        "--manual-gc-interval",
        type=int,
        default=0,
        help="Steps between collections of --manual-gc; 0 for none but those around validations.",
    ),
    Flag(
        "--no-manual-gc-eval",
        inverts="manual_gc_eval",
        help="With --manual-gc, do not collect around validations.",
    ),
)

_FAULT_TOLERANCE = grouped("fault tolerance", *FAULT_TOLERANCE_FLAGS)
