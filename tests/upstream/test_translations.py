"""Other spellings: what each is read as, and where its meaning would change, a refusal."""

import pickle
import shlex
from functools import lru_cache

import pytest

from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry

EXPERTS = "--num-layers 4 --num-experts 4"
BY_BEST = (
    "--moe-router-load-balancing-type group_limited_greedy --moe-router-num-groups 2 "
    "--moe-router-group-topk 1"
)
MLA = "--multi-latent-attention"
YARN = "--rope-scaling-type yarn --rope-scaling-factor 40"
SPECS = "mindspeed_llm.tasks.models.spec"


@lru_cache
def known(host):
    return flag_set(Registry.discover(), host)


def parse(text, host="standalone"):
    return known(host).parse(shlex.split(text))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--qk-nope-head-dim 64", {"qk_head_dim": 64}),
        ("--use-mc2 --use-deter-comp", {"use_ascend_mc2": True, "npu_deterministic": True}),
        ("--qk-rope-head-dim 32", {"qk_pos_emb_head_dim": 32}),
        (f"{MLA} --rope-scaling-type yarn --yarn-scaling-factor 1", {"rope_type": "yarn"}),
        ("--o2-optimizer", {"quant_states": "bf16"}),
        ("--o2-gradient", {"quant_grads": True}),
        (f"{MLA} --rope-scaling-type yarn --rope-scaling-factor 40", {"rotary_scaling_factor": 40.0}),
        (
            "--rope-scaling-mscale 0.7 --rope-scaling-mscale-all-dim 0.8",
            {"mscale": 0.7, "mscale_all_dim": 0.8},
        ),
        (
            f"{MLA} {YARN} --rope-scaling-original-max-position-embeddings 4096",
            {"original_max_position_embeddings": 4096},
        ),
        ("--rope-scaling-beta-fast 16 --rope-scaling-beta-slow 2", {"beta_fast": 16.0, "beta_slow": 2.0}),
        (
            "--rope-scaling-type llama3 --rope-scaling-factor 8 --low-freq-factor 1 --high-freq-factor 4",
            {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
        ),
        ("--use-rope-scaling --rope-scaling-factor 16", {"rope_scaling_factor": 16.0}),
        (f"{EXPERTS} --first-k-dense-replace 1", {"moe_layer_freq": [0, 1, 1, 1]}),
        (f"{EXPERTS} --first-k-dense-replace 1 --moe-layer-freq 1", {"moe_layer_freq": [0, 1, 1, 1]}),
        (f"{EXPERTS} --first-k-dense-replace 1 --moe-layer-freq -1", {"moe_layer_freq": [0, 1, 1, 1]}),
        (f"{EXPERTS} --first-k-dense-replace 1 --moe-layer-freq 2", {"moe_layer_freq": [0, 0, 1, 0]}),
        (f"{EXPERTS} --first-k-dense-replace -1 --moe-layer-freq -1", {"moe_layer_freq": 1}),
        ("--stage sft", {"is_instruction_dataset": True}),
        ("--is-instruction-dataset --no-pad-to-seq-lengths", {"variable_seq_lengths": True}),
        ("--no-pad-to-seq-lengths", {"variable_seq_lengths": False}),
        (
            "--stage sft --neat-pack --no-pad-to-seq-lengths",
            {"pack_samples": True, "variable_seq_lengths": False},
        ),
        ("--pack --neat-pack", {"pack_samples": True}),
        (f"{EXPERTS} --first-k-dense-replace 0", {"moe_layer_freq": 1}),
        (f"{EXPERTS} --moe-layer-freq -2", {"moe_layer_freq": 2}),
        (f"{EXPERTS} --norm-topk-prob", {"moe_router_pre_softmax": False}),
        (
            f"{EXPERTS} --norm-topk-prob --moe-router-score-function sigmoid",
            {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False},
        ),
        (
            f"{EXPERTS} --norm-topk-prob --moe-router-score-function sigmoid "
            "--moe-router-load-balancing-type none --moe-router-topk-scaling-factor 2.5",
            {"moe_router_topk_scaling_factor": 2.5},
        ),
        (f"{EXPERTS} --seq-aux", {"moe_router_load_balancing_type": ["aux_loss"]}),
        (
            f"{EXPERTS} --moe-router-load-balancing-type pai_megatron_aux_loss "
            "--moe-router-score-function sigmoid",
            {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True},
        ),
        (f"{EXPERTS} --norm-topk-prob --moe-router-pre-softmax", {"moe_router_pre_softmax": False}),
        (
            f"{EXPERTS} --norm-topk-prob --moe-router-pre-softmax --moe-router-load-balancing-type none",
            {"moe_router_pre_softmax": True},
        ),
        (
            f"{EXPERTS} --seq-aux --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01",
            {"moe_router_load_balancing_type": ["seq_aux_loss"]},
        ),
        (
            f"{EXPERTS} --seq-aux --moe-router-load-balancing-type none",
            {"moe_router_load_balancing_type": ["none"]},
        ),
        (
            f"{EXPERTS} --moe-router-load-balancing-type pai_megatron_aux_loss --moe-router-num-groups 2",
            {
                "moe_router_load_balancing_type": ["aux_loss"],
                "moe_router_pre_softmax": True,
                "moe_router_num_groups": None,
            },
        ),
        (
            f"{EXPERTS} {BY_BEST} --moe-router-topk-scaling-factor 16",
            {
                "moe_router_best_of_group": True,
                "moe_router_load_balancing_type": ["aux_loss"],
                "moe_router_pre_softmax": True,
                "moe_router_num_groups": 2,
                "moe_router_group_topk": 1,
                "moe_router_topk_scaling_factor": 16.0,
            },
        ),
        (
            f"{EXPERTS} {BY_BEST} --seq-aux --norm-topk-prob --moe-router-pre-softmax "
            "--moe-router-topk-scaling-factor 16",
            {
                "moe_router_best_of_group": True,
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_router_pre_softmax": False,
                "moe_router_topk_scaling_factor": None,
            },
        ),
        (
            f"{EXPERTS} {BY_BEST} --norm-topk-prob --moe-router-topk 1",
            {"moe_router_best_of_group": True, "moe_router_pre_softmax": True},
        ),
        (
            f"{EXPERTS} --n-group 2 --topk-group 1 --routed-scaling-factor 2.5",
            {
                "moe_router_num_groups": 2,
                "moe_router_group_topk": 1,
                "moe_router_topk_scaling_factor": 2.5,
            },
        ),
        (
            f"{EXPERTS} --n-group 0 --topk-group 0 --routed-scaling-factor 0",
            {
                "moe_router_num_groups": None,
                "moe_router_group_topk": None,
                "moe_router_topk_scaling_factor": None,
            },
        ),
        (f"{EXPERTS} --n-group 2 --moe-router-num-groups 2", {"moe_router_num_groups": 2}),
        (
            f"{EXPERTS} --moe-router-load-balancing-type pai_megatron_aux_loss --n-group 2 --topk-group 1 "
            "--routed-scaling-factor 16",
            {
                "moe_router_num_groups": None,
                "moe_router_group_topk": None,
                "moe_router_topk_scaling_factor": None,
            },
        ),
        (
            f"{EXPERTS} --moe-router-load-balancing-type group_limited_greedy --n-group 2 --topk-group 1 "
            "--norm-topk-prob --routed-scaling-factor 16",
            {
                "moe_router_best_of_group": True,
                "moe_router_num_groups": 2,
                "moe_router_group_topk": 1,
                "moe_router_topk_scaling_factor": None,
            },
        ),
        (f"{EXPERTS} --shared-expert-gate", {"moe_shared_expert_gate": True}),
        (f"{EXPERTS} --router-gating-in-fp32 --topk-softmax-in-fp32", {"moe_router_dtype": "fp32"}),
        ("--add-rmsnorm-offset --normalization RMSNorm", {"apply_layernorm_1p": True}),
        (f"{EXPERTS} --moe-intermediate-size 96", {"moe_ffn_hidden_size": 96}),
        ("--partial-rotary-factor 0.25", {"rotary_percent": 0.25}),
        ("--partial-rotary-factor 0", {"rotary_percent": 1.0}),
        ("--tokenizer-type PretrainedFromHF", {"tokenizer_type": "HuggingFaceTokenizer"}),
        ("--tokenizer-name-or-path here", {"tokenizer_model": "here"}),
        ("--use-custom-fsdp", {"use_megatron_fsdp": True}),
        ("--no-position-embedding", {"position_embedding_type": "none"}),
        ("--no-position-embedding --position-embedding-type rope", {"position_embedding_type": "rope"}),
        ("--ckpt-format torch", {"ckpt_format": "torch_dist"}),
        ("--ckpt-format torch_dcp", {"ckpt_format": "torch_dist"}),
        ("--use-flash-attn --shape-order BNSD", {"shape_order": "SBH"}),
        ("--attention-backend flash", {"use_flash_attn": True}),
        ("--attention-backend unfused", {"use_flash_attn": False}),
    ],
)
def test_a_spelling_gives_the_configuration_that_it_means(flags, expected):
    parsed = parse(flags)
    assert parsed.problems == ()
    assert {dest: getattr(parsed.args, dest) for dest in expected} == expected


