"""Losses of layers weigh what they do in one process, in a loop of one's own with masked tokens."""

from dataclasses import replace

import pytest
import torch
from own_loop import OwnLoop, described, of_the_batches, recorded

from mindspeed_core import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.worlds import run_world

MODEL = tuple(
    "--num-layers 2 --hidden-size 32 --weight-decay 0 --untie-embeddings-and-output-weights".split()
)
EXPERTS = (
    *(*MODEL, "--num-experts", "4", "--moe-ffn-hidden-size", "32", "--disable-bias-linear", "--swiglu"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.5"),
    *("--moe-z-loss-coeff", "0.5", "--calculate-per-token-loss"),
)
REENTERED = (
    *(
        *MODEL,
        "--mtp-num-layers",
        "1",
        "--num-experts",
        "4",
        "--moe-ffn-hidden-size",
        "32",
        "--disable-bias-linear",
    ),
    *("--swiglu", "--moe-expert-capacity-factor", "0.5", "--moe-token-drop-policy", "position"),
)
SINKS = (*MODEL, "--softmax-type", "learnable")


class Masked(OwnLoop):
    """Keeps the norm of each step."""

    def _step(self, batches, args):
        half = torch.arange(args.seq_length) % 2
        masked = [
            [replace(batch, loss_mask=batch.loss_mask * half.to(batch.loss_mask)) for batch in part]
            for part in batches
        ]
        step = self.optimizer.step

        def remembered():
            result = step()
            self.norm = float(result[1])
            return result

        self.optimizer.step = remembered
        return super()._step(masked, args)


def train(*flags):
    with recorded(*flags) as (memory, run):
        args = run.args
    _, configs = described(*flags)
    with activate(of_the_batches(args), platform="cpu", configs=configs) as session:
        own = Masked(session, configs, memory, args)
        number = len(memory.batches[0]) // 3
        own.step([memory.batches[0][:number]], args)
        squares = [
            (bool(getattr(parameter, "tensor_model_parallel", False)), name)
            for name, parameter in own.chunks[0].named_parameters()
            if "softmax_offset" in name
        ]
    destroy_megatron_state()
    return own.norm, squares


def train_all(cases):
    return {name: train(*flags) for name, flags in cases.items()}


@pytest.fixture(scope="module")
def trained():
    one = {
        "one micro-batch": (*EXPERTS[:-1], "--micro-batch-size", "4"),
        "micro-batches": (*EXPERTS, "--micro-batch-size", "1"),
        "larger ones": (*EXPERTS, "--micro-batch-size", "2"),
    }
    two = {
        "data parallel": EXPERTS,
        "tensor parallel": (*EXPERTS, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        "sinks": (*SINKS, "--tensor-model-parallel-size", "2"),
    }
    return run_world(train_all, 1, one)[0] | run_world(train_all, 2, two)[0]


def test_losses_of_experts_weigh_what_they_do_in_one_micro_batch(trained):
    wanted = trained["one micro-batch"][0]
    norms = {name: norm for name, (norm, _) in trained.items() if name != "sinks"}
    assert norms == {name: pytest.approx(wanted, rel=2e-5) for name in norms}


def test_sinks_of_every_rank_are_marked_as_parts(trained):
    marks = trained["sinks"][1]
    assert len(marks) == 2
    assert all(marked for marked, _ in marks)


def leave_and_enter():
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer.moe import router

    # From megatron-core 0.17 on a function of its own computes the losses of predictions.
    shift = "roll_tensor" if hasattr(gpt_model, "roll_tensor") else "process_mtp_loss"

    def functions():
        return getattr(gpt_model, shift), router.apply_router_token_dropping

    with recorded(*REENTERED) as (memory, run):
        args = run.args
    native = functions()
    _, configs = described(*REENTERED)
    session = activate(of_the_batches(args), platform="cpu", configs=configs)
    session.close(force=True)
    changed = []
    with session:
        own = Masked(session, configs, memory, args)
        changed.append(functions())
    left = functions()
    with session:
        changed.append(functions())
    destroy_megatron_state()
    del own
    return [all(one is not other for one, other in zip(found, native)) for found in changed], left == native


def test_a_session_that_is_entered_again_changes_the_same_functions():
    assert run_world(leave_and_enter, 1)[0] == ([True, True], True)
