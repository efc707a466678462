"""The checkpoint that a restarted job loads: the latest that this very job published.

``--load`` says where the job came from (perhaps a pretrained model with ``--finetune``); once the job has a
checkpoint of its own, that one counts. Others in ``--save``, of earlier jobs, are left alone.
"""

from __future__ import annotations

from argparse import Namespace

from mindspeed_megatron.launch.environment import current_job
from mindspeed_train.checkpoint import publish, source


def own_checkpoint(args: Namespace) -> publish.FoundCheckpoint | None:
    """Find the checkpoint to continue from, or None where this job has published none."""
    job = current_job()
    if not job.may_continue or not args.save:
        return None
    return source.find_of_job(args.save, job.name)


def continue_from(args: Namespace, checkpoint: publish.FoundCheckpoint) -> None:
    """Change the arguments so that the job continues from its own checkpoint."""
    args.load = source.folder_with(checkpoint)
    args.ckpt_step = None
    args.finetune = False
    args.no_load_optim = args.no_save_optim
    args.no_load_rng = args.no_save_rng
