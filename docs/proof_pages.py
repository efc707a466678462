"""The page of proofs: their declaration, and the model on which they train."""

from __future__ import annotations

import ast
from itertools import pairwise

from class_pages import PROOFS, ROOT, class_sections, classes
from docstrings import markdown
from tables import code, table

from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_testing.model_flags import SMALL_GPT

HOST = "standalone"


def scenarios_page(registry: Registry) -> str:
    """Proofs and the small GPT."""
    found = classes("mindspeed_core/scenario.py")
    help_of = {
        option: entry.flag.help for entry in flag_set(registry, HOST).entries for option in entry.flag.options
    }
    lines = [
        "# Proofs",
        "",
        "The declaration of a feature's proofs, and what they train. `mindspeed-features verify` and the",
        "fixture `mindspeed_equivalence` run them ([Writing a plugin](../writing-a-plugin.md)).",
        *class_sections(found[name] for name in PROOFS),
        "",
        "## SMALL_GPT",
        "",
        *small_gpt_prose(),
        "",
        *table(
            ("flag", "value", "meaning"),
            ((code(name), code(value), help_of[name]) for name, value in pairs()),
        ),
    ]
    return "\n".join(lines)


def pairs() -> list[tuple[str, str]]:
    """The flags of the small GPT with their values; a switch has none."""
    found: list[tuple[str, str]] = []
    for text in SMALL_GPT:
        if text.startswith("--"):
            found.append((text, ""))
        else:
            found[-1] = (found[-1][0], text)
    return found


def small_gpt_prose() -> list[str]:
    """The text below ``SMALL_GPT`` in its module."""
    path = ROOT / "plugins" / "mindspeed_testing" / "src" / "mindspeed_testing" / "model_flags.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    (text,) = (
        following.value.value
        for item, following in pairwise(body)
        if isinstance(item, ast.Assign)
        and ast.unparse(item.targets[0]) == "SMALL_GPT"
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    )
    return markdown(str(text)).splitlines()
