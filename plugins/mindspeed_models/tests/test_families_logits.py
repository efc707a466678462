"""Models of every family give transformers' logits, loaded straight from the files under several layouts."""

import json
import re
from pathlib import Path

import pytest
import torch
from loaded_logits import logits_of, losses_of
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, make

from mindspeed_testing import run_world
from mindspeed_testing.small_llama import write_small_llama

TP2 = ["--tensor-model-parallel-size", "2"]
SP = [*TP2, "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]
BOTH = [*SP, *PP2]
WHOLE_EXPERTS = ["--expert-tensor-parallel-size", "1"]
ROUTED = {"qwen3-moe", "mixtral", "deepseek-v2", "deepseek-v2-groups", "deepseek-v3"}
FEW = ("llama", "deepseek-v3", "deepseek-v2-groups", "baichuan-13b")
LATER = [name for name in MODELS if name not in FEW]
BOUND = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def of(name):
        if not (root / name).exists():
            make(name, root / name)
        return root / name

    return of


def difference(folder, results):
    """Return the largest difference of logits, relative to the largest logit."""
    reference = torch.load(folder / "reference.pt")["logits"]
    texts = [each for each in results if isinstance(each, str)]
    assert not texts, texts[0]
    (logits, *_) = [each for each in results if each is not None]
    assert logits.shape == reference.shape
    return float((logits - reference).abs().max() / reference.abs().max())


def old_spelling(folder, target):
    """Copy a model with the config.json that older releases wrote."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters", None) or {}
    config["torch_dtype"] = config.pop("dtype", "float32")
    if "rope_theta" in rope:
        config["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    target.mkdir()
    for name in ("model.safetensors", "reference.pt"):
        (target / name).symlink_to(folder / name)
    (target / "config.json").write_text(json.dumps(config))
    return target


def swap(names, tensors, first, second):
    """Exchange two ranges of rows, or two tensors."""
    a, b = tensors[names[0]][first].clone(), tensors[names[-1]][second].clone()
    tensors[names[0]][first], tensors[names[-1]][second] = b, a


def mutated(folder, target, change):
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "reference.pt"):
        (target / name).symlink_to(folder / name)
    return target


WHOLE = slice(None)
LAYER = "model.layers.1."
ATTENTION, MLP = LAYER + "self_attn.", LAYER + "mlp."
MUTATIONS = {
    "groups of keys swapped": (
        "llama",
        lambda t: swap([ATTENTION + "k_proj.weight"], t, slice(0, 16), slice(16, 32)),
    ),
    "gate and up swapped": (
        "llama",
        lambda t: swap([MLP + "gate_proj.weight", MLP + "up_proj.weight"], t, WHOLE, WHOLE),
    ),
    "layers shifted": (
        "llama",
        lambda t: swap([MLP + "down_proj.weight", "model.layers.2.mlp.down_proj.weight"], t, WHOLE, WHOLE),
    ),
    "a bias of queries dropped": ("qwen2", lambda t: t[ATTENTION + "q_proj.bias"].zero_()),
    "a bias of the projection dropped": ("internlm", lambda t: t[ATTENTION + "o_proj.bias"].zero_()),
}


SECOND, KEYS = (
    re.compile(r"(.*\b(?:layers|h)\.)1(\..*)"),
    re.compile(r"k_proj|kv_b_proj|W_pack|query_key_value"),
)


def layers_exchanged(tensors):
    """Exchange the second and third layer."""
    for name in [*tensors]:
        if found := SECOND.fullmatch(name):
            swap([name, f"{found[1]}2{found[2]}"], tensors, WHOLE, WHOLE)


def keys_exchanged(tensors):
    """Exchange the halves of a layer's keys: groups, heads, or parts of the one there is."""
    (name,) = (
        each for each in tensors if SECOND.fullmatch(each) and KEYS.search(each) and each.endswith("weight")
    )
    rows = len(tensors[name])
    # Queries come before keys where they are in one tensor.
    first, rows = (rows // 3, rows // 3) if "W_pack" in name else (0, rows)
    middle = first + rows // 2
    swap([name], tensors, slice(first, middle), slice(middle, first + rows))


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Few families in one process, an old config.json, and models in which something is wrong."""
    root = tmp_path_factory.mktemp("changed")
    cases = {name: folder(name) for name in FEW}
    cases["old spelling"] = old_spelling(folder("deepseek-v3"), root / "old")
    for index, (name, (family, change)) in enumerate(MUTATIONS.items()):
        cases[name] = mutated(folder(family), root / str(index), change)
    (found,) = run_world(logits_of, 1, [(str(path), []) for path in cases.values()])
    return {name: difference(path, [logits]) for (name, path), logits in zip(cases.items(), found)}


@pytest.mark.parametrize("name", [*FEW, "old spelling"])
def test_logits_are_those_of_transformers(alone, name):
    assert alone[name] <= BOUND


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_mapping_shows_in_the_logits(alone, name):
    assert alone[name] > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("change", [layers_exchanged, keys_exchanged], ids=lambda change: change.__name__)
def test_a_wrong_mapping_shows_in_the_logits_of_every_family(folder, tmp_path, change):
    paths = [mutated(folder(name), tmp_path / name, change) for name in MODELS]
    (found,) = run_world(logits_of, 1, [(str(path), []) for path in paths], timeout=900)
    sizes = {path.name: difference(path, [logits]) for path, logits in zip(paths, found)}
    assert {name: size for name, size in sizes.items() if size < 1e-3} == {}


@pytest.mark.thorough
def test_logits_of_all_other_families_are_those_of_transformers(folder, tmp_path):
    paths = [folder(name) for name in LATER]
    paths += [old_spelling(folder(name), tmp_path / name) for name in LATER]
    (found,) = run_world(logits_of, 1, [(str(path), []) for path in paths], timeout=900)
    wrong = {path.name: difference(path, [logits]) for path, logits in zip(paths, found)}
    assert {name: size for name, size in wrong.items() if size > BOUND} == {}


@pytest.mark.thorough
def test_every_family_gives_the_same_logits_on_two_ranks(folder):
    cases = [(name, layout) for name in MODELS for layout in (SP, PP2)]
    # Routers with tensor parallelism need sequence parallelism too.
    cases += [(name, EP2 if name in ROUTED else TP2) for name in MODELS]
    given = [(str(folder(name)), layout) for name, layout in cases]
    results = zip(*run_world(logits_of, 2, given, timeout=1800))
    wrong = {
        (name, *layout): size
        for (name, layout), found in zip(cases, results)
        if (size := difference(folder(name), found)) > BOUND
    }
    assert wrong == {}


@pytest.fixture(scope="module")
def on_four_ranks(folder, tmp_path_factory):
    """Return the differences of models on two tensor-parallel ranks in each of two pipeline stages."""
    root = tmp_path_factory.mktemp("spelled")

    def of(names, *, old):
        paths = [old_spelling(folder(name), root / name) if old else folder(name) for name in names]
        results = zip(*run_world(logits_of, 4, [(str(path), BOTH) for path in paths], timeout=1800))
        return {
            name: difference(path, found) for name, path, found in zip(names, paths, results, strict=True)
        }

    return of


def test_logits_are_those_of_transformers_under_both_kinds_of_parallelism(on_four_ranks):
    found = on_four_ranks(["llama3", "deepseek-v3"], old=True)
    assert {name: size for name, size in found.items() if size > BOUND} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("old", [False, True], ids=["new spelling", "old spelling"])
def test_every_family_gives_the_same_logits_under_both_kinds_of_parallelism(on_four_ranks, old):
    names = [name for name in MODELS if not (old and name in ("llama3", "deepseek-v3"))]
    found = on_four_ranks(names, old=old)
    assert {name: size for name, size in found.items() if size > BOUND} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [PP2, [*SP, *WHOLE_EXPERTS], [*BOTH, *WHOLE_EXPERTS]], ids=" ".join)
def test_experts_on_two_ranks_give_the_same_logits_beside_other_parallelism(folder, layout):
    cases = [(str(folder(name)), [*EP2, *layout]) for name in MODELS if name in ROUTED]
    results = zip(*run_world(logits_of, 4, cases, timeout=900))
    sizes = {path: difference(folder(Path(path).name), found) for (path, _), found in zip(cases, results)}
    assert {path: size for path, size in sizes.items() if size > BOUND} == {}


@pytest.mark.thorough
def test_training_goes_on_from_the_loaded_weights_alike_in_every_layout(tmp_path):
    """Main parameters, shards of the optimizer and virtual stages begin with what was loaded."""
    path = str(write_small_llama(tmp_path / "hf"))
    sharded = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    virtual = [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]
    ((alone, half),) = run_world(losses_of, 1, path, [[], ["--bf16"]])
    shared = run_world(losses_of, 2, path, [sharded, virtual, SP, [*sharded, "--bf16"]])[1]
    for losses in shared[:3]:
        assert losses == pytest.approx(alone, abs=2e-5)
    assert shared[3] == pytest.approx(half, abs=5e-3)
    assert len(set(alone)) == 3
