"""Instruments that count what a rank does, for proofs and for features at run time.

`communication` counts calls and bytes per operation and group, and what was computed between the launch of an
asynchronous call and its wait; `call_order` compares the calls of ranks; `work_counter` counts floating-point
operations, and `passes` tells forward, backward and recomputed ones apart; `memory` follows the bytes of
tensors, `allocation_history` who allocated them; `kept_state` weighs what a rank keeps between steps. Nothing
here depends on the tools of proofs.
"""
