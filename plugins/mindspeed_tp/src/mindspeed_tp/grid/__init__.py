"""Two-dimensional tensor parallelism: every weight is cut in both of its dimensions over a grid of ranks.

Within a tensor-parallel group of ``x · y`` ranks, rank ``j · x + i`` has place ``i`` in its x group and place
``j`` in its y group. Between modules a rank holds ``[s / x, b, h / y]`` of the hidden state.
"""
