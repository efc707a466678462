"""The fused core attention inside megatron-core: equal to the native one, and what the native one lacks."""

import logging
from contextlib import nullcontext

import pytest
import torch
from attention_kernels import attention_kernels
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mindspeed_kernels.attention.bias import alibi_slopes
from mindspeed_kernels.attention.mask_store import (
    STORE,
    MaskStore,
    generate_attention_mask,
    get_attention_mask,
    set_attention_mask,
)
from mindspeed_kernels.attention.visibility import Visibility
from mindspeed_kernels.modules.core_attention import (
    AttentionOptions,
    FusedCoreAttention,
    place_attention,
    without_attention_recompute,
)
from mindspeed_kernels.ops import ContractError
from mindspeed_megatron.fake.tensors import ShapesOnly


class Placements:
    def __init__(self):
        self.counts = {}

    def place(self, owner, count, **roles):
        self.counts[owner] = self.counts.get(owner, 0) + count


class Tracker:
    """Stands for megatron-core's tracker of device random states."""

    def __init__(self):
        self.forks = 0

    def fork(self):
        self.forks += 1
        return torch.random.fork_rng()


class Group:
    """Stands for a tensor-parallel group."""

    def __init__(self, size=1, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


class Groups:
    def __init__(self, size=1, rank=0):
        self.tp = Group(size, rank)


@pytest.fixture(scope="module")
def groups():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with pytest.MonkeyPatch.context() as patched:
        # Where megatron-core's attention gets its scratch memory.
        patched.setattr(torch.cuda, "current_device", lambda: "cpu")
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def tracker(monkeypatch):
    tracker = Tracker()
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    return tracker


def config(**changes):
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
    }
    return TransformerConfig(**{**values, **changes})


def core(kind, model, **options):
    arguments = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return build_module(kind, config=model, **{**arguments, **options})


def tensors(sq=12, groups=4, sk=None):
    torch.manual_seed(0)
    return (
        torch.randn(sq, 2, 4, 8, requires_grad=True),
        torch.randn(sk or sq, 2, groups, 8, requires_grad=True),
        torch.randn(sk or sq, 2, groups, 8, requires_grad=True),
    )


def native_mask(size=12):
    return torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": 2},
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
        {"softmax_scale": 0.5},
        {"softmax_type": "off-by-one"},
        {"softmax_type": "learnable"},
    ],
    ids=["plain", "grouped-queries", "layer-scaling", "own-scale", "off-by-one", "learnable-sink"],
)
def test_it_equals_that_of_megatron(groups, tracker, monkeypatch, changes):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    if "learnable" in changes.values():
        # The native one passes its parameter through the initializer, which returns nothing.
        changes = {**changes, "init_method": lambda tensor: torch.nn.init.normal_(tensor)}
    model = config(**changes)
    arguments = {"layer_number": 3, "softmax_scale": model.softmax_scale}
    results = []
    state = None
    for kind, mask in ((DotProductAttention, native_mask()), (FusedCoreAttention, None)):
        inputs = tensors(groups=model.num_query_groups)
        module = core(kind, model, **arguments)
        state = module.state_dict() if state is None else module.load_state_dict(state)
        output = module(*inputs, mask)
        output.square().sum().backward()
        offset = [module.softmax_offset.grad] if "learnable" in changes.values() else []
        results.append((output, *(tensor.grad for tensor in inputs), *offset))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_tensor_decides_what_is_visible(groups, tracker):
    mask = native_mask()
    mask[..., 6:, :6] = True
    inputs = tensors()
    expected = core(DotProductAttention, config())(*inputs, mask)
    torch.testing.assert_close(core(FusedCoreAttention, config())(*inputs, mask), expected)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_mask_that_was_set_decides_for_every_causal_attention(groups, tracker, mode):
    mask = native_mask()[0, 0]
    mask[6:, :6] = True
    inputs = tensors()
    expected = core(DotProductAttention, config())(*inputs, mask[None, None])
    module = core(FusedCoreAttention, config(), options=AttentionOptions(sparse_mode=mode))
    whole = core(FusedCoreAttention, config(), attn_mask_type=AttnMaskType.no_mask)
    plain = whole(*inputs, None)
    set_attention_mask(mask)
    try:
        torch.testing.assert_close(module(*inputs, None), expected)
        torch.testing.assert_close(whole(*inputs, None), plain)
        ends = torch.tensor([0, 5, 12])
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        with pytest.raises(ValueError, match="packed sequences take none"):
            module(*(tensor[:, 0] for tensor in inputs), None, packed_seq_params=packed)
    finally:
        STORE.reset()
    assert not torch.allclose(module(*inputs, None), expected)


