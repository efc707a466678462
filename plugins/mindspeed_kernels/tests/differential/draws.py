"""Random choices from a seed, kept so that a failing call can be made smaller."""

import random

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (1, 2, 3, 5, 8, 7, 16, 33)


class Draws:
    """Choices of one case. The first option of each choice is the simplest one.

    ``forced`` holds choices by place that replace the drawn ones, None where nothing does.
    """

    def __init__(self, seed, forced=(), dtypes=FLOATS, checkable=False):
        """``checkable`` asks for what small differences can judge: small, float64, not overlapping."""
        self.seed, self.dtypes, self.checkable = seed, (torch.float64,) if checkable else dtypes, checkable
        self.choices = []
        self._forced = forced
        self._random = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)

    def choice(self, options):
        place, drawn = len(self.choices), self._random.randrange(len(options))
        if place < len(self._forced) and self._forced[place] is not None:
            drawn = min(self._forced[place], len(options) - 1)
        self.choices.append(drawn)
        return options[drawn]

    def maybe(self):
        """False, or now and then True."""
        return self.choice((False, False, True))

    def integer(self, low, high):
        return self.choice(range(low, high + 1))

    def size(self, low=1):
        """A length of at least ``low``; 0 now and then where that is allowed."""
        if self.checkable:
            return self.choice((2, 1, 3))
        return self.choice((*SIZES, 0) if low == 0 else [size for size in SIZES if size >= low])

    def dtype(self):
        return self.choice(self.dtypes)

    def tensor(self, *shape, dtype, positive=False, plain=False):
        """Normal numbers of a dtype, in some layout; with ``plain`` never overlapping."""
        kinds = ["contiguous", "transposed", "part"]
        if not (plain or self.checkable):
            kinds.append("repeated")
        kind = self.choice(kinds)
        made = self._normal(shape, dtype, positive)
        if kind == "transposed" and len(shape) > 1:
            return made.transpose(-1, -2).contiguous().transpose(-1, -2)
        if kind == "part" and shape:
            wide = torch.full((*shape[:-1], shape[-1] + 3), 9.0).to(dtype)
            wide[..., 1:-2] = made
            return wide[..., 1:-2]
        if kind == "repeated" and len(shape) > 1:
            return made[:1].expand(shape) if shape[0] else made
        return made

    def _normal(self, shape, dtype, positive=False):
        made = torch.randn(shape, generator=self._numbers, dtype=torch.float64)
        return (made.abs() + 0.1 if positive else made).to(dtype)

    def like(self, tensor):
        """A gradient of a result: normal numbers, also one number for all, or transposed."""
        kind = self.choice(("contiguous", "one number", "transposed"))
        if kind == "one number":
            return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        made = self._normal(tensor.shape, tensor.dtype)
        return (
            made.transpose(0, -1).contiguous().transpose(0, -1)
            if kind == "transposed" and made.dim()
            else made
        )

    def integers(self, low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high + 1, shape, generator=self._numbers).to(dtype)

    def order(self, count):
        return torch.randperm(count, generator=self._numbers)

    def ends(self, rows, groups):
        """Draw the ends of ``groups`` that share ``rows``; groups may be empty, also at both sides."""
        cuts = sorted(self.integer(0, rows) for _ in range(groups - 1))
        return [*cuts, rows]


def shrunk(choices, fails, attempts=150):
    """The smallest choices found for which ``fails`` holds, simpler ones first."""
    best = list(choices)
    progress = True
    while progress and attempts > 0:
        progress = False
        for place, value in enumerate(best):
            for simpler in dict.fromkeys((0, value // 2, value - 1)):
                if not 0 <= simpler < value or attempts <= 0:
                    continue
                attempts -= 1
                tried = [*best[:place], simpler, *best[place + 1 :]]
                if fails(tried):
                    best, progress = tried, True
                    break
    return best
