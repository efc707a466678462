"""Commands of AscendSpeed's README for data, weights, finetuning, word for word: flags, defaults, arity."""

import shlex
from pathlib import Path

import pytest

from mindspeed_core.registry import Registry
from mindspeed_core.validation import check
from mindspeed_models.data.preprocess_command import command as preprocess
from mindspeed_models.running.config import write_config
from mindspeed_models.weights.legacy_commands import from_huggingface, when_tp_pp_change
from mindspeed_testing.model_flags import training_flags

INSTALLED = Registry.discover()
PREPROCESS = "python tools/preprocess_data.py"
CONVERT = "python tools/ckpt_convert/llama/convert_weights_from_huggingface.py"
_LLAMA = {
    "tokenizer_type": "PretrainedFromHF",
    "tokenizer_not_use_fast": True,
    "json_keys": ("text",),
    "append_eod": False,
    "streaming": False,
    "workers": 1,
    "dataset_impl": "mmap",
}
COMMANDS = {
    r"""python tools/preprocess_data.py --input alpaca_data.json \
        --output-prefix dataset/alpaca \
        --tokenizer-type PretrainedFromHF \
        --tokenizer-name-or-path llama-7b-hf \
        --tokenizer-not-use-fast \
        --handler-name GeneralInstructionHandler""": {
        **_LLAMA,
        "source": "alpaca_data.json",
        "output_prefix": "dataset/alpaca",
        "tokenizer": "llama-7b-hf",
        "handler_name": "GeneralInstructionHandler",
    },
    r"""python tools/preprocess_data.py --input train-00000-of-00001-a09b74b3ef9c3b56.parquet \
        --output-prefix dataset/alpaca \
        --tokenizer-type PretrainedFromHF \
        --tokenizer-name-or-path llama-7b-hf \
        --tokenizer-not-use-fast \
        --handler-name GeneralInstructionHandler""": {
        **_LLAMA,
        "source": "train-00000-of-00001-a09b74b3ef9c3b56.parquet",
        "handler_name": "GeneralInstructionHandler",
    },
    r"""python tools/preprocess_data.py \
        --input "WORKSPACE/wikipedia" \
        --hf-datasets-params ${hf_config_json} \
        --output-prefix WORKSPACE/wikipedia_preprocessed/wikipedia \
        --dataset-impl mmap \
        --tokenizer-type PretrainedFromHF \
        --tokenizer-name-or-path WORKSPACE/llama-7b-hf \
        --tokenizer-not-use-fast \
        --streaming \
        --workers 8""": {
        **_LLAMA,
        "source": "WORKSPACE/wikipedia",
        "hf_datasets_params": "${hf_config_json}",
        "streaming": True,
        "workers": 8,
        "handler_name": "",
    },
    r"""python tools/preprocess_data.py --input WORKSPACE/train-00000-of-00001-a09b74b3ef9c3b56.parquet \
        --output-prefix WORKSPACE/alpaca_preprocessed/alpaca \
        --tokenizer-type PretrainedFromHF \
        --tokenizer-name-or-path WORKSPACE/llama-7b-hf \
        --tokenizer-not-use-fast \
        --json-key text""": {**_LLAMA, "handler_name": ""},
    r"""python tools/preprocess_data.py \
        --input WORKSPACE/alpaca/train-00000-of-00001-a09b74b3ef9c3b56.parquet \
        --output-prefix WORKSPACE/alpaca_preprocessed/alpaca \
        --tokenizer-type PretrainedFromHF \
        --tokenizer-name-or-path WORKSPACE/llama-7b-hf \
        --tokenizer-not-use-fast \
        --handler-name GeneralInstructionHandler \
        --append-eod""": {**_LLAMA, "append_eod": True, "handler_name": "GeneralInstructionHandler"},
    r"""python tools/ckpt_convert/llama/convert_weights_from_huggingface.py --input-model-dir ../llama-7b-hf \
        --output-model-dir ckpt \
        --tensor-model-parallel-size 1 \
        --pipeline-model-parallel-size 1 \
        --type 7B""": {
        "source": Path("../llama-7b-hf"),
        "target": Path("ckpt"),
        "tensor": 1,
        "pipeline": 1,
        "size": "7B",
        "deepspeed": False,
        "bias": False,
        "merge_mlp": False,
        "pse": False,
        "use_wpack_rotray": False,
        "load_weight_map": False,
        "divisible": 128,
        "added": 0,
    },
    r"""python tools/ckpt_convert/llama/convert_weights_from_huggingface.py --input-model-dir llama-7b-hf \
        --output-model-dir llama-7b-tp2-pp2 \
        --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 \
        --type 7B""": {"tensor": 2, "pipeline": 2, "size": "7B"},
    r"""python tools/ckpt_convert/llama/convert_weights_from_huggingface.py --input-model-dir llama-7b-hf \
        --output-model-dir llama-7b-deepspeed \
        --type 7B \
        --deepspeed""": {"tensor": 1, "pipeline": 1, "size": "7B", "deepspeed": True},
}
LORA = {
    r"--lora-target-modules query_key_value dense gate_proj dense_h_to_4h dense_4h_to_h \ ": {
        "lora_target_modules": ["query_key_value", "dense", "gate_proj", "dense_h_to_4h", "dense_4h_to_h"],
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_modules_to_save": None,
        "lora_register_forward_hook": ["word_embeddings", "input_layernorm"],
    },
    r"""--lora-target-modules query_key_value \
        --lora-r 64 \
        --lora-alpha 128 \
        --lora-modules-to-save word_embeddings output_layer \
        --lora-register-forward-hook word_embeddings input_layernorm \ """: {
        "lora_r": 64,
        "lora_alpha": 128,
        "lora_modules_to_save": ["word_embeddings", "output_layer"],
        "lora_register_forward_hook": ["word_embeddings", "input_layernorm"],
    },
    "--data-path WORKSPACE/alpaca_preprocessed/alpaca --is-instruction-dataset --variable-seq-lengths": {
        "is_instruction_dataset": True,
        "variable_seq_lengths": True,
        "data_path": ["WORKSPACE/alpaca_preprocessed/alpaca"],
        "keep_last_token": False,
    },
    "--data-path WORKSPACE/wikipedia_preprocessed/wikipedia_text_document": {
        "data_path": ["WORKSPACE/wikipedia_preprocessed/wikipedia_text_document"]
    },
}
RESPLIT = r"""python tools/ckpt_convert/llama/convert_weights_when_tp_pp_change.py --input-model-dir a \
    --output-model-dir b --orig-vocab-size 32000 --make-vocab-size-divisible-by 128 \
    --src-tensor-model-parallel-size 8 --src-pipeline-model-parallel-size 2 \
    --tgt-tensor-model-parallel-size 4 --tgt-pipeline-model-parallel-size 4 \
    --num-layers 32 --num-heads 32 --num-kv-heads 32 --hidden-size 4096 --merge-mlp"""


