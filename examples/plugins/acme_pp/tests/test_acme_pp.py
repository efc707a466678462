"""The schedule of another package is listed, checked, simulated and trained with."""

from pathlib import Path

import pytest

import acme_pp.eager
from acme_pp.features import DECLARATIONS
from mindspeed_core.activation import plan_for
from mindspeed_core.testing.contract import contract_checks
from mindspeed_core.testing.scenarios import scenario_parameters
from mindspeed_core.testing.verify import verify
from mindspeed_pp.choice import compared
from mindspeed_pp.lint import lint
from mindspeed_pp.program import main
from mindspeed_pp.registry import rules
from mindspeed_pp.rule import Context
from mindspeed_pp.simulator import Costs

EAGER, PLAIN = (lambda name=name: rules()[name] for name in ("eager-1f1b", "1f1b"))


def test_it_is_a_value_of_the_flag():
    plan, _ = plan_for(
        ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "eager-1f1b"], platform="cpu"
    )
    assert {"pp-engine", "acme-eager-1f1b"} <= set(plan.names)


def test_it_fits_on_a_screen():
    assert len(Path(acme_pp.eager.__file__).read_text().splitlines()) < 30


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_it_can_run(ranks):
    for microbatches in (1, ranks, 3 * ranks):
        lint(EAGER().schedule(Context(ranks, 1, microbatches)))


def test_messages_lengthen_it_less_than_1f1b():
    found = compared((EAGER(), PLAIN()), 4, 1, 16, Costs(message=0.3))
    (_, eager), (_, plain) = found
    assert eager.makespan < plain.makespan
    assert max(eager.peaks) == 7


def test_the_program_draws_it(tmp_path, capsys):
    assert main(["show", "eager-1f1b", "--picture", str(tmp_path / "eager.svg")]) == 0
    assert "bubble" in capsys.readouterr().out
    assert "rank 3" in (tmp_path / "eager.svg").read_text()


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, platform="cpu", always=())
)
def test_it_trains_what_megatron_cores_schedule_trains(feature, scenario):
    verdict = verify(feature, scenario, platform="cpu")
    assert verdict.passed, str(verdict)


@pytest.mark.thorough
@pytest.mark.parametrize("check", contract_checks("acme-pp", platform="cpu"), ids=str)
def test_the_contract_is_kept(check):
    check()
