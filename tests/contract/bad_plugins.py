"""Distributions that break the contract, one rule each, written as installed packages."""

from __future__ import annotations

from pathlib import Path

HEAD = """
from pathlib import Path
from mindspeed_core.feature import (
    Conflict, Fallback, Feature, Flag, HookApi, Patch, Requirement, Resume, Scenario, hookimpl
)

class Sound(Feature):
    family = "bad"
    summary = "keeps the contract but for one rule"
    docs = "bad_features:page.md"

def sound(name, **attributes):
    flag = "--" + name
    body = {
        "name": name,
        "__module__": __name__,
        "family": "bad",
        "summary": "keeps the contract but for one rule",
        "docs": "bad_features:page.md",
        "flags": (Flag(flag, help="Ask for it."),),
        "verify": (Scenario("same", flags=(flag,), tolerance=0.0),),
        **attributes,
    }
    return type(name.title().replace("-", ""), (Feature,), body)
"""

FEATURES = """
@hookimpl
def ending(self):
    raise SystemExit(0)

DECLARATIONS = (
    HookApi("1.3"),
    sound("bad-nothing"),
    sound("bad-page", docs=""),
    sound("bad-lost-page", docs="bad_features:nowhere.md"),
    sound("bad-unmentioned"),
    sound("bad-help", flags=(Flag("--bad-help"),)),
    sound("bad-platform", platforms=("cpu", "cuba")),
    sound("bad-fallback", platforms=("npu",), fallback=Fallback("", feature="bad-nobody")),
    sound("bad-requirement", requires=(Requirement(flag="--no-such-flag"),)),
    sound("bad-conflict", conflicts=(Conflict(flag="--swiglo", reason="it is misspelled"),)),
    sound("bad-name", after=("bad-nothin",)),
    sound("bad-hidden", conflicts=(Conflict(feature="bad-level", reason="never both"),)),
    sound("bad-level", enabled=classmethod(lambda cls, args: args.bad_level and not args.bad_hidden)),
    sound(
        "bad-patch",
        patches=(Patch("torch:add", new="bad_features.declared:kept", reason="to see", kind="wrap"),),
    ),
    sound("bad-proofless", verify=()),
    sound("bad-searching", verify=(), trains_nothing="it prints a list and ends", prepare_process=ending),
    sound("bad-claim", verify=(), trains_nothing="it says so", train_step=ending, slots=("norm",)),
    sound("bad-silent-claim", verify=(), trains_nothing="nothing"),
    sound("bad-proved-claim", trains_nothing="it prints a list and ends", prepare_process=ending),
    sound("bad-idle-proof", verify=(Scenario("idle", flags=()),)),
    sound("bad-twice", verify=(Scenario("one", ("--bad-twice",)), Scenario("one", ("--bad-twice",)))),
    sound("bad-both-sides", verify=(Scenario("x", ("--bad-both-sides",), ("--bad-both-sides",)),)),
    sound(
        "bad-same-feature",
        verify=(Scenario("x", ("--bad-same-feature",), ("--bf16",), same_feature=True),),
    ),
    sound("bad-resume", verify=(Scenario("x", ("--bad-resume",), resume=Resume(("--bf16",))),)),
    sound(
        "bad-filed",
        flags=(Flag("--bad-filed", type=str, help="A file."),),
        verify=(Scenario("x", ("--bad-filed", "{files}/page.md"), files=("bad_features:page.md",)),),
        validate=classmethod(lambda cls, args: () if Path(args.bad_filed).is_file() else ["no file"]),
    ),
    sound("bad-flags", verify=(Scenario("x", ("--bad-flags", "--bad-flaggs")),)),
    sound("bad-enabled", enabled=classmethod(lambda cls, args: args.num_layres > 1)),
    sound("bad-presets", presets=classmethod(lambda cls, args: {"seed": args.no_such_seed})),
    sound("bad-preset", presets=classmethod(lambda cls, args: {"seed": 5})),
    sound("bad-notes", notes=classmethod(lambda cls, args: [args.no_such_heads])),
    sound("bad-init", __init__=lambda self, size: None),
    sound("bad-before", before=("bad-nothin",)),
    sound("bad-deaf", flags=(Flag("--bad-deaf", help="On."), Flag("--bad-unheard", help="Of no use."))),
    sound(
        "bad-excused",
        flags=(Flag("--bad-excused", help="On."), Flag("--bad-former", help="Accepted.")),
        unread=classmethod(lambda cls, args: {"--bad-former": "it is the default"}),
    ),
)

def kept(function):
    return function
"""