def words_of(text):
    """The words of a command as a shell reads it, without its program."""
    words = shlex.split(text.replace("\\\n", " ").rstrip(" \\"))
    return words[2:] if words[0] == "python" else words


def params(command, text):
    return command.make_context(command.name, words_of(text)).params


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_is_read_with_the_seeds_defaults(text):
    command = preprocess if text.startswith(PREPROCESS) else from_huggingface
    assert text.startswith((PREPROCESS, CONVERT))
    found = params(command, text)
    assert {name: found[name] for name in COMMANDS[text]} == COMMANDS[text]


def test_the_program_that_changes_the_layout_reads_its_flags():
    found = params(when_tp_pp_change, RESPLIT)
    named = (
        "vocabulary",
        "src_tensor",
        "src_pipeline",
        "tensor",
        "pipeline",
        "layers",
        "groups",
        "merge_mlp",
    )
    assert tuple(found[name] for name in named) == (32000, 8, 2, 4, 4, 32, 32, True)
    defaults = params(when_tp_pp_change, "python x")
    assert tuple(defaults[name] for name in named[:5]) == (32000, 1, 1, 1, 1)


@pytest.mark.parametrize("text", LORA)
def test_flags_of_finetuning_are_read_with_the_seeds_defaults(tmp_path, text):
    write_config("llama-tiny", tmp_path)
    words = [*training_flags(words_of(text), 1, INSTALLED), "--untie-embeddings-and-output-weights"]
    checked = check(words, registry=INSTALLED)
    assert checked.ok, [str(problem) for problem in checked.problems]
    assert {name: getattr(checked.args, name) for name in LORA[text]} == LORA[text]


def test_a_base_and_its_adapters_are_named_as_ever():
    text = r"""--lora-target-modules query_key_value \
        --load ${ORIGIN_CHECKPOINT} \
        --lora-load ${LORA_CHECKPOINT} \ """
    checked = check(training_flags(words_of(text), 1, INSTALLED), registry=INSTALLED)
    # Nothing is wrong but that there is no such folder.
    assert [(problem.flag, problem.value) for problem in checked.problems] == [
        ("--lora-load", "'${LORA_CHECKPOINT}'")
    ]


@pytest.mark.parametrize(
    "flag",
    [
        *("--lora-target-modules", "--lora-modules-to-save", "--lora-register-forward-hook"),
        *("--lora-r", "--lora-alpha", "--lora-load", "--is-instruction-dataset", "--keep-last-token"),
        *("--mlp-layer-fusion", "--embed-layernorm", "--lm-norm-weight", "--z-loss-weight", "--no-add-gate"),
        *("--row-col-parallel-linear-bias", "--square-alibi-mask", "--pad-vocab-size-to"),
    ],
)
def test_every_flag_of_the_seed_is_known(flag):
    values = {
        **dict.fromkeys(("--lora-r", "--lora-alpha", "--pad-vocab-size-to"), "256"),
        **dict.fromkeys(("--lora-target-modules", "--lora-load"), "linear_qkv"),
        **dict.fromkeys(("--lora-modules-to-save", "--lora-register-forward-hook"), "word_embeddings"),
        "--z-loss-weight": "0.1",
    }
    words = (flag, values[flag]) if flag in values else (flag,)
    checked = check(training_flags(words, 1, INSTALLED), registry=INSTALLED)
    assert [problem for problem in checked.problems if problem.code == "E-UNKNOWN-FLAG"] == []
