"""Choosing a backend: automatically, by force, from other packages; contracts; what is refused."""

import logging
import subprocess
import sys

import pytest
import torch

from mindspeed_core.discovery.extensions import installed_extensions
from mindspeed_core.errors import ArgumentError
from mindspeed_core.validation import check
from mindspeed_kernels import ops
from mindspeed_kernels.contract import Choice, Divisible, Dtype, Holds, Range, Rank, SameDtype, Size
from mindspeed_kernels.ops import OPERATORS, Backend, BackendError, ContractError, Operator, checking, use
from mindspeed_kernels.ops import operator as operator_module
from mindspeed_kernels.ops.catalog import check_backends


def double(x, factor=2.0, kind="plain", other=None):
    return x * factor


@pytest.fixture
def operator():
    made = Operator(
        "double",
        double,
        contract=(
            Dtype("x"),
            Rank("x", 1, 2),
            Divisible("x", -1, 2),
            Size("x", 0, 1, 8),
            Range("factor", 0.0, 4.0),
            Choice("kind", ("plain", "odd")),
            SameDtype(("x", "other")),
            Holds("other", "must be absent", lambda call: (1, "None") if call.given("other") else None),
        ),
    )
    yield made
    del OPERATORS["double"]


def which(calls, name):
    def function(x, factor=2.0, kind="plain", other=None):
        calls.append(name)
        return x * factor

    return function


def test_the_highest_priority_that_can_serve_is_chosen_once_per_kind_of_call(operator):
    calls, asked = [], []

    def only_plain(call):
        asked.append(call["kind"])
        return "" if call["kind"] == "plain" else "it knows the plain kind only"

    operator.add(Backend("double", "slow", which(calls, "slow"), priority=1))
    operator.add(Backend("double", "fast", which(calls, "fast"), priority=2, supports=only_plain))
    for kind in ("plain", "plain", "odd", "odd"):
        operator(torch.ones(2), kind=kind)
    assert calls == ["fast", "fast", "slow", "slow"]
    assert asked == ["plain", "odd"]


def test_another_dtype_is_another_kind_of_call(operator):
    calls = []
    operator.add(
        Backend("double", "single", which(calls, "single"), contract=(Dtype("x", (torch.float32,)),))
    )
    operator(torch.ones(2))
    operator(torch.ones(2).double())
    assert calls == ["single"]


def test_passing_over_a_better_backend_is_said_once(operator, caplog):
    operator.add(Backend("double", "fast", double, priority=2, supports=lambda call: "it is tired"))
    operator.add(Backend("double", "absent", double, priority=3, available=lambda: "not installed"))
    with caplog.at_level(logging.INFO, "mindspeed_kernels.ops"):
        operator(torch.ones(2))
        operator(torch.ones(2, 2))
    assert caplog.messages == ["double on cpu uses reference; fast cannot: it is tired"]


def test_a_backend_for_another_device_is_not_considered(operator):
    calls = []
    operator.add(Backend("double", "npu", which(calls, "npu"), ("npu",), priority=9))
    operator(torch.ones(2))
    assert calls == []


def test_a_forced_backend_that_cannot_serve_is_an_error_with_the_reason(operator):
    operator.add(Backend("double", "fast", double, supports=lambda call: "it is tired"))
    with use(double="fast"), pytest.raises(BackendError, match=r"backend fast was asked for.*it is tired"):
        operator(torch.ones(2))
    with use("double=nothing"), pytest.raises(BackendError, match=r"no backend 'nothing'.*it has fast, ref"):
        operator(torch.ones(2))


def test_forcing_every_operator_leaves_those_without_such_a_backend_alone(operator):
    calls = []
    operator.add(Backend("double", "mine", which(calls, "mine"), priority=-200))
    with use("*=mine"):
        operator(torch.ones(2))
        ops.swiglu(torch.ones(2))
    assert calls == ["mine"]


def test_the_inner_context_wins_and_the_environment_comes_last(operator, monkeypatch):
    calls = []
    for name in ("a", "b", "c"):
        operator.add(Backend("double", name, which(calls, name), priority=-200))
    monkeypatch.setenv("MINDSPEED_OPS", "double=c")
    operator(torch.ones(2))
    with use(double="a"):
        operator(torch.ones(2))
        with use(double="b"):
            operator(torch.ones(2))
        operator(torch.ones(2))
    assert calls == ["c", "a", "b", "a"]


