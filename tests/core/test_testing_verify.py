import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from mindspeed_core.feature import DeclarationError, Feature, Flag, Gain, Resume, Scenario, hookimpl
from mindspeed_testing.proof_files import flags_with_files
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.training import train_side
from mindspeed_testing.verify import verify
from mindspeed_testing.worlds import WorldError

HERE = "test_testing_verify"


def scenario(name, **changes):
    two_layers = ("--num-layers", "2")
    return Scenario("small", flags=(f"--{name}", *two_layers), baseline=two_layers, **changes)


class Harmless(Feature):
    name = "harmless"
    family = "samples"
    summary = "Changes nothing and says how often it was asked"
    flags = (Flag("--harmless", help="Switch it on."),)
    verify = (scenario("harmless", tolerance=0.0, steps=2),)

    @hookimpl(wrapper=True)
    def train_step(self, run):
        run.metrics.add("asked", 1.0, "sum")
        return (yield)


class ScaledGradient(Feature):
    name = "scaled-gradient"
    family = "samples"
    summary = "Gradients are 0.1 % too large"
    flags = (Flag("--scaled-gradient", help="Switch it on."),)
    verify = (scenario("scaled-gradient"),)

    @hookimpl(wrapper=True)
    def finalize_gradients(self, model):
        result = yield
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.main_grad.mul_(1.001)
        return result


class DroppedBias(Feature):
    name = "dropped-bias"
    family = "samples"
    summary = "The MLP forgets its last bias"
    flags = (Flag("--dropped-bias", help="Switch it on."),)
    verify = (scenario("dropped-bias"),)

    @hookimpl(wrapper=True)
    def build_model(self, session):
        model = yield
        layer = model[0].decoder.layers[1].mlp.linear_fc2
        forward = layer.forward
        session.instances.set(self.name, layer, "forward", lambda x: (forward(x)[0], torch.zeros(64)))
        return model


class WrongUpdate(Feature):
    name = "wrong-update"
    family = "samples"
    summary = "One weight is moved after the update"
    flags = (Flag("--wrong-update", help="Switch it on."),)
    verify = (scenario("wrong-update", steps=1),)

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        result = yield
        with torch.no_grad():
            next(iter(run.model[0].parameters()))[0, 0] += 1e-3
        return result


class DriftingCopy(Feature):
    name = "drifting-copy"
    family = "samples"
    summary = "The second rank's norm goes its own way"
    flags = (Flag("--drifting-copy", help="Switch it on."),)
    verify = (scenario("drifting-copy", steps=1, world_size=2, baseline_world_size=1),)

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        result = yield
        if run.dist.rank == 1:
            with torch.no_grad():
                run.model[0].module.decoder.final_layernorm.weight.mul_(1.01)
        return result


class Costly(Feature):
    name = "costly"
    family = "samples"
    summary = "Promises what it does not keep"
    flags = (Flag("--costly", help="Switch it on."),)
    verify = (
        scenario(
            "costly", gains=(Gain("peak_bytes", 0.5), Gain("parameter_bytes", 1.0), Gain("no-such", 1.0))
        ),
    )

    @hookimpl(wrapper=True)
    def log_step(self):
        return (yield)


def proof(feature, *declared):
    chosen = [f"{HERE}:{cls.__name__}" for cls in (declared or (feature,))]
    return verify(feature, feature.verify[0], declarations=chosen)


def test_a_feature_that_changes_nothing_is_bit_equal():
    verdict = proof(Harmless)
    assert verdict.passed, str(verdict)
    assert verdict.largest_error == 0.0
    # 2 losses; 28 tensors, as gradients of two steps and as parameters.
    assert verdict.compared == 2 + 3 * 28


def test_a_gradient_scaled_by_a_thousandth_is_caught():
    verdict = proof(ScaledGradient)
    assert not verdict.passed
    assert any(line.startswith("gradients of step 1: ") for line in verdict.differences)
    assert verdict.largest_error == pytest.approx(1e-3, rel=0.2)


