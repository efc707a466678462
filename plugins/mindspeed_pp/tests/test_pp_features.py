"""The declarations: sound, free of heavy imports, refused with flag, value and way out, proved."""

import subprocess
import sys
from argparse import Namespace

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.registry import Registry
from mindspeed_core.validation import check
from mindspeed_pp import asked, schedules
from mindspeed_pp.features import DECLARATIONS, NoopKeys
from mindspeed_pp.features.proofs import CHUNKS2, PP2, scheduled
from mindspeed_pp.program import main
from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context
from mindspeed_pp.stage_map import layers_of_stages, layout_text, parse_rows
from mindspeed_testing.declared import declaration_faults
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify

FEATURES = declared_features(DECLARATIONS)
INSTALLED = Registry.discover()
PP4 = ("--pipeline-model-parallel-size", "4", "--micro-batch-size", "1", "--global-batch-size", "8")

CHIMERA = (*PP4, "--pipeline-schedule", "chimera")
LISTED = (*PP2, "--optimized-mbs-list")


def test_declarations_are_sound_light_and_on_their_pages():
    assert declaration_faults("mindspeed_pp.features") == []


def test_the_flag_names_every_schedule_that_is_built_in():
    assert tuple(rule.name for rule in schedules.BUILT_IN) == asked.BUILT_IN


def test_no_symbol_is_patched():
    assert [patch for feature in FEATURES for patch in feature.patches] == []


def test_declarations_and_the_program_import_neither_torch_nor_megatron():
    code = (
        "import sys, mindspeed_pp.features, mindspeed_pp.program as p; p.main(['compare', '-m', '4']); "
        "print({'torch', 'megatron', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def problems(*flags, world_size=4):
    found = check(training_flags(flags, 1, INSTALLED), world_size=world_size, registry=INSTALLED)
    return "\n".join(map(str, found.problems))


def plan(*flags):
    return prepare(
        training_flags(flags, 1, INSTALLED), platform="cpu", registry=INSTALLED, host="standalone"
    ).plan


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_every_host_takes_the_flags(host):
    made, _ = plan_for(
        [*PP2, *scheduled("zb-h1"), "--transformer-impl", "local"],
        platform="cpu",
        host=host,
        registry=INSTALLED,
    )
    assert {"pp-engine", "pp-weight-gradients"} <= set(made.names)


def test_linears_are_replaced_only_where_weight_gradients_come_apart():
    assert "pp-weight-gradients" not in plan(*PP2, *scheduled("1f1b")).names
    assert "pp-weight-gradients" in plan(*PP2, *scheduled("zbv")).names


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--use-nanopipe", *CHUNKS2), "nanopipe"),
        (("--foldx-mode", "aiao", *CHUNKS2), "fold-aiao"),
        (("--fold-mode", "fifo", *CHUNKS2), "fold-fifo"),
        (("--optimize-send-recv-comm",), "1f1b"),
        (("--optimize-vpp-send-recv-comm", *CHUNKS2), "interleaved"),
        (("--overlap-warmup-cooldown-communication", "--use-multi-stream"), "1f1b"),
        (scheduled("auto"), "zbv"),
        (("--optimized-mbs-list", "4,4"), "1f1b"),
        (("--optimized-mbs-list", "4,4", *CHUNKS2), "interleaved"),
        (("--optimized-pipeline", "--manual-mbs", "4,4"), "1f1b"),
        (("--automated-pipeline-perf",), "1f1b"),
    ],
)
def test_upstream_spellings_name_schedules(flags, names):
    assert any(f"the pipeline schedule is {names}" in str(note) for note in plan(*PP2, *flags).notes)


@pytest.mark.parametrize("name", ["nanopipe", "fold-aiao", "dualpipev", "chimera"])
def test_dominated_schedules_say_so(name):
    chunks = CHUNKS2 if name not in ("dualpipev", "chimera") else ()
    (note,) = plan(*PP2, *scheduled(name), *chunks).notes
    assert any(other in str(note) for other in ("zbi", "zbv", "interleaved"))


EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--disable-bias-linear"),
    *("--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2", "--swiglu"),
)


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_that_keep_their_weight_gradients_are_named(grouped):
    flags = (*EXPERTS, *PP2, *scheduled("zb-h1"), *(("--moe-grouped-gemm",) if grouped else ()))
    notes = "".join(map(str, plan(*flags, "--use-pipe-experts", "--moe-expert-capacity-factor", "1").notes))
    assert (
        "--use-pipe-experts with --pipeline-schedule zb-h1: weight gradients of these" in notes
    ) == grouped
    assert "weight gradients" not in "".join(map(str, plan(*flags).notes))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (scheduled("zbv"), "--pipeline-schedule zbv with --pipeline-model-parallel-size 1: use 2 or more"),
        ((*PP2, *scheduled("zbi")), "needs two or more model chunks on each rank; add --num-virtual"),
        ((*PP2, *scheduled("zb-h1"), *CHUNKS2), "schedule zb-h1 has 1 model chunks on each rank, not 2"),
        (
            (*PP2, *scheduled("zbv"), "--num-virtual-stages-per-pipeline-rank", "3", "--num-layers", "6"),
            "schedule zbv has 2 model chunks on each rank, not 3",
        ),
        ((*PP2, *scheduled("zbv"), "--num-layers", "6"), "cuts the model into 4 stages, and --num-layers 6"),
        ((*PP4, *scheduled("dualpipev")), "cuts the model into 8 stages, and --num-layers 4"),
        (
            (*PP4, *scheduled("dualpipev"), "--num-layers", "8", "--global-batch-size", "4"),
            "on 4 ranks needs at least 8 micro-batches, the batch has 4",
        ),
        (
            (*PP4, *scheduled("zbi"), *CHUNKS2, "--num-layers", "8", "--global-batch-size", "6"),
            "needs a multiple of 4 micro-batches, the batch has 6",
        ),
        ((*PP2, *scheduled("zbi"), *CHUNKS2, "--use-nanopipe"), "--use-nanopipe both say the order"),
        ((*CHIMERA, "--virtual-data-parallel-size", "3"), "size 3: the model is held 2, 4, 8, ... times"),
        ((*CHIMERA, "--virtual-data-parallel-size", "1"), "size 1: the model is held 2, 4, 8, ... times"),
        ((*CHIMERA, "--virtual-data-parallel-size", "8"), "size 8: 4 pipeline ranks hold at most 4 copies"),
        ((*CHIMERA, "--global-batch-size", "7"), "2 copies cannot share 7 micro-batches"),
        ((*CHIMERA, "--num-layers", "6"), "cuts the model into 4 stages, and --num-layers 6"),
        ((*CHIMERA, "--overlap-grad-reduce"), "finish the copies of a stage in different orders"),
        ((*CHIMERA, "--rampup-batch-size", "2", "2", "8"), "every batch of a ramp would have to"),
        ((*CHIMERA, "--num-experts", "4", "--moe-router-enable-expert-bias"), "would drift apart"),
        (
            (*CHIMERA, "--num-experts", "4", "--moe-router-load-balancing-type", "global_aux_loss"),
            "it counts tokens of one copy alone",
        ),
        ((*CHIMERA, *CHUNKS2), "the copies of a stage are on several pipeline ranks"),
        ((*CHIMERA, "--mtp-num-layers", "1"), "the copies of a stage are on several pipeline ranks"),
        ((*PP4, "--schedules-method", "chimera", *scheduled("zbv")), "both say the order of the pipeline"),
        (
            (*PP2, *scheduled("1f1b"), "--virtual-data-parallel-size", "2"),
            "--virtual-data-parallel-size 2 with --pipeline-schedule 1f1b: it is an option of",
        ),
        ((*PP2, *scheduled("1f1b"), "--chimera-decouple-bw"), "--chimera-decouple-bw with"),
        ((*LISTED, "1,2,3"), "has 6 samples, and --global-batch-size gives each data-parallel rank 4"),
        ((*LISTED, "1,x"), "'1,x': is no list of numbers"),
        ((*LISTED, "4,0"), "has a micro-batch without samples"),
        (
            (*LISTED, "1,3", "--optimized-pipeline", "--manual-mbs", "1,3"),
            "both say the sizes of micro-batches",
        ),
        ((*LISTED, "1,3", "--no-dpp-loss-weighting"), "samples of small micro-batches would count more"),
        ((*LISTED, "1,3", "--rampup-batch-size", "2", "2", "8"), "a list is for one batch size"),
        ((*LISTED, "1,3", "--variable-seq-lengths"), "samples of different lengths cannot be put together"),
        ((*LISTED, "1,3", "--context-parallel-size", "2"), "it counts samples of equal ones"),
        ((*LISTED, "1,3", *scheduled("dualpipev")), "needs at least 4 micro-batches, the batch has 2"),
        ((*LISTED, "1,3", "--mbs-idx", "2"), "--mbs-idx 2: it counts the micro-batches"),
        ((*PP2, "--optimized-pipeline"), "--optimized-pipeline without sizes: add --manual-mbs"),
        ((*PP2, "--manual-mbs", "4,4"), "--manual-mbs 4,4: add --optimized-pipeline"),
        (
            (*PP2, "--optimized-pipeline", "--manual-mbs", "example-config-2"),
            "is for 8 pipeline ranks, and there are 2",
        ),
        ((*PP2, "--pp-schedule-list", '{"stage0": ["F0", "B0"]}'), "has 1 stages for 2 pipeline ranks"),
        ((*PP2, "--pp-schedule-list", "[1]"), "is no JSON with a list of passes for each stage"),
        ((*PP2, "--pp-schedule-list", '{"stage0": ["F0", "B0"], "stage1": ["B0", "F0"]}'), "waits"),
        ((*PP2, "--automated-pipeline-perf", *scheduled("zb-h1")), "sizes are searched for 1f1b"),
        ((*PP2, "--pipeline-tensor-shapes", "[]"), "without --use-multiparameter-pipeline-model-parallel"),
        (
            (*PP2, "--use-multiparameter-pipeline-model-parallel", "--pipeline-tensor-shapes", "[]"),
            "is no list of tensors",
        ),
        ((*PP2, "--noop-layers-keep-numbering"), "without it positions are the numbers of layers"),
        ((*PP2, "--use-multi-stream", *scheduled("1f1b")), "is an option of --overlap-warmup-cooldown"),
        (
            (*PP2, *scheduled("1f1b"), "--pipeline-w-placement", "greedy"),
            "computes no weight gradients apart",
        ),
        (
            (*PP2, *scheduled("zb-h1"), "--pipeline-times", "1", "0", "1"),
            "--pipeline-times 1 0 1: give three",
        ),
        (
            (*PP2, *scheduled("zb-h1"), "--pipeline-memory-limit", "1"),
            "rank 0 keeps 2 micro-batches alive, and the limit is 1",
        ),
        ((*PP2, "--pipeline-schedule-file", "/nowhere"), "/nowhere: cannot be read"),
        ((*PP2, *scheduled("auto"), "--pipeline-times-from", "/nowhere"), "/nowhere: cannot be read"),
        (
            (*PP2, *scheduled("list"), "--pipeline-times-from", "x", "--pipeline-times", "1", "1", "1"),
            "--pipeline-times-from and --pipeline-times both say times",
        ),
        (
            (*PP2, *scheduled("1f1b"), "--use-nanopipe-swap"),
            "it is an option of --use-nanopipe; add that one",
        ),
        (
            (*PP2, *CHUNKS2, "--use-nanopipe", "--use-nanopipe-swap", "--pipeline-w-placement", "greedy"),
            "both move what belongs to weight gradients; drop one",
        ),
        ((*PP2, *scheduled("zbv"), "--pipeline-w-output-layer"), "has the weight of the embedding; add"),
        (
            (*PP2, *scheduled("1f1b"), "--pipeline-w-output-layer", "--untie-embeddings-and-output-weights"),
            "no pipeline schedule computes weight gradients apart",
        ),
        (
            (*PP2, "--profile-pipeline", "x", "--profile-pipeline-steps", "0"),
            "--profile-pipeline-steps 0: measure 1 or more",
        ),
        ((*PP2, *scheduled("1f1b"), "--use-torch-fsdp2"), "its hooks expect the order of autograd"),
        (
            (
                *(*PP2, *scheduled("1f1b"), "--pipeline-recompute", "--num-experts", "4"),
                *("--moe-router-load-balancing-type", "global_aux_loss"),
            ),
            "--pipeline-recompute with --moe-router-load-balancing-type global_aux_loss: it sums the tokens",
        ),
        ((*PP2, *scheduled("1f1b"), "--use-megatron-fsdp"), "its hooks expect the order of autograd"),
        ((*PP2, *scheduled("zbv"), "--decoder-first-pipeline-num-layers", "1"), "are on one rank"),
        ((*PP2, *scheduled("zbv"), "--account-for-loss-in-pipeline-split"), "are on one rank"),
        (
            (*PP2, *CHUNKS2, "--pipeline-num-transformer-layers", "[[1,1],[1,2]]"),
            "5 layers, and --num-layers is 4",
        ),
        ((*PP2, "--noop-layers", "0,9"), "9 is beyond the last of the 4 positions"),
        ((*PP2, "--noop-layers", "0,0"), "names a position twice"),
        ((*PP2, "--noop-layers", "0,1,2,3"), "leaves no layer at all"),
        ((*PP2, "--noop-layers", "0;1"), "is no list of numbers"),
        (
            (*PP2, "--noop-layers", "0", "--num-layers", "5"),
            "5 positions of --num-layers are not divisible by 2",
        ),
        ((*PP2, "--num-layer-list", "1,1,2"), "has 3 numbers for 2 pipeline ranks; give 2"),
        ((*PP2, "--num-layer-list", "1,2"), "has 3 layers, and --num-layers is 4"),
        ((*PP2, "--pipeline-num-transformer-layers", "[[1,1],[1]]"), "has a row of 1 for 2 chunks"),
        ((*PP2, "--pipeline-num-transformer-layers", "[[1],[1],[2]]"), "has 3 rows for 2 pipeline ranks"),
        ((*PP2, "--pipeline-num-transformer-layers", "[[1]"), "is no list of rows"),
        ((*PP2, "--noop-layers", "0,3", "--num-layer-list", "1,1"), "layer-partition"),
        ((*PP2, "--noop-layers", "0,3", "--pipeline-model-parallel-layout", "Et|tL"), "keep one of the two"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    assert message in problems(*flags)


def test_keys_of_positions_are_refused_in_formats_of_megatron_lm_without_them():
    (said,) = NoopKeys.validate(Namespace(ckpt_format="torch"))
    assert said == (
        "--noop-layers-keep-numbering with --ckpt-format torch: only torch_dist names layers by a number of "
        "the model; use --ckpt-format torch_dist"
    )


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--hybrid-context-parallel", "it has another schedule"),
    ],
)
def test_newer_schedules_of_megatron_core_are_refused(flag, message):
    assert message in problems(*PP2, *scheduled("1f1b"), flag)


