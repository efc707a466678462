"""Installed features, hosts and platforms; one broken plugin never takes others down."""

import gc
import subprocess
import sys
import textwrap
from functools import wraps

import pytest

from mindspeed_core.discovery import entry_points
from mindspeed_core.discovery.entry_points import Installed
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.discovery.order import cycles
from mindspeed_core.discovery.stages import wanted_arguments
from mindspeed_core.feature import ExtensionPoint, Feature, Flag, Requirement, Slot, StageSpecs, hookimpl
from mindspeed_core.registry import Registry, RegistryError


def feature(name, **attributes):
    """A sound feature with one switch, changed by ``attributes``."""
    values = {
        "name": name,
        "family": "demo",
        "summary": "a demonstration",
        "flags": (Flag(f"--{name}"),),
        **attributes,
    }
    return type(name.replace("-", "_"), (Feature,), values)


def only_broken(registry):
    (record,) = registry.broken
    return record


def test_a_sound_feature_is_listed_with_its_distribution():
    record = Registry.of((feature("ring"),), dist="demo-dist", version="1.2").features["ring"]
    assert (record.dist, record.version, record.cls.name) == ("demo-dist", "1.2", "ring")


def test_features_are_sorted_by_family_and_name():
    declared = (feature("b", family="y"), feature("c", family="x"), feature("a", family="y"))
    assert list(Registry.of(declared).features) == ["c", "a", "b"]


def test_a_misspelled_fact_breaks_only_its_feature():
    registry = Registry.of((feature("good"), feature("bad", deterministc=True)))
    assert list(registry.features) == ["good"]
    assert "deterministc" in only_broken(registry).error


def test_something_that_is_no_declaration_is_reported_by_its_type():
    registry = Registry.of((feature("good"), 42))
    assert list(registry.features) == ["good"]
    assert "42" in only_broken(registry).error


@pytest.mark.parametrize("declarations", ["a string", 7, Feature])
def test_an_entry_point_that_is_no_iterable_of_declarations_is_broken(declarations):
    assert "iterable of declarations" in only_broken(Registry.of(declarations)).error


def test_a_generator_that_fails_is_broken_and_keeps_nothing_back_from_others():
    def declarations():
        yield feature("one")
        raise ImportError("no such library")

    registry = Registry.of_distributions({"bad": ("1", declarations()), "good": ("1", (feature("two"),))})
    assert list(registry.features) == ["two"]
    assert only_broken(registry).error == "ImportError: no such library"


def test_a_name_of_two_packages_breaks_the_later_one_and_names_both():
    registry = Registry.of_distributions(
        {"two": ("2.1", (feature("same", flags=()),)), "one": ("1.0", (feature("same", flags=()),))}
    )
    assert registry.features["same"].dist == "one"
    error = only_broken(registry).error
    assert "one 1.0" in error
    assert "two 2.1" in error


def test_a_name_that_one_package_declares_twice_is_used_by_nobody():
    registry = Registry.of((feature("same", flags=()), feature("same", flags=())))
    assert not registry.features
    assert len(registry.broken) == 2


def test_a_flag_of_two_packages_breaks_the_later_one_and_names_both():
    registry = Registry.of_distributions(
        {
            "two": ("1", (feature("b", flags=(Flag("--depth", type=str),)), feature("c"))),
            "one": ("1", (feature("a", flags=(Flag("--depth", type=int),)),)),
        }
    )
    assert set(registry.features) == {"a", "c"}
    broken = only_broken(registry)
    assert (broken.dist, broken.feature) == ("two", "b")
    assert "a (one 1)" in broken.error
    assert "b (two 1)" in broken.error


def test_a_published_flag_stays_with_the_package_it_belongs_to():
    registry = Registry.of_distributions(
        {
            "acme": ("1", (feature("a", flags=(Flag("--use-flash-attn", type=int),)),)),
            "mindspeed_kernels": ("1", (feature("flash-attn", flags=(Flag("--use-flash-attn"),)),)),
        }
    )
    assert list(registry.features) == ["flash-attn"]


def test_a_flag_with_two_meanings_in_one_package_is_used_by_nobody_of_it():
    registry = Registry.of_distributions(
        {
            "one": (
                "1",
                [feature(n, flags=(Flag("--depth", type=k),)) for n, k in (("a", int), ("b", str))],
            ),
            "two": ("1", (feature("c", flags=(Flag("--depth", type=float),)),)),
        }
    )
    assert list(registry.features) == ["c"]


def test_a_broken_feature_takes_no_flag_from_a_sound_one():
    registry = Registry.of_distributions(
        {
            "one": ("1", (feature("a", slots=("nrm",), flags=(Flag("--depth", type=int),)),)),
            "two": ("1", (feature("b", flags=(Flag("--depth", type=str),)),)),
        }
    )
    assert list(registry.features) == ["b"]


