"""Megatron-LM's call graph with the adaptor's line: stages are reached, numbers right, nothing is left."""

import inspect
import re
from pathlib import Path

import fake_training as fake
import pytest

from mindspeed_core.discovery.stages import core_stages
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu")


class Probe:
    """Wraps every stage and remembers which were called."""

    def __init__(self):
        self.called = []


def probe():
    from mindspeed_core.feature import hookimpl

    seen = Probe()
    for name, stage in core_stages().items():

        def wrapper(name=name):
            seen.called.append(name)
            return (yield)

        def plain(name=name):
            seen.called.append(name)

        function = (
            hookimpl(wrapper=True)(_renamed(wrapper, name))
            if stage.firstresult
            else hookimpl(_renamed(plain, name))
        )
        setattr(seen, name, function)
    return seen


def _renamed(function, name):
    def body():
        seen = yield from function()
        return seen

    def collected():
        return function()

    chosen = body if inspect.isgeneratorfunction(function) else collected
    chosen.__name__ = name
    return chosen


def world(name, *args, size=1, **options):
    return run_world(f"{__name__}:{name}", size, *args, timeout=120, **options)


@pytest.fixture(scope="module")
def plain():
    return world("train_plainly")[0]


def train_plainly():
    from mindspeed_testing.leak_check import ProcessState

    fake.use_fake()
    import megatron.training.training  # noqa: F401 - the adaptor comes last here
    import torch
    from torch.autograd import profiler

    # What torch changes of itself on first use.
    vars(profiler).pop("_cupti_monitor_module", None)
    torch._dynamo.mutation_guard.install_generation_tagging_init()
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    before = ProcessState.now()
    adaptor = fake.adapt(fake.Scaled, fake.Failing, fake.Stopping, fake.Unsure)
    entered = ProcessState.now()
    found = {"none": fake.run_script(*LOCAL), "left": ProcessState.now().left_since(entered)}
    fake.forget_run()
    found["acme"] = fake.run_script("--platform", "acme")
    fake.forget_run()
    found["again"] = fake.run_script(*LOCAL, "--train-iters", "2")
    fake.forget_run()
    found["scaled"] = fake.run_script(*LOCAL, "--scaled-tokens", "3", "--log-interval", "3")
    fake.forget_run()
    found["stopped"] = fake.run_script(*LOCAL, "--stop-after", "2")
    fake.forget_run()
    found["exited"] = fake.run_script(*LOCAL, "--exit-interval", "1")
    found["left by exit"] = ProcessState.now().left_since(entered)
    fake.forget_run()
    try:
        fake.run_script(*LOCAL, "--failing")
    except ValueError as error:
        found["failure"] = [str(error), *getattr(error, "__notes__", [])]
    found["left by failure"] = ProcessState.now().left_since(entered)
    adaptor.uninstall()
    found["left after uninstall"] = ProcessState.now().left_since(before)
    return found


def test_the_script_trains_evaluates_and_ends(plain):
    losses = [line["lm loss"] for line in plain["none"]["log"] if "lm loss" in line]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert sum("validation lm loss" in line for line in plain["none"]["log"]) == 2
    assert plain["none"]["status"] == 0


def test_without_features_few_functions_are_intercepted(plain):
    intercepted = re.search(r"(\d+) functions of Megatron-LM are intercepted", plain["none"]["out"])
    assert int(intercepted.group(1)) <= 7
    assert "train_step" not in plain["none"]["out"]
    assert "features: none" in plain["none"]["out"]


def test_defaults_that_need_packages_are_changed_and_said_in_one_line(plain):
    lines = [line for line in plain["none"]["out"].splitlines() if "--transformer-impl local" in line]
    assert len(lines) == 1
    assert "--distributed-backend gloo" in lines[0]


def test_pretrain_can_be_called_again_with_other_flags(plain):
    again = [line["lm loss"] for line in plain["again"]["log"] if "lm loss" in line]
    first = [line["lm loss"] for line in plain["none"]["log"] if "lm loss" in line]
    assert len(again) == 2
    assert again[0] == first[0]


def test_a_platform_like_the_cpu_changes_and_trains_the_same(plain):
    def changed(name):
        text = plain[name]["out"].replace("for acme", "for cpu")
        return [
            line for line in text.splitlines() if "intercepted" in line or line.startswith("mindspeed:   ")
        ]

    assert len(changed("none")) > 7
    assert changed("acme") == changed("none")
    assert plain["acme"]["log"] == plain["none"]["log"]


def test_a_feature_changes_what_the_model_sees(plain):
    scaled = next(line for line in plain["scaled"]["log"] if "lm loss" in line)
    losses = [line["lm loss"] for line in plain["none"]["log"] if "lm loss" in line]
    assert abs(scaled["lm loss"] - sum(losses) / 3) > 1e-4


def test_a_number_of_a_feature_is_printed_as_it_is_over_several_steps(plain):
    line = next(line for line in plain["scaled"]["log"] if "lm loss" in line)
    assert line["added to tokens"] == pytest.approx(3.0)