def test_a_file_for_other_sizes_is_refused(tmp_path):
    path = tmp_path / "order.txt"
    path.write_text(rule_named("1f1b").schedule(Context(4, 1, 8)).text())
    assert "it is for 4 pipeline ranks, and --pipeline-model-parallel-size is 2" in problems(
        *PP2, "--pipeline-schedule-file", str(path)
    )
    path.write_text(rule_named("1f1b").schedule(Context(2, 1, 4)).text())
    assert "is written for 4 micro-batches, the batch has 8" in problems(
        *PP2, "--pipeline-schedule-file", str(path), world_size=2
    )


def test_times_of_another_model_are_refused(tmp_path):
    path = tmp_path / "times.json"
    path.write_text('{"pipeline_times": {"stages": [[1, 1, 1]], "message": 0, "layers": 9}}')
    said = problems(*PP2, *scheduled("zb-h1"), "--pipeline-times-from", str(path))
    assert "it is of a model of 9 layers, and --num-layers is 4" in said


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("[[0,1],[1,1]*4,[1,0]]", [[0, 1], *[[1, 1]] * 4, [1, 0]]),
        ("[[1*2],[3,4]]", [[1, 1], [3, 4]]),
        (" [ [ 2 ] ] ", [[2]]),
    ],
)
def test_rows_repeat_what_stands_before_a_star(text, rows):
    assert parse_rows(text) == rows