def test_one_flag_with_one_meaning_may_be_declared_twice():
    both = [feature(n, flags=(Flag("--depth", type=int),)) for n in ("a", "b")]
    assert set(Registry.of(both).features) == {"a", "b"}


def test_a_flag_of_the_core_is_reserved():
    assert (
        "reserved" in only_broken(Registry.of((feature("x", flags=(Flag("--platform", type=str),)),))).error
    )


def test_help_is_reserved():
    assert "--help is reserved" in only_broken(Registry.of((feature("x", flags=(Flag("--help"),)),))).error


def test_an_unknown_slot_is_refused_with_a_suggestion():
    error = only_broken(Registry.of((feature("x", slots=("core-atention",)),))).error
    assert "did you mean 'core-attention'" in error


def test_a_slot_that_a_plugin_declares_can_be_filled():
    registry = Registry.of((Slot("my-role"), feature("x", slots=("my-role",))))
    assert "x" in registry.features
    assert "my-role" in registry.slots


def test_a_stage_that_does_not_exist_is_refused_with_a_suggestion():
    @hookimpl(wrapper=True)
    def build_modle(self, session):
        return (yield)

    assert (
        "did you mean 'build_model'"
        in only_broken(Registry.of((feature("x", build_modle=build_modle),))).error
    )


def test_a_wrapper_without_a_yield_is_broken():
    @hookimpl(wrapper=True)
    def build_model(self, session):
        return None

    error = only_broken(Registry.of((feature("x", build_model=build_model),))).error
    assert error.startswith("stage 'build_model': its wrapper has no yield")


def test_an_implementation_that_yields_without_being_a_wrapper_is_broken():
    @hookimpl
    def build_model(self, session):
        return (yield)

    error = only_broken(Registry.of((feature("x", build_model=build_model),))).error
    assert "mark it @hookimpl(wrapper=True)" in error


def test_an_argument_the_stage_does_not_offer_is_refused_and_the_offer_listed():
    @hookimpl(wrapper=True)
    def build_model(self, session, modl_config):
        return (yield)

    error = only_broken(Registry.of((feature("x", build_model=build_model),))).error
    assert "'modl_config'" in error
    assert "args, config, pg, session" in error


def test_a_stage_that_a_plugin_publishes_can_be_implemented_without_importing_it():
    @hookimpl(wrapper=True)
    def plan_ring(self, anything):
        return (yield)

    specs = StageSpecs("no_such_module.hooks", ("plan_ring",))
    registry = Registry.of((specs, feature("x", plan_ring=plan_ring)))
    assert "x" in registry.features
    assert registry.stage_specs() == (specs,)


def test_a_cycle_over_requires_and_after_breaks_the_features_on_it_and_prints_it():
    a = feature("a", requires=(Requirement(feature="b"),))
    b = feature("b", after=("c",))
    c = feature("c", requires=(Requirement(feature="a"),))
    registry = Registry.of((a, b, c, feature("d", requires=(Requirement(feature="a"),))))
    assert list(registry.features) == ["d"]
    assert {b.feature for b in registry.broken} == {"a", "b", "c"}
    assert all("a -> b -> c -> a" in b.error or "a -> c -> b -> a" in b.error for b in registry.broken)


def test_statements_of_order_that_contradict_each_other_name_both_and_break_the_later_package():
    registry = Registry.of_distributions(
        {
            "one": ("1", (feature("a", before=("b",)), feature("c", requires=(Requirement(feature="a"),)))),
            "two": ("1", (feature("b", before=("a",)),)),
        }
    )
    assert set(registry.features) == {"a", "c"}
    error = only_broken(registry).error
    assert "a comes before b (says a)" in error
    assert "b comes before a (says b)" in error


def test_a_statement_against_a_requirement_is_no_contradiction():
    a = feature("a", requires=(Requirement(feature="b"),), before=("b",))
    assert set(Registry.of((a, feature("b"))).features) == {"a", "b"}


@pytest.mark.parametrize(("wrong", "meant"), [("flag", "flags"), ("slot", "slots"), ("requre", "requires")])
def test_a_misspelled_fact_gets_a_suggestion(wrong, meant):
    assert f"did you mean '{meant}'?" in only_broken(Registry.of((feature("x", **{wrong: ()}),))).error


def test_cycles_finds_a_feature_that_comes_before_itself():
    assert cycles({"a": ["a"], "b": []}) == [("a",)]


def test_a_broken_feature_owns_its_flag_so_that_asking_for_it_can_be_answered():
    registry = Registry.of((feature("x", stability="shaky"),), dist="demo")
    assert registry.broken_flags["--x"].dist == "demo"


def test_a_host_among_the_declarations_can_be_asked_for():
    host = HostDeclaration("mine", "a host", flags="", stages=())
    assert Registry.of((host,)).host("mine") is host


