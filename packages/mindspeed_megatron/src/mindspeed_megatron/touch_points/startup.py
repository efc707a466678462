"""The check of megatron-core's version at the start of a run."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from typing import TYPE_CHECKING

from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.discovery.installed import installed_version
from mindspeed_core.errors import ArgumentError, UserError

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry
    from mindspeed_core.resolver.plan import Plan
    from mindspeed_megatron.touch_points.changes import Change
    from mindspeed_megatron.touch_points.survey import Survey

logger = logging.getLogger("mindspeed_core")

FLAG = "--strict-versions"


def check_version(registry: Registry, plan: Plan, args: Namespace, host: HostDeclaration) -> None:
    """Compare the installed megatron-core with those that are known, before anything of it is imported.

    Of an unknown version, the touch points that changed are named. The run goes on unless it uses one of them
    and would fail there, or replaces a function whose source changed.

    Raises:
        ArgumentError: ``--strict-versions`` is given and the version was not tested.
        UserError: a touch point that changed is in use.
    """
    from mindspeed_megatron.touch_points.changes import listed
    from mindspeed_megatron.touch_points.survey import is_recorded, survey

    version = installed_version("megatron-core")
    if not version:
        return
    if getattr(args, "strict_versions", False):
        _refuse_untested(version)
    if is_recorded(version):
        return
    found = survey(version, (name for names in registry.packages().values() for name in names))
    if found is None:
        return
    used = in_use(found, registry, plan, host)
    if used:
        change, by = used[0]
        further = f" ({len(used) - 1} further)" if len(used) > 1 else ""
        raise UserError(
            f"megatron-core {found}, and this run uses one: {change}, in use by {by}{further}. Install the "
            f"newest known one (pip install megatron-core=={found.compared}); mindspeed-features doctor "
            "lists all changes"
        )
    if os.environ.get("RANK", "0") == "0":
        logger.warning("megatron-core %s%s; none is in use", found, listed(found.changes))


def _refuse_untested(version: str) -> None:
    from mindspeed_megatron.doctor.supported_versions import TABLE, matches

    tested = next(row.tested for row in TABLE if row.distribution == "megatron-core")
    if not any(matches(version, f"=={release}") for release in tested):
        raise ArgumentError(
            FLAG,
            None,
            f"megatron-core {version} is installed, and this release was tested with {', '.join(tested)}",
            f"pip install megatron-core=={tested[-1]}, or leave {FLAG} out",
        )


def in_use(survey: Survey, registry: Registry, plan: Plan, host: HostDeclaration) -> list[tuple[Change, str]]:
    """Return the changes that a run meets, each with the feature or host that does.

    A change that breaks is met where a module that uses it is loaded with the host's stages, or can be by an
    active feature. A changed source is met where a patch of the run replaces the function, and other
    parameters where one wraps it.
    """
    from mindspeed_megatron.touch_points.reach import reached

    if not survey.changes:
        return []
    packages = {name for names in registry.packages().values() for name in names}
    places = {
        f"host {host.name}": reached([path.partition(":")[0] for path in host.stages], packages, lazily=False)
    }
    for name in plan.names:
        module = registry.features[name].cls.__module__
        places[f"feature {name}"] = reached([module], [module.partition(".")[0]], lazily=True)
    patches = {patch.target.replace(":", "."): patch for patch in (*host.patches, *plan.patches)}
    met = []
    for change in survey.changes:
        users = [who for who, modules in places.items() if change.breaks and modules & {*change.modules}]
        patch = patches.get(change.point)
        if patch is not None and (patch.kind == "replace" or not change.of_source):
            users.append(f"feature {patch.owner}" if patch.owner else f"host {host.name}")
        if users:
            met.append((change, users[0]))
    return met
