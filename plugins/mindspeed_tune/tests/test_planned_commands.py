"""Commands that are planned for real: every rank runs in a process of its own, on shapes."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed_core.cli.features import program as features
from mindspeed_core.errors import UserError
from mindspeed_megatron.instruments.operations import ATTENTION, MATRIX
from mindspeed_tune.command import program
from mindspeed_tune.driver import PlanError, Ranks, records_of
from mindspeed_tune.extrapolate import whole
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.launch_plan import make_plan
from mindspeed_tune.summary import markdown
from mindspeed_tune.warm_process import WarmProcess

MODEL = (
    "--mock-data --num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --bf16 "
    "--use-distributed-optimizer --micro-batch-size 2 --train-iters 2 --lr 1e-3 --attention-dropout 0"
)
LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
COMMAND = f"mindspeed-train --fake-world-size 8 {MODEL} {LAYOUT} --global-batch-size 16"


@pytest.fixture(scope="module")
def runner():
    """Runs ranks of any command: the imports of torch and megatron-core are done once."""
    with Ranks(read_command(COMMAND.split(), {})) as runner:
        yield runner


@pytest.fixture(scope="module")
def records(runner):
    runner.command = read_command(COMMAND.split(), {})
    return records_of(runner)


def test_every_kind_is_run_and_every_kind_of_call_has_a_partner(records):
    plan = make_plan(("train",), records)
    assert [kind.kind.name for kind in plan.kinds] == ["stage 0", "stage 1"]
    assert plan.order.differences == ()
    assert plan.order.unchecked == ()
    assert plan.ok


def test_closed_forms_are_what_was_counted(records):
    forms = [form for kind in make_plan(("train",), records).kinds for form in kind.forms]
    assert {form.expected.operation for form in forms} >= {"isend", "irecv", "reduce_scatter_tensor"}
    assert [form.difference for form in forms] == [0.0] * len(forms)


def test_the_schedule_that_ran_is_the_one_of_the_timeline(records):
    from mindspeed_tune.schedules import order

    for record in records:
        first = record.runs[0]
        assert list(first.steps) == order(record.layout, record.stage, first.microbatches)


def test_features_that_would_keep_less_are_found_by_their_formulas(records):
    found = {relief.feature: relief for relief in records[0].reliefs}
    assert {"flash-attn", "fused-rmsnorm"} <= found.keys()
    # Half a batch of 2 x 64 tokens on this rank, in each of 3 layers, 4 heads: context and one number.
    assert found["flash-attn"].kept == 3 * 64 * 4 * (2 * 16 + 4)
    assert found["flash-attn"].flags == "--use-flash-attn"


def test_samples_of_any_length_are_planned_as_the_longest(runner, records):
    runner.command = read_command([*COMMAND.split(), "--variable-seq-lengths"], {})
    plan = make_plan(("train",), records_of(runner))
    assert plan.ok
    fixed = [kind.fullest.needed for kind in make_plan(("train",), records).kinds]
    assert [kind.fullest.needed for kind in plan.kinds] == pytest.approx(fixed, rel=1e-3)


def test_a_rank_costs_little(records):
    assert all(record.cost["peak_bytes"] < 2**30 for record in records)


@pytest.fixture(scope="module")
def exact(runner):
    return run_exactly(runner, layers=True, microbatches=True)


def run_exactly(runner, *, layers, microbatches):
    """Return the records of both stages, of which layers or micro-batches are not extrapolated."""
    runner.command = read_command(COMMAND.split(), {})
    runner.exact_layers, runner.exact_microbatches = layers, microbatches
    try:
        return runner.run([0, 4])
    finally:
        runner.exact_layers = runner.exact_microbatches = False


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layers", "microbatches"),
    [(False, True), (True, False), (False, False)],
    ids=["layers", "micro-batches", "both"],
)
def test_extrapolated_bytes_and_traffic_are_those_of_the_whole_step(runner, exact, layers, microbatches):
    for record, whole_record in zip(run_exactly(runner, layers=layers, microbatches=microbatches), exact):
        one, other = whole(record), whole(whole_record)
        assert other.exact
        assert not one.exact
        assert sum(one.peak.values()) == pytest.approx(sum(other.peak.values()), rel=0.005)
        assert one.traffic.keys() == other.traffic.keys()
        for key, counted in other.traffic.items():
            assert one.traffic[key] == pytest.approx(counted, rel=0.005)


@pytest.mark.thorough
def test_a_plan_writes_its_reports_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(
        program,
        [
            "plan",
            "--plan-out",
            "reports",
            "--plan-ranks",
            "0",
            "--json",
            "--",
            *COMMAND.split(),
            "--save",
            "kept",
        ],
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["ranks_run"] == [0]
    assert sorted(os.listdir(tmp_path)) == ["reports"]
    assert sorted(os.listdir("reports")) == ["plan.html", "plan.json", "plan.md", "schedule.json"]


@pytest.mark.thorough
def test_a_world_that_no_layout_divides_is_one_sentence():
    command = read_command(COMMAND.replace("size 8", "size 6", 1).split(), {})
    with Ranks(command) as runner, pytest.raises(UserError, match="6") as caught:
        records_of(runner)
    assert "\n" not in str(caught.value)


def test_the_command_is_one_of_mindspeed_features_too():
    found = CliRunner().invoke(features, ["plan-scale", "--", "bash", "run.sh"])
    assert found.exit_code == 1
    assert "a shell script hides its command" in found.output


DENSE = MODEL.replace("--num-layers 6", "--num-layers 2") + " --global-batch-size 16"
FETCHED = "--context-parallel-size 4 --context-parallel-algo kvallgather_cp_algo"
RING = "--context-parallel-size 4 --context-parallel-algo megatron_cp_algo"
HEADS = "--context-parallel-size 4 --context-parallel-algo ulysses_cp_algo"
HYBRID = "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2"
GROUPED = "--group-query-attention --num-query-groups 2"
KEPT = "--context-parallel-kv-cache-policy"
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 12"
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
)
FORMS = {
    "fetched keys": (f"{FETCHED} --use-flash-attn --pre-tockens 20", {"CONTEXT": 2}),
    "experts": (EXPERTS, {"EXPERT_": 4}),
    "ring": (f"{RING} {GROUPED}", {"CONTEXT": 4}),
    "ring that keeps keys": (f"{RING} {KEPT} half", {"CONTEXT": 4}),
    "ring in two groups": (f"{RING} --use-cp-send-recv-overlap", {"CONTEXT": 2, "cp.second": 2}),
    "double ring": (f"{RING} --cp-window-size 2 --cp-grad-comm-dtype model", {"CONTEXT": 2, "cp.across": 2}),
    "heads": (f"{HEADS} {GROUPED}", {"CONTEXT": 1}),
    "heads exchanged again": (f"{HEADS} {KEPT} full", {"CONTEXT": 1}),
    "heads, gathered keys": (f"{HEADS} {GROUPED} --use-ulysses-allgather-kv", {"CONTEXT": 3}),
    "hybrid": (f"{HYBRID} {GROUPED} --tensor-model-parallel-size 2", {"cp.inner": 1, "cp.outer": 4}),
    "latent ring": (f"{RING} {LATENT}", {"CONTEXT": 4}),
    "latent hybrid": (f"{HYBRID} {LATENT}", {"cp.inner": 1, "cp.outer": 4}),
    "latent fetched keys": (f"{FETCHED} {LATENT}", {"CONTEXT": 2}),
}


ALWAYS = ("fetched keys", "hybrid")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough) for name in FORMS]
)
def test_closed_forms_of_split_sequences_and_experts_are_what_was_counted(runner, case):
    flags, wanted = FORMS[case]
    runner.command = read_command(f"mindspeed-train --fake-world-size 8 {DENSE} {flags}".split(), {})
    [record] = runner.run([5])
    [kind] = make_plan(("train",), [record]).kinds
    assert [form for form in kind.forms if form.difference] == []
    for group, forms in wanted.items():
        found = [form for form in kind.forms if group in form.expected.group]
        assert len(found) == forms


@pytest.mark.thorough
def test_more_tokens_on_the_experts_of_a_rank_are_more_bytes(runner):
    runner.command = read_command(f"mindspeed-train --fake-world-size 8 {DENSE} {EXPERTS}".split(), {})
    kept, peaks = {}, {}
    for skew in (None, 1.0, 1.5):
        runner.skew = skew
        [record] = runner.run([0])
        peak = whole(record)
        kept[skew] = peak.modules["decoder.layers.*.mlp.experts.local_experts.*.linear_fc1"]
        peaks[skew] = sum(peak.peak.values())
    runner.skew = None
    assert 1.5 * kept[None] == 1.5 * kept[1.0] == kept[1.5]
    assert peaks[None] == peaks[1.0] < peaks[1.5]


@pytest.mark.thorough
def test_an_interleaved_schedule_runs_in_the_order_of_the_timeline(runner):
    from mindspeed_tune.schedules import order

    flags = f"{LAYOUT} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 32"
    model = MODEL.replace("--num-layers 6", "--num-layers 8")
    runner.command = read_command(f"mindspeed-train --fake-world-size 8 {model} {flags}".split(), {})
    records = runner.run([0, 4])
    plan = make_plan(("train",), records)
    assert plan.order.differences == ()
    assert [form for kind in plan.kinds for form in kind.forms if form.difference] == []
    for record in records:
        assert record.layout.vpp == 4
        size = int(record.sizes["microbatch_group_size"])
        for run in record.runs:
            assert list(run.steps) == order(record.layout, record.stage, run.microbatches, size)


@pytest.mark.thorough
def test_one_group_of_micro_batches_tells_what_later_interleaved_stages_hold(runner):
    layout = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
    model = MODEL.replace("--num-layers 6", "--num-layers 8")
    command = f"mindspeed-train --fake-world-size 8 {model} {layout} --global-batch-size 16"
    runner.command = read_command(command.split(), {})
    plan = make_plan(("train",), records_of(runner))
    assert [kind.kind.stages for kind in plan.kinds] == [(0,), (1, 2), (3,)]
    runner.exact_microbatches = True
    try:
        [own] = runner.run([4])
    finally:
        runner.exact_microbatches = False
    assert (own.stage, own.microbatches, [run.microbatches for run in own.runs]) == (2, 4, [4])
    assert plan.stages()[2].exact == pytest.approx(sum(whole(own).peak.values()), rel=0.005)


@pytest.mark.thorough
def test_layers_of_a_chunk_follow_from_one_and_two_of_them(runner):
    flags = f"{LAYOUT} --num-layers-per-virtual-pipeline-stage 4 --global-batch-size 32"
    model = MODEL.replace("--num-layers 6", "--num-layers 16")
    runner.command = read_command(f"mindspeed-train --fake-world-size 8 {model} {flags}".split(), {})
    few = runner.run([0, 4])
    runner.exact_layers = True
    try:
        every = runner.run([0, 4])
    finally:
        runner.exact_layers = False
    assert [run.layers for run in few[0].runs] == [{"dense": 2}, {"dense": 2}, {"dense": 4}]
    assert [run.layers for run in every[0].runs] == [{}, {}]
    one, other = (make_plan(("train",), records) for records in (few, every))
    assert one.order.differences == ()
    for short, long in zip(one.stages(), other.stages(), strict=True):
        assert short.exact == pytest.approx(long.exact, rel=0.005)
    for short, long in zip(few, every):
        counted, expected = whole(short), whole(long)
        assert counted.traffic.keys() == expected.traffic.keys()
        for key, (calls, size) in expected.traffic.items():
            assert counted.traffic[key] == pytest.approx((calls, size))
        for name, numbers in expected.work.items():
            assert counted.work[name] == pytest.approx(numbers)


@pytest.mark.parametrize(
    ("flags", "reduced"),
    [
        ("--recompute-activation-function --recompute-activation-function-num-layers 1", True),
        ("--recompute-activation-function --recompute-activation-function-num-layers 2", False),
        ("--swap-attention --use-flash-attn --recompute-num-layers 2", False),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 9", True),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", False),
    ],
)
def test_layers_that_features_treat_unlike_others_are_counted_as_they_are(runner, flags, reduced):
    runner.command = read_command(
        f"mindspeed-train --fake-world-size 2 {MODEL} --global-batch-size 8 {flags}".split(), {}
    )
    [found] = runner.run([0])
    assert bool(found.runs[0].layers) is reduced
    runner.exact_layers = True
    try:
        [every] = runner.run([0])
    finally:
        runner.exact_layers = False
    one, other = whole(found), whole(every)
    assert sum(one.peak.values()) == pytest.approx(sum(other.peak.values()), rel=0.005)
    for name, numbers in other.work.items():
        products = {key: number for key, number in numbers.items() if key.startswith((MATRIX, ATTENTION))}
        assert {key: one.work[name].get(key) for key in products} == pytest.approx(products)


def test_replicas_that_are_compared_agree_and_are_gathered_as_ever(runner):
    flags = "--tensor-model-parallel-size 2 --qk-layernorm --test-mode --global-batch-size 16"
    model = MODEL.replace("RMSNorm", "LayerNorm")
    runner.command = read_command(f"mindspeed-train --fake-world-size 8 {model} {flags}".split(), {})
    [record] = runner.run([0])
    gathering = [call for call in record.calls if call.operation == "all_gather"]
    assert {record.groups[call.group].ranks.size for call in gathering} == {2, 4}


def test_a_later_stage_whose_gradients_are_exchanged_behind_the_passes_is_planned(runner):
    flags = f"{LAYOUT} --overlap-grad-reduce --overlap-param-gather --global-batch-size 16"
    model = MODEL.replace("--num-layers 6", "--num-layers 8")
    runner.command = read_command(f"mindspeed-train --fake-world-size 8 {model} {flags}".split(), {})
    [last] = runner.run([4])
    assert last.stage == 1
    phases = {call.phase for call in last.calls if call.operation == "reduce_scatter_tensor"}
    assert "gradients" in phases


@pytest.mark.parametrize("chunks", ["", "--num-layers-per-virtual-pipeline-stage 2"], ids=["plain", "chunks"])
def test_parameters_that_are_gathered_behind_passes_are_counted_once(runner, chunks):
    flags = f"{LAYOUT} {chunks} --overlap-grad-reduce --overlap-param-gather --global-batch-size 16"
    model = MODEL.replace("--num-layers 6", "--num-layers 8")
    runner.command = read_command(f"mindspeed-train --fake-world-size 8 {model} {flags}".split(), {})
    plan = make_plan(("train",), records_of(runner))
    assert plan.ok
    gathered = [form for kind in plan.kinds for form in kind.forms if "gather" in form.expected.operation]
    assert gathered
    assert [form for form in gathered if form.difference] == []


@pytest.mark.thorough
def test_a_rank_that_hangs_is_ended_and_named(tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text("import threading\nthreading.Event().wait()\n", encoding="utf-8")
    command = read_command(["python", str(script)], {})
    with WarmProcess(limit=1.0) as process, Ranks(command, process=process) as ranks:
        with pytest.raises(PlanError, match="rank 0 could not be planned: it hangs: no record after 1 s"):
            ranks.run([0])


KERNELS = "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb"


def test_the_kernels_of_cuda_are_planned_where_there_is_no_cuda(runner):
    command = f"mindspeed-train --fake-world-size 8 {DENSE} {LAYOUT} {KERNELS}"
    runner.command = read_command(command.split(), {})
    [cpu] = runner.run([0])
    runner.platform, before = "fake-cuda", runner.platform
    try:
        [cuda] = runner.run([0])
    finally:
        runner.platform = before
    one, other = (record.runs[0].work["0 forward"] for record in (cuda, cpu))
    # The same products and the same traffic; attention is one kernel in place of many blocks.
    assert one["operators"] < other["operators"]
    assert one["attention bfloat16"] == other["attention bfloat16"]
    assert cuda.static == cpu.static
    assert whole(cuda).traffic == whole(cpu).traffic
    modules = [whole(record).modules for record in (cpu, cuda)]
    for name in ("input_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1"):
        kept = [one[f"decoder.layers.*.{name}"] for one in modules]
        assert kept[0] == kept[1]


def refused(runner, command):
    """Return the sentence with which a command cannot be planned."""
    runner.command = read_command(command.split(), {})
    with pytest.raises(PlanError) as caught:
        runner.run([0])
    # Which stage raised it stands below.
    return str(caught.value).splitlines()[0]


@pytest.mark.thorough
def test_a_feature_that_needs_data_is_one_sentence(runner):
    documents = "--context-parallel-size 2 --reset-attention-mask --reset-position-ids"
    said = refused(runner, f"mindspeed-train --fake-world-size 2 {DENSE} {documents}")
    assert "what depends on the content of data cannot be planned" in said


@pytest.mark.thorough
def test_a_feature_without_fake_support_makes_a_plan_incomplete_by_name(runner):
    flags = "--reset-attention-mask --fix-sub-seq-length 16"
    runner.command = read_command(f"mindspeed-train --fake-world-size 2 {DENSE} {flags}".split(), {})
    plan = make_plan(("train",), runner.run([0]))
    assert list(plan.incomplete) == ["packed-documents"]
    assert "incomplete: packed-documents: does not state that it works on tensors" in markdown(plan)


MEGATRON = Path(__file__).parents[3] / "packages/mindspeed_megatron/tests/megatron_lm_host/fake"
SCRIPT_FLAGS = "--no-persist-layer-norm --use-cpu-initialization --use-distributed-optimizer"


def test_a_script_of_megatron_lm_is_planned_by_its_own_command_line(runner):
    script = f"torchrun --nproc-per-node 4 {MEGATRON / 'pretrain_fake.py'} {SCRIPT_FLAGS}"
    runner.command = read_command(f"{script} --tensor-model-parallel-size 2".split(), {})
    plan = make_plan(("train",), records_of(runner))
    assert str(plan.records[0].layout) == "tp2 dp2"
    assert plan.ok
    assert plan.order.unchecked == ()
    forms = [form for kind in plan.kinds for form in kind.forms]
    assert {form.expected.operation for form in forms} >= {"all_reduce", "reduce_scatter_tensor"}
    assert [form for form in forms if form.difference] == []


@pytest.mark.thorough
def test_a_model_that_depends_on_data_is_one_sentence_with_its_place(runner, tmp_path):
    text = (MEGATRON / "pretrain_fake.py").read_text(encoding="utf-8")
    by_data = text.replace(
        "    return GPTModel(", "    torch.rand(4).argmax().item()\n    return GPTModel("
    ).replace("Path(__file__).parent", f"Path({str(MEGATRON)!r})")
    assert by_data != text
    script = tmp_path / "pretrain_by_data.py"
    script.write_text(by_data, encoding="utf-8")
    said = refused(runner, f"PYTHONPATH={MEGATRON} torchrun --nproc-per-node 2 {script} {SCRIPT_FLAGS}")
    assert "the model depends on data, which a dry run does not have: " in said
    assert "pretrain_by_data.py:" in said


def test_contradictory_variables_are_one_sentence():
    with pytest.raises(UserError, match="--fake-world-size says 8 ranks and the variable WORLD_SIZE says 4"):
        read_command(COMMAND.split(), {"WORLD_SIZE": "4"})