def test_an_unknown_host_is_refused_with_what_is_installed():
    with pytest.raises(RegistryError, match="standalone"):
        Registry.of(()).host("standalon")


def test_an_unknown_platform_is_refused_with_what_is_installed():
    with pytest.raises(RegistryError, match="cpu, cuda, fake, fake-cuda, fake-npu, lagging, npu"):
        Registry.of(()).platform("tpu")


PLUGINS = {
    "good": "from mindspeed_core.feature import Feature, Flag\n"
    "class Good(Feature):\n"
    "    name, family, summary, flags = 'good', 'demo', 'works', (Flag('--good'),)\n"
    "DECLARATIONS = (Good,)\n",
    "importing": "import a_module_that_is_not_there\n",
    "exiting": "import sys\nsys.exit(3)\n",
    "failing": "raise RuntimeError('100% \\n broken')\n",
    "syntax": "def (\n",
    "nameless": "OTHER = ()\n",
    "recursive": "def f():\n    f()\nf()\n",
    "number": "DECLARATIONS = 3\n",
}


def install(folder, name, source, version="1.0", group="mindspeed.features", attribute="DECLARATIONS"):
    module = f"plugin_{name}"
    (folder / f"{module}.py").write_text(source)
    info = folder / f"demo_{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: demo-{name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attribute}\n")


def python(code, *paths, arguments=()):
    lines = [f"import sys; sys.path[:0] = {[str(p) for p in paths]!r}", textwrap.dedent(code)]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def broken_installation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for name, source in PLUGINS.items():
        install(folder, name, source)
    code = """
        from mindspeed_core.registry import Registry
        registry = Registry.discover()
        print("features", *[n for n, r in registry.features.items() if r.dist.startswith("demo-")])
        for record in registry.broken:
            if record.dist.startswith("demo-"):
                print("broken", record.dist, record.version, record.error)
    """
    return python(code, folder).splitlines()


def test_every_way_of_failing_to_load_leaves_the_good_plugin_alone(broken_installation):
    assert broken_installation[0] == "features good"


def test_each_broken_plugin_is_one_line_with_distribution_and_version(broken_installation):
    lines = [line for line in broken_installation if line.startswith("broken ")]
    assert sorted(line.split()[1] for line in lines) == sorted(f"demo-{n}" for n in PLUGINS if n != "good")
    assert all(line.split()[2] == "1.0" for line in lines)


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("importing", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("exiting", "it tried to exit the program (3)"),
        ("failing", "RuntimeError: 100% broken"),
        ("nameless", "DECLARATIONS"),
        ("recursive", "RecursionError"),
    ],
)
def test_the_line_of_a_broken_plugin_says_what_happened(broken_installation, plugin, words):
    (line,) = [line for line in broken_installation if line.startswith(f"broken demo-{plugin} ")]
    assert words in line