def test_a_dropped_bias_is_caught_and_named():
    verdict = proof(DroppedBias)
    assert not verdict.passed
    assert any("decoder.layers.1.mlp.linear_fc2.bias" in line for line in verdict.differences)


def test_a_wrong_update_is_caught_in_the_parameters_alone():
    verdict = proof(WrongUpdate)
    assert [line.split(":")[:2] for line in verdict.differences] == [
        ["parameters", " embedding.word_embeddings.weight"]
    ]


def test_a_copy_that_drifts_on_another_rank_is_caught():
    verdict = proof(DriftingCopy)
    assert not verdict.passed
    assert all(
        line.startswith("parameters, copies on several ranks: decoder.final_layernorm.weight")
        for line in verdict.differences
    )


def test_a_promise_that_is_not_kept_fails_with_the_ratio():
    verdict = proof(Costly)
    assert not verdict.passed
    assert not verdict.differences
    kept = {gain.measure: gain.met for gain in verdict.gains}
    assert kept == {"peak_bytes": False, "parameter_bytes": True, "no-such": False}
    assert verdict.gains[0].ratio == pytest.approx(1.0)
    assert "x peak_bytes" in str(verdict)


def test_a_feature_that_its_flags_do_not_activate_proves_nothing():
    verdict = verify(
        Harmless, Scenario("small", flags=("--num-layers", "2")), declarations=[f"{HERE}:Harmless"]
    )
    assert not verdict.passed
    assert "not active" in verdict.error


def test_a_feature_that_is_active_in_its_baseline_proves_nothing():
    both = Scenario("both", flags=("--harmless",), baseline=("--harmless",), steps=1)
    verdict = verify(Harmless, both, declarations=[f"{HERE}:Harmless"])
    assert not verdict.passed
    assert "baseline" in verdict.error


def test_what_was_compared_and_in_which_layouts_stands_in_the_verdict():
    (sides,) = proof(Harmless).sides
    assert (sides.side, sides.reference) == ("1 rank", "1 rank")
    assert sides.quantities == {"losses": 2, "gradients": 2 * 28, "parameters": 28}


def test_quantities_that_are_not_named_are_not_compared():
    chosen = replace(Harmless.verify[0], compare=("losses", "learning rates"))
    (sides,) = verify(Harmless, chosen, declarations=[f"{HERE}:Harmless"]).sides
    assert sides.quantities == {"losses": 2, "learning rates": 2}
    without_gradients = scenario("x", compare_gradients=False)
    assert without_gradients.quantities == ("losses", "parameters")


def test_the_same_feature_on_both_sides_has_to_be_active_on_both():
    flags = ("--tensor-model-parallel-size", "2", "--harmless")
    both = Scenario(
        "both",
        flags=flags,
        world_size=2,
        baseline_world_size=1,
        steps=1,
        compare=("losses",),
        same_feature=True,
    )
    verdict = verify(Harmless, both, declarations=[f"{HERE}:Harmless"])
    assert verdict.error.startswith("the feature is not active with ''")
    verdict = verify(Harmless, replace(both, baseline=("--harmless",)), declarations=[f"{HERE}:Harmless"])
    assert verdict.passed, str(verdict)


OVERLAPPED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
"""Parameters are complete one forward pass late: what is saved without waiting for them is stale."""


