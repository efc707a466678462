"""Every field of megatron-core's configuration is a flag, or excluded with a reason."""

import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Flag
from mindspeed_megatron import config_fields as fields_module
from mindspeed_megatron.config_fields import UNKNOWN, ConfigField, config_fields
from mindspeed_megatron.config_flags import (
    EXCLUDED,
    SPELLINGS,
    dest_of,
    flag_of,
    generated_flags,
    why_excluded,
)
from mindspeed_megatron.config_values import config_values
from mindspeed_megatron.layer_patterns import layer_pattern, window
from mindspeed_train.flags import host_flags
from mindspeed_train.model.config import check_recomputed_layers

CLASSES = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


@pytest.fixture(scope="module")
def flags():
    return {option: flag for flag in host_flags() for option in flag.options}


def test_every_field_of_the_installed_classes_is_found():
    found = {field.name for field in config_fields()}
    assert {name for kind in CLASSES for name in kind.__dataclass_fields__} <= found


def test_every_field_is_a_flag_or_excluded_with_a_reason(flags):
    dests = {flag.dest for flag in flags.values()}
    unreachable = [
        field.name
        for field in config_fields()
        if not why_excluded(field) and dest_of(field.name) not in dests and field.name not in dests
    ]
    assert unreachable == []


def test_the_tables_name_no_field_twice():
    assert set(SPELLINGS) & set(EXCLUDED) == set()


def test_defaults_are_those_of_the_classes(flags):
    dests = {flag.dest: flag for flag in generated_flags(())}
    differing = []
    for kind in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        for name, field in kind.__dataclass_fields__.items():
            flag = dests.get(dest_of(name))
            told = next((f for f in config_fields() if f.name == name), None)
            if flag is None or name in SPELLINGS or told is None or told.default is UNKNOWN:
                continue
            if told.owner == kind.__name__ and flag.default != field.default:
                differing.append(name)
    assert differing == []


def test_a_new_field_becomes_a_flag_without_our_doing(tmp_path, monkeypatch):
    folder = tmp_path / "transformer"
    folder.mkdir()
    (folder / "transformer_config.py").write_text(
        "@dataclass\nclass TransformerConfig(ModelParallelConfig):\n"
        "    brand_new: Optional[int] = None\n"
        '    """Something new. And more of it."""\n\n'
        "    shiny: bool = True\n"
        '    """Shines."""\n\n'
        "    mode: Literal['a', 'b'] = 'a'\n\n"
        "    hook: Callable = print\n\n"
        "    def __post_init__(self):\n        pass\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(fields_module, "_megatron_core", lambda: tmp_path)
    fields_module.config_fields.cache_clear()
    try:
        made = {flag.name: flag for flag in generated_flags(())}
    finally:
        fields_module.config_fields.cache_clear()
    assert made["--brand-new"].type is int
    assert made["--brand-new"].help == "Something new."
    assert made["--no-shiny"].options == ("--no-shiny", "--disable-shiny")
    assert made["--no-shiny"].dest == "shiny"
    assert made["--mode"].choices == ("a", "b")
    assert "--hook" not in made


def test_flags_written_by_hand_win():
    written = Flag("--moe-router-topk", type=int, default=7)
    assert not any("--moe-router-topk" in flag.options for flag in generated_flags([written]))


@pytest.mark.parametrize(
    ("option", "dest", "default"),
    [
        ("--num-experts", "num_experts", None),
        ("--expert-model-parallel-size", "expert_model_parallel_size", 1),
        ("--q-lora-rank", "q_lora_rank", None),
        ("--kv-lora-rank", "kv_lora_rank", 32),
        ("--mtp-loss-scaling-factor", "mtp_loss_scaling_factor", 0.1),
        ("--decoder-first-pipeline-num-layers", "decoder_first_pipeline_num_layers", None),
        ("--ddp-average-in-collective", "ddp_average_in_collective", False),
        ("--no-gradient-reduce-div-fusion", "gradient_reduce_div_fusion", True),
        ("--fp8-format", "fp8", None),
        ("--initial-loss-scale", "initial_loss_scale", 2.0**32),
        ("--window-size", "window_size", None),
        ("--moe-router-load-balancing-type", "moe_router_load_balancing_type", ["aux_loss"]),
    ],
)
def test_spelling_and_default_are_megatron_lms(flags, option, dest, default):
    assert (flags[option].dest, flags[option].default) == (dest, default)


def test_values_reach_the_configuration():
    args = Namespace(
        moe_aux_loss_coeff=[0.1],
        moe_router_load_balancing_type=["aux_loss", "global_aux_loss"],
        attention_backend="local",
        norm_epsilon=1e-3,
        softmax_scale=None,
        q_lora_rank=None,
    )
    values = config_values(MLATransformerConfig, args)
    assert values == {
        "moe_aux_loss_coeff": 0.1,
        "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
        "attention_backend": AttnBackend.local,
        "layernorm_epsilon": 1e-3,
        "q_lora_rank": None,
    }


@pytest.mark.parametrize(
    ("layout", "unit", "problem"),
    [
        ({}, 2, None),
        ({}, 3, "3: does not divide the 4 layers"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, 2, "the 1 layers"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tttL"}, 2, "rank 0"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|ttL"}, 2, None),
        ({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}, 3, "the 1 layers"),
    ],
)
def test_units_of_recomputed_layers_fit_into_every_chunk(layout, unit, problem):
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": unit}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        **layout,
        **recompute,
    )
    if problem is None:
        check_recomputed_layers(config)
        return
    with pytest.raises(ArgumentError, match=problem):
        check_recomputed_layers(config)


def test_dtypes_are_named_by_their_short_names():
    values = config_values(OptimizerConfig, Namespace(exp_avg_dtype="bf16"))
    assert values == {"exp_avg_dtype": torch.bfloat16}


def test_reading_the_fields_imports_no_torch():
    code = (
        "import sys; from mindspeed_train.flags import host_flags; host_flags(); "
        "print([name for name in ('torch', 'megatron.core', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("[1,0]", [1, 0]),
        ("([0]*3+[1])*2", [0, 0, 0, 1, 0, 0, 0, 1]),
        ("[0]+2*[1]", [0, 1, 1]),
    ],
)
def test_layer_patterns(text, value):
    assert layer_pattern(text) == value


@pytest.mark.parametrize(
    "text", ["", "print(1)", "[1]*[2]", "[a]", "[[1]]", "-1", "[1]*99999999", "1.5", "(" * 400]
)
def test_what_is_no_layer_pattern_is_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        layer_pattern(text)


def test_windows():
    assert window("(127,0)") == window(" 127, 0") == (127, 0)
    with pytest.raises(ValueError, match="127,0"):
        window("127")


def test_a_field_without_text_gets_a_help():
    field = ConfigField("TransformerConfig", "bare", "int", (), 1, (), "")
    assert "TransformerConfig.bare" in flag_of(field).help