@pytest.mark.parametrize(
    ("flags", "flag", "says"),
    [
        (f"{EXPERTS} --seq-aux --moe-router-load-balancing-type sinkhorn", "--seq-aux", "another loss"),
        (f"{EXPERTS} --seq-aux --moe-aux-loss-coeff 0.01", "--seq-aux", "the default"),
        (f"{EXPERTS} --first-k-dense-replace 4", "--first-k-dense-replace", "no layer of --num-layers 4"),
        (f"{EXPERTS} --first-k-dense-replace two", "--first-k-dense-replace", "one whole number"),
        ("--num-experts 2 --first-k-dense-replace 1", "--first-k-dense-replace", "--num-layers"),
        (
            f"{EXPERTS} --first-k-dense-replace 1 --moe-layer-freq [0,1,1,1]",
            "--first-k-dense-replace",
            "layer by layer",
        ),
        (f"{MLA} --spec {SPECS}.bailing_spec layer_spec", "--spec", "layers of bailing_spec"),
        ("--rope-scaling-type yarn", "--rope-scaling-type", "latent attention alone"),
        ("--rope-scaling-type longrope", "--rope-scaling-type", "longrope"),
        (f"{MLA} --rope-scaling-type yarn", "--rope-scaling-type", "by 8, and MindSpeed by 1"),
        ("--stage dpo", "--stage", "no preferences"),
        ("--pack", "--pack", "attend to one another"),
        (
            "--rope-scaling-type llama3 --low-freq-factor 2",
            "--rope-scaling-type",
            "--low-freq-factor is fixed",
        ),
        (
            f"{EXPERTS} --norm-topk-prob --moe-router-pre-softmax --moe-router-topk-scaling-factor 2",
            "--norm-topk-prob",
            "would undo",
        ),
        (f"{EXPERTS} --norm-topk-prob --routed-scaling-factor 2", "--norm-topk-prob", "would undo"),
        (
            f"{EXPERTS} --norm-topk-prob --moe-router-score-function sigmoid --routed-scaling-factor 2",
            "--norm-topk-prob",
            "would undo",
        ),
        (
            f"{EXPERTS} --norm-topk-prob --moe-router-score-function sigmoid --moe-router-topk 1",
            "--norm-topk-prob",
            "every weight one",
        ),
        (
            f"{EXPERTS} --norm-topk-prob --moe-router-pre-softmax --routed-scaling-factor 2",
            "--norm-topk-prob",
            "would undo",
        ),
        (f"{EXPERTS} --n-group 2 --moe-router-num-groups 4", "--n-group", "is given too"),
        (f"{EXPERTS} --moe-router-num-groups 4 --n-group 2", "--n-group", "is given too"),
        (f"{EXPERTS} --topk-group 1 --moe-router-group-topk 2", "--topk-group", "is given too"),
        (
            f"{EXPERTS} --routed-scaling-factor 2 --moe-router-topk-scaling-factor 1",
            "--routed-scaling-factor",
            "is given too",
        ),
        (f"{EXPERTS} --n-group two", "--moe-router-num-groups", "two"),
        ("--partial-rotary-factor 0.5 --rotary-percent 0.25", "--partial-rotary-factor", "is given too"),
        (
            "--moe-router-load-balancing-type softmax_topk",
            "--moe-router-load-balancing-type",
            "MindSpeed-LLM",
        ),
        (f"--spec {SPECS}.gemma2_spec layer_spec", "--spec", "layers of gemma2_spec"),
        (f"--spec {SPECS}.qwen3_spec other_spec", "--spec", "layers of qwen3_spec"),
        (f"{MLA} --spec {SPECS}.deepseek_spec layer_spec", "--spec", "layers of deepseek_spec"),
        (
            f"{MLA} {YARN} --rope-scaling-mscale 0.7 --rope-scaling-mscale-all-dim 1 "
            f"--spec {SPECS}.deepseek_spec layer_spec",
            "--spec",
            "layers of deepseek_spec",
        ),
        (
            f"{EXPERTS} --router-gating-in-fp32 --moe-router-dtype fp64",
            "--router-gating-in-fp32",
            "given too",
        ),
    ],
)
def test_a_spelling_that_would_change_meaning_is_refused(flags, flag, says):
    problems = [problem for problem in parse(flags).problems if problem.flag == flag]
    assert len(problems) == 1
    assert says in problems[0].reason
    assert problems[0].remedy