def test_a_learnable_sink_trains_in_bfloat16_on_the_kernels_of_npus(groups, tracker):
    model = config(
        softmax_type="learnable",
        params_dtype=torch.bfloat16,
        bf16=True,
        init_method=lambda tensor: torch.nn.init.normal_(tensor),
    )
    module = core(FusedCoreAttention, model)
    found = []
    for kernels in (nullcontext(), attention_kernels()):
        inputs = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors()]
        module.zero_grad()
        with kernels as calls:
            module(*inputs, None).square().sum().backward()
        found.append((*(tensor.grad for tensor in inputs), module.softmax_offset.grad.clone()))
    assert calls["npu_fusion_attention_grad_v2"] == 1
    assert found[1][3].dtype == torch.bfloat16
    for got, expected in zip(found[1], found[0]):
        torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)


def test_a_bias_is_added_to_the_scaled_scores():
    query, key, value = tensors()
    bias = torch.randn(1, 4, 12, 12)
    got = core(FusedCoreAttention, config())(query, key, value, None, attention_bias=bias)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * 8**-0.5 + bias
    weights = scores.masked_fill(native_mask(), float("-inf")).softmax(-1)
    torch.testing.assert_close(got, torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2))


def test_fewer_queries_than_keys_are_the_last_ones():
    query, key, value = tensors()
    module = core(FusedCoreAttention, config())
    everything = module(query, key, value, None)
    torch.testing.assert_close(module(query[8:], key, value, None), everything[8:])


def ends(*numbers):
    return torch.tensor([0, *numbers], dtype=torch.int32)


def test_packed_sequences_equal_those_sequences_alone():
    query, key, value = (tensor[:, 0] for tensor in tensors(groups=2))
    module = core(FusedCoreAttention, config())
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends(5, 5, 12), cu_seqlens_kv=ends(5, 5, 12))
    got = module(query, key, value, None, packed_seq_params=params)
    assert got.shape == (12, 32)
    for part in (slice(0, 5), slice(5, 12)):
        alone = module(query[part, None], key[part, None], value[part, None], None)
        torch.testing.assert_close(got[part], alone[:, 0])


def test_tokens_behind_and_between_packed_sequences_are_seen_by_nobody_else():
    query, key, value = (tensor[:, 0] for tensor in tensors())
    module = core(FusedCoreAttention, config())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends(3, 7),
        cu_seqlens_kv=ends(3, 7),
        cu_seqlens_q_padded=ends(4, 9),
        cu_seqlens_kv_padded=ends(4, 9),
    )
    got = module(query, key, value, None, packed_seq_params=params)
    changed = value.detach().clone()
    changed[3], changed[8:] = 7.0, 7.0
    other = module(query, key, changed, None, packed_seq_params=params)
    for valid in (slice(0, 3), slice(4, 8)):
        assert torch.equal(got[valid], other[valid])
    del params._mindspeed_sequence_ends
    with pytest.raises(ValueError, match="padding need causal"):
        module(query, key, value, None, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=params)


