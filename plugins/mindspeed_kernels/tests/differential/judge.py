"""Comparison of one call with its formula: results, gradients, changed arguments, untouched arguments."""

import torch
from torch.utils._pytree import tree_map_only

from differential.case import public_operators
from differential.draws import Draws, shrunk

TOLERANCES = {torch.float64: 1e-9, torch.float32: 4e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Of the largest expected number, at least of one."""


def run_case(name, generator, seed, device="cpu", **draws):
    """Judge the case of a seed; a failure says seed and the smallest call that fails too."""
    made = Draws(seed, **draws)
    try:
        judge(name, generator(made), made, device)
        return
    except Exception as error:
        first = error

    def fails(choices):
        again = Draws(seed, choices, **draws)
        try:
            judge(name, generator(again), again, device)
        except Exception as error:
            return type(error) is type(first)
        return False

    smallest = Draws(seed, shrunk(made.choices, fails), **draws)
    case = generator(smallest)
    try:
        judge(name, case, smallest, device)
    except Exception as error:
        first = error
    raise AssertionError(
        f"seed {seed}: {describe(name, case.args, case.options)}\n{type(first).__name__}: {first}"
    ) from first


def describe(name, args, options):
    parts = [shown(value) for value in args]
    parts += [f"{option}={shown(value)}" for option, value in options.items()]
    return f"{name}({', '.join(parts)})"


def shown(value):
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        small = f" = {value.tolist()}" if not value.is_floating_point() and value.numel() < 17 else ""
        return f"{kind}{list(value.shape)}{strides}{small}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return f"[{', '.join(map(shown, value))}]"
    return repr(value)


def judge(name, case, draws, device="cpu"):
    """Compare a call with its formula; raise AssertionError where they differ."""
    operator = public_operators()[name]
    leaves, wide = Leaves(case, device), Leaves(case, "cpu", torch.float64)
    before = [leaf.detach().clone() for leaf in leaves.tensors]
    with torch.set_grad_enabled(case.gradients):
        result = operator(*leaves.args, **leaves.options)
        results = outcome(case, result, leaves)
        given = [results[place].cpu() for place in case.knows]
        expected = case.formula(*wide.args, *given, **wide.options)
    assert len(results) == len(expected), f"{len(results)} results instead of {len(expected)}"
    tolerance = tolerance_of(case)
    dtypes = case.dtypes or (case.args[0].dtype,) * len(expected)
    for index, (got, wanted, dtype) in enumerate(zip(results, expected, dtypes)):
        close(got, wanted, tolerance, f"result {index}")
        assert got.dtype == dtype, f"result {index} is {got.dtype}, not {dtype}"
    for index, (leaf, old) in enumerate(zip(leaves.tensors, before)):
        if not (case.changed is not None and leaf is leaves.args[case.changed]):
            assert torch.equal(leaf.detach().nan_to_num(), old.nan_to_num()), f"argument {index} was changed"
    if case.gradients:
        compare_gradients(leaves, wide, results, expected, draws, tolerance)


def outcome(case, result, leaves):
    """Return the results of a call that count."""
    if case.changed is not None:
        return (leaves.args[case.changed],)
    if case.results is not None:
        return case.results(result)
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def compare_gradients(leaves, wide, results, expected, draws, tolerance):
    pairs = [
        (got, wanted, draws.like(wanted.detach().to(got.dtype)))
        for got, wanted in zip(results, expected)
        if got.is_floating_point() and wanted.requires_grad
    ]
    if not pairs or not leaves.followed:
        return
    for got, _, _ in pairs:
        assert got.requires_grad, "a result is not followed by autograd"
    outers = [outer for _, _, outer in pairs]
    got = torch.autograd.grad(
        [one for one, _, _ in pairs],
        leaves.followed,
        [outer.to(one.device) for outer, (one, _, _) in zip(outers, pairs)],
        allow_unused=True,
    )
    wanted = torch.autograd.grad(
        [other for _, other, _ in pairs], wide.followed, [o.double() for o in outers], allow_unused=True
    )
    for leaf, one, other in zip(leaves.followed, got, wanted):
        if hasattr(leaf, "main_grad"):
            assert one is None or not one.any(), "a gradient went to main_grad and to autograd"
            one = leaf.main_grad
        where = f"gradient of {shown(leaf.detach())}"
        if one is None or other is None:
            rest = other if one is None else one
            assert rest is None or not rest.any(), f"{where}: there is {'none' if one is None else 'one'}"
            continue
        close(one, other, 2 * tolerance, where)
        assert one.dtype == leaf.dtype or hasattr(leaf, "main_grad"), f"{where} is {one.dtype}"


def close(got, wanted, tolerance, where):
    assert tuple(got.shape) == tuple(wanted.shape), (
        f"{where}: shape {list(got.shape)}, not {list(wanted.shape)}"
    )
    got, wanted = got.detach().cpu().double(), wanted.detach().double()
    if not got.numel():
        return
    assert bool(got.isfinite().eq(wanted.isfinite()).all()), f"{where}: infinite at other places"
    got, wanted = (tensor.nan_to_num(posinf=0.0, neginf=0.0) for tensor in (got, wanted))
    worst, limit = (got - wanted).abs().max().item(), tolerance * max(1.0, wanted.abs().max().item())
    assert worst <= limit, f"{where}: differs by {worst:.3g}, more than {limit:.3g}"


def tolerance_of(case):
    dtypes = {tensor.dtype for tensor in tensors_in((case.args, case.options))} | {*(case.dtypes or ())}
    return tolerance_for({dtype for dtype in dtypes if dtype.is_floating_point}, case.tolerance)


def tolerance_for(dtypes, others):
    """The widest limit of some floating dtypes."""
    limits = {**TOLERANCES, **others}
    return max((limits[dtype] for dtype in dtypes), default=limits[torch.float32])


def tensors_in(values):
    found = []
    tree_map_only(torch.Tensor, found.append, values)
    return found


class Leaves:
    """A case's arguments on a device, with gradients asked for; the same tensor twice stays the same."""

    def __init__(self, case, device, dtype=None):
        self.tensors, self.followed = [], []
        self._made = {}
        self._follow, self._device, self._dtype = case.gradients, device, dtype
        changed = None if case.changed is None else case.args[case.changed]
        self._changed = changed
        self.args = self._copied(case.args)
        self.options = {
            name: self._copied(value, name not in case.frozen) for name, value in case.options.items()
        }
        for name in case.requiring:
            self.options[name].requires_grad_()

    def _copied(self, value, follow=True):
        return tree_map_only(torch.Tensor, lambda tensor: self._copy(tensor, follow), value)

    def _copy(self, tensor, follow):
        if id(tensor) in self._made:
            return self._made[id(tensor)]
        made = tensor.detach()
        if self._dtype is not None and made.is_floating_point():
            made = made.to(self._dtype)
        made = made.to(self._device)
        if tensor is self._changed:
            made = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=made.device).copy_(
                made
            )
        if follow and self._follow and made.is_floating_point():
            made.requires_grad_()
            self.followed.append(made)
        if hasattr(tensor, "main_grad") and self._dtype is None:
            wide = torch.promote_types(made.dtype, torch.float32)
            made.main_grad = torch.zeros_like(made, dtype=wide, requires_grad=False)
        self.tensors.append(made)
        self._made[id(tensor)] = made
        return made