@pytest.mark.parametrize(
    "flags",
    [
        f"--qk-layernorm --spec {SPECS}.qwen3_spec layer_spec",
        f"{MLA} {YARN} --rope-scaling-mscale 0.7 --rope-scaling-mscale-all-dim 0.7 "
        f"--spec {SPECS}.deepseek_spec layer_spec",
    ],
)
def test_specifications_of_megatron_cores_own_layers_are_noted(flags):
    parsed = parse(flags)
    assert parsed.problems == ()
    assert any(note.flag.startswith("--spec") and not note.read_as for note in parsed.flag_notes)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--beta-fast 32 --rope-scaling-beta-slow 1", 0),
        ("--rope-scaling-original-max-position-embeddings 4096", 0),
        ("--beta-fast 16 --rope-scaling-beta-slow 2", 2),
    ],
)
def test_constants_that_a_script_cannot_take_are_noted_where_they_are_the_default(flags, refused):
    assert len(parse(flags, "megatron-lm").problems) == refused


def test_what_prepares_records_and_names_formats_is_noted():
    parsed = parse(
        "--stage sft --handler-name AlpacaStyleInstructionHandler --prompt-type qwen3 --enable-thinking true "
        "--workers 4 --padded-samples --pad-to-multiple-of 8 --tokenizer-padding-side left "
        "--max-batch-size 4 --model-type-hf qwen3 --enable-hf2mg-convert --lora-fusion "
        "--lora-ckpt-filter"
    )
    assert parsed.problems == ()
    assert len(parsed.flag_notes) == 13


