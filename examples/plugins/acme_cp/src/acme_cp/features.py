"""The declaration of a prefix that all tokens see; importing it loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mindspeed_core.feature import Feature, Flag, HookApi, Requirement, Resume, Scenario, hookimpl

_MODEL = ("--position-embedding-type", "rope", "--adam-eps", "1e-3", "--context-parallel-size", "2")
_RING = ("--context-parallel-algo", "megatron_cp_algo")
_FETCHED = ("--context-parallel-algo", "kvallgather_cp_algo")


class SplitPrefix(Feature):
    """Models with a prefix, over sequences that are split over ranks."""

    name = "acme-prefix"
    family = "acme"
    summary = "Let all tokens see the first tokens of the sequence"
    stability = "prototype"
    flags = (Flag("--acme-prefix", type=int, help="So many first tokens are seen by all tokens."),)
    requires = (
        Requirement(feature="context-parallel", reason="attention over split sequences takes rules of masks"),
    )
    docs = "acme_cp:docs/prefix.md"
    deterministic = True
    affects_checkpoint = False
    # All tokens see the first one anyway: a prefix of one token must change nothing.
    verify: ClassVar[Sequence[Scenario]] = (
        Scenario(
            "one-token",
            flags=(*_MODEL, *_FETCHED, "--acme-prefix", "1"),
            baseline=(*_MODEL, *_FETCHED),
            world_size=2,
        ),
        # A longer prefix changes the training, and does so alike wherever it continues.
        Scenario(
            "resume",
            flags=(*_MODEL, *_FETCHED, "--acme-prefix", "8"),
            world_size=2,
            resume=Resume(flags=(*_MODEL, *_RING, "--acme-prefix", "8"), world_size=2),
        ),
    )

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse a prefix that is no part of the sequence."""
        if 0 < args.acme_prefix <= args.seq_length:
            return ()
        return [f"--acme-prefix {args.acme_prefix} is no part of --seq-length {args.seq_length}"]

    @hookimpl
    def cp_mask_rule(self, run: Any) -> Any:
        """Return the same rule for every sample."""
        from mindspeed_cp.engine.masks import MaskRule

        return (MaskRule(run.args.seq_length, prefix=run.args.acme_prefix),)


DECLARATIONS = (HookApi("1.3"), SplitPrefix)
