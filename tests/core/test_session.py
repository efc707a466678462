"""A session registers what is active, says who failed where, and leaves nothing behind."""

import json
import os
from types import FunctionType, SimpleNamespace

import pytest

from mindspeed_core import Feature, Flag, Patch, Requirement, hookimpl
from mindspeed_core.activation import activate, prepare
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.errors import SessionError, UserError
from mindspeed_core.hooks import DONE
from mindspeed_core.registry import Registry
from mindspeed_core.session import current


class TinyHost:
    """Defaults of the few stages that these tests call."""

    @hookimpl(trylast=True)
    def should_stop(self):
        return "host"

    @hookimpl(trylast=True)
    def start_run(self):
        return DONE


HOST = HostDeclaration(
    name="tiny", summary="For tests.", flags=f"{__name__}:no_flags", stages=(f"{__name__}:TINY_HOST",)
)
TINY_HOST = TinyHost()


def no_flags():
    return ()


class Named(Feature):
    family = "tests"
    summary = "For tests."


class Outer(Named):
    name = "outer"
    flags = (Flag("--outer", help="Wrap."),)

    @hookimpl(wrapper=True)
    def should_stop(self):
        return f"outer({(yield)})"


class Inner(Named):
    name = "inner"
    flags = (Flag("--inner", help="Wrap."),)
    after = ("outer",)

    @hookimpl(wrapper=True)
    def should_stop(self):
        return f"inner({(yield)})"


class Around(Named):
    """Needs a feature, and wraps around it all the same."""

    name = "around"
    flags = (Flag("--around", help="Wrap."),)
    requires = (Requirement(feature="outer", implies=True),)
    before = ("outer",)

    @hookimpl(wrapper=True)
    def should_stop(self):
        return f"around({(yield)})"


class Replaces(Named):
    name = "replaces"
    flags = (Flag("--replaces", help="Replace."),)

    @hookimpl
    def should_stop(self, session, run):
        return "replaced " + session.default("should_stop", run=run)


class Fails(Named):
    name = "fails"
    flags = (Flag("--fails", help="Fail."),)

    @hookimpl(wrapper=True)
    def should_stop(self):
        result = yield
        raise KeyError(result)


class Forgets(Named):
    name = "forgets"
    flags = (Flag("--forgets", help="Forget to return."),)

    @hookimpl(wrapper=True)
    def should_stop(self):
        yield


class Environment(Named):
    name = "environment"
    flags = (Flag("--environment", help="Set a variable."),)

    @hookimpl(wrapper=True)
    def prepare_process(self, session):
        session.setenv("MINDSPEED_TEST_VARIABLE", "set")
        return (yield)


class Patches(Named):
    name = "patches"
    flags = (Flag("--patches", help="Patch the standard library."),)
    patches = (Patch("json:dumps", new=f"{__name__}:shouting", kind="wrap", reason="For tests."),)


class Lost(Named):
    name = "lost"
    flags = (Flag("--lost", help="Place nothing."),)
    places_modules = True

    @hookimpl(wrapper=True)
    def start_run(self, session):
        session.place(self.name, 0)
        return (yield)


class Twice(Named):
    name = "twice"
    flags = (Flag("--twice", help="Yield twice."),)

    @hookimpl(wrapper=True)
    def should_stop(self):
        result = yield
        yield
        return result


class Never(Named):
    name = "never"
    flags = (Flag("--never", help="Return before the yield."),)

    @hookimpl(wrapper=True)
    def should_stop(self, run):
        if run is None:
            return "too early"
        return (yield)


class Unmade(Named):
    name = "unmade"
    flags = (Flag("--unmade", help="Fail while it is made."),)

    def __init__(self):
        raise ValueError("no such number")


def shouting(dumps):
    return lambda value: dumps(value).upper()


ALL = (Outer, Inner, Around, Replaces, Fails, Forgets, Environment, Patches, Lost, Twice, Never, Unmade)


@pytest.fixture
def registry():
    return Registry.of((HOST, *ALL))


@pytest.fixture
def opened(registry):
    sessions = []

    def open_with(*flags):
        session = activate(list(flags), host="tiny", platform="cpu", registry=registry)
        sessions.append(session)
        return session

    yield open_with
    for session in sessions:
        session.close()


def test_the_first_in_the_plan_is_the_outermost_wrapper(opened):
    assert opened("--inner", "--outer").call("should_stop", run=None) == "outer(inner(host))"


def test_a_feature_wraps_around_what_it_requires_where_it_says_so(opened):
    session = opened("--around", "--inner")
    assert session.plan.names == ("around", "outer", "inner")
    assert session.call("should_stop", run=None) == "around(outer(inner(host)))"


def test_an_inactive_feature_is_not_registered(opened):
    assert opened("--inner").implementations("should_stop") == ["inner", f"host tiny, {__name__}:TINY_HOST"]


def test_a_feature_that_replaces_a_stage_can_ask_for_the_default(opened):
    assert opened("--replaces", "--inner").call("should_stop", run=None) == "inner(replaced host)"


