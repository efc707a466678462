"""Routing maps ``[T, E]`` of experts: which experts each token goes to, as indices, and checks of that.

`npu_moe_token_permute_with_routing_map` and its counterpart take a token's experts as a row of a map instead
of as indices. Both need as many experts in every row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops.row_groups import is_traced


def copies_per_token(operator: str, routing_map: Tensor, num_out_tokens: int | None) -> int:
    """Return how many experts each token goes to: rounded down, or counted where no number is given.

    Raises:
        ContractError: the number is none of copies of these tokens.
    """
    tokens, experts = routing_map.shape
    if num_out_tokens is None:
        return int(routing_map[0].sum()) if tokens else 0
    copies = num_out_tokens // max(1, tokens)
    if not 0 <= copies <= experts:
        raise ContractError(
            f"{operator}: num_out_tokens must be tokens times experts of each, 0 to {tokens * experts}, got "
            f"{num_out_tokens}"
        )
    return copies


def rows_per_expert(operator: str, routing_map: Tensor, num_out_tokens: int | None) -> int:
    """Return the capacity of each expert, rounded down.

    Raises:
        ContractError: there is no number, or a larger one than tokens can fill.
    """
    tokens, experts = routing_map.shape
    if num_out_tokens is None:
        raise ContractError(f"{operator}: drop_and_pad needs num_out_tokens, experts times their capacity")
    capacity = num_out_tokens // max(1, experts)
    if not 0 <= capacity <= tokens:
        raise ContractError(
            f"{operator}: num_out_tokens must be experts times a capacity of at most {tokens}, the number of "
            f"tokens, got {num_out_tokens} for {experts} experts"
        )
    return capacity


def check_rows(operator: str, routing_map: Tensor, copies: int) -> None:
    """Check that every token goes to as many experts; on CUDA the device does, without being waited for.

    Raises:
        ContractError: names the first token that does not.
    """
    if is_traced(routing_map):
        return
    wrong = routing_map.sum(1) != copies
    if wrong.is_cuda:
        torch._assert_async(
            ~wrong.any(), f"{operator}: not every row of routing_map selects {copies} experts"
        )
        return
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise ContractError(
            f"{operator}: every row of routing_map must select as many experts, {copies} by num_out_tokens "
            f"or the first row, got {int(routing_map[token].sum())} for token {token}; nearest supported: "
            "drop_and_pad, or the unfused permutation"
        )


def experts_of(routing_map: Tensor, copies: int) -> Tensor:
    """Return the experts ``[T, k]`` of each token, in rising order, int64."""
    return routing_map.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :copies]


def tokens_of(routing_map: Tensor, capacity: int) -> Tensor:
    """Return the tokens ``[E, capacity]`` of each expert, int64: its own in rising order, then others."""
    ranked = routing_map.t().to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return ranked[:, :capacity]


def by_token(table: Tensor, experts: Tensor) -> Tensor:
    """Return the entries ``[T * k]`` of a table ``[T, E]`` for the experts ``[T, k]`` of each token."""
    tokens = torch.arange(table.shape[0], device=table.device).unsqueeze(1)
    return table.reshape(-1).index_select(0, (tokens * table.shape[1] + experts).reshape(-1))


def by_expert(table: Tensor, tokens: Tensor) -> Tensor:
    """Return the entries ``[E * capacity]`` of a table ``[T, E]`` for each expert's tokens ``[E, c]``."""
    experts = torch.arange(table.shape[1], device=table.device).unsqueeze(1)
    return table.reshape(-1).index_select(0, (tokens * table.shape[1] + experts).reshape(-1))


def with_equal_rows(routing_map: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Return a map of which a kernel that trusts its rows cannot make a wrong access, and if it is the given.

    Kernels of the device compute with rows of other numbers as if they were right. Asking would mean waiting
    for the device; what a caller does instead is to spoil the result with NaN where the flag is False.
    """
    sound = (routing_map.sum(1) == copies).all()
    first = torch.arange(routing_map.shape[1], device=routing_map.device) < copies
    return torch.where(sound, routing_map, first), sound


def sample_map(device: torch.device) -> Tensor:
    """Return a map ``[4, 5]`` for samples of operators: two experts of each token."""
    routing_map = torch.zeros(4, 5, dtype=torch.bool, device=device)
    for token, experts in enumerate(((0, 4), (3, 4), (2, 4), (1, 3))):
        routing_map[token, list(experts)] = True
    return routing_map
