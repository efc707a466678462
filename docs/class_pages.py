"""Pages of the classes that authors of plugins meet, from the source of their modules."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from docstrings import docstring_parts, entries, markdown
from tables import code, table

ROOT = Path(__file__).resolve().parent.parent

RECORDS = (
    "Run", "RunContext", "DistInfo", "RngInfo", "Batch", "Loss", "OptimizerStep", "StepResult", "Datasets",
    "DataIterators", "LoadInfo", "SaveInfo", "BoundarySchema", "TensorSpec",
)  # fmt: skip
"""In the order in which an author meets them."""
PROOFS = ("Scenario", "Gain", "Resume", "Proofs")
MADE_BY_CORE = ("Session",)
"""Classes that nobody else makes: their constructors are not shown."""


@dataclass(frozen=True)
class Attribute:
    """One attribute of a class, as its page shows it."""

    name: str
    kind: str
    default: str
    meaning: str


def records_page() -> str:
    """The records that pass between stages, and the metrics of a step."""
    lines = [
        "# Records",
        "",
        "What the [stages](stages.md) hand each other, all importable from `mindspeed_core.run`. In shapes,",
        "`s` is the sequence, `b` the micro-batch and `h` the width of the hidden state.",
    ]
    run = {**classes("mindspeed_core/run.py"), **classes("mindspeed_core/batch.py")}
    names = [*RECORDS, *(name for name in run if name not in RECORDS)]
    lines += class_sections(run[name] for name in names)
    lines += class_sections(classes("mindspeed_core/runtime/metrics.py").values())
    return "\n".join(lines)


def session_page() -> str:
    """The session, its process groups and its changes of instances."""
    lines = [
        "# Session",
        "",
        "The argument `session` of every stage. `mindspeed_core.activate` makes one inside somebody else's",
        "program ([library sessions](../library-sessions.md)).",
    ]
    lines += class_sections([classes("mindspeed_core/session.py")["Session"]])
    lines += class_sections([classes("mindspeed_core/runtime/process_groups.py")["Groups"]])
    lines += class_sections([classes("mindspeed_core/runtime/instance_patches.py")["Instances"]])
    return "\n".join(lines)


def declarations_page() -> str:
    """Everything that a plugin declares, except proofs."""
    lines = [
        "# Declarations",
        "",
        "What a plugin's `DECLARATIONS` hold: subclasses of `Feature` and the records that their attributes",
        "name, all importable from `mindspeed_core.feature` without torch. Proofs have",
        "[a page of their own](scenarios.md).",
    ]
    feature = classes("mindspeed_core/feature.py")
    found = {"Flag": feature["Flag"], **classes("mindspeed_core/conditions.py"), "Patch": feature["Patch"]}
    found |= {**classes("mindspeed_core/scenario.py"), **feature}
    names = ["Feature", *(name for name in found if name not in ("Feature", *PROOFS))]
    return "\n".join([*lines, *class_sections(found[name] for name in names)])


def platform_page() -> str:
    """The base class of platforms."""
    lines = [
        "# Platform",
        "",
        "`session.platform`, and the base class of a platform that a package brings through the entry-point",
        "group `mindspeed.platforms`.",
    ]
    found = classes("mindspeed_core/platforms/platform.py")
    names = ["Platform", *(name for name in found if name not in ("Platform", "OpeningSession"))]
    return "\n".join([*lines, *class_sections(found[name] for name in names)])


def classes(path: str) -> dict[str, ast.ClassDef]:
    """The public classes of a module that are no errors, by name."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and not node.name.endswith("Error")
    }


def class_sections(nodes: Iterable[ast.ClassDef]) -> Iterator[str]:
    """The lines of some classes."""
    for node in nodes:
        yield ""
        yield from class_lines(node)


def class_lines(node: ast.ClassDef) -> list[str]:
    """One class: prose, how it is made, attributes, methods."""
    prose, sections = docstring_parts(ast.get_docstring(node) or "")
    lines = [f"## {node.name}", "", prose]
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    constructor = next((method for method in methods if method.name == "__init__"), None)
    if constructor is not None and arguments(constructor) and node.name not in MADE_BY_CORE:
        lines += ["", *signature_lines(node.name, constructor), *argument_lines(constructor)]
    found = list(attributes(node, dict(entries(sections.get("Attributes", "")))))
    if found:
        rows = ((code(a.name), code(a.kind), code(a.default), a.meaning) for a in found)
        lines += ["", *table(("attribute", "type", "default", "meaning"), rows)]
    for method in methods:
        if not method.name.startswith("_") and "property" not in decorators(method):
            lines += ["", *method_lines(node.name, method)]
    return lines


