"""URLs in the place of a folder: which are refused, and how they are shown.

An object store is reached through a driver of fsspec. Whether one is there is found out before training
starts, and a URL never carries a secret: command lines are visible to all users of a machine and end up in
logs.
"""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_core.errors import ArgumentError

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.:-]*)://(?P<rest>.*)", re.DOTALL)
_SECRET = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")
_QUERY = re.compile(r"((?:key|token|secret|password|sig|credential)[\w-]*)=[^&\s'\"]+", re.IGNORECASE)
_FOLDERS = ("file", "local")


def is_url(location: str) -> bool:
    """Return whether a location is spelled as a URL, that of a folder (``file://``) included."""
    return _URL.match(location) is not None


def folder_of(location: str) -> Path | None:
    """Return the folder that a path or a URL of this machine names; None for an object store."""
    match = _URL.match(location)
    if match is None:
        return Path(location)
    return Path(match["rest"]) if match["protocol"].lower() in _FOLDERS else None


def masked(text: str) -> str:
    """Return a text with the passwords of its URLs and the secrets of its queries left out."""
    return _QUERY.sub(r"\1=***", _SECRET.sub("***@", text))


def protocol_of(url: str) -> str:
    """Return the protocol of a URL; empty for a path."""
    match = _URL.match(url)
    return match["protocol"].lower() if match else ""


def check_url(flag: str, url: str) -> None:
    """Refuse a URL that cannot hold checkpoints; ``flag`` names where it was given.

    Raises:
        ArgumentError: it carries a secret, is no prefix, or nothing on this machine can open it.
    """
    shown = masked(url)
    protocol = protocol_of(url)
    if _SECRET.search(url):
        reason = "a password in a URL is visible to everybody on this machine"
        raise ArgumentError(flag, shown, reason, "give it to the driver by environment or configuration")
    if "::" in url:
        reason = "chained URLs keep copies that other ranks do not see"
        raise ArgumentError(flag, shown, reason, "name the store itself")
    if re.search(r"[?#*\[\]{}\s]", url) or "/../" in f"{url}/":
        reason = "is no plain prefix (a query, a pattern, a space or ..)"
        raise ArgumentError(flag, shown.partition("?")[0], reason, "name it as protocol://bucket/folder")
    if protocol in _FOLDERS:
        if not url.partition("://")[2].startswith("/"):
            remedy = f"write {protocol}:///folder, or the path"
            raise ArgumentError(flag, shown, "names no absolute path", remedy)
        return
    if not url.partition("://")[2].strip("/"):
        raise ArgumentError(flag, shown, "names no bucket", f"write {protocol}://bucket/folder")
    _check_driver(flag, shown, protocol)


def _check_driver(flag: str, shown: str, protocol: str) -> None:
    install = "pip install 'mindspeed-core[fsspec]'"
    try:
        from fsspec.registry import get_filesystem_class
    except ImportError:
        raise ArgumentError(flag, shown, "needs the package fsspec", install) from None
    try:
        get_filesystem_class(protocol)
    except ValueError:
        reason = f"fsspec knows no protocol {protocol!r}"
        raise ArgumentError(
            flag, shown, reason, f"correct it, or install its driver: {install} DRIVER"
        ) from None
    except ImportError as error:
        reason = f"the driver of {protocol!r} is missing ({masked(str(error)).strip().rstrip('.')})"
        raise ArgumentError(flag, shown, reason, f"{install} and that package") from None
