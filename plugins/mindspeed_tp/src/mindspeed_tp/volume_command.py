"""``mindspeed-features tp-volume``: what each grid of ranks communicates, before a launch."""

from __future__ import annotations

import click

from mindspeed_megatron.tables import print_table
from mindspeed_tp.volume import LayerShape, table


@click.command("tp-volume")
@click.option("--hidden-size", type=click.IntRange(min=1), required=True)
@click.option("--ffn-hidden-size", type=click.IntRange(min=1), required=True)
@click.option(
    "--query-width", type=click.IntRange(min=1), help="Of all query heads; the hidden size if absent."
)
@click.option(
    "--key-value-width", type=click.IntRange(min=1), help="Of all key heads; that of queries if absent."
)
@click.option("--not-gated", is_flag=True, help="The feed-forward module is no gated one.")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="Tensor-parallel size.")
def volume(
    hidden_size: int,
    ffn_hidden_size: int,
    query_width: int | None,
    key_value_width: int | None,
    not_gated: bool,
    ranks: int,
) -> None:
    """Print the communication of a layer for each grid X x Y, in units of the hidden state.

    Received by a rank in the forward pass of one dense layer; Y 1 is tensor parallelism in one dimension.
    """
    query = query_width or hidden_size
    shape = LayerShape(
        tokens=1,
        hidden=hidden_size,
        feed_forward=ffn_hidden_size,
        gated=not not_gated,
        query=query,
        key_value=key_value_width or query,
    )
    rows = [(str(x), str(y), f"{found:.3f}") for x, y, found in table(shape, ranks)]
    print_table(("--tp-x", "--tp-y", "volume"), rows)