def test_the_ends_of_packed_sequences_are_read_once_per_batch(monkeypatch):
    query, key, value = (tensor[:, 0] for tensor in tensors())
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends(5, 12), cu_seqlens_kv=ends(5, 12))
    modules = [core(FusedCoreAttention, config(), layer_number=number) for number in (1, 2, 3)]
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(1) or read(tensor))
    for module in modules:
        module(query, key, value, None, packed_seq_params=params)
    assert len(reads) == 2


def test_a_window_applies_to_the_layers_that_have_one():
    model = config(window_size=(3, 0), window_attn_skip_freq=2)
    assert core(FusedCoreAttention, model, layer_number=1).window == (3, 0)
    assert core(FusedCoreAttention, model, layer_number=2).window is None


def test_a_window_equals_the_mask_of_one(groups, tracker):
    inputs = tensors()
    distance = torch.arange(12)[:, None] - torch.arange(12)
    mask = ((distance < 0) | (distance > 3))[None, None]
    expected = core(DotProductAttention, config())(*inputs, mask)
    torch.testing.assert_close(core(FusedCoreAttention, config(window_size=(3, 0)))(*inputs, None), expected)


def test_sparse_modes_of_the_flags_reach_the_operator():
    query, key, value = tensors()
    band = core(FusedCoreAttention, config(), options=AttentionOptions(sparse_mode=4, pre_tokens=3))
    windowed = core(FusedCoreAttention, config(window_size=(3, 0)))
    near = core(FusedCoreAttention, config(), options=AttentionOptions(sparse_mode=0, pre_tokens=3))
    expected = windowed(query, key, value, None)
    torch.testing.assert_close(band(query, key, value, None), expected)
    torch.testing.assert_close(near(query, key, value, None), expected)


@pytest.mark.parametrize("mode", [0, 4, 7, 8])
@pytest.mark.parametrize("cached", [7, 11])
def test_a_band_holds_for_tokens_behind_cached_keys(mode, cached):
    query, key, value = tensors()
    options = AttentionOptions(sparse_mode=mode, pre_tokens=3)
    band = core(FusedCoreAttention, config(), options=options).eval()
    expected = core(FusedCoreAttention, config(window_size=(3, 0)))(query, key, value, None)
    # megatron-core says no_mask for a token, and gives a mask of later keys for several.
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None, cached:]
    kind = AttnMaskType.no_mask if cached == 11 else None
    mask = None if cached == 11 else later
    found = band(query[cached:], key, value, mask, attn_mask_type=kind)
    torch.testing.assert_close(found, expected[cached:])


