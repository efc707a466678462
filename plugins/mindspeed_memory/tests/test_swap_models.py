"""Sub-models that swap: the list, what is refused, and which layers are changed."""

import logging

import pytest

from mindspeed_core.activation import activate, prepare
from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.features.proofs import FUSED_LLAMA, PP2
from mindspeed_memory.names import models_of
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

INSTALLED = Registry.discover()


def test_a_list_names_sub_models_and_their_layers():
    assert models_of("decoder,4; vision_model , 2;") == {"decoder": 4, "vision_model": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decoder", "is no name and number of layers"),
        ("decoder,x", "is no name and number of layers"),
        (",4", "is no name and number of layers"),
        ("decoder,1;decoder,2", "decoder is named twice"),
        (";", "names no sub-model"),
    ],
)
def test_what_is_no_list_is_refused_with_its_flag(text, message):
    with pytest.raises(PlanError) as error:
        prepare(
            training_flags(("--use-flash-attn", "--swap-models", text), 1, INSTALLED),
            platform="cpu",
            registry=INSTALLED,
            host="standalone",
        )
    assert f"--swap-models {text}: " in str(error.value)
    assert message in str(error.value)


def test_full_recomputation_beside_it_is_refused():
    block = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
    flags = training_flags(("--use-flash-attn", "--swap-models", "decoder,1", *block), 1, INSTALLED)
    with pytest.raises(PlanError, match="both say which layers swap; drop one of the two"):
        prepare(flags, platform="cpu", registry=INSTALLED, host="standalone")


def changed(models):
    flags = training_flags((*FUSED_LLAMA, *PP2, "--swap-models", models), 1, INSTALLED)
    with activate(flags, platform="cpu", registry=INSTALLED, host="standalone") as session:
        run = loop.setup(session)
        layers = unwrap(run.model[0]).decoder.layers
        found = [layer.layer_number for layer in layers if "forward" in vars(layer.self_attention)]
        loop.teardown(session)
    return found


def all_changes():
    with pytest.raises(UserError) as error:
        changed("encoder,1")
    return changed("decoder,3"), str(error.value)


def test_layers_count_over_the_stages_and_unknown_names_are_refused():
    first, second = run_world(all_changes, 2)
    assert (first[0], second[0]) == ([1, 2], [3])
    assert first[1] == second[1]
    assert first[1].startswith(
        "--swap-models encoder: no part of the model with layers has this name; there are "
    )
    assert "decoder" in first[1]


def said():
    """Train two steps in which every tensor is small; return what is logged."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger("mindspeed_core").addHandler(handler)
    flags = training_flags((*FUSED_LLAMA, "--swap-attention"), 2, INSTALLED)
    with activate(flags, platform="cpu", registry=INSTALLED, host="standalone") as session:
        run = loop.setup(session)
        for _ in range(2):
            session.call("train_step", run=run)
        loop.teardown(session)
    return [record.getMessage() for record in records]


def test_a_run_that_swaps_nothing_since_all_is_small_says_so_once():
    ((*messages,),) = run_world(said, 1)
    (message,) = (one for one in messages if one.startswith("--swap-attention"))
    assert message == (
        "--swap-attention: the chosen modules save nothing to swap; of what they save some is below "
        "--swap-min-bytes"
    )
