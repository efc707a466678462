"""Dry runs: one rank of a world that does not exist, on tensors that have shapes and no values.

`world` holds process groups without peers, `position` the rank that this process is, `tensors` the mode in
which a session runs, `answers` what code is told that reads a number, `balanced` the token counts of experts.
`platform` and `npu` join them into the platforms ``fake`` and ``fake-npu``.
"""