def test_a_model_that_looks_both_ways_has_no_band_without_a_cause(groups, tracker):
    inputs = tensors()
    options = AttentionOptions(sparse_mode=4, pre_tokens=3)
    both = core(FusedCoreAttention, config(), options=options, attn_mask_type=AttnMaskType.no_mask).eval()
    plain = core(DotProductAttention, config(), attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(both(*inputs, None), plain(*inputs, None))


def test_narrower_values_of_latent_attention_give_a_narrower_context():
    query, key, value = tensors()
    module = core(FusedCoreAttention, config(), k_channels=8, v_channels=4)
    assert module(query, key, value[..., :4], None).shape == (12, 2, 16)


def test_latent_attention_of_megatron_builds_with_it(groups):
    from megatron.core.transformer import MLATransformerConfig

    model = MLATransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        rope_type="rope",
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    layer = get_gpt_layer_local_spec(multi_latent_attention=True)
    placed = place_attention(Placements(), TransformerBlockSubmodules(layer_specs=[layer]))
    spec = placed.layer_specs[0].submodules.self_attention.submodules.core_attention
    module = core(spec, model, k_channels=12, v_channels=8)
    query, key, value = torch.randn(6, 2, 4, 12), torch.randn(6, 2, 4, 12), torch.randn(6, 2, 4, 8)
    assert module(query, key, value, None).shape == (6, 2, 32)


def test_dropout_draws_from_the_ranks_own_state(tracker):
    module = core(FusedCoreAttention, config(attention_dropout=0.5))
    module(*tensors(), None)
    module.eval()(*tensors(), None)
    assert tracker.forks == 1


def test_a_learnable_sink_is_saved_by_heads(groups):
    module = core(FusedCoreAttention, config(softmax_type="learnable"))
    saved = module.sharded_state_dict("attention.")
    assert saved["attention.softmax_offset"].global_shape == (4,)
    assert core(FusedCoreAttention, config()).sharded_state_dict("attention.") == {}


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"sparse_mode": 7}, {}, "--sparse-mode 7 is for packed sequences"),
        ({}, {"attn_mask_type": AttnMaskType.arbitrary}, "needs a mask tensor"),
        ({"alibi": 2}, {"attention_bias": torch.zeros(1)}, "--position-embedding-type alibi"),
        ({}, {"packed_seq_params": PackedSeqParams(qkv_format="sbhd")}, "packed sequences come as thd"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_flag(options, arguments, message):
    module = core(FusedCoreAttention, config(), options=AttentionOptions(**options), pg_collection=Groups())
    with pytest.raises(ValueError, match=message):
        module(*tensors(), None, **arguments)


def test_a_window_besides_a_band_is_refused():
    with pytest.raises(ValueError, match=r"--sparse-mode 4 .* --window-size"):
        core(FusedCoreAttention, config(window_size=(3, 0)), options=AttentionOptions(sparse_mode=4))


def test_every_core_attention_is_replaced():
    session = Placements()
    layer = get_gpt_layer_local_spec()
    options = AttentionOptions(sparse_mode=4)
    placed = place_attention(session, TransformerBlockSubmodules(layer_specs=[layer] * 2), options)
    assert session.counts == {"flash-attn": 2}
    spec = placed.layer_specs[1].submodules.self_attention.submodules.core_attention
    assert (spec.module, spec.params["options"]) == (FusedCoreAttention, options)


def test_selective_recompute_leaves_attention_alone_and_says_so(caplog):
    model = config(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    with caplog.at_level(logging.WARNING):
        changed = without_attention_recompute(model)
    assert changed.recompute_modules == ["mlp"]
    assert "--recompute-granularity selective" in caplog.text


@pytest.mark.parametrize("heads", [1, 8, 12, 40])
def test_slopes_are_those_of_the_paper(heads):
    slopes = alibi_slopes(heads)
    power = 1 << (heads.bit_length() - 1)
    assert len(slopes) == heads
    assert slopes[0] == pytest.approx(2 ** (-8 / power))
    assert slopes[:power] == pytest.approx([2 ** (-8 * (i + 1) / power) for i in range(power)])
    rest = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    assert slopes[power:] == pytest.approx(rest)


def alibi_by_hand(query, key, value, slopes, root=False):
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * query.shape[-1] ** -0.5
    distance = (torch.arange(len(query))[:, None] - torch.arange(len(key))).abs().to(scores.dtype)
    scores = scores - slopes[:, None, None].to(scores.dtype) * (distance.sqrt() if root else distance)
    scores = scores.masked_fill(torch.ones(len(query), len(key)).triu(1).bool(), float("-inf"))
    return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), value).flatten(2)


@pytest.mark.parametrize("kind", [0, 2, 3])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1), (4, 3)])
def test_alibi_of_a_rank_uses_the_slopes_of_its_heads(kind, size, rank):
    model = config(num_attention_heads=12, hidden_size=96, num_query_groups=12)
    module = core(
        FusedCoreAttention, model, options=AttentionOptions(alibi=kind), pg_collection=Groups(size, rank)
    )
    heads = 12 // size
    query, key, value = (torch.randn(9, 2, heads, 8) for _ in range(3))
    slopes = torch.tensor(alibi_slopes(12)[rank * heads : (rank + 1) * heads])
    expected = alibi_by_hand(query, key, value, slopes, root=kind == 3)
    torch.testing.assert_close(module(query, key, value, None), expected)