def test_the_note_says_what_is_read_and_what_leaves():
    parsed = parse(f"{EXPERTS} --norm-topk-prob --moe-router-pre-softmax")
    (note,) = parsed.flag_notes
    assert note.read_as == "no --moe-router-pre-softmax"
    assert "softmax over these" in note.reason


def test_an_older_name_that_another_flag_takes_away_is_noted():
    balancing = "--moe-router-load-balancing-type pai_megatron_aux_loss"
    parsed = parse(f"{EXPERTS} {balancing} --n-group 2")
    notes = {note.flag: note.read_as for note in parsed.flag_notes}
    assert notes["--n-group 2"] == "left out"
    assert notes[balancing].endswith("no --moe-router-num-groups")


def test_older_names_of_a_dictionary_are_read_too():
    given = {"num_layers": 4, "num_experts": 4, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
    parsed = known("library").parse_mapping(given)
    assert parsed.problems == ()
    assert (parsed.args.moe_router_num_groups, parsed.args.moe_router_group_topk) == (2, 1)
    assert parsed.args.moe_router_topk_scaling_factor == 2.5


def test_a_dictionary_is_translated_too():
    flags = known("library")
    parsed = flags.parse_mapping(
        {"num_layers": 4, "num_experts": 4, "first_k_dense_replace": 1, "moe_layer_freq": 1, "swiglu": True}
    )
    assert parsed.problems == ()
    assert parsed.args.moe_layer_freq == [0, 1, 1, 1]
    assert parsed.args.swiglu is True


def test_a_package_that_declares_a_spelling_reads_it_itself():
    from mindspeed_core.feature import Feature, Flag

    class FirstLayers(Feature):
        name = "first-layers"
        family = "test"
        summary = "Declares what is otherwise translated."
        flags = (Flag("--first-k-dense-replace", type=int, help="Dense layers."),)

    registry = Registry.of((FirstLayers,))
    parsed = flag_set(registry, "standalone").parse(shlex.split(f"{EXPERTS} --first-k-dense-replace 1"))
    assert parsed.flag_notes == ()
    assert parsed.args.first_k_dense_replace == 1


def test_groups_by_their_best_expert_are_refused_where_nobody_ranks_them_so():
    parsed = flag_set(Registry.of(()), "standalone").parse(shlex.split(f"{EXPERTS} {BY_BEST}"))
    (problem,) = [one for one in parsed.problems if one.flag == "--moe-router-load-balancing-type"]
    assert "is the nearest" in problem.remedy


FSDP2 = "--use-torch-fsdp2 --bf16 --fsdp2-config-path"


def options_file(tmp_path, text):
    path = tmp_path / "fsdp2.yaml"
    path.write_text(text)
    return path


def test_options_of_fsdp2_that_change_no_number_are_noted(tmp_path):
    text = "sharding_size: auto\nparam_dtype: bf16\nreduce_dtype: bf16\nrecompute_modules: [layers]\n"
    parsed = parse(f"{FSDP2} {options_file(tmp_path, text)}")
    assert parsed.problems == ()
    assert parsed.args.torch_fsdp2_reshard_after_forward is True
    (note,) = parsed.flag_notes
    assert "--recompute-granularity full" in note.reason


@pytest.mark.parametrize("host", ["standalone", "megatron-lm"])
def test_a_file_of_fsdp2_that_keeps_parameters_says_so_by_a_flag(tmp_path, host):
    parsed = parse(f"{FSDP2} {options_file(tmp_path, 'reshard_after_forward: false')}", host)
    assert parsed.problems == ()
    assert parsed.args.torch_fsdp2_reshard_after_forward is False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reduce_dtype: fp32", "reduce_dtype: 'fp32' differs from bf16"),
        ("ignored_modules: [image_encoder]", "out of sharding and of gradient reduction"),
        ("offload_to_cpu: true", "on the host"),
        ("reshard_after_forward: 4", "is a number of ranks"),
        ("no_such_option: 1", "no option that is known"),
        ("- a list", "holds a list"),
        ("a: [", "is no YAML"),
        ("!!python/object/apply:os.getcwd []", "is no YAML"),
    ],
)
def test_what_a_file_of_fsdp2_would_change_is_refused(tmp_path, text, says):
    (problem,) = parse(f"{FSDP2} {options_file(tmp_path, text)}").problems
    assert problem.flag == "--fsdp2-config-path"
    assert says in problem.reason
    assert problem.remedy


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_is_no_file_of_fsdp2(tmp_path, protocol):
    path = tmp_path / "fsdp2.yaml"
    path.write_bytes(pickle.dumps({"reshard_after_forward": False}, protocol))
    (problem,) = parse(f"{FSDP2} {path}").problems
    assert problem.flag == "--fsdp2-config-path"
    assert "fsdp2.yaml" in problem.reason
    assert problem.remedy


def test_a_file_of_fsdp2_that_is_not_there_is_named(tmp_path):
    (problem,) = parse(f"{FSDP2} {tmp_path / 'none.yaml'}").problems
    assert "none.yaml: cannot be read (No such file" in problem.reason
