"""Rules about how the tensors of one call fit together: numbers of elements, dtypes, split sizes.

Backends of devices copy by addresses and counts. What gloo refuses they refuse too, or they write past the
end of a tensor; in a dry run, where nobody is asked, these rules are all that looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mindspeed_megatron.backend_contracts.tensor_facts import CollectiveCall, TensorFacts

_SPLIT_OF = (("input_split_sizes", "input"), ("output_split_sizes", "output"))


def broken_layout(call: CollectiveCall) -> str:
    """Return the rule that the tensors of a call break together; empty where they fit.

    The output of a rank that receives nothing may have no elements, and so may parts of an all-to-all.
    """
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in call.tensors))
    if len(dtypes) > 1:
        return f"its tensors have {' and '.join(dtypes)}, and one dtype travels in a call"
    check = _CHECKS.get(call.operation)
    return next(check(call), "") if check is not None else ""


def _gathered(call: CollectiveCall) -> Iterator[str]:
    yield from _whole_and_part(call, *call.of("output_tensor"), *call.of("input_tensor"))


def _scattered(call: CollectiveCall) -> Iterator[str]:
    yield from _whole_and_part(call, *call.of("input"), *call.of("output"))


def _whole_and_part(call: CollectiveCall, *tensors: TensorFacts) -> Iterator[str]:
    if len(tensors) == 2 and tensors[0].numbers != call.size * tensors[1].numbers:
        whole, part = tensors
        yield (
            f"{whole.argument} has {whole.numbers} numbers, and {call.size} ranks with the "
            f"{part.numbers} of {part.argument} have {call.size * part.numbers}"
        )


def _listed(*arguments: str) -> Callable[[CollectiveCall], Iterator[str]]:
    def check(call: CollectiveCall) -> Iterator[str]:
        for argument in arguments:
            count = len(call.of(argument))
            # A rank that is not the root of a gather or a scatter gives no list.
            if count not in (0, call.size):
                yield f"{argument} has {count} tensors for {call.size} ranks"

    return check


def _alike(call: CollectiveCall) -> Iterator[str]:
    yield from _listed("gather_list")(call)
    (given,) = call.of("tensor")[:1] or (None,)
    for tensor in call.of("gather_list"):
        if given is not None and tensor.shape != given.shape:
            yield f"gather takes tensors of one shape, not {tensor} beside {given}; use all_gather"


def _exchanged(call: CollectiveCall) -> Iterator[str]:
    for splits, argument in _SPLIT_OF:
        sizes = call.splits.get(splits)
        for tensor in call.of(argument):
            rows = tensor.shape[0] if tensor.shape else 0
            if not sizes and any(call.splits.values()) and rows % call.size:
                yield f"{argument} has {rows} rows, which {call.size} ranks do not divide; give {splits}"
            if sizes and len(sizes) != call.size:
                yield f"{splits} has {len(sizes)} sizes for {call.size} ranks"
            if sizes and min(sizes) < 0:
                yield f"{splits} has the size {min(sizes)}"
            if sizes and sum(sizes) != rows:
                yield f"{splits} add up to {sum(sizes)}, and {argument} has {rows} rows"
    given, made = call.of("input"), call.of("output")
    if given and made and not any(call.splits.values()) and given[0].numbers != made[0].numbers:
        yield f"input has {given[0].numbers} numbers, output {made[0].numbers}; give split sizes"
    if given and made and given[0].shape[1:] != made[0].shape[1:] and any(call.splits.values()):
        yield f"rows of input are {list(given[0].shape[1:])}, of output {list(made[0].shape[1:])}"


def _received(call: CollectiveCall) -> Iterator[str]:
    if call.from_any:
        yield "a receive names its sender; give src"


_CHECKS: dict[str, Callable[[CollectiveCall], Iterator[str]]] = {
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
    "all_gather": _listed("tensor_list"),
    "reduce_scatter": _listed("input_list"),
    "scatter": _listed("scatter_list"),
    "all_to_all": _listed("input_tensor_list", "output_tensor_list"),
    "gather": _alike,
    "all_to_all_single": _exchanged,
    "recv": _received,
    "irecv": _received,
}