def test_a_training_continues_from_its_checkpoint_in_the_same_and_in_another_layout(mindspeed_equivalence):
    other = ("--use-distributed-optimizer", "--tensor-model-parallel-size", "2", "--sequence-parallel")
    verdict = mindspeed_equivalence(OVERLAPPED, world_size=2, steps=2, resume=Resume(other, world_size=2))

    same, there = verdict.sides
    dp2 = "2 ranks (dp 2, distributed optimizer, overlapped parameter gather)"
    assert same.side == f"resumed on {dp2}"
    assert there.side == "resumed on 2 ranks (tp 2, sequence parallel, distributed optimizer)"
    assert same.reference == there.reference == f"uninterrupted on {dp2}"
    # Main parameters and two moments beside the parameters.
    assert same.quantities == there.quantities | {"feature state": 0}
    assert same.quantities["parameters"] == 52
    assert same.quantities["optimizer state"] >= 3 * 16
    assert (same.tolerance, there.tolerance) == (0.0, 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("saved", "size", "other", "other_size"),
    [
        pytest.param("--use-torch-fsdp2", 2, "", 1, id="fsdp2-to-one"),
        pytest.param("", 1, "--use-torch-fsdp2", 2, id="one-to-fsdp2"),
        pytest.param(
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
            "--use-distributed-optimizer",
            2,
            "--use-distributed-optimizer",
            1,
            id="megatron-fsdp-to-one",
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            2,
            "--tensor-model-parallel-size 2 --sequence-parallel",
            2,
            id="interleaved-to-tp2",
        ),
        pytest.param(
            "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --use-distributed-optimizer "
            "--expert-model-parallel-size 2",
            2,
            "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --use-distributed-optimizer",
            1,
            id="ep2-to-one",
        ),
    ],
)
def test_other_layouts_continue_too(mindspeed_equivalence, saved, size, other, other_size):
    llama = (
        *"--untie-embeddings-and-output-weights --position-embedding-type rope".split(),
        *"--normalization RMSNorm --swiglu --disable-bias-linear --adam-eps 1e-3".split(),
    )
    resume = Resume((*llama, *other.split()), other_size)
    mindspeed_equivalence((*llama, *saved.split()), world_size=size, steps=2, resume=resume)


def test_a_feature_that_the_other_layout_should_lack_is_found_there():
    resume = Resume(("--harmless", "--num-layers", "2"), world_size=2, steps=1, with_feature=False)
    wrong = Scenario("resume", ("--harmless", "--num-layers", "2"), steps=1, resume=resume)
    verdict = verify(Harmless, wrong, declarations=[f"{HERE}:Harmless"])
    assert verdict.error.startswith("the feature is active in the other layout too")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"compare": ("loss",)}, "compare names 'loss'; it can name losses"),
        ({"files": ("acme:corpus.jsonl",)}, "{files}"),
        ({"flags": ("--data-path", "{files}/corpus")}, "{files}"),
        ({"flags": "--some"}, r"flags = '--some' is a tuple"),
        ({"same_feature": True, "baseline": ("--some",)}, "layouts of both sides differ"),
        ({"resume": Resume(("--some",))}, "continues in the same layout anyway"),
        ({"resume": Resume(()), "baseline": ("--x",)}, "no baseline"),
        ({"resume": Resume(()), "gains": (Gain("peak_bytes"),)}, "gains"),
        ({"resume": Resume(()), "extra_losses": ("z loss",)}, "the same losses and parameters everywhere"),
    ],
)
def test_a_proof_that_contradicts_itself_is_refused(facts, words):
    with pytest.raises(DeclarationError, match=words):
        Scenario(**{"name": "x", "flags": ("--some",), **facts})


def write_corpus(folder):
    (folder / "corpus.txt").write_text("to be or not to be")


def test_files_of_a_proof_are_there_for_a_side_and_gone_afterwards():
    files = (f"{HERE}:write_corpus", "mindspeed_core:py.typed")
    with flags_with_files(("--data", "{files}/corpus.txt"), files) as (_, path):
        assert Path(path).read_text() == "to be or not to be"
        assert (Path(path).parent / "py.typed").is_file()
    assert not Path(path).parent.exists()
    with flags_with_files(("--data", "x"), ()) as flags:
        assert flags == ("--data", "x")


def test_a_file_that_nobody_has_is_named():
    with pytest.raises(
        DeclarationError, match=r"'mindspeed_core:nowhere\.txt' is neither a file of a package"
    ):
        with flags_with_files(("{files}",), ("mindspeed_core:nowhere.txt",)):
            pass


