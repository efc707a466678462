"""Results of the first linear layer of feed-forward layers, told apart from everything else that is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from mindspeed_memory.recompute.layers import layers_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session
    from mindspeed_memory.saved.engine import SavedTensors


def put_first_products_away(
    session: Session, chunks: Sequence[Any], owner: str, engine: SavedTensors
) -> None:
    """Put away what the first linear layer of every dense feed-forward layer gives to the activation.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
        engine: puts tensors away.
    """
    for placed in layers_of(chunks):
        mlp = placed.layer.mlp
        if not isinstance(mlp, MLP):
            continue
        products: set[int] = set()
        session.instances.set(
            owner, mlp.linear_fc1, "forward", _remembering(mlp.linear_fc1.forward, products, engine)
        )
        scoped = engine.scope(_forgetting(mlp.forward, products), accepts=_among(products))
        session.instances.set(owner, mlp, "forward", scoped)


def _remembering(forward: Callable[..., Any], products: set[int], engine: SavedTensors) -> Callable[..., Any]:
    def remembered(*args: Any, **kwargs: Any) -> Any:
        engine.count_again()
        result = forward(*args, **kwargs)
        product = result[0] if isinstance(result, tuple) else result
        products.add(product.untyped_storage()._cdata)
        return result

    return remembered


def _forgetting(forward: Callable[..., Any], products: set[int]) -> Callable[..., Any]:
    def forgotten(*args: Any, **kwargs: Any) -> Any:
        products.clear()
        try:
            return forward(*args, **kwargs)
        finally:
            products.clear()

    return forgotten


def _among(products: set[int]) -> Callable[[Tensor], bool]:
    return lambda tensor: tensor.untyped_storage()._cdata in products
