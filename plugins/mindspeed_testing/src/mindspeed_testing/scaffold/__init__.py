"""Starts a third-party plugin: a package that installs, lists, trains and proves itself as it comes.

The directory ``plugin`` beside this file is the package with ``$plugin``, ``$package``, ``$option`` and so on
in place of names, and ``dot_`` in place of the dot that hidden names begin with; what `create_plugin` writes
differs from it in nothing else.
"""

from __future__ import annotations

import keyword
import re
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from string import Template

from packaging.utils import canonicalize_name

from mindspeed_core import __version__
from mindspeed_core.errors import UserError
from mindspeed_core.hooks.versions import API_VERSION

TEMPLATE = Path(__file__).parent / "plugin"
SUFFIX = ".tmpl"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")


class ScaffoldError(UserError):
    """A plugin cannot be started under this name or in this place."""


def plugin_names(plugin: str) -> dict[str, str]:
    """Return what the template's placeholders stand for: names derived from the distribution's name.

    Raises:
        ScaffoldError: the name cannot be a distribution and a Python package, or is taken.
    """
    if not _NAME.match(plugin):
        raise ScaffoldError(
            f"{plugin!r} is no plugin name: use lower-case words joined by single hyphens, beginning with a "
            "letter, for instance acme-losses"
        )
    package = plugin.replace("-", "_")
    if keyword.iskeyword(package) or keyword.issoftkeyword(package) or package in sys.stdlib_module_names:
        raise ScaffoldError(
            f"{plugin!r}: {package} is a word or module of Python itself; add a prefix of yours"
        )
    if find_spec(package) is not None or plugin in _installed():
        raise ScaffoldError(f"{plugin!r}: something of that name is installed here; choose another name")
    return {
        "plugin": plugin,
        "package": package,
        "entry": package,
        "feature": f"{plugin}-loss-average",
        "option": f"--{plugin}-loss-average",
        "dest": f"{package}_loss_average",
        "metric": f"{plugin} loss average",
        "hook_api": API_VERSION,
        "core": ".".join(__version__.split(".")[:2]),
        "next": str(int(__version__.split(".")[0]) + 1),
    }


def create_plugin(plugin: str, parent: Path) -> list[Path]:
    """Write a new plugin into ``parent / plugin`` and return the files that were written.

    Raises:
        ScaffoldError: the name cannot be used, or the directory exists; nothing is ever overwritten.
    """
    names = plugin_names(plugin)
    if not parent.is_dir():
        raise ScaffoldError(f"{parent}: no such directory; create it first, or choose another with --path")
    target = parent / plugin
    try:
        target.mkdir()
    except FileExistsError:
        raise ScaffoldError(
            f"{target} exists, and nothing is overwritten; choose another name or another --path"
        ) from None
    except OSError as error:
        raise ScaffoldError(f"{target} cannot be created: {error.strerror}; choose another --path") from error
    written = []
    for source in sorted(TEMPLATE.rglob("*" + SUFFIX)):
        relative = source.relative_to(TEMPLATE).as_posix().replace("__package__", names["package"])
        parts = [re.sub(r"^dot_", ".", part) for part in relative[: -len(SUFFIX)].split("/")]
        path = target.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(source.read_text(encoding="utf-8")).substitute(names), encoding="utf-8")
        written.append(path)
    return written


def _installed() -> set[str]:
    return {canonicalize_name(dist.metadata["Name"] or "") for dist in distributions()}