def test_a_side_that_cannot_run_is_a_failed_verdict_with_the_reason():
    wrong = Scenario("wrong", flags=("--harmless", "--num-attention-heads", "7"), steps=1)
    verdict = verify(Harmless, wrong, declarations=[f"{HERE}:Harmless"])
    assert not verdict.passed
    assert "--num-attention-heads 7" in verdict.error


def test_values_and_differences_can_be_demanded():
    """Layers of 12 blocks of 64 x 64 float32 weights, their norms and biases: 49,984 parameters each."""
    flags, baseline = ("--harmless", "--num-layers", "2"), ("--num-layers", "3")
    per_layer = 4 * 49_984
    gains = (
        *(Gain("parameter_bytes", less=per_layer), Gain("parameter_bytes", less=per_layer + 1)),
        *(Gain("host_buffers", exactly=0), Gain("asked", exactly=1), Gain("asked", exactly=2)),
        *(Gain("host_bytes", value_at_most=0), Gain("asked", value_at_most=0.5)),
        *(Gain("forward_bytes", 1.0), Gain("no-such", exactly=0)),
    )
    scenario = Scenario("values", flags=flags, baseline=baseline, steps=1, compare=("losses",), gains=gains)
    verdict = verify(Harmless, scenario, declarations=(f"{HERE}:Harmless",))
    assert [gain.met for gain in verdict.gains] == [True, False, True, True, False, True, False, True, False]
    assert "parameter_bytes: " in str(verdict)
    assert "(exactly 199,936 less)" in str(verdict)


def test_metrics_and_time_can_be_gains():
    gains = (Gain("asked"), Gain("step_seconds"))
    one = Scenario("one", flags=("--harmless",), steps=1, gains=gains)
    verdict = verify(Harmless, one, declarations=[f"{HERE}:Harmless"])
    asked, seconds = verdict.gains
    assert (asked.feature, asked.baseline, asked.met) == (1.0, None, True)
    assert seconds.ratio > 0
    assert verdict.passed


def test_sides_with_another_model_cannot_start_from_the_same_weights():
    wider = Scenario("wider", flags=("--harmless", "--ffn-hidden-size", "320"), steps=1)
    verdict = verify(Harmless, wider, declarations=[f"{HERE}:Harmless"])
    assert not verdict.passed
    assert "the state has shape" in verdict.error


def test_verdicts_are_plain_data():
    verdict = proof(Harmless)
    assert json.loads(json.dumps(asdict(verdict), allow_nan=False))["passed"] is True


def test_equivalence_reports_the_worst_tensors(mindspeed_equivalence):
    with pytest.raises(AssertionError, match="gradients of step 1"):
        mindspeed_equivalence(["--scaled-gradient"], steps=1, declarations=[f"{HERE}:ScaledGradient"])


@pytest.mark.parametrize(
    ("flags", "error"), [("--scaled-gradient", AssertionError), ("--scaled-gradiant", WorldError)]
)
def test_equivalence_shows_the_line_of_the_test_and_none_of_its_own(mindspeed_equivalence, flags, error):
    with pytest.raises(error) as caught:
        mindspeed_equivalence([flags], steps=1, declarations=[f"{HERE}:ScaledGradient"])
    shown = caught.traceback.filter(caught)
    assert [entry.path.name for entry in shown] == [f"{HERE}.py"]


def test_scenarios_become_parameters_with_readable_names():
    found = scenario_parameters([Harmless, "something else", WrongUpdate])
    assert [parameter.id for parameter in found] == ["harmless-small", "wrong-update-small"]
    assert scenario_parameters([Harmless], platform="elsewhere") == []


@pytest.mark.parametrize(
    ("always", "marked"),
    [(None, 0), ((), 1), (("second",), 0), (("harmless-second",), 0), (("x-second",), 1)],
)
def test_further_scenarios_can_be_left_to_a_longer_run(monkeypatch, always, marked):
    monkeypatch.setattr(Harmless, "verify", (*Harmless.verify, replace(Harmless.verify[0], name="second")))
    found = scenario_parameters([Harmless], always=always)
    assert sum(len(parameter.marks) for parameter in found) == marked


