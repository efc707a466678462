"""megatron-core's checkpoint that drops its output, repaired for environments without TransformerEngine."""

import pytest
import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

from mindspeed_core.activation import activate
from mindspeed_testing import run_world
from mindspeed_testing.verify import assert_equivalent

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--swiglu", "--disable-bias-linear"),
    *("--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall", "--num-layers", "2"),
)
LATENT = (
    *"--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8".split(),
    *("--v-head-dim", "12", "--q-lora-rank", "16", "--position-embedding-type", "rope"),
)


def checkpointed(learns):
    """Square what is checkpointed; return the gradient, and bytes of the output after forward."""
    x = torch.linspace(-1, 1, 8, requires_grad=learns)
    checkpoint = CheckpointWithoutOutput()
    inner = checkpoint.checkpoint(torch.tanh, x)
    result = inner * inner
    checkpoint.discard_output_and_register_recompute(result)
    kept = inner.untyped_storage().nbytes()
    if learns:
        result.sum().backward()
    return x.grad, kept


def checkpoint_in_sessions():
    found = []
    for _ in range(2):
        with activate(["--platform", "cpu"]):
            found.append((checkpointed(True), checkpointed(False)))
    return found, CheckpointWithoutOutput().fp8


@pytest.fixture(scope="module")
def found():
    return run_world(checkpoint_in_sessions, 1)[0]


def test_the_output_is_dropped_and_computed_again(found):
    x = torch.linspace(-1, 1, 8)
    for (gradient, kept), _ in found[0]:
        torch.testing.assert_close(gradient, 2 * torch.tanh(x) * (1 - torch.tanh(x) ** 2))
        assert kept == 0


def test_an_output_whose_consumer_learns_nothing_is_kept(found):
    for _, (gradient, kept) in found[0]:
        assert gradient is None
        assert kept == 32


def test_closing_a_session_leaves_the_class_as_it_was(found):
    assert found[1] is True


@pytest.mark.parametrize(
    ("model", "module"),
    [
        (DROPOUT, "layernorm"),
        pytest.param(EXPERTS, "moe_act", marks=pytest.mark.thorough),
        pytest.param(LATENT, "mla_up_proj", marks=pytest.mark.thorough),
    ],
    ids=["layernorm", "moe_act", "mla_up_proj"],
)
def test_selective_recomputation_changes_nothing(model, module):
    assert_equivalent((*model, *SELECTIVE, module), model, tolerance=1e-6, platform="cpu")
