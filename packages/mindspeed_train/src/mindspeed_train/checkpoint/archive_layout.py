"""The bytes of a ``torch.save`` archive, compared with the one layout that torch writes.

Programs read a zip file from different ends: ``zipfile`` from the last directory, the reader of torch from
the offset that it names, and in whatever case a name is spelled. An archive that could be read in two ways is
refused before anything reads it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from mindspeed_train.checkpoint.opened_files import Part

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR64 = struct.Struct("<4sIQI")
SIZES64 = struct.Struct("<2H2Q")
HAS_DESCRIPTOR = 1 << 3
IN_ZIP64 = 0xFFFFFFFF
_MEMBER = re.compile(
    r"data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+"
)


class LayoutError(ValueError):
    """The bytes are not laid out as ``torch.save`` does it; the message says in what."""


@dataclass(frozen=True)
class _Entry:
    name: str
    offset: int
    size: int


def members(part: Part) -> dict[str, tuple[int, int]]:
    """Return where the content of each member of an archive begins, and its size, by name without root.

    Accepts one archive of stored members without prefix, gap, comment, second directory or odd name.

    Raises:
        LayoutError: anything else.
    """
    begin, count = _directory(part)
    entries = _entries(part, begin, count)
    _check_names([entry.name for entry in entries])
    found, position = {}, 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset != position:
            raise LayoutError(f"{entry.name} does not follow on what is before it")
        first, position = _extent_of_member(part, entry)
        found[entry.name.partition("/")[2]] = (first, entry.size)
    if position != begin:
        raise LayoutError("there is something between the members and their directory")
    return found


def _directory(part: Part) -> tuple[int, int]:
    """Return where the directory begins and how many entries it has."""
    at = part.size - END.size
    if at < 0 or part.read(0, 4) != b"PK\x03\x04":
        raise LayoutError("it is no zip archive from its first byte on")
    signature, disk, first_disk, here, count, size, begin, comment = END.unpack(part.read(at, END.size))
    if signature != b"PK\x05\x06" or comment or disk or first_disk or here != count:
        raise LayoutError("it does not end with its directory")
    locator = at - LOCATOR64.size
    if locator >= END64.size and part.read(locator, 4) == b"PK\x06\x07":
        at = locator - END64.size
        _, disk, where, _ = LOCATOR64.unpack(part.read(locator, LOCATOR64.size))
        end = END64.unpack(part.read(at, END64.size))
        kind, length, _, _, disk64, _, here64, count64, size64, begin64 = end
        if kind != b"PK\x06\x06" or where != at or length != END64.size - 12 or disk or disk64:
            raise LayoutError("its directory has two ends that differ")
        if here64 != count64 or count not in (count64, 0xFFFF):
            raise LayoutError("its directory has two ends that differ")
        if size not in (size64, IN_ZIP64) or begin not in (begin64, IN_ZIP64):
            raise LayoutError("its directory has two ends that differ")
        count, size, begin = count64, size64, begin64
    if begin + size != at:
        raise LayoutError("its directory is not where it says")
    return begin, count


def _entries(part: Part, begin: int, count: int) -> list[_Entry]:
    """Read the directory."""
    entries: list[_Entry] = []
    content, at = part.read(begin, part.size - begin), 0
    try:
        for _ in range(count):
            (signature, _, _, flags, method, *_, packed, size, name, extra, comment, disk, _, _, offset) = (
                CENTRAL.unpack_from(content, at)
            )
            if signature != b"PK\x01\x02" or method or comment or disk or flags & 1:
                raise LayoutError("its directory has an entry that torch does not write")
            at += CENTRAL.size
            text = content[at : at + name].decode("ascii")
            packed, size, offset = _wide(content[at + name : at + name + extra], packed, size, offset)
            if packed != size:
                raise LayoutError(f"{text} has two sizes")
            entries.append(_Entry(text, offset, size))
            at += name + extra
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise LayoutError(f"its directory cannot be read ({error})") from error
    tail = len(content) - at
    if tail not in (END.size, END.size + LOCATOR64.size + END64.size):
        raise LayoutError("its directory is longer than its entries")
    return entries


def _wide(extra: bytes, packed: int, size: int, offset: int) -> tuple[int, int, int]:
    """Return sizes and offset, from the zip64 field where the entry refers to it."""
    if IN_ZIP64 not in (packed, size, offset):
        return packed, size, offset
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            wanted = [values.pop(0) if value == IN_ZIP64 else value for value in (size, packed, offset)]
            return wanted[1], wanted[0], wanted[2]
        at += 4 + length
    raise LayoutError("an entry refers to a size that is not there")


def _check_names(names: list[str]) -> None:
    root = names[0].partition("/")[0] if names else ""
    members = [name.removeprefix(f"{root}/") for name in names]
    odd = next((name for name, member in zip(names, members) if not _MEMBER.fullmatch(member)), None)
    if odd is not None:
        raise LayoutError(f"it holds {odd!r}, which torch.save does not write")
    if len({name.casefold() for name in names}) != len(names) or not {"data.pkl", "version"} <= set(members):
        raise LayoutError("it does not hold data.pkl and its version exactly once")


def _extent_of_member(part: Part, entry: _Entry) -> tuple[int, int]:
    """Return where a member's content begins and the member ends, its header read from where it should be."""
    try:
        header = LOCAL.unpack(part.read(entry.offset, LOCAL.size))
    except struct.error as error:
        raise LayoutError(f"{entry.name} lies outside of it") from error
    signature, _, flags, method, _, _, _, packed, _, name, extra = header
    at = entry.offset + LOCAL.size
    named = part.read(at, name + extra)
    if signature != b"PK\x03\x04" or method or named[:name] != entry.name.encode():
        raise LayoutError(f"{entry.name} has another header than its directory says")
    first = at + name + extra
    end = first + entry.size
    if end > part.size:
        raise LayoutError(f"{entry.name} lies outside of it")
    if not flags & HAS_DESCRIPTOR:
        if packed not in (entry.size, IN_ZIP64):
            raise LayoutError(f"{entry.name} has two sizes")
        return first, end
    # crc, then both sizes, of eight bytes each where the header has a zip64 field
    wide = named[name : name + 2] == b"\x01\x00"
    length = 24 if wide else 16
    descriptor = part.read(end, length).ljust(length, b"\0")
    sizes = struct.unpack("<4xI2Q" if wide else "<4x3I", descriptor)[1:]
    if descriptor[:4] != b"PK\x07\x08" or sizes != (entry.size, entry.size):
        raise LayoutError(f"{entry.name} does not end where its directory says")
    return first, end + length