SESSIONS = """
@hookimpl(wrapper=True)
def train_step(self, run):
    result = yield
    import torch
    torch.manual_sneed = lambda: None
    return result

@hookimpl(wrapper=True)
def prepare_process(self):
    import os
    os.environ["BAD_VARIABLE"] = "1"
    return (yield)

@hookimpl(wrapper=True)
def build_model(self):
    raise RuntimeError("no model today")
    yield

@hookimpl(wrapper=True)
def compute_loss(self):
    from dataclasses import replace
    loss = yield
    return replace(loss, total=loss.total * 2)

@hookimpl(wrapper=True)
def prepare_process_with_attribute(self):
    import torch.nn.functional
    self._dropout = torch.nn.functional.dropout
    torch.nn.functional.dropout = lambda *args, **kwargs: self._dropout(*args, **kwargs)
    return (yield)

@hookimpl(wrapper=True)
def train_step_in_two(self):
    result = yield
    yield
    return result

@hookimpl(wrapper=True)
def build_layer_spec(self, session):
    spec = yield
    from mindspeed_megatron.layer_spec import SpecEditor
    editor = SpecEditor(spec, owner=self.name, session=session)
    editor.replace(("final_layernorm", "fc1"), lambda site: site.spec)
    editor.replace("proj", lambda site: site.spec, wrap=True)
    return editor.spec

DECLARATIONS = (
    HookApi("1.3"),
    sound(
        "bad-quiet",
        verify=(
            Scenario("same", flags=("--bad-quiet",), tolerance=0.0),
            Scenario(
                "resume", ("--bad-quiet",), resume=Resume(("--bad-quiet", "--num-layers", "2"), world_size=2)
            ),
        ),
    ),
    sound("bad-roles", build_layer_spec=build_layer_spec, replaces_roles=("mlp.fc1",)),
    sound(
        "bad-role-name",
        build_layer_spec=build_layer_spec,
        slots=("norm",),
        replaces_roles=("fc_1", "fc1"),
    ),
    sound("bad-second-yield", train_step=train_step_in_two),
    sound("bad-leak", train_step=train_step),
    sound("bad-environment", prepare_process=prepare_process),
    sound("bad-attribute", prepare_process=prepare_process_with_attribute),
    sound("bad-model", build_model=build_model),
    sound("bad-proof", compute_loss=compute_loss),
)
"""

PAGE = (
    "--bad-nothing --bad-page --bad-lost-page --bad-help --bad-platform --bad-fallback --bad-requirement "
    "--bad-conflict --bad-name --bad-hidden --bad-level --bad-patch --bad-proofless --bad-idle-proof "
    "--bad-twice --bad-both-sides --bad-same-feature --bad-resume --bad-filed --bad-flags --bad-leak "
    "--bad-environment --bad-attribute --bad-model --bad-proof --bad-quiet --bad-enabled --bad-presets "
    "--bad-searching --bad-claim --bad-silent-claim --bad-proved-claim "
    "--bad-preset --bad-notes --bad-init --bad-before --bad-deaf --bad-unheard --bad-excused --bad-former"
)

PLATFORM = """
from mindspeed_core.platforms.platform import Platform
from mindspeed_core.platforms.cpu import CpuPlatform

class Nameless(Platform):
    name = "other"
    like = "cqu"

class Boastful(CpuPlatform):
    name = "boastful"
    like = "cpu"
    preference = -5

    @classmethod
    def probe(cls):
        return True

class Spilling(CpuPlatform):
    name = "spilling"
    like = "cpu"
    preference = -5

    def open(self, session):
        super().open(session)
        import torch
        torch.spilled = lambda: None

    def memory_allocated(self):
        from mindspeed_core.platforms.platform import MemoryFigure
        return MemoryFigure(0, "")

class Lost(CpuPlatform):
    name = "lost"
    like = "cpu"
    preference = -5

    def device_model(self, device):
        return ""

    def memory_snapshot(self, path):
        return path
"""

EXTENSIBLE = """
from mindspeed_core.feature import ExtensionPoint, StageSpecs
from mindspeed_core.hooks import hookspec

@hookspec
def bad_mute(session):
    pass

@hookspec(firstresult=False)
def bad_collects(session):
    '''Collects, and does not say so among the declarations.'''

@hookspec
def bad_secret(session):
    '''Is not announced.'''

DECLARATIONS = (
    StageSpecs("bad_extensible.declared", ("bad_mute", "bad_collects", "bad_absent")),
    StageSpecs("bad_extensible.nowhere", ("bad_lost",)),
    ExtensionPoint("bad.point", "bad_extensible.points", check="bad_extensible.declared:absent"),
)
"""