def test_layers_without_gaps_are_laid_out_stage_by_stage():
    args = Namespace(
        pipeline_model_parallel_size=2,
        num_layers=8,
        noop_layers="0,3,6,7",
        num_virtual_stages_per_pipeline_rank=2,
    )
    assert layers_of_stages(args) == ([1, 1, 2, 0], 4)
    assert layout_text([1, 1, 2, 0]) == "Et|t|tt|L"
    assert layout_text([1, 0], predictions=1) == "Et|mL"


@pytest.mark.parametrize("format", ["png", "svg"])
def test_the_program_draws_and_traces_a_schedule(tmp_path, capsys, format):
    picture, trace = tmp_path / f"a.{format}", tmp_path / "a.json"
    assert main(["show", "zbv", "-m", "8", "--picture", str(picture), "--trace", str(trace)]) == 0
    assert "bubble 1.5" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
    assert '"F0.0"' in trace.read_text()


def test_the_program_compares_and_recommends_within_a_limit(capsys):
    assert main(["compare", "-p", "8", "-m", "32", "--times", "1", "1.2", "0.8", "--limit", "8"]) == 0
    out = capsys.readouterr().out
    assert "choose zbv: step 100.2, 8 micro-batches alive" in out
    assert main(["compare", "-m", "6"]) == 0
    assert "needs a multiple of 4 micro-batches, the batch has 6" in capsys.readouterr().out


