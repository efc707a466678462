"""Losses of layers, drops and norms inside a script are those of one process, with masked tokens."""

import os
import re
from pathlib import Path

import fake_training as fake
import pytest
import torch

from mindspeed_core.feature import hookimpl
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

MODEL = (
    *("--platform", "cpu", "--use-cpu-initialization", "--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--eod-mask-loss", "--train-iters", "1", "--untie-embeddings-and-output-weights"),
)
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--disable-bias-linear", "--swiglu"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.5"),
    *("--moe-z-loss-coeff", "0.5"),
)
PREDICTIONS = ("--mtp-num-layers", "1")
CASES = {"experts": EXPERTS, "predictions": PREDICTIONS}
PER_TOKEN = ("--calculate-per-token-loss",)
# As many tokens of a micro-batch count as of every other one, and half of them.
HALF = (
    ("(row[1:] % 5 != 0).float()", "(places[1:] % 2).float()"),
    (
        "labels=labels, packed_seq_params=packed",
        "labels=labels, packed_seq_params=packed, loss_mask=loss_mask",
    ),
)
SINKS = ("--softmax-type", "learnable", "--train-iters", "1")
DROPS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--disable-bias-linear", "--swiglu"),
    *("--moe-expert-capacity-factor", "0.5", "--moe-token-drop-policy", "position"),
)
CUT = re.compile(
    r"word_embeddings|output_layer|softmax_offset|linear_(qkv|fc1)\.(weight|bias)|linear_(proj|fc2)\.weight"
)
PADDED = "--moe-pad-expert-input-to-capacity"


class Seen:
    """Gradient norms, squares of gradients that ranks have in parts and in copies, and what routers say."""

    def __init__(self):
        self.norms, self.squares, self.maps = [], [], []

    @hookimpl(wrapper=True)
    def build_model(self):
        model = yield
        for chunk in model:
            for module in chunk.modules():
                if type(module).__name__ == "TopKRouter":
                    module.register_forward_hook(lambda _, inputs, result: self.maps.append(result))
        return model

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        squares = {True: 0.0, False: 0.0}
        for chunk in run.model:
            for name, parameter in chunk.named_parameters():
                squares[bool(CUT.search(name))] += parameter.main_grad.double().square().sum().item()
        self.squares.append((squares[True], squares[False]))
        update = yield
        self.norms.append(update.grad_norm)
        return update


def train(folder, runs):
    path = fake.changed_script(Path(folder) / f"half-{os.getpid()}.py", HALF)
    found = {}
    for name, flags in runs.items():
        seen = Seen()
        fake.adapt(extra=(seen,))
        fake.run_script(*flags, script=path)
        found[name] = seen
        fake.forget_run()
    return found


def _norms(folder, runs):
    return {name: seen.norms for name, seen in train(folder, runs).items()}


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("scripts"))
    one, two = {}, {}
    for case, flags in CASES.items():
        model = (*MODEL, *flags)
        # In one micro-batch a mean over its tokens is the mean over those of the step: a definition.
        one[case, "means"] = (*model, "--micro-batch-size", "4")
        for size in ("1", "2", "4"):
            one[case, size] = (*model, *PER_TOKEN, "--micro-batch-size", size)
        two[case, "dp 2"] = (*model, *PER_TOKEN)
        two[case, "tp 2"] = (*model, *PER_TOKEN, "--tensor-model-parallel-size", "2", "--sequence-parallel")
        if case == "experts":
            staged = (*model, "--pipeline-model-parallel-size", "2")
            two["staged", "means"] = (*staged, "--micro-batch-size", "4")
            two["staged", "pp 2"] = (*staged, *PER_TOKEN)
    return run_world(_norms, 1, folder, one)[0] | run_world(_norms, 2, folder, two)[0]


@pytest.mark.parametrize("case", [*CASES, "staged"])
def test_losses_of_layers_weigh_what_they_do_in_one_micro_batch_of_one_process(norms, case):
    wanted = norms[case, "means"]
    assert len(wanted) == 1
    found = {layout: norm for (name, layout), norm in norms.items() if name == case}
    assert found == {layout: pytest.approx(wanted, rel=2e-5) for layout in found}


def train_sinks(folder, *layout):
    (seen,) = train(folder, {"": (*MODEL, *SINKS, *layout)}).values()
    return seen.norms[0], *seen.squares[0]


def test_the_norm_counts_learnable_sinks_of_every_rank(tmp_path):
    ranks = run_world(train_sinks, 2, str(tmp_path), "--tensor-model-parallel-size", "2")
    (norm, first, copied), (_, second, _) = ranks
    assert norm == pytest.approx((first + second + copied) ** 0.5, rel=1e-6)


def train_dropping(folder):
    runs = {
        "chosen": (*MODEL, *DROPS[:-4]),
        "kept": (*MODEL, *DROPS),
        "padded": (*MODEL, *DROPS, "--moe-token-dispatcher-type", "alltoall", PADDED),
    }
    return {name: seen.maps[0] for name, seen in train(folder, runs).items()}


def test_experts_keep_the_first_of_their_tokens(tmp_path):
    found = run_world(train_dropping, 1, str(tmp_path))[0]
    chosen, (probs, kept), (padded_probs, padded) = found["chosen"][1], found["kept"], found["padded"]
    places = 8
    assert (chosen.sum(dim=0) > places).any()
    assert torch.equal(kept, chosen & (chosen.cumsum(dim=0) <= places))
    assert torch.equal(padded & (padded_probs > 0), kept)
    assert padded.sum(dim=0).tolist() == [places] * 4
    assert torch.equal(probs, padded_probs)