def test_what_is_not_written_as_a_choice_is_refused(operator, monkeypatch):
    with pytest.raises(BackendError, match="'double' is not OP=BACKEND"):
        with use("double"):
            pass
    monkeypatch.setenv("MINDSPEED_OPS", "double=a,double=b")
    with pytest.raises(BackendError, match=r"MINDSPEED_OPS.*two backends, a and b"):
        operator(torch.ones(2))


def test_deterministic_choice_leaves_out_what_does_not_repeat_its_bits(operator):
    calls = []
    operator.add(Backend("double", "loose", which(calls, "loose"), deterministic=False))
    operator(torch.ones(2))
    with use(deterministic=True):
        operator(torch.ones(2))
        with use(double="loose"), pytest.raises(BackendError, match="not deterministic"):
            operator(torch.ones(2))
    operator(torch.ones(2))
    assert calls == ["loose", "loose"]


def test_two_backends_of_one_name_are_refused(operator):
    operator.add(Backend("double", "mine", double, dist="acme"))
    with pytest.raises(BackendError, match="already, from acme; the one from mindspeed-kernels needs"):
        operator.add(Backend("double", "mine", double))


def test_two_operators_of_one_name_are_refused(operator):
    with pytest.raises(BackendError, match="operator 'double' already"):
        Operator("double", double)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(2).long(),), r"double\[any\]: x dtype must be one of float32.*got int64; nearest"),
        ((torch.ones(1, 1, 2),), r"x must have 1 to 2 dimensions, got 3 \(1, 1, 2\); nearest supported: 2"),
        (
            (torch.ones(5),),
            r"x size of dimension -1 must be a multiple of 2, got 5; nearest supported: 4 or 6",
        ),
        ((torch.ones(9, 2),), "size of dimension 0 must be 1 to 8, got 9; nearest supported: 8"),
        ((torch.ones(2), 7.0), r"factor must be 0\.0 to 4\.0, got 7\.0; nearest supported: 4\.0"),
        (
            (torch.ones(2), 1.0, "even"),
            "kind must be one of plain, odd, got 'even'; nearest supported: plain",
        ),
        ((torch.ones(2), 1.0, "ODD", torch.ones(2).double()), "other dtype must be that of x, got float64"),
        ((torch.ones(2), 1.0, "odd", torch.ones(2)), "other must be absent, got 1; nearest supported: None"),
    ],
)
def test_a_broken_rule_names_argument_value_and_the_nearest_choice(operator, args, message):
    with pytest.raises(ContractError, match=message):
        operator(*args)


def test_a_later_call_of_a_kind_is_checked_when_it_fails_or_when_asked_to(operator):
    operator.add(Backend("double", "picky", lambda x, *a: x.view(-1, 2) * 2.0))
    operator(torch.ones(4))
    with pytest.raises(ContractError, match="multiple of 2, got 5"):
        operator(torch.ones(5))
    with use(double="reference"):
        operator(torch.ones(4))
        operator(torch.ones(5))
        with checking(), pytest.raises(ContractError, match="multiple of 2, got 5"):
            operator(torch.ones(5))


def test_a_backend_without_backward_refuses_what_requires_grad(operator):
    operator.add(Backend("double", "blind", double, differentiable=False))
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ContractError, match=r"double\[blind\]: it has no backward.*torch\.no_grad"):
        operator(x)
    with torch.no_grad():
        assert operator(x).tolist() == [2.0, 2.0]


def test_a_compiled_graph_follows_a_changed_choice(operator):
    operator.add(Backend("double", "triple", lambda x, *a, **o: x * 3.0, priority=-200))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: operator(x, kind="odd"), backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    with use(double="triple"):
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_compiled_reference_is_compiled_where_the_platform_holds_compilation(monkeypatch):
    from mindspeed_core.activation import activate
    from mindspeed_kernels.ops import compiled

    monkeypatch.setattr(compiled, "COMPILER", "aot_eager")
    made = Operator("quadruple", lambda x: x * 2.0 * torch.tensor(2.0))
    compiled.add_compiled(made)
    torch._dynamo.reset()
    try:
        assert made.choose(made.call_of(torch.ones(2))).name == "reference"
        with activate(["--ops-backend", "quadruple=compiled"], host="standalone", platform="cpu"):
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert made(torch.ones(2)).tolist() == [4.0, 4.0]
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    finally:
        del OPERATORS["quadruple"]


