"""Default of the fields of a batch that a pipeline stage needs."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_core.feature import hookimpl


@hookimpl(trylast=True)
def batch_fields(args: Namespace, pre_process: bool, post_process: bool) -> frozenset[str]:
    """Return tokens and positions for the embedding, labels and their mask for the loss."""
    fields: set[str] = set()
    # Layers that predict further tokens sit on the last stage and embed tokens themselves.
    if pre_process or (post_process and getattr(args, "mtp_num_layers", None)):
        fields |= {"tokens", "position_ids"}
    if post_process:
        fields |= {"labels", "loss_mask"}
    if args.create_attention_mask_in_dataloader:
        fields.add("attention_mask")
    return frozenset(fields)
