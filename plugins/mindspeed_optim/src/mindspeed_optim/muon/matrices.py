"""The matrices of a model: which parameters are one, and which are several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_core.errors import UserError
from mindspeed_megatron.parameter_parts import ParameterPart
from mindspeed_megatron.unwrap import unwrap
from mindspeed_optim.muon.options import DUPLICATED, MuonOptions

_Split = Callable[[torch.Tensor], Sequence[torch.Tensor]]
_Join = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter that is orthogonalized.

    Attributes:
        part: where what this rank updates lies in the parameter.
        cut: dimension by which tensor-parallel ranks share each of its matrices; None for none.
        split: from the parameter, of this rank or whole, to its matrices, each ``[out, in]``.
        join: from matrices to the parameter's shape.
        gather_first: its parts on tensor-parallel ranks are no matrices by themselves: it is split when it is
            whole.
    """

    part: ParameterPart
    cut: int | None
    split: _Split
    join: _Join
    gather_first: bool = False

    def cost(self) -> float:
        """Return how much work orthogonalizing this rank's part is, relative to others."""
        shapes = [piece.shape for piece in self.split(torch.empty(self.part.shape, device="meta"))]
        return float(sum(min(shape) ** 2 * max(shape) for shape in shapes))


class Matrices:
    """Tells the matrices among the parameters of a model.

    Everything of two dimensions is one, but embeddings, whose rows are looked up, and the output layer.
    """

    def __init__(self, model: Iterable[Any], options: MuonOptions) -> None:
        """Read what the chunks of the model say about themselves.

        Args:
            model: the chunks; without any, every parameter of two dimensions is one matrix.
            options: of the rule.
        """
        chunks = [unwrap(chunk) for chunk in model]
        self._options = options
        self._config: Any = chunks[0].config if chunks else None
        self._experts = dict(_experts_in_one(chunks))

    def of(self, part: ParameterPart) -> Matrix | None:
        """Return the matrix, or several, that a parameter is; None for one that is updated otherwise."""
        if len(part.shape) != 2 or _is_embedding_or_output(part):
            return None
        options, config = self._options, self._config
        cut = part.tensor_parallel_dim
        experts = self._experts.get(part.parameter) if part.parameter is not None else None
        if experts is not None:
            first = part.name.endswith("weight1")
            halves = 2 if first and options.split_gated and config.gated_linear_unit else 1
            # These are kept as [in, out].
            turned = None if cut is None else 1 - cut
            return Matrix(part, turned, *_of_experts(experts, halves, part.shape, first=first))
        if options.split_qkv and part.name.endswith("linear_qkv.weight"):
            few = part.tensor_parallel_group is not None and (
                config.num_query_groups < part.tensor_parallel_group.size()
            )
            gather_first = options.tp_mode == DUPLICATED and few
            if few and not gather_first:
                raise UserError(
                    f"--muon-tp-mode {options.tp_mode}: {part.name} has {config.num_query_groups} groups of "
                    f"heads, fewer than the {part.tensor_parallel_group.size()} tensor-parallel ranks; use "
                    "--muon-tp-mode duplicated, or --muon-no-split-qkv"
                )
            return Matrix(part, cut, *_by_groups(_group_sizes(config)), gather_first=gather_first)
        if options.split_gated and part.name.endswith("linear_fc1.weight") and config.gated_linear_unit:
            return Matrix(part, cut, lambda whole: whole.chunk(2), lambda pieces: torch.cat(list(pieces)))
        return Matrix(part, cut, lambda whole: (whole,), lambda pieces: pieces[0])


def _is_embedding_or_output(part: ParameterPart) -> bool:
    # Copies of the embedding, on stages that predict further tokens, do not have the mark.
    marked = getattr(part.parameter, "is_embedding_or_output_parameter", False)
    return bool(marked) or "embedding" in part.name or "output_layer" in part.name


def _experts_in_one(chunks: Iterable[Any]) -> Iterable[tuple[torch.Tensor, int]]:
    """Yield parameters that hold the matrices of all experts of a rank, and the number of experts."""
    for chunk in chunks:
        for module in chunk.modules():
            held = [getattr(module, name, None) for name in ("weight1", "weight2")]
            if hasattr(module, "num_local_experts") and all(isinstance(w, torch.nn.Parameter) for w in held):
                for weight in held:
                    yield weight, module.num_local_experts  # type: ignore[misc]


def _group_sizes(config: Any) -> list[int]:
    """Return the rows of query, key and value of one group of heads, in the order of the weight."""
    queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gate = [queries] if getattr(config, "attention_output_gate", False) else []
    return [queries, *gate, config.kv_channels, config.kv_channels]


def _by_groups(sizes: list[int]) -> tuple[_Split, _Join]:
    def split(whole: torch.Tensor) -> list[torch.Tensor]:
        groups = whole.view(-1, sum(sizes), whole.shape[1])
        return [piece.reshape(-1, whole.shape[1]) for piece in groups.split(sizes, dim=1)]

    def join(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        columns = pieces[0].shape[1]
        parts = [piece.reshape(-1, size, columns) for piece, size in zip(pieces, sizes)]
        return torch.cat(parts, dim=1).view(-1, columns)

    return split, join


def _of_experts(experts: int, halves: int, shape: torch.Size, *, first: bool) -> tuple[_Split, _Join]:
    """Return how to split the weights of all experts, which lie behind each other as ``[in, out]`` each."""

    def split(whole: torch.Tensor) -> list[torch.Tensor]:
        each = whole.reshape((experts, shape[0], -1) if first else (experts, -1, shape[1]))
        return [half for expert in each for half in expert.mT.chunk(halves)]

    def join(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        each = [torch.cat(list(pieces[index : index + halves])).mT for index in range(0, len(pieces), halves)]
        return torch.stack(each).reshape(shape)

    return split, join


def matrices_of(recognised: Matrices, parts: Iterable[ParameterPart]) -> Mapping[torch.Tensor, Matrix]:
    """Return the matrices among parameters, by the model's parameter, in the order of the parts."""
    found = ((part, recognised.of(part)) for part in parts)
    return {
        part.parameter: matrix for part, matrix in found if matrix is not None and part.parameter is not None
    }