def test_an_exception_keeps_its_type_and_names_feature_and_stage(opened):
    with pytest.raises(KeyError) as failed:
        opened("--fails").call("should_stop", run=None)
    assert "feature 'fails'" in failed.value.__notes__[0]
    assert "'should_stop'" in failed.value.__notes__[0]


def test_a_wrapper_that_returns_nothing_is_named(opened):
    with pytest.raises(SessionError, match=r"should_stop.*forgets"):
        opened("--forgets").call("should_stop", run=None)


@pytest.mark.parametrize(
    ("flag", "words"), [("twice", "yields a second time"), ("never", "ends without a yield")]
)
def test_a_wrapper_that_does_not_yield_once_is_named_with_its_package(opened, flag, words):
    session = opened("--outer", f"--{flag}")
    with pytest.raises(
        SessionError, match=f"feature '{flag}' of test 0: its wrapper of stage 'should_stop' {words}"
    ) as caught:
        session.call("should_stop", run=None)
    assert not getattr(caught.value, "__notes__", [])


def test_a_feature_that_cannot_be_made_is_named_with_its_package(registry):
    session = prepare(["--unmade"], host="tiny", platform="cpu", registry=registry)
    with pytest.raises(
        SessionError, match=r"feature 'unmade': its __init__\(\) fails in test 0: ValueError: no such number"
    ):
        session.open()


def test_a_stage_that_does_not_exist_is_an_error(opened):
    with pytest.raises(SessionError, match="no stage 'stop'"):
        opened().call("stop")


def test_environment_variables_are_restored(opened):
    session = opened("--environment")
    assert os.environ["MINDSPEED_TEST_VARIABLE"] == "set"
    session.close()
    assert "MINDSPEED_TEST_VARIABLE" not in os.environ


def test_reopening_with_other_features_leaves_the_originals(opened):
    original = json.dumps
    first = opened("--patches")
    assert json.dumps("a") == '"A"'
    first.close()
    assert json.dumps is original
    second = opened("--inner")
    assert json.dumps is original
    assert second.call("should_stop", run=None) == "inner(host)"


def test_a_second_open_session_is_refused_and_the_first_is_located(opened, registry):
    first = opened()
    with pytest.raises(SessionError, match="test_session"):
        activate([], host="tiny", platform="cpu", registry=registry)
    assert current() is first
    assert first.is_open


def test_a_session_that_cannot_open_leaves_nothing_open(registry):
    host = HostDeclaration(name="broken", summary="x", flags=HOST.flags, stages=("json:no_such_object",))
    session = prepare([], host="tiny", platform="cpu", registry=registry)
    session.host = host
    with pytest.raises(AttributeError):
        session.open()
    with pytest.raises(SessionError, match="no mindspeed session is open"):
        current()


def test_a_closed_session_answers_with_a_clear_error(opened):
    session = opened()
    session.close()
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.call("should_stop", run=None)


def test_a_feature_that_places_nothing_is_an_error(opened):
    session = opened("--lost")
    session.call("start_run", run=None)
    with pytest.raises(SessionError, match="lost: active, but matched no module"):
        session.check_placements()


def test_a_feature_that_matches_nothing_says_what_it_sought_and_what_there_is(opened):
    session = opened("--lost")
    session.place("lost", 0, sought=("fc3",), present=("fc1", "fc2"))
    with pytest.raises(SessionError, match=r"lost looked for fc3; there are fc1 fc2\. Drop --lost"):
        session.check_placements()


def test_a_placed_module_satisfies_the_check(opened):
    session = opened("--lost")
    session.place("lost", 1)
    session.check_placements()


def test_claims_are_those_of_active_features(opened):
    session = opened("--inner")
    assert session.claims("--inner") == ["inner"]
    assert session.claims("--outer") == []


def test_the_hosts_own_user_errors_carry_no_note(opened):
    class Refuses:
        @hookimpl
        def should_stop(self):
            raise UserError("plain")

    session = opened()
    session._stages.manager.register(Refuses(), name="host tiny/refuses")
    with pytest.raises(UserError) as refused:
        session.call("should_stop", run=None)
    assert not getattr(refused.value, "__notes__", ())


def test_a_wrapper_through_which_an_error_passes_is_not_blamed(opened):
    def should_stop():
        raise ValueError("of the model")

    elsewhere = FunctionType(should_stop.__code__, {"__name__": "code_of_a_model"})
    session = opened("--inner", "--outer")
    session._stages.manager.register(SimpleNamespace(should_stop=hookimpl(elsewhere)), name="model")
    with pytest.raises(ValueError, match="of the model") as failed:
        session.call("should_stop", run=None)
    assert failed.value.__notes__ == ["mindspeed: raised in stage 'should_stop' by host 'tiny'"]


class Counted:
    def __init__(self):
        self.steps = 0


def test_the_state_of_an_owner_is_made_once_per_session_and_outlives_closing(registry):
    session = prepare([], host="tiny", platform="cpu", registry=registry)
    session.state(Counted).steps += 1
    with session:
        session.state(Counted).steps += 1
    assert session.state(Counted).steps == 2
    other = prepare([], host="tiny", platform="cpu", registry=registry)
    assert other.state(Counted).steps == 0
