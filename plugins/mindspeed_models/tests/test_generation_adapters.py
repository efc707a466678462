"""Several adapters beside one base: each request computes with the one that it names."""

import pytest
import torch
from generation_runs import generations
from test_generation import LONG, NEW, of_transformers
from tiny_models import make, oracle

from mindspeed_testing import run_world

peft = pytest.importorskip("peft")
TARGETS = {"poet": ["q_proj", "k_proj", "v_proj", "o_proj"], "clerk": ["gate_proj", "up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A base, adapters of other linears and ranks, and peft's tokens with each."""
    root = tmp_path_factory.mktemp("adapters")
    make("llama", root / "base")
    expected = {"": of_transformers(oracle("llama"), LONG, max_new_tokens=NEW, do_sample=False)}
    for number, (name, targets) in enumerate(TARGETS.items()):
        torch.manual_seed(number)
        config = peft.LoraConfig(
            r=4 + 2 * number,
            lora_alpha=3,
            target_modules=targets,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(oracle("llama"), config).eval()
        model.save_pretrained(root / name)
        expected[name] = of_transformers(model, LONG, max_new_tokens=NEW, do_sample=False)
    return root, expected


@pytest.mark.parametrize("options", [{}, pytest.param({"tp": 2}, marks=pytest.mark.thorough)], ids=str)
def test_a_request_computes_with_the_adapter_that_it_names(adapters, options):
    root, expected = adapters
    opened = {**options, "lora": [str(root / name) for name in TARGETS]}
    calls = [
        ("ids", (LONG,), {"max_new_tokens": NEW, "adapter": name}) for name in ("clerk", "", "poet", "clerk")
    ]
    calls += [("ids", (LONG,), {"max_new_tokens": NEW}), ("ids", (LONG,), {"adapter": "poem"})]
    (*_, (found,)) = run_world(generations, 2 if options else 1, str(root / "base"), [opened], calls)
    *tokens, refused = found
    assert tokens == [expected[name] for name in ("clerk", "", "poet", "clerk", "poet")]
    assert len({tuple(each) for each in expected.values()}) == 3
    assert "adapter 'poem' is not loaded; did you mean 'poet'?" in refused