def test_two_copies_on_the_path_count_once_and_the_first_wins(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, version in ((first, "2.0"), (second, "1.0")):
        folder.mkdir()
        install(folder, "good", PLUGINS["good"], version)
    code = """
        from mindspeed_core.registry import Registry
        registry = Registry.discover()
        print(registry.features["good"].version, [b for b in registry.broken if "demo" in b.dist])
    """
    assert python(code, first, second).strip() == "2.0 []"


def test_unreadable_metadata_of_one_distribution_is_its_own_problem(tmp_path):
    install(tmp_path, "good", PLUGINS["good"])
    install(tmp_path, "damaged", PLUGINS["good"])
    entries = tmp_path / "demo_damaged-1.0.dist-info" / "entry_points.txt"
    entries.write_bytes(b"[mindspeed.features]\nno value\n\xff\xfe")
    code = """
        from mindspeed_core.registry import Registry
        registry = Registry.discover()
        print("good" in registry.features, *[b.dist for b in registry.broken])
    """
    assert python(code, tmp_path).strip() == "True demo-damaged"


def test_two_copies_count_once_beside_unreadable_metadata_too(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, version in ((first, "2.0"), (second, "1.0")):
        folder.mkdir()
        install(folder, "good", PLUGINS["good"], version)
    install(first, "damaged", PLUGINS["good"])
    (first / "demo_damaged-1.0.dist-info" / "entry_points.txt").write_text("[mindspeed.features]\nno value\n")
    code = """
        from mindspeed_core.registry import Registry
        registry = Registry.discover()
        print(registry.features["good"].version, [b.dist for b in registry.broken])
    """
    assert python(code, first, second).strip() == "2.0 ['demo-damaged']"


def test_extensions_load_on_demand_and_a_broken_one_is_left_out(tmp_path):
    install(tmp_path, "planner", "PLANNER = 'zigzag'\n", group="demo.planners", attribute="PLANNER")
    install(tmp_path, "rotten", "raise ValueError('rotten')\n", group="demo.planners", attribute="PLANNER")
    code = """
        from mindspeed_core.feature import ExtensionPoint
        from mindspeed_core.registry import Registry
        registry = Registry.of((ExtensionPoint("demo.planners", "demo.planners"),))
        assert "plugin_planner" not in sys.modules
        print(dict(registry.extensions("demo.planners")), [b.error for b in registry.broken])
    """
    out = python(code, tmp_path)
    assert "{'planner': 'zigzag'}" in out
    assert "ValueError: rotten (plugin_rotten.py:1)" in out


def test_an_extension_that_the_points_check_refuses_is_left_out(tmp_path):
    install(tmp_path, "planner", "PLANNER = 'zigzag'\n", group="demo.planners", attribute="PLANNER")
    (tmp_path / "demo_checks.py").write_text("def check(item):\n    raise ValueError(f'{item} is text')\n")
    code = """
        from mindspeed_core.feature import ExtensionPoint
        from mindspeed_core.registry import Registry
        registry = Registry.of((ExtensionPoint("p", "demo.planners", check="demo_checks:check"),))
        print(dict(registry.extensions("p")), [b.error for b in registry.broken])
    """
    out = python(code, tmp_path)
    assert out.startswith("{}")
    assert "zigzag is text" in out


def test_extensions_are_choices_of_a_flag_and_load_when_they_are_chosen(tmp_path):
    install(tmp_path, "zigzag", "PLANNER = 'zigzag'\n", group="demo.planners", attribute="PLANNER")
    install(tmp_path, "rotten", "raise ValueError('rotten')\n", group="demo.planners", attribute="PLANNER")
    code = """
        from mindspeed_core.feature import ExtensionPoint, Feature, Flag
        from mindspeed_core.flags.flag_set import flag_set
        from mindspeed_core.registry import Registry

        class Demo(Feature):
            name, family, summary = "demo", "demo", "demo"
            flags = (Flag("--demo", type=str, choices=("plain",), choices_from="demo.planners"),)

        flags = flag_set(Registry.of((ExtensionPoint("demo.planners", "demo.planners"), Demo)))
        print(flags["--demo"].flag.choices)
        assert "plugin_zigzag" not in sys.modules
        for value in ("plain", "zigzag", "rotten", "other"):
            parsed = flags.parse(["--demo", value])
            print(value, parsed.args.demo, [problem.reason for problem in parsed.problems])
    """
    out = python(code, tmp_path)
    assert "('plain', 'rotten', 'zigzag')" in out
    assert "plain plain []" in out
    assert "zigzag zigzag []" in out
    assert "rotten None ['demo-rotten 1.0 (entry point rotten) is broken: ValueError: rotten" in out
    assert "not one of plain, rotten, zigzag" in out


def test_an_unknown_extension_point_is_refused():
    registry = Registry.of((ExtensionPoint("a.b", "g"),))
    with pytest.raises(RegistryError, match=r"a\.b"):
        registry.extensions("a.c")


def test_discovering_parsing_and_resolving_load_nothing_heavy():
    code = """
        from mindspeed_core.flags.flag_set import flag_set
        from mindspeed_core.registry import Registry
        from mindspeed_core.resolver.resolve import resolve
        registry = Registry.discover()
        parsed = flag_set(registry).parse(["--no-such-flag"])
        resolve(registry, parsed.args, provenance=parsed.provenance, platform="cpu")
        print(sorted({"torch", "megatron", "numpy", "pluggy"} & set(sys.modules)))
    """
    assert python(code).strip() == "[]"


class _Asking:
    def plain(self, args, plan):
        """Ask for two arguments."""

    def optional(self, args, plan=None):
        """Ask for one."""

    def named(self, args, *, plan, config=None):
        """Ask for two, one by name."""

    def everything(self, args, **others):
        """Ask for one, and for whatever else there is."""

    wrapped = wraps(plain)(lambda *args, **options: None)


@pytest.mark.parametrize(
    ("name", "asked"),
    {
        "plain": ["args", "plan"],
        "optional": ["args"],
        "named": ["args", "plan"],
        "everything": ["args", "others"],
        "wrapped": ["args", "plan"],
    }.items(),
)
def test_the_arguments_that_an_implementation_asks_for(name, asked):
    assert wanted_arguments(vars(_Asking)[name]) == asked


def test_a_declaration_that_looks_up_entry_points_while_it_is_loaded_reads_none_anew(monkeypatch):
    installed = Installed()
    monkeypatch.setattr(entry_points, "installed_distributions", lambda: pytest.fail("read anew"))

    with installed.shared():
        assert Installed().sources(entry_points.FEATURES) == installed.sources(entry_points.FEATURES)
        assert not gc.isenabled()
    assert gc.isenabled()
