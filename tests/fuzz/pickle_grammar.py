"""A grammar of hostile pickles: operations, listed classes and functions, and states that do not fit them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

from mindspeed_train.checkpoint.pickled_classes import VALUES, index_table

LISTED = sorted({*VALUES.builders, *VALUES.constants, *index_table(lambda values, made: None).builders})
FOREIGN = [
    "os.system",
    "posix.system",
    "builtins.eval",
    "builtins.exec",
    "builtins.getattr",
    "builtins.__import__",
    "subprocess.Popen",
    "torch.load",
    "torch.serialization.load",
    "operator.attrgetter",
    "functools.partial",
    "copyreg._reconstructor",
    "torch.storage._load_from_bytes",
    "argparse.Namespace.__init__",
    "mindspeed_core.activation.activate",
]
STRINGS = [
    "",
    "a",
    "fqn",
    "offset",
    "storage",
    "0",
    "cpu",
    "latin1",
    "O",
    "f8",
    "V4",
    "i4",
    "<",
    "|",
    ">",
    "../../../etc/passwd",
    "/etc/passwd",
    "trust_checkpoint",
    "__class__",
    "__setstate__",
    "__reduce__",
    "__dict__",
    "state_dict_metadata",
    "storage_data",
    "relative_path",
    "chunks",
    "sizes",
    "\x1b[2J\x1b[31mred",
    "\u202eevil",
    "<script>alert(1)</script>",
    "x" * 5000,
    "data/0",
]
NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    7,
    16,
    255,
    -1,
    -2,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63,
    -(2**63),
    2**127,
    2**200,
    2**3000,
]
UNKNOWN = [
    b"0",
    b"1",
    b"2",
    b"i__builtin__\neval\n",
    b"(o",
    b"\x82\x01",
    b"\x83\x01\x00",
    b"\x84\x01\x00\x00\x00",
]
UNKNOWN += [
    b"\x92",
    b"\x97",
    b"\x98",
    b"Pabc\n",
    b"S'x'\n",
    b"T\x01\x00\x00\x00x",
    b"U\x01x",
    b"\xff",
    b"\x00",
]


class Grammar:
    """Pickles of one seed."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.memo = 0

    def pickle(self) -> bytes:
        """Return a whole pickle, sometimes with something wrong about its frame or its end."""
        draw = self.draw
        begin = draw.choice([b"\x80\x02", b"\x80\x02", b"\x80\x04", b"\x80\x05", b""])
        body = self.value(draw.randrange(1, 6))
        if draw.random() < 0.1:
            body = b"\x95" + struct.pack("<Q", draw.choice([len(body) + 1, 0, 2**62])) + body
        return begin + body + draw.choice([b".", b".", b".", b".", b"", b"..", b".x"])

    def value(self, depth: int) -> bytes:
        """Return operations that leave one value on the stack, or try to."""
        draw = self.draw
        kinds: Sequence[Callable[[int], bytes]] = (
            self._scalar,
            self._scalar,
            self._container,
            self._container,
            self._call,
            self._call,
            self._call,
            self._built,
            self._shared,
            self._external,
            self._array,
            self._tensor,
            self._strange,
        )
        made = draw.choice(kinds)(depth) if depth > 0 else self._scalar(depth)
        if draw.random() < 0.2:
            made += b"q" + bytes([self.memo % 250])
            self.memo += 1
        return made

    def _scalar(self, depth: int) -> bytes:
        draw = self.draw
        kind = draw.randrange(8)
        if kind == 0:
            return draw.choice([b"N", b"\x88", b"\x89"])
        if kind == 1:
            return self._name()
        if kind == 2:
            return b"G" + struct.pack(">d", draw.choice([0.0, -1.5, 1e308, float("inf"), float("nan")]))
        if kind == 3:
            length = draw.choice([0, 1, 8, 16, 200])
            return b"C" + bytes([length]) + draw.randbytes(length)
        if kind == 4 and self.memo:
            return b"h" + bytes([draw.randrange(self.memo + 1) % 250])
        if kind == 5:
            return text(draw.choice(STRINGS))
        return number(draw.choice(NUMBERS))

    def _name(self) -> bytes:
        full = self.draw.choice(FOREIGN) if self.draw.random() < 0.03 else self.draw.choice(LISTED)
        module, _, name = full.rpartition(".")
        if self.draw.random() < 0.5:
            return b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        return text(module) + text(name) + b"\x93"

    def _tuple(self, depth: int, count: int | None = None) -> bytes:
        count = self.draw.randrange(6) if count is None else count
        return b"(" + b"".join(self.value(depth - 1) for _ in range(count)) + b"t"

    def _dictionary(self, depth: int) -> bytes:
        pairs = b"".join(
            (text(self.draw.choice(STRINGS)) if self.draw.random() < 0.8 else self.value(depth - 1))
            + self.value(depth - 1)
            for _ in range(self.draw.randrange(5))
        )
        return b"}(" + pairs + b"u"

    def _container(self, depth: int) -> bytes:
        draw = self.draw
        items = b"".join(self.value(depth - 1) for _ in range(draw.randrange(6)))
        return draw.choice(
            [
                lambda: b"](" + items + b"e",
                lambda: b"(" + items + b"l",
                lambda: b"\x8f(" + items + b"\x90",
                lambda: b"(" + items + b"\x91",
                lambda: b"(" + items + b"d",
                lambda: self._tuple(depth),
                lambda: self._dictionary(depth),
                lambda: b"]" * draw.choice([3, 60, 2000]) + b"a" * draw.choice([2, 59, 1999]),
            ]
        )()

    def _call(self, depth: int) -> bytes:
        made = self._name() + self._tuple(depth) + self.draw.choice([b"R", b"\x81", b"\x81", b"\x92"])
        return made + self.draw.choice([b"", b"", self._dictionary(depth) + b"b", self._tuple(depth) + b"b"])

    def _built(self, depth: int) -> bytes:
        draw = self.draw
        target = draw.choice([self._name, lambda: self._name() + b")\x81", lambda: self.value(depth - 1)])()
        state = draw.choice(
            [
                lambda: b"N" + self._dictionary(depth) + b"\x86",
                lambda: self._dictionary(depth) + self._dictionary(depth) + b"\x86",
                lambda: self._dictionary(depth),
                lambda: self.value(depth - 1),
            ]
        )()
        return target + (state + b"b") * draw.choice([1, 1, 2])

    def _shared(self, depth: int) -> bytes:
        draw = self.draw
        begin = self.value(depth - 1)
        doubled = draw.choice([b"q\xfah\xfa\x86", b"q\xfa0]h\xfaah\xfaa", b"2\x86"])
        made = begin + doubled * draw.choice([2, 10, 40, 70])
        return b"}" + made + b"K\x01s" if draw.random() < 0.4 else made

    def _external(self, depth: int) -> bytes:
        draw = self.draw
        kind = draw.choice(["FloatStorage", "LongStorage", "UntypedStorage", "DoubleStorage"])
        count = draw.choice([0, 1, 2, 4, 8, -1, 2**40, 2**62])
        parts = text(draw.choice(["storage", "storage", "x"])) + b"ctorch\n" + kind.encode() + b"\n"
        return b"(" + parts + text(draw.choice(["0", "1", "../0"])) + text("cpu") + number(count) + b"tQ"

    def _tensor(self, depth: int) -> bytes:
        draw = self.draw
        storage = self._external(depth) if draw.random() < 0.8 else self.value(depth - 1)
        rank = draw.choice([0, 1, 2, 3, 20])
        shapes = [
            b"(" + b"".join(number(draw.choice([0, 1, 2, 4, -1, 2**31, 2**62])) for _ in range(rank)) + b"t"
            for _ in range(2)
        ]
        rest = b"\x89" + b"ccollections\nOrderedDict\n)R"
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n("
            + storage
            + number(draw.choice([0, 1, -1, 2**62]))
            + b"".join(shapes)
            + rest
            + b"tR"
        )

    def _array(self, depth: int) -> bytes:
        draw = self.draw
        kind = text(draw.choice(["O", "f8", "i4", "V8", "O8", "u1", "S4", "U9", "M8", "f8,O"]))
        dtype = b"cnumpy\ndtype\n" + kind + b"\x89\x88\x87R"
        if draw.random() < 0.8:
            order = text(draw.choice(["<", "|", ">", "=", "x"]))
            tail = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff" + number(draw.choice([0, 63, 2**31])) + b"tb"
            dtype += b"(K\x03" + order + tail
        shape = (
            b"("
            + b"".join(number(draw.choice([0, 1, 2, 2**62, -1])) for _ in range(draw.randrange(3)))
            + b"t"
        )
        content = b"C\x10" + b"A" * 16
        if draw.random() < 0.4:
            return b"cnumpy.core.multiarray\nscalar\n" + dtype + content + b"\x86R"
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
        return made + b"(K\x01" + shape + dtype + draw.choice([b"\x88", b"\x89"]) + content + b"tb"

    def _strange(self, depth: int) -> bytes:
        draw = self.draw
        lying = struct.pack("<Q", draw.choice([2**62, 2**31, 10**6, 2**63]))
        return draw.choice(
            [
                draw.choice(UNKNOWN),
                b"\x8e" + lying,
                b"\x8d" + lying,
                b"\x96" + lying,
                b"\x8b\xff\xff\xff\x7f",
                b"X\xff\xff\xff\xff",
                b"r\xff\xff\xff\xff",
                b"Nr\xff\xff\xff\xff",
                b"I" + b"9" * draw.choice([30, 5000]) + b"\n",
                b"L" + b"9" * 5000 + b"L\n",
                b"F1e999\n",
                b"g99\n",
                b"V\\u0000\\ud800\n",
                b"e",
                b"u",
                b"t",
                b"b",
                b"R",
                b"(",
            ]
        )


def text(value: str) -> bytes:
    """Return the operation that pushes a text."""
    content = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(content)) + content


def number(value: int) -> bytes:
    """Return the operation that pushes an integer."""
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(content) < 256:
        return b"\x8a" + bytes([len(content)]) + content
    return b"\x8b" + struct.pack("<i", len(content)) + content
