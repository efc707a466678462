"""The declaration of the flag that forces backends of operators."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Flag, Scenario, hookimpl
from mindspeed_kernels.features.proofs import LLAMA, KernelFeature, resumed

_FUSED = ("--use-fused-rmsnorm", "--use-fused-swiglu")
_REFERENCES = (*_FUSED, "--ops-backend", "*=reference")


class OpsBackend(KernelFeature):
    """Forces the backends of operators for a whole training."""

    name = "ops-backend"
    summary = "Choose the backend of an operator instead of the automatic choice"
    level = 0
    flags = (
        Flag(
            "--ops-backend",
            type=str,
            metavar="OP=BACKEND[,OP=BACKEND]",
            help="Force backends of operators, *=reference for all; mindspeed-features ops lists them.",
        ),
    )
    docs = "mindspeed_kernels:docs/ops-backend.md"
    verify = (
        Scenario("references", flags=(*LLAMA, *_REFERENCES), baseline=(*LLAMA, *_FUSED)),
        resumed(_REFERENCES, LLAMA),
    )

    @hookimpl(wrapper=True)
    def validate_arguments(self, args: Any) -> Generator[None, Any, Any]:
        """Refuse operators and backends that no installed package brings, also where nothing is opened."""
        from mindspeed_kernels.ops.forcing import checked_choices

        checked_choices(args.ops_backend)
        return (yield)

    @hookimpl(wrapper=True)
    def prepare_process(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Force them until the session closes."""
        done = yield
        from mindspeed_kernels.ops.forcing import force_until_close

        force_until_close(session, args.ops_backend, owner=self.name)
        return done