HEAVY = """
import numpy
from bad_heavy import deep
DECLARATIONS = ()
"""


LOAD = """
@hookimpl(wrapper=True)
def train_step(self, run):
    return None

DECLARATIONS = (
    sound("bad-load", sumary="x"),
    sound("bad-flag", flag="--bad-flag"),
    sound("bad-slot", slot="norm"),
    sound("bad-yield", train_step=train_step),
    sound("bad-same-flag", flags=(Flag("--bad-nothing", type=int, help="Another one."),)),
    sound("bad-behind", before=("bad-ahead",)),
    sound("bad-ahead", before=("bad-behind",)),
)
"""


def install(site: Path) -> None:
    """Write every distribution into a folder that is put on the path."""
    _package(
        site,
        "bad-features",
        {"declared.py": HEAD + FEATURES, "page.md": PAGE},
        {"mindspeed.features": {"bad": "bad_features.declared:DECLARATIONS"}},
        requires=("mindspeed-core>=0.1",),
    )
    _package(
        site,
        "bad-sessions",
        {"declared.py": HEAD + SESSIONS},
        {"mindspeed.features": {"sessions": "bad_sessions.declared:DECLARATIONS"}},
        requires=("mindspeed-core>=0.1",),
    )
    _package(
        site,
        "bad-providers",
        {
            "platforms.py": PLATFORM,
            "commands.py": "import click\n\ndef plain():\n    pass\n\n"
            "@click.command()\ndef mute():\n    pass\n\n"
            "@click.command(help='Help.')\n@click.option('--traceback')\ndef shadowed(**_):\n    pass\n",
        },
        {
            "mindspeed.platforms": {
                "nameless": "bad_providers.platforms:Nameless",
                "boastful": "bad_providers.platforms:Boastful",
                "spilling": "bad_providers.platforms:Spilling",
                "lost": "bad_providers.platforms:Lost",
            },
            "mindspeed.hosts": {"absent": "bad_providers.nowhere:HOST"},
            "mindspeed.commands": {
                "plain": "bad_providers.commands:plain",
                "mute": "bad_providers.commands:mute",
            },
            "mindspeed.train_commands": {
                "sample": "bad_providers.commands:plain",
                "--loud": "bad_providers.commands:mute",
                "shadowed": "bad_providers.commands:shadowed",
            },
        },
        requires=("mindspeed-core",),
    )
    _package(
        site,
        "bad-extensible",
        {"declared.py": EXTENSIBLE},
        {"mindspeed.features": {"extensible": "bad_extensible.declared:DECLARATIONS"}},
        requires=("mindspeed-core>=0.1",),
    )
    _package(
        site,
        "bad-heavy",
        {"declared.py": HEAVY, "deep.py": "import torch\n"},
        {"mindspeed.features": {"heavy": "bad_heavy.declared:DECLARATIONS"}},
    )
    _package(
        site,
        "bad-load",
        {"declared.py": HEAD + LOAD},
        {"mindspeed.features": {"load": "bad_load.declared:DECLARATIONS"}},
    )
    _package(
        site,
        "bad-resuming",
        {
            "declared.py": HEAD
            + "DECLARATIONS = (HookApi('1.1'), sound('bad-never-resumed'),\n"
            + "    sound('bad-server', modes=('inference',)))\n"
        },
        {"mindspeed.features": {"resuming": "bad_resuming.declared:DECLARATIONS"}},
    )
    _package(
        site,
        "bad-version",
        {
            "declared.py": HEAD
            + "@hookimpl(wrapper=True)\ndef should_stop(self):\n    return (yield)\n"
            + "DECLARATIONS = (HookApi('1.0'), sound('bad-version', should_stop=should_stop))\n"
        },
        {"mindspeed.features": {"version": "bad_version.declared:DECLARATIONS"}},
    )


def _package(
    site: Path,
    dist: str,
    files: dict[str, str],
    groups: dict[str, dict[str, str]],
    requires: tuple[str, ...] = (),
) -> None:
    package = dist.replace("-", "_")
    (site / package).mkdir()
    for name, text in {"__init__.py": "", **files}.items():
        (site / package / name).write_text(text)
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {dist}", "Version: 1.0"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires), ""]))
    points = []
    for group, entries in groups.items():
        points += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(points) + "\n")