def test_a_compiled_reference_takes_any_number_of_shapes(monkeypatch):
    from mindspeed_kernels.ops import compiled

    monkeypatch.setattr(compiled, "COMPILER", "aot_eager")
    made = Operator("quintuple", lambda x: x * 5.0)
    compiled.add_compiled(made)
    torch._dynamo.reset()
    try:
        with use(quintuple="compiled"):
            found = [made(torch.ones(rows, 2)).sum().item() for rows in range(2, 16)]
        assert found == [10.0 * rows for rows in range(2, 16)]
    finally:
        del OPERATORS["quintuple"]


ACME = """
import torch
from mindspeed_kernels.ops import Backend

def rms_norm(x, gamma, epsilon=1e-6, zero_centered=False):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma + zero_centered, epsilon)

BACKENDS = (Backend("rms_norm", "acme", rms_norm, devices=("cpu",), priority=20),)
CLASH = (Backend("rms_norm", "rows", rms_norm),)
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    (tmp_path / "acme_ops.py").write_text(ACME, encoding="utf-8")
    metadata = tmp_path / "acme_ops-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ops\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[mindspeed_kernels.backends]\n"
        "acme = acme_ops:BACKENDS\nbad = acme_ops:nothing\nclash = acme_ops:CLASH\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(operator_module, "_backends_loaded", False)
    installed_extensions.cache_clear()
    ops.rms_norm._chosen.clear()
    yield tmp_path
    monkeypatch.undo()
    ops.rms_norm.remove("acme")
    installed_extensions.cache_clear()


def test_another_package_brings_a_backend_and_a_broken_one_hurts_nobody(acme, caplog):
    x, gamma = torch.randn(3, 8), torch.randn(8)
    with caplog.at_level(logging.INFO, "mindspeed_kernels.ops"):
        got = ops.rms_norm(x, gamma, 1e-5)
    torch.testing.assert_close(got, ops.rms_norm.reference(x, gamma, 1e-5))
    found = {item.backend: item for item in ops.explain("rms_norm", "cpu")}
    assert next(iter(found)) == "acme"
    assert found["acme"].dist == "acme-ops"
    assert any("acme-ops" in message and "rows" in message for message in caplog.messages)
    assert any("nothing" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (3, "not an iterable"),
        ((3,), "is not a mindspeed_kernels.ops.Backend"),
        ((Backend("norm", "acme", double),), "no operator 'norm'; there are"),
    ],
)
def test_what_is_no_iterable_of_backends_is_refused(extension, message):
    from mindspeed_core.feature import DeclarationError

    with pytest.raises(DeclarationError, match=message):
        check_backends(extension)


def test_the_command_lists_backends_and_why_not(capsys):
    from mindspeed_core.cli.features import main

    assert main(["ops", "rms_norm", "swiglu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["rms_norm", "rows", "cpu", "cuda"] for line in lines)
    assert any("package torch_npu is not installed" in line for line in lines)
    assert main(["ops", "no_such"]) == 2


def session_with(text):
    from mindspeed_core.activation import activate

    return activate(["--ops-backend", text], host="standalone", platform="cpu")


def test_the_flag_forces_a_backend_until_the_session_closes():
    x = torch.randn(2, 8, requires_grad=True)
    with session_with("swiglu=reference"):
        inside = type(ops.swiglu(x).grad_fn).__name__
    assert "SwiGLU" not in inside
    assert "SwiGLU" in type(ops.swiglu(x).grad_fn).__name__


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swiglu", "is not OP=BACKEND"),
        ("swigloo=reference", "no operator 'swigloo'"),
        ("swiglu=magic", "no backend 'magic'; there are compiled, fused, liger, npu, reference, triton"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_with_the_flag(text, message):
    with pytest.raises(ArgumentError, match=f"--ops-backend.*{message}"):
        session_with(text)


@pytest.mark.parametrize("text", ["abc", "swigloo=reference", "swiglu=magic"])
def test_a_choice_that_cannot_be_is_a_problem_of_the_flags_already(text):
    found = check(["--ops-backend", text], platform="cpu")
    assert [problem.flag for problem in found.problems] == ["--ops-backend"]
    allowed = check(["--ops-backend", "swiglu=reference"], platform="cpu").problems
    assert "--ops-backend" not in [problem.flag for problem in allowed]


def test_operators_need_no_session_and_no_megatron():
    code = (
        "import sys, torch; from mindspeed_kernels.ops import swiglu; swiglu(torch.ones(2, 4));"
        "print('megatron' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