def test_a_suite_chooses_how_many_scenarios_stay_and_which_suit(monkeypatch):
    further = [replace(Harmless.verify[0], name=name) for name in ("second", "third")]
    monkeypatch.setattr(Harmless, "verify", (*Harmless.verify, *further))

    def names(**choices):
        found = scenario_parameters([Harmless], always=(), **choices)
        return [parameter.id + "*" * len(parameter.marks) for parameter in found]

    assert names(first=2) == ["harmless-small", "harmless-second", "harmless-third*"]
    suits = names(suits=lambda feature, scenario: scenario.name != "small")
    assert suits == ["harmless-second", "harmless-third*"]


def test_a_feature_without_proof_is_an_error():
    class Bare(Feature):
        name = "bare"

    with pytest.raises(ValueError, match="bare carries no scenario"):
        scenario_parameters([Bare])


def test_the_pytest_plugin_loads_neither_torch_nor_megatron():
    code = (
        "import sys, mindspeed_testing.pytest_plugin; "
        "print([m for m in ('torch', 'megatron', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


P = 210_304
"""Parameters of the small GPT: 128x64 + 32x64 embeddings, 4 layers of 12 h^2 + 13 h, final norm 2 h."""


def test_data_parallel_traffic_follows_the_closed_formula():
    side = train_side(("--use-distributed-optimizer",), 2, steps=1, measure=True, gradients=False)
    assert P == 128 * 64 + 32 * 64 + 4 * (12 * 64**2 + 13 * 64) + 2 * 64
    for table in side.communication:
        scatter = [total for (name, _), total in table.items() if name == "reduce_scatter_tensor"]
        gather = [total for (name, _), total in table.items() if name == "all_gather_into_tensor"]
        assert [total.input_bytes for total in scatter] == [4 * P]
        assert [total.input_bytes for total in gather] == [4 * P // 2]
    assert side.measures["parameter_bytes"] == side.measures["gradient_bytes"] == 4 * P
    # Two moments for the half that each rank updates; plus one step counter per parameter.
    assert side.measures["optimizer_bytes"] - 2 * 4 * P // 2 <= 4 * 52


def test_tensor_parallel_traffic_follows_the_closed_formula():
    side = train_side(("--tensor-model-parallel-size", "2"), 2, steps=1, measure=True, gradients=False)
    hidden = 32 * 1 * 64 * 4
    for table in side.communication:
        total = table["all_reduce", "TENSOR_MODEL_PARALLEL_GROUP"]
        # Per micro-batch: 4 per layer, embedding, gradient of the logits; maximum, label, sum of the loss.
        assert total.calls == 4 * (4 * 4 + 2 + 3)
        assert total.input_bytes == 4 * ((4 * 4 + 2) * hidden + 3 * 32 * 4)


def test_pipeline_traffic_follows_the_closed_formula():
    side = train_side(("--pipeline-model-parallel-size", "2"), 2, steps=1, measure=True, gradients=False)
    for table in side.communication:
        sends = [total for (name, _), total in table.items() if name in ("isend", "send")]
        assert sum(total.calls for total in sends) == 4
        assert sum(total.input_bytes for total in sends) == 4 * 32 * 64 * 4


def test_recomputation_is_measured_as_less_memory():
    plain = train_side((), 1, steps=1, measure=True, gradients=False)
    flags = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
    less = train_side(flags, 1, steps=1, measure=True, gradients=False)
    assert less.measures["peak_bytes"] < 0.7 * plain.measures["peak_bytes"]
    again = train_side(flags, 1, steps=1, measure=True, gradients=False)
    assert again.measures["peak_bytes"] == less.measures["peak_bytes"]


@pytest.mark.parametrize("name", ["world", "equivalence"])
def test_the_old_name_of_a_fixture_is_the_new_one_with_a_warning(request, name):
    with pytest.warns(DeprecationWarning, match=f"'mindspeed_{name}'"):
        old = request.getfixturevalue(name)
    assert old is request.getfixturevalue(f"mindspeed_{name}")