def test_only_what_a_feature_implements_is_intercepted_besides(plain):
    assert "training_log" in plain["scaled"]["out"]
    assert "training:train_step" not in plain["scaled"]["out"]


@pytest.fixture(scope="module")
def drawn():
    return world("train_while_others_draw")[0]


def test_dropout_is_the_same_whatever_else_draws_random_numbers(drawn):
    quiet, drawing, without, _, _ = drawn
    assert drawing == quiet != without


def test_a_feature_seeds_dropout_when_the_run_starts(drawn):
    quiet, _, _, first, second = drawn
    assert len({tuple(quiet), tuple(first), tuple(second)}) == 3


def train_while_others_draw():
    fake.adapt(fake.OwnDropout)
    import torch
    from megatron.training import initialize, training

    def losses(*flags):
        log = fake.run_script(*LOCAL, "--eval-interval", "1", *flags)["log"]
        fake.forget_run()
        return [line["lm loss"] for line in log if "lm loss" in line]

    dropout = ("--hidden-dropout", "0.1")
    found = [losses(*dropout)]
    batches, build = training._batches, training.build_train_valid_test_data_iterators

    def drawing_batches(*args):
        for batch in batches(*args):
            torch.rand(1)  # a loader that starts again
            yield batch

    def drawing_build(provider):
        result = build(provider)
        torch.rand(5)
        return result

    initialize._warmup_jit_function = lambda: torch.rand(99)
    training._batches, training.build_train_valid_test_data_iterators = drawing_batches, drawing_build
    seeded = [losses(*dropout, "--own-dropout", seed) for seed in ("1", "2")]
    return [*found, losses(*dropout), losses(), *seeded]


def test_a_provider_without_a_configuration_builds_with_that_of_features(provided):
    assert provided["no argument"]["log"][0]["lm loss"] == provided["argument"]["log"][0]["lm loss"]
    assert "core_transformer_config_from_args" in provided["no argument"]["out"]
    assert "core_transformer_config_from_args" not in provided["argument"]["out"]


def test_the_configuration_of_features_is_made_once_and_not_for_every_micro_batch(provided):
    assert provided["configurations"] == 1


def test_a_provider_that_leaves_the_given_configuration_aside_is_refused(provided):
    assert provided["aside"]["status"] == 1
    assert "scaled: changes the model's configuration" in provided["aside"]["err"]


@pytest.fixture(scope="module")
def provided(tmp_path_factory):
    return world("train_with_providers", str(tmp_path_factory.mktemp("scripts")))[0]


def train_with_providers(folder):
    fake.adapt(fake.Scaled)
    flags = (*LOCAL, "--scaled-tokens", "1", "--scaled-dropout", "0.2", "--train-iters", "1")
    call = "model_builder(get_args(), pre_process, post_process, vp_stage, config, pg_collection)"
    changes = {
        "argument": [],
        "no argument": [
            ("True, vp_stage=None, config=None, pg_collection=None", "True, vp_stage=None, **rest"),
            (call, call.replace("config, pg_collection", 'None, rest["pg_collection"]')),
        ],
        "aside": [(call, call.replace("config, ", "None, "))],
    }
    found = {}
    for name, change in changes.items():
        script = fake.changed_script(Path(folder) / f"{name}.py", change)
        fake.configurations.clear()
        found[name] = fake.run_script(*flags, script=script)
        found.setdefault("configurations", len(fake.configurations))
        fake.forget_run()
    return found


def test_a_feature_that_fails_unasked_stops_nobody_and_is_named(plain):
    assert "held back: unsure: its enabled() fails in test 0: AttributeError" in plain["none"]["out"]


def test_what_an_active_feature_notes_is_printed_at_the_start(plain):
    assert "mindspeed: note: scaled: every token is 3 larger" in plain["scaled"]["out"]
    assert "note:" not in plain["none"]["out"]


def test_a_feature_ends_the_run(plain):
    assert sum("lm loss" in line for line in plain["stopped"]["log"]) == 2
    assert "stopping: enough" in plain["stopped"]["out"]


def test_leaving_the_loop_early_closes_the_session(plain):
    assert sum("lm loss" in line for line in plain["exited"]["log"]) == 1
    assert plain["left by exit"] == []


def test_a_failing_step_says_whose_it_is_and_closes_the_session(plain):
    assert plain["failure"][0] == "this step fails"
    assert "feature 'failing'" in plain["failure"][1]
    assert plain["left by failure"] == []


def test_nothing_of_torch_and_megatron_stays_changed(plain):
    assert plain["left"] == []
    assert plain["left after uninstall"] == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return world("save_and_resume", str(tmp_path_factory.mktemp("saved")), size=2)


def save_and_resume(folder):
    seen = probe()
    flags = (*LOCAL, "--use-distributed-optimizer", "--average", "--twice")
    adaptor = fake.adapt(fake.Average, fake.Twice, extra=(seen,))
    place = ("--save", folder, "--save-interval", "2", "--exit-interval", "2")
    found = {"whole": fake.run_script(*flags, "--train-iters", "5")["log"]}
    fake.forget_run()
    found["part"] = fake.run_script(*flags, "--train-iters", "5", *place)["log"]
    fake.forget_run()
    found["rest"] = fake.run_script(*flags, "--train-iters", "5", "--load", folder)["log"]
    found["called"] = sorted(set(seen.called))
    fake.forget_run()
    adaptor.install(extra_plugins=[object()])
    found["without"] = fake.run_script(*LOCAL, "--use-distributed-optimizer", "--load", folder)["log"]
    return found


