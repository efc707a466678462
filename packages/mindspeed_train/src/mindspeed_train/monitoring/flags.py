"""Flags of monitoring, with Megatron-LM's spelling where Megatron-LM has them.

Data only, torch-free. What they do lives in `throughput`, `timing`, `straggler` and `writers`.
"""

from __future__ import annotations

from mindspeed_core.feature import Flag

MONITORING_FLAGS = (
    Flag("--log-interval", type=int, default=1, help="Steps between log lines."),
    Flag("--run-dir", type=str, per_rank=True, help="Folder of this run's files; by default runs/<time>."),
    Flag("--no-progress", inverts="progress", help="Plain lines even on a terminal."),
    Flag(
        "--log-throughput",
        help="Log TFLOP/s per device, without and with recomputation, and the share of the peak.",
    ),
    Flag(
        "--peak-tflops",
        type=float,
        per_rank=True,
        help="Peak TFLOP/s of a device in the training dtype; by default from its name, on CPU measured.",
    ),
    Flag(
        "--timing-log-level",
        type=int,
        default=0,
        choices=(0, 1, 2),
        help="Time parts of a step: 0 none, 1 once per step, 2 also per micro-batch and transfer.",
    ),
    Flag(
        "--timing-log-option",
        type=str,
        default="minmax",
        choices=("max", "minmax", "all"),
        help="Ranks whose times are shown: the slowest, slowest and fastest, or all.",
    ),
    Flag(
        "--no-barrier-with-level-1-timing",
        inverts="barrier_with_L1_time",
        help="Do not synchronize ranks before timing a part of level 1.",
    ),
    Flag("--log-straggler", help="Compare the forward times of ranks and name the slowest."),
    Flag("--straggler-minmax-count", type=int, default=1, help="Slowest and fastest ranks that are named."),
    Flag("--log-params-norm", help="Log the norm of all parameters."),
    Flag("--log-energy", help="Log energy per step and power, where the device reports them."),
    Flag("--tensorboard-dir", type=str, per_rank=True, help="Write TensorBoard events into this folder."),
    Flag("--tensorboard-log-interval", type=int, default=1, help="Steps between TensorBoard events."),
    Flag(
        "--tensorboard-queue-size", type=int, default=1000, help="Events kept in memory between two writes."
    ),
    Flag("--log-timers-to-tensorboard", help="Send the times of --timing-log-level to the writers."),
    Flag("--log-memory-to-tensorboard", help="Send the peak memory to the writers."),
    Flag("--log-validation-ppl-to-tensorboard", help="Send the perplexity of validations to the writers."),
    Flag("--log-world-size-to-tensorboard", help="Send the number of ranks to the writers."),
    Flag("--wandb-project", type=str, help="Record the run in this Weights & Biases project."),
    Flag("--wandb-exp-name", type=str, help="Name of the run in Weights & Biases; required with a project."),
    Flag("--wandb-save-dir", type=str, per_rank=True, help="Local folder of Weights & Biases."),
    Flag("--wandb-entity", type=str, help="Owner of the Weights & Biases project."),
)
