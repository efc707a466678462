"""Declaration of the dump of what modules compute. No torch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_profile.features.proofs import PP2, TP2, unchanged

if TYPE_CHECKING:
    from pathlib import Path


_FLAG = "--npu-datadump"
_FILES = ("mindspeed_profile.features.dump:write_config",)
_PROOF = (_FLAG, "{files}/dump.json")


class DataDump(Feature):
    """Statistics of what every module computes, to find where two runs part."""

    name = "npu-datadump"
    family = "profile"
    summary = "Dump statistics of what each module computes, for mindspeed-profile compare"
    level = 0
    flags = (
        Flag(
            _FLAG,
            type=str,
            nargs="*",
            metavar="CONFIG",
            per_rank=True,
            help="Dump statistics of modules in the first step, or as a file of msprobe's form says.",
        ),
    )
    docs = "mindspeed_profile:docs/datadump.md"
    modes = ("train",)
    affects_checkpoint = False
    fake_tensors = True
    deterministic = True
    verify = unchanged(_PROOF, {"single": (), "tp2-sp": TP2, "pp2": PP2}, files=_FILES)

    _dump: Any = None

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether the flag is given, with a file or without."""
        return args.npu_datadump is not None

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Check the file."""
        from mindspeed_profile.dump_options import read_options

        if len(args.npu_datadump) > 1:
            return (f"{_FLAG} {' '.join(args.npu_datadump)}: it takes one file at most; name one",)
        try:
            read_options(args.npu_datadump)
        except UserError as error:
            return (str(error),)
        return ()

    @hookimpl(wrapper=True)
    def train_step(self, session: Any, run: Any) -> Generator[None, Any, Any]:
        """Dump the step, if it is chosen, with msprobe where it can, otherwise with hooks of our own."""
        from mindspeed_profile.dump_options import read_options

        if session.platform.dry_run:
            return (yield)
        if self._dump is None:
            from mindspeed_profile.dump_backends import make_dump

            self._dump = make_dump(run, read_options(run.args.npu_datadump))
            session.at_close(self._stop)
        with self._dump.step(run):
            return (yield)

    def _stop(self) -> None:
        """Close the files of the dump."""
        dump, self._dump = self._dump, None
        dump.close()


def write_config(folder: Path) -> None:
    """Write ``dump.json``, which dumps two steps into the folder."""
    import json

    content = {"dump_path": str(folder / "datadump"), "step": [0, 1]}
    (folder / "dump.json").write_text(json.dumps(content), encoding="utf-8")