def test_every_stage_with_a_place_is_reached(saved):
    # A probe is registered after the process is prepared; the others need a pipeline, and another model.
    elsewhere = {"prepare_process", "boundary_schema", "batch_fields", "build_mtp_spec"}
    expected = set(core_stages()) - elsewhere
    assert expected - set(saved[0]["called"]) == set()


def test_a_resumed_run_goes_on_exactly(saved):
    whole = [line["lm loss"] for line in saved[0]["whole"] if "lm loss" in line]
    rest = [line["lm loss"] for line in saved[0]["rest"] if "lm loss" in line]
    assert rest == whole[2:]


def test_the_state_of_a_feature_travels_in_the_checkpoint(saved):
    assert saved[0]["rest"][0]["steps counted"] == 3


def test_metrics_and_reports_of_features_are_those_of_all_ranks(saved):
    first = saved[0]["whole"][0]
    assert first["lm loss"] == saved[1]["whole"][0]["lm loss"]
    assert first["micro-batch"] == 0
    assert first["largest token"] == saved[1]["whole"][0]["largest token"] > 0


@pytest.fixture(scope="module")
def pipelined():
    return world("train_in_stages", size=2)


def train_in_stages():
    seen = probe()
    fake.adapt(fake.Average, extra=(seen,))
    flags = (
        "--pipeline-model-parallel-size",
        "2",
        "--untie-embeddings-and-output-weights",
        "--hidden-dropout",
        "0",
    )
    fake.adapt(fake.Average)
    return fake.run_script(*LOCAL, *flags, "--average")["log"], "boundary_schema" in seen.called


def test_every_rank_of_a_pipeline_logs_the_numbers_of_features(pipelined):
    (first, _), (last, _) = pipelined
    assert [line["steps counted"] for line in first[:3]] == [1, 2, 3]
    assert "lm loss" not in first[0]
    assert last[0]["lm loss"] > 0


def test_features_are_asked_for_the_shapes_between_stages(pipelined):
    assert all(asked for _, asked in pipelined)


def test_changed_tensors_are_refused_under_interleaving():
    ranks = world("train_interleaved", size=2)
    assert [rank["status"] for rank in ranks] == [1, 1]
    # One rank speaks for all.
    printed = "".join(rank["err"] for rank in ranks)
    assert "wider: changes the tensors between pipeline stages" in printed
    assert "megatron-core's interleaved schedule cannot" in printed


def train_interleaved():
    fake.adapt(fake.Wider)
    flags = ("--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
    return fake.run_script(*LOCAL, *flags, "--num-layers", "4", "--wider")


def test_tensor_parallel_ranks_train_with_sequence_parallelism():
    losses = world("train_sharded", size=2)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def train_sharded():
    fake.adapt()
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--normalization", "RMSNorm")
    return [line["lm loss"] for line in fake.run_script(*LOCAL, *flags)["log"] if "lm loss" in line]


@pytest.fixture(scope="module")
def everywhere():
    return world("train_with_positions_everywhere", size=4)


def train_with_positions_everywhere():
    fake.adapt(fake.WholeBatch)
    flags = (*LOCAL, "--untie-embeddings-and-output-weights", "--reset-position-ids", "--train-iters", "1")
    longer = ("--num-layers", "4", "--whole-batch", "--global-batch-size", "2")
    found = {}
    for name, sizes in {"pp4": ("4", "1"), "tp2": ("2", "2")}.items():
        pp, tp = sizes
        fake.batches_seen.clear()
        sizes = ("--pipeline-model-parallel-size", pp, "--tensor-model-parallel-size", tp)
        done = fake.run_script(*flags, *longer, *sizes)
        found[name] = done["status"], fake.batches_seen[0]
        fake.forget_run()
    return found


def test_a_feature_gets_what_it_needs_of_a_batch_on_every_pipeline_stage(everywhere):
    ranks = [rank["pp4"][1] for rank in everywhere]
    assert [sorted(rank[0]) for rank in ranks] == [
        ["labels", "loss_mask", "position_ids", "tokens"],
        ["position_ids"],
        ["position_ids"],
        ["labels", "loss_mask", "position_ids"],
    ]
    first = [batch["position_ids"] for batch in ranks[0]]
    assert all([batch["position_ids"] for batch in rank] == first for rank in ranks)


def test_every_tensor_parallel_rank_gets_it(everywhere):
    ranks = [rank["tp2"][1] for rank in everywhere]
    assert ranks[2] == ranks[3]
    assert sorted(ranks[3][0]) == ["labels", "loss_mask", "position_ids"]
    assert ranks[3][0]["position_ids"] == ranks[0][0]["position_ids"] > 0