def attributes(node: ast.ClassDef, meanings: dict[str, str]) -> Iterator[Attribute]:
    """The attributes of a class: annotated ones, those that only its docstring names, and properties."""
    named = set()
    for item, following in zip(node.body, [*node.body[1:], None]):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name = item.target.id
            if name.startswith("_"):
                continue
            named.add(name)
            said = docstring(following)
            kind = ast.unparse(item.annotation)
            if kind.startswith("ClassVar["):
                kind = kind.removeprefix("ClassVar[").removesuffix("]")
            yield Attribute(name, kind, default_text(item.value), said or meanings.get(name, ""))
    properties = {
        item.name: item
        for item in node.body
        if isinstance(item, ast.FunctionDef) and "property" in decorators(item) and item.name[0] != "_"
    }
    for name, meaning in meanings.items():
        if name not in named and name not in properties:
            yield Attribute(name, assigned_kind(node, name), "", meaning)
    for name, method in properties.items():
        kind = ast.unparse(method.returns) if method.returns else ""
        yield Attribute(name, kind, "", " ".join(method_parts(method)[0].removeprefix("Return ").split()))


def docstring(node: ast.stmt | None) -> str:
    """The text of a string literal that stands alone, as below an attribute; empty for anything else."""
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return markdown(" ".join(node.value.value.split()))
    return ""


def default_text(value: ast.expr | None) -> str:
    """The default of an attribute; a factory as its call."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
        return (
            f"{options['default_factory']}()" if "default_factory" in options else options.get("default", "")
        )
    return "" if value is None else ast.unparse(value)


def assigned_kind(node: ast.ClassDef, name: str) -> str:
    """The type of an attribute that the constructor assigns from an argument, or annotates."""
    for item in ast.walk(node):
        target = item.target if isinstance(item, ast.AnnAssign) else None
        if isinstance(item, ast.Assign) and len(item.targets) == 1:
            target = item.targets[0]
        if not isinstance(target, ast.Attribute) or target.attr != name:
            continue
        if isinstance(item, ast.AnnAssign):
            return ast.unparse(item.annotation)
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call):
            called = ast.unparse(item.value.func)
            return called if called[0].isupper() else ""
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Name):
            makers = (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__")
            kinds = {a.arg: a.annotation for maker in makers for a in arguments(maker)}
            kind = kinds.get(item.value.id)
            return ast.unparse(kind) if kind is not None else ""
    return ""


def decorators(method: ast.FunctionDef) -> list[str]:
    """The decorators of a method as text."""
    return [ast.unparse(decorator) for decorator in method.decorator_list]


def arguments(method: ast.FunctionDef) -> list[ast.arg]:
    """The arguments of a method without ``self`` or ``cls``."""
    found = method.args
    every = [*found.posonlyargs, *found.args, found.vararg, *found.kwonlyargs, found.kwarg]
    return [argument for argument in every if argument is not None and argument.arg not in ("self", "cls")]


def method_parts(method: ast.FunctionDef) -> tuple[str, dict[str, str]]:
    """The docstring of a method: prose and sections."""
    return docstring_parts(ast.get_docstring(method) or "")


def method_lines(owner: str, method: ast.FunctionDef) -> list[str]:
    """One method: signature, prose, arguments, result, errors."""
    prose, sections = method_parts(method)
    lines = [f"### {owner}.{method.name}", "", *signature_lines(method.name, method), "", prose]
    lines += argument_lines(method)
    if returned := sections.get("Returns", ""):
        lines += ["", f"Returns: {markdown(' '.join(returned.split()))}"]
    for error, when in entries(sections.get("Raises", "")):
        lines += ["", f"Raises {code(error)}: {when}"]
    return lines


def signature_lines(name: str, method: ast.FunctionDef) -> list[str]:
    """The call of a method as a block of code, one argument a line where it is long."""
    given = list(argument_texts(method))
    returned = f" -> {ast.unparse(method.returns)}" if method.returns and method.name != "__init__" else ""
    line = f"{name}({', '.join(given)}){returned}"
    if len(line) > 88:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in given), f"){returned}"])
    return ["```python", line, "```"]


def argument_texts(method: ast.FunctionDef) -> Iterator[str]:
    """The arguments of a method as they are written."""
    found = method.args
    plain = [*found.posonlyargs, *found.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(found.defaults)), *found.defaults]
    for argument, default in zip(plain, defaults):
        if argument.arg not in ("self", "cls"):
            yield argument_text(argument, default)
    if found.vararg is not None:
        yield f"*{argument_text(found.vararg, None)}"
    elif found.kwonlyargs:
        yield "*"
    for argument, default in zip(found.kwonlyargs, found.kw_defaults):
        yield argument_text(argument, default)
    if found.kwarg is not None:
        yield f"**{argument_text(found.kwarg, None)}"


def argument_text(argument: ast.arg, default: ast.expr | None) -> str:
    """One argument with its type and default."""
    text = (
        argument.arg if argument.annotation is None else f"{argument.arg}: {ast.unparse(argument.annotation)}"
    )
    if default is None:
        return text
    return f"{text}{' = ' if argument.annotation is not None else '='}{ast.unparse(default)}"


def argument_lines(method: ast.FunctionDef) -> Sequence[str]:
    """The meanings of a method's arguments, where its docstring gives them."""
    meanings = list(entries(method_parts(method)[1].get("Args", "")))
    rows = ((code(name), meaning) for name, meaning in meanings)
    return ["", *table(("argument", "meaning"), rows)] if meanings else []