def test_the_program_checks_a_file(tmp_path, capsys):
    path = tmp_path / "order.txt"
    assert main(["show", "zb-h1", "-m", "4", "--text"]) == 0
    path.write_text(capsys.readouterr().out)
    assert main(["lint", str(path)]) == 0
    assert "4 ranks, 4 stages, 4 micro-batches; at most 4 alive" in capsys.readouterr().out
    path.write_text(path.read_text().replace("F0.1 F0.2", "F0.2 F0.2"))
    assert main(["lint", str(path)]) == 1
    assert "F of stage 0 and micro-batch 1 comes 0 times" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, platform="cpu", always=(), first=1)
)
def test_scenarios(feature, scenario):
    verdict = verify(feature, scenario, platform="cpu")
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [("[0,1,1,1]", [1, 1]), ("[0,1]", [0, 1]), ("1", 1)],
    ids=["by position", "by layer", "every layer"],
)
def test_lists_of_layers_name_positions_or_layers(pattern, kept):
    from mindspeed_core.validation import check
    from mindspeed_testing.model_flags import training_flags

    experts = ("--num-experts", "2", "--moe-layer-freq", pattern, "--disable-bias-linear")
    flags = training_flags((*PP2, *experts, "--num-layers", "4", "--noop-layers", "0,3"), 2)
    checked = check(flags, world_size=2, platform="cpu")
    assert checked.problems == ()
    assert checked.args.num_layers == 2
    assert checked.args.moe_layer_freq == kept


def test_a_frequency_beside_empty_positions_says_what_it_counts():
    made = plan(
        *PP2, "--num-experts", "2", "--moe-layer-freq", "2", "--num-layers", "6", "--noop-layers", "0,5"
    )
    assert any("counts the layers that are there" in note.text for note in made.notes)
