"""Micro-batches for a loop of one's own: those of mindspeed-train, and experts without padding."""

from itertools import islice

import pytest
import torch

from mindspeed_core import activate
from mindspeed_core.errors import DataError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_models.data.batches import instruction_batches
from mindspeed_models.features.instruction_proofs import write_samples
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.worlds import run_world
from mindspeed_train.interface import setup

INSTALLED = Registry.discover()
FLAGS = ("--is-instruction-dataset", "--split", "1,0,0", "--seq-length", "128", "--micro-batch-size", "2")
OPTIONS = {"seq_length": 128, "micro_batch_size": 2, "vocab_size": 128}
KINDS = {
    "fixed": ((), {}),
    "variable": (("--variable-seq-lengths",), {"variable": True}),
    "grouped": (
        ("--variable-seq-lengths", "--group-by-length"),
        {"variable": True, "group_by_length": 4, "num_samples": 80},
    ),
    "packed": (("--pack-samples", "--use-flash-attn"), {"pack": True}),
    "aligned": (("--keep-last-token",), {"keep_last_token": True}),
}
COUNT = 10
"""Micro-batches: more than an epoch of eight samples."""


def ours(folder):
    """The micro-batches of the standalone host, and those of the function."""
    found = {}
    for name, (flags, options) in KINDS.items():
        line = training_flags((*FLAGS, "--data-path", f"{folder}/samples", *flags), 20, INSTALLED)
        try:
            with activate(line, platform="cpu", host="standalone") as session:
                run = setup(session)
                theirs = list(islice(run.data.train[0], COUNT))
        finally:
            destroy_megatron_state()
        found[name] = (
            theirs,
            list(islice(instruction_batches(f"{folder}/samples", **OPTIONS, **options), COUNT)),
        )
    found["experts"] = {
        name: library_step(folder, variable=name == "variable") for name in ("fixed", "variable")
    }
    return found


def library_step(folder, *, variable):
    """Loss and squared gradients of a step with experts in a library session."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.01,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    with activate({}, configs=[config], platform="cpu") as session:
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234)
        config = session.config(config)
        model = session.model(
            GPTModel(
                config,
                session.layer_spec(config),
                vocab_size=128,
                max_sequence_length=128,
                position_embedding_type="rope",
            )
        )
        total = tokens = 0.0
        for batch in islice(instruction_batches(f"{folder}/samples", **OPTIONS, variable=variable), 2):
            losses = model(
                batch["tokens"],
                batch["position_ids"],
                None,
                labels=batch["labels"],
                padding_mask=batch["padding_mask"],
            )
            total = total + (losses * batch["loss_mask"]).sum()
            tokens += float(batch["loss_mask"].sum())
        (total / tokens).backward()
        squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
        return float(total / tokens), squares


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("samples")
    write_samples(place)
    return str(place)


@pytest.fixture(scope="module")
def found(folder):
    return run_world(ours, 1, folder, timeout=200)[0]


@pytest.mark.parametrize("name", KINDS)
def test_micro_batches_are_those_of_the_training_program(found, name):
    theirs, own = found[name]
    assert len(theirs) == len(own) == COUNT
    for one, other in zip(theirs, own):
        assert sorted(one) == sorted(other)
        assert all(torch.equal(one[field], other[field]) for field in one)


def test_padding_reaches_no_expert_of_a_library_session(found):
    fixed, variable = found["experts"]["fixed"], found["experts"]["variable"]
    assert variable == pytest.approx(fixed, rel=1e-5)


def test_ranks_share_the_micro_batches(folder):
    whole = list(islice(instruction_batches(f"{folder}/samples", **OPTIONS), 4))
    for rank in (0, 1):
        part = list(islice(instruction_batches(f"{folder}/samples", **OPTIONS, dp_rank=rank, dp_size=2), 2))
        assert all(
            torch.equal(one["tokens"], whole[2 * index + rank]["tokens"]) for index, one in enumerate(part)
        )


def test_a_library_session_refuses_the_flag():
    with pytest.raises(PlanError, match="does not work in the training loop of host library"):
        activate(["--is-instruction-dataset"], host="library", platform="cpu", registry=INSTALLED)


def test_what_contradicts_itself_or_is_not_there_is_refused(folder):
    with pytest.raises(ValueError, match="leave variable and group_by_length out"):
        instruction_batches(f"{folder}/samples", **OPTIONS, pack=True, variable=True)
    with pytest.raises(DataError, match="absent_packed_input_ids_document"):
        instruction_batches(f"{folder}/absent", **OPTIONS)
    with pytest.raises(DataError, match="the tokenizer has 50 ids"):
        next(instruction_batches(f"{folder}/samples", **{**OPTIONS, "vocab_size": 50}))
