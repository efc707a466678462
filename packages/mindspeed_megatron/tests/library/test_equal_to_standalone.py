"""A loop of one's own with a session trains, to the bit, what the standalone host trains."""

import os
from importlib.metadata import version

import pytest
from own_loop import STEPS, OwnLoop, both, described, of_the_batches, recorded
from packaging.version import Version

from mindspeed_core import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing import run_world

LLAMA = ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--no-bias-swiglu-fusion")
KERNELS = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
SPLIT = ("--context-parallel-size", "2", "--position-embedding-type", "rope")
DOCUMENTS = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-router-topk", "2", "--num-layers", "2")
WHOLE = (*EXPERTS, *TP2, "--expert-tensor-parallel-size", "1", "--disable-bias-linear", "--swiglu")
SPREAD = (
    *(*EXPERTS, "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"),
    *(
        "--disable-bias-linear",
        "--swiglu",
        "--moe-grouped-gemm",
        "--moe-shared-expert-intermediate-size",
        "32",
    ),
)
PP2 = ("--pipeline-model-parallel-size", "2")

EACH_LAYER = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "2")
LATENT = (
    *"--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8".split(),
    *("--v-head-dim", "12", "--qk-layernorm", "--position-embedding-type", "rope"),
)
QWEN3 = (
    *(*SPREAD[:-2], "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--qk-layernorm"),
    *("--group-query-attention", "--num-query-groups", "2"),
)
DEEPSEEK = (
    *(*SPREAD, "--normalization", "RMSNorm", *LATENT, "--moe-layer-freq", "[0,1]"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *(
        "--moe-router-num-groups",
        "2",
        "--moe-router-group-topk",
        "1",
        "--moe-router-topk-scaling-factor",
        "2.5",
    ),
)

ALONE = {
    "nothing": ((), ()),
    "kernels": (LLAMA, KERNELS),
    "modules by role, with a group": ((), ("--toy-groups", "--toy-attention-scale", "0.5")),
    "a built instance": ((), ("--toy-embedding-scale", "2.0")),
    "an inner optimizer": (("--optimizer", "toy-lion"), ()),
    "split main parameters": (("--bf16", "--grad-reduce-in-bf16"), ("--reuse-fp32-param",)),
    "swapped state": ((), ("--swap-optimizer",)),
    "a batch": (("--vocab-size", "16"), ("--toy-documents", "7")),
    "a loss": ((), ("--toy-token-weights", "uniform")),
    "an added loss": ((), ("--acme-z-loss", "0.1")),
    "a snapshot beside the update": ((), ("--toy-snapshot",)),
    "numbers": ((), ("--toy-numbers",)),
    "parts computed again": ((), ("--recompute-activation-function", "--recompute-norm")),
    "dense layers computed again": (
        ("--recompute-granularity", "selective", "--recompute-modules", "mlp", "--disable-bias-linear"),
        ("--recompute-norm",),
    ),
    "swapped attention": (LLAMA, (*KERNELS, "--swap-attention", "--swap-min-bytes", "1024")),
    "swapped inputs": (BLOCK, ("--swap-layer-input", "--swap-min-bytes", "1024")),
    "a profiler": ((), ("--profile", "--profile-step-start", "1", "--profile-step-end", "2")),
}
TOGETHER = {
    "kernels, tensor and sequence parallel": ((*TP2, *LLAMA), KERNELS),
    "an added loss, tensor parallel": (TP2[:2], ("--acme-z-loss", "0.1")),
    "gradients over another group": (TP2[:2], ("--toy-norm-gradients",)),
    "shards exchanged after the update": (TP2[:2], ("--toy-exchange-mlp",)),
    "parts computed again, tensor parallel": (
        (*TP2, *LLAMA),
        (*KERNELS, "--recompute-activation-function", "--recompute-norm", "--recompute-norm-num-layers", "2"),
    ),
    "swapped attention, pipeline": (
        (*PP2, *LLAMA),
        (*KERNELS, "--swap-attention", "--swap-min-bytes", "1024", "--swap-prefetch-depth", "2"),
    ),
    "layers counted over a rank": ((*PP2, *BLOCK), ("--enable-recompute-layers-per-pp-rank",)),
    "kernels, pipeline": ((*PP2, *LLAMA), KERNELS),
    "another boundary": (PP2, ("--toy-double-boundary",)),
    "another schedule": (PP2, ("--toy-sequential-schedule",)),
    "a zero-bubble schedule": (PP2, ("--pipeline-schedule", "zb-h1")),
    "a schedule on another placement": (
        (*PP2, "--num-virtual-stages-per-pipeline-rank", "2", "--untie-embeddings-and-output-weights"),
        ("--pipeline-schedule", "zbv"),
    ),
    "products in parts": ((*TP2, *LLAMA), ("--use-ascend-coc", "--coc-parallel-num", "2")),
    "fused products": ((*TP2, *LLAMA), ("--use-ascend-mc2",)),
    "a grid of ranks": (
        (*TP2[:2], *LLAMA, "--position-embedding-type", "rope"),
        ("--tp-2d", "--tp-x", "1", "--tp-y", "2"),
    ),
    "layers computed again without sums": (
        (*TP2, *LLAMA, *EACH_LAYER),
        ("--optimize-recomp-communication-level", "2"),
    ),
    "losses without whole logits": ((*TP2, *LLAMA), ("--lm-loss-chunks", "4")),
    "an embedding with masks": ((*TP2, *LLAMA), ("--embedding-with-masks", "--mlp-layer-fusion")),
    "optimizer state in slices, without gloo": (
        ("--use-distributed-optimizer",),
        ("--disable-gloo-group", "--hccl-slice-size", "1000"),
    ),
    "planned linears whose weights learn later": (
        (*PP2, *LLAMA),
        ("--use-ascend-coc", "--coc-mode", "1", "--pipeline-schedule", "zb-h1"),
    ),
    "layers of stages": (PP2, ("--num-layer-list", "3,1")),
    "data parallel": ((), ("--toy-groups", "--toy-snapshot")),
    "experts": (WHOLE, ()),
    "grouped experts": ((*WHOLE, "--moe-grouped-gemm"), ()),
    "overlapped experts": ((*SPREAD, "--moe-alltoall-overlap-comm"), ()),
    "experts side by side": ((*SPREAD, "--moe-fb-overlap"), ()),
    "a former name of a dispatcher": ((*SPREAD, "--moe-token-dispatcher-type", "alltoall_seq"), ()),
    "fused permutation": (SPREAD, ("--use-fused-moe-token-permute-and-unpermute",)),
    "Qwen3's experts": (QWEN3, ("--moe-alltoall-overlap-comm",)),
    "DeepSeek-V3's experts": (DEEPSEEK, ("--moe-alltoall-overlap-comm", "--moe-zero-memory", "level0")),
    "rows that travel once": (SPREAD, ("--moe-zerc", "--moe-load-log", os.devnull)),
    "moving experts": (SPREAD, ("--enable-expert-placement", "--expert-placement-freq", "1")),
    "copied experts": (
        SPREAD,
        (
            *("--balanced-moe-experts", "--balanced-moe-hot-expert-num", "1"),
            *("--trans-hot-expert-group-num", "1"),
        ),
    ),
    "a ring, dropout": ((*SPLIT, "--attention-dropout", "0.1"), ()),
    "heads, documents": (SPLIT, ("--context-parallel-algo", "ulysses_cp_algo", *DOCUMENTS)),
}
if Version(version("megatron-core")) >= Version("0.16"):
    # An older layer specification names no router.
    TOGETHER["balanced devices, weighed by tokens"] = (
        (*SPREAD, "--calculate-per-token-loss"),
        ("--moe-device-level-aux-loss-coeff", "0.5", "--moe-comm-aux-loss-coeff", "0.2"),
    )


def train_all(cases):
    return {name: both(*flags) for name, flags in cases.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, asked_for):
    folder = tmp_path_factory.mktemp("traces")
    wanted = {"a profiler", "data parallel", "kernels", *asked_for("name")}
    alone = {
        name: (model, (*features, "--profile-save-path", str(folder)) if name == "a profiler" else features)
        for name, (model, features) in ALONE.items()
        if name in wanted
    }
    together = {name: case for name, case in TOGETHER.items() if name in wanted}
    results = {name: [result] for name, result in run_world(train_all, 1, alone)[0].items()}
    for found in run_world(train_all, 2, together):
        for name, result in found.items():
            results.setdefault(name, []).append(result)
    return results, folder


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_the_losses_are_those_of_the_standalone_host(trained, name):
    for expected, losses, *_ in trained[0][name]:
        assert losses == expected
        assert len(set(losses)) == len(losses)


def train_means(flags):
    plain = ("--acme-z-loss", "0.1")
    return both(flags, plain, mean=True)[:2], both(flags, (), mean=True)[1]


@pytest.mark.parametrize(("flags", "size"), [((), 1), (SPLIT, 2)], ids=["one process", "split sequences"])
def test_a_loss_that_is_a_mean_gets_the_same_addition(flags, size):
    for (expected, losses), without in run_world(train_means, size, flags):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses[1:] != pytest.approx(without[1:], rel=1e-4)


def train_listed(mean):
    """The same samples in equal micro-batches, and in micro-batches of a list in the own loop."""
    flags = (*PP2, "--micro-batch-size", "2", "--global-batch-size", "8", "--weight-decay", "0")
    with recorded(*flags) as (memory, run):
        args = run.args
    _, configs = described(*flags)
    listed = [*of_the_batches(args), "--optimized-mbs-list", "1,3,3,1"]
    with activate(listed, platform="cpu", configs=configs) as session:
        own = OwnLoop(session, configs, memory, args, mean)
        batches = memory.batches[0]
        per_step = len(batches) // STEPS
        steps = [[batches[i : i + per_step]] for i in range(0, len(batches), per_step)]
        losses = [own.step(step, args)["lm loss"] for step in steps]
    destroy_megatron_state()
    return memory.losses, losses


@pytest.mark.parametrize("mean", [False, True], ids=["sums", "means"])
def test_micro_batches_of_a_list_train_what_equal_ones_do(mean):
    for expected, losses in run_world(train_listed, 2, mean):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert len(losses) == STEPS


def of_features(numbers):
    """Without what depends on the process's memory, and on the host's own name of the loss."""
    left_out = ("toy memory share", "toy perplexity")
    return {key: value for key, value in numbers.items() if key.startswith("toy") and key not in left_out}


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_features_log_the_same_numbers(trained, name):
    for _, _, theirs, ours, _ in trained[0][name]:
        assert [of_features(step) for step in ours] == [of_features(step) for step in theirs]


def test_a_profiler_wrote_the_chosen_step(trained):
    assert [path for path in trained[1].rglob("*") if path.is_file()]


def test_the_report_says_what_features_did(trained):
    report = trained[0]["kernels"][0][-1]
    assert report["modules"] == {"flash-attn": 4, "fused-rmsnorm": 9, "fused-swiglu": 4}
    assert report["stages"]["build_layer_spec"] == ["flash-attn", "fused-rmsnorm", "fused-swiglu"]
    assert trained[0]["data parallel"][1][-1]["groups"]["toy.forward"] == [[0, 1], [0, 1]]