@pytest.mark.parametrize("kind", [0, 2, 3])
def test_alibi_never_looks_ahead_and_reaches_beyond_the_trained_length(kind):
    module = core(FusedCoreAttention, config(), options=AttentionOptions(alibi=kind), pg_collection=Groups())
    query, key, value = (tensor.detach() for tensor in tensors(sq=40))
    short = module(query[:20], key[:20], value[:20], None)
    long = module(query, key, value, None)
    torch.testing.assert_close(long[:20], short)
    assert torch.isfinite(long).all()


def test_alibi_stays_precise_in_half_precision():
    torch.manual_seed(0)
    module = core(FusedCoreAttention, config(), options=AttentionOptions(alibi=2), pg_collection=Groups())
    query, key, value = (torch.randn(512, 1, 4, 8) for _ in range(3))
    rounded = [tensor.bfloat16() for tensor in (query, key, value)]
    truth = alibi_by_hand(*[tensor.double() for tensor in rounded], torch.tensor(alibi_slopes(4)))
    error = (module(*rounded, None).double() - truth).norm() / truth.norm()
    assert float(error) <= 5e-3


def test_a_dry_run_has_one_mask_for_all_layers_and_leaves_none_behind():
    store, device = MaskStore(), torch.device("cpu")
    with ShapesOnly():
        planned = store.causal(device)
        assert store.causal(device) is planned
    with ShapesOnly():
        assert store.causal(device) is not planned
    with FakeTensorMode():
        assert store.causal(device) is not store.causal(device)
    assert store.causal(device).sum() == 2048 * 2047 // 2


def test_one_mask_serves_every_layer_and_is_small():
    store = MaskStore()
    masks = [store.causal(torch.device("cpu")) for _ in range(3)]
    assert len({mask.data_ptr() for mask in masks}) == 1
    assert masks[0].untyped_storage().nbytes() == 4 * 2**20
    assert torch.equal(masks[0], torch.ones(2048, 2048).triu(1).bool())
    prefix = store.prefix(torch.device("cpu"))
    assert prefix.shape == (3072, 2048)
    assert not prefix[2048:, :1024].any()
    assert prefix[2048:, 1024:].all()


def test_a_mask_of_a_dry_run_is_not_kept():
    store = MaskStore()
    with FakeTensorMode():
        assert isinstance(store.causal(torch.device("cpu")), FakeTensor)
    assert not isinstance(store.causal(torch.device("cpu")), FakeTensor)
    with FakeTensorMode():
        assert isinstance(store.prefix(torch.device("cpu")), FakeTensor)


@pytest.mark.parametrize("size", [1, 31, 300])
def test_a_full_mask_is_the_strict_upper_triangle(size):
    mask = generate_attention_mask(size, compress=False)
    assert torch.equal(mask, torch.ones(size, size).triu(1).bool())
    assert generate_attention_mask(size, compress=False).data_ptr() == mask.data_ptr()


def test_a_mask_that_was_set_is_everybodys_mask():
    mask = torch.zeros(4, 4, dtype=torch.bool)
    try:
        set_attention_mask(mask)
        assert get_attention_mask(4) is mask
    finally:
        STORE.reset()
    assert get_attention_mask(4).shape == (2048, 2048)
    with pytest.raises(ContractError, match=r"bool with 2 or 4 dimensions, got torch\.float32 with 1"):
        set_attention_mask(torch.zeros(4))


def test_a_band_hides_what_its_visibility_hides():
    seen = Visibility(5, 7, 2, 1, 0)
    hidden = MaskStore().full(seen, torch.device("cpu"))
    expected = [[not (0 <= i + 2 - j <= 1) for j in range(7)] for i in range(5)]
    assert hidden.tolist() == expected
