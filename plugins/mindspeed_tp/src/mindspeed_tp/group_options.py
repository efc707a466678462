"""Options of HCCL's communicators, by the name of a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def hccl_options(sizes: Mapping[str, int], modes: Mapping[str, int]) -> Callable[[str], Any]:
    """Return a rule from the name of a group to ``ProcessGroupHCCL.Options``, or None.

    Args:
        sizes: mebibytes of a communicator's buffer.
        modes: where its operations are expanded, numbers of CANN.
    """

    def options_of(name: str) -> Any:
        config = {}
        if name in sizes:
            config["hccl_buffer_size"] = sizes[name]
        if name in modes:
            config["hccl_op_expansion_mode"] = modes[name]
        if not config:
            return None
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options.hccl_config = config
        return options

    return options_of


def check_names(session: Session, given: Mapping[str, Mapping[str, int]]) -> None:
    """Refuse names of groups that no active feature has created.

    Args:
        session: with its groups.
        given: numbers by the name of a group, by flag.

    Raises:
        UserError: a group of a feature is not there.
    """
    for flag, numbers in given.items():
        missing = [name for name in numbers if "." in name and name not in session.groups]
        if missing:
            known_groups = ", ".join(session.groups) or "none"
            raise UserError(
                f"{flag} names {', '.join(missing)}, which no active feature creates (groups of features are "
                f"{known_groups}); mend or drop the entry"
            )
