"""Other spellings of MindSpeed and MindSpeed-LLM: what to read instead, from the whole command line.

Each function judges one flag. Where the meaning depends on other flags, it looks at them; where nothing here
means the same, it refuses. The table at the end is read by `reading` and by the pages of the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from mindspeed_megatron.upstream.finetuning import (
    fewer_bits,
    gradients_of_16_bits,
    noted_as,
    packed,
    packed_apart,
    prepared,
    stage,
    unpadded,
)
from mindspeed_megatron.upstream.fsdp2_file import fsdp2_file
from mindspeed_megatron.upstream.given import (
    ChangesNothing,
    Given,
    Line,
    Outcome,
    Refused,
    Translated,
    Translation,
)
from mindspeed_megatron.upstream.routing import (
    balancing_type,
    normalized_weights,
    sequence_loss,
    unless_zero,
)
from mindspeed_megatron.upstream.verdicts import MEGATRON_LM, MINDSPEED, MINDSPEED_LLM


def renamed(option: str) -> Translation:
    """Return the translation of a flag that has another name and the same values."""

    def translate(given: Given, line: Line) -> Outcome:
        return Translated((option, *given.words))

    return translate


def position_embedding(given: Given, line: Line) -> Outcome:
    """``--no-position-embedding``: Megatron-LM takes it beside rotary embeddings alone, which stay."""
    if line.has("--use-rotary-position-embeddings") or line.value("--position-embedding-type") == "rope":
        return ChangesNothing("rotary embeddings take the place of the one that it leaves out")
    return Translated(("--position-embedding-type", "none"))


def layer_frequency(given: Given, line: Line) -> Outcome | None:
    """``--moe-layer-freq -1``: MindSpeed-LLM counts modulo it, so that the sign has no effect."""
    if line.number("--first-k-dense-replace", 0) > 0 and not line.knows("--first-k-dense-replace"):
        return None
    word = given.words[0] if len(given.words) == 1 else ""
    if word.startswith("-") and word[1:].isdigit() and word != "-0":
        return Translated(("--moe-layer-freq", word[1:]), "layers are counted modulo it, without its sign")
    return None


def first_dense_layers(given: Given, line: Line) -> Outcome:
    """``--first-k-dense-replace K``: layer i has experts if i >= K and --moe-layer-freq divides i."""
    word = given.words[0] if len(given.words) == 1 else ""
    if not word.lstrip("-").isdigit():
        return Refused("it takes one whole number", "write --first-k-dense-replace K")
    if not line.has("--num-experts"):
        return ChangesNothing("the model has no experts")
    dense = max(int(word), 0)
    if not dense:
        return ChangesNothing("no layer is made dense by it")
    frequency, layers = line.value("--moe-layer-freq", "1"), line.value("--num-layers")
    if not frequency.lstrip("-").isdigit() or not int(frequency):
        return Refused(
            f"--moe-layer-freq {frequency} says it too, layer by layer", "keep --moe-layer-freq alone"
        )
    if not layers.isdigit():
        return Refused("the layers behind the first ones are counted by --num-layers", "add --num-layers")
    if dense >= int(layers):
        return Refused(
            f"no layer of --num-layers {layers} would have experts", "lower it, or leave out --num-experts"
        )
    step = abs(int(frequency))
    if step == 1:
        pattern = f"([0]*{dense}+[1]*{int(layers) - dense})"
    else:
        pattern = f"[{','.join(str(int(i >= dense and i % step == 0)) for i in range(int(layers)))}]"
    return Translated(("--moe-layer-freq", pattern), without=("--moe-layer-freq",))


def rope_scaling(given: Given, line: Line) -> Outcome:
    """``--rope-scaling-type``: yarn is of latent attention, llama3 has a flag of its own."""
    word = given.words[0] if len(given.words) == 1 else ""
    if word == "yarn":
        if not line.has(*_LATENT):
            return Refused(
                "yarn scales the positions of latent attention alone here",
                "add --multi-latent-attention, or leave it out",
            )
        if not line.has("--rope-scaling-factor", "--yarn-scaling-factor", "--rotary-scaling-factor"):
            return Refused(
                "without a factor MindSpeed-LLM scales positions by 8, and MindSpeed by 1",
                "add --rope-scaling-factor N",
            )
        return Translated(("--rope-type", "yarn"))
    if word == "llama3":
        fixed = {
            "--low-freq-factor": 1.0,
            "--high-freq-factor": 4.0,
            "--original-max-position-embeddings": 8192.0,
            "--rope-scaling-original-max-position-embeddings": 8192.0,
        }
        other = [option for option, value in fixed.items() if line.number(option, value) != value]
        if other:
            return Refused(
                f"{other[0]} is fixed at {fixed[other[0]]:g} here", "use Llama 3.1's value, or leave it out"
            )
        return Translated(("--use-rope-scaling",))
    return Refused(f"positions are not scaled as {word or 'an empty type'} says", "use yarn or llama3")


def rope_scaling_factor(given: Given, line: Line) -> Outcome | None:
    """``--rope-scaling-factor``: Llama 3.1's beside --use-rope-scaling, else of --rope-scaling-type."""
    if line.value("--rope-scaling-type") == "yarn":
        return Translated(("--rotary-scaling-factor", *given.words))
    return None


def llama_constant(given: Given, line: Line) -> Outcome:
    """``--low-freq-factor``, ``--high-freq-factor``: fixed parts of Llama 3.1's scaling."""
    if line.value("--rope-scaling-type") == "llama3":
        return ChangesNothing("Llama 3.1's value is the one that is used")
    return ChangesNothing("it is read with --rope-scaling-type llama3 alone")


def original_positions(given: Given, line: Line) -> Outcome:
    """``--rope-scaling-original-max-position-embeddings``."""
    if line.value("--rope-scaling-type") == "llama3":
        return ChangesNothing("Llama 3.1's value is the one that is used")
    return Translated(("--original-max-position-embeddings", *given.words))


def tokenizer_type(given: Given, line: Line) -> Outcome | None:
    """``--tokenizer-type PretrainedFromHF``: a folder or file of Hugging Face's tokenizers."""
    if given.words == ("PretrainedFromHF",):
        return Translated(("--tokenizer-type", "HuggingFaceTokenizer"))
    if given.words == ("MagistralTokenizer",):
        return Refused("Magistral's own tokenizer is not here", "use HuggingFaceTokenizer")
    return None


def tokenizer_path(given: Given, line: Line) -> Outcome:
    """``--tokenizer-name-or-path``."""
    return Translated(("--tokenizer-model", *given.words))


def kernel_layout(given: Given, line: Line) -> Outcome | None:
    """``--shape-order BNSD``: the order of axes in which a kernel takes its operands."""
    if given.words == ("BNSD",):
        return ChangesNothing("the kernel takes its operands in another order of axes, with the same result")
    return None


def checkpoint_format(given: Given, line: Line) -> Outcome | None:
    """``--ckpt-format torch`` and ``torch_dcp``: formats of Megatron-LM's; written as torch_dist."""
    if given.words in (("torch",), ("torch_dcp",)):
        return Translated(
            ("--ckpt-format", "torch_dist"),
            "checkpoints are written in megatron-core's format; a folder of --load in another one is refused",
        )
    if given.words == ("fsdp_dtensor",) and line.has("--use-megatron-fsdp", "--use-custom-fsdp"):
        return Translated(
            ("--ckpt-format", "torch_dist"),
            "parameters that Megatron-FSDP shards are written in megatron-core's format too",
        )
    return None


def attention_backend(given: Given, line: Line) -> Outcome | None:
    """``--attention-backend flash``: a plugin's flash attention, where layers are megatron-core's own."""
    local = line.value("--transformer-impl") == "local" or find_spec("transformer_engine") is None
    if given.words != ("flash",) or not local:
        return None
    if line.has("--use-flash-attn"):
        return ChangesNothing("--use-flash-attn says it")
    return Translated(("--use-flash-attn",)) if line.knows("--use-flash-attn") else None


def custom_fsdp(given: Given, line: Line) -> Outcome:
    """``--use-custom-fsdp``: the first name of Megatron-FSDP."""
    return Translated(("--use-megatron-fsdp",))


def norm_offset(given: Given, line: Line) -> Outcome:
    """``--add-rmsnorm-offset``: norms scale with one plus their weight."""
    return Translated(
        ("--apply-layernorm-1p",),
        "weights start at zero; MindSpeed-LLM's start at one and scale by two",
    )


def softmax_type(given: Given, line: Line) -> Outcome:
    """``--topk-softmax-in-fp32``: weights of experts stay in float32 until they are used."""
    if not line.has("--num-experts"):
        return ChangesNothing("the model has no experts")
    return Translated(("--moe-router-dtype", "fp32"), "the product of the router is in float32 as well")


def specification(given: Given, line: Line) -> Outcome | None:
    """``--spec mindspeed_llm…``: layers that MindSpeed-LLM describes in code."""
    word = given.words[0] if given.words else ""
    if not word.startswith("mindspeed_llm."):
        return None
    name = word.rpartition(".")[2]
    if given.words[1:] == ("layer_spec",):
        if name in _PLAIN_LAYERS and not line.has(*_LATENT):
            return ChangesNothing("megatron-core's own layers are these, norms of queries and keys included")
        if name == "deepseek_spec" and _same_latent_attention(line):
            return ChangesNothing(
                "megatron-core's latent attention computes the same; weights there have other names"
            )
    return Refused(f"the layers of {name} are not here", "leave it out for megatron-core's layers")


_PLAIN_LAYERS = ("qwen3_spec", "bailing_spec")
"""Specifications of megatron-core's own attention and MLP, with norms of queries and keys."""
_LATENT = ("--multi-latent-attention", "--multi-head-latent-attention")


def _same_latent_attention(line: Line) -> bool:
    """Return whether positions and scores are scaled as in megatron-core.

    Without yarn MindSpeed-LLM rotates other pairs of channels, and with two constants it scales scores by
    the second one.
    """
    scales = [line.number(f"--rope-scaling-{name}", 0.0) for name in ("mscale", "mscale-all-dim")]
    yarn = line.value("--rope-scaling-type") == "yarn"
    return line.has(*_LATENT) and yarn and scales[0] == scales[1] != 0


@dataclass(frozen=True)
class Entry:
    """One translation of the table.

    Attributes:
        source: whose spelling it is.
        translate: the function.
        reads: one phrase for the documentation: what is read instead.
        declared: where somebody declares the flag: `NEVER` asked, asked about values that are `NO_CHOICE`
            of it, or `ALWAYS` asked.
        older_name_of: the flag that it is an older name of; other translations see it under this name too.
    """

    source: str
    translate: Translation
    reads: str
    declared: str = "never"
    older_name_of: str = ""


NEVER, NO_CHOICE, ALWAYS = "never", "no choice", "always"


def _renamed(source: str, names: Mapping[str, str]) -> dict[str, Entry]:
    return {old: Entry(source, renamed(new), f"`{new}`", older_name_of=new) for old, new in names.items()}


TRANSLATIONS: Mapping[str, Entry] = {
    **_renamed(
        MINDSPEED,
        {
            "--multi-head-latent-attention": "--multi-latent-attention",
            "--qk-nope-head-dim": "--qk-head-dim",
            "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
            "--yarn-scaling-factor": "--rotary-scaling-factor",
            "--rope-scaling-beta-fast": "--beta-fast",
            "--rope-scaling-beta-slow": "--beta-slow",
            "--rope-scaling-mscale": "--mscale",
            "--rope-scaling-mscale-all-dim": "--mscale-all-dim",
        },
    ),
    **_renamed(
        MINDSPEED_LLM,
        {
            "--moe-intermediate-size": "--moe-ffn-hidden-size",
            "--use-mc2": "--use-ascend-mc2",
            "--use-deter-comp": "--npu-deterministic",
            "--shared-expert-gate": "--moe-shared-expert-gate",
        },
    ),
    **{
        old: Entry(MINDSPEED_LLM, unless_zero(new), f"`{new}`", older_name_of=new)
        for old, new in {
            "--n-group": "--moe-router-num-groups",
            "--topk-group": "--moe-router-group-topk",
            "--routed-scaling-factor": "--moe-router-topk-scaling-factor",
            "--partial-rotary-factor": "--rotary-percent",
        }.items()
    },
    "--add-rmsnorm-offset": Entry(
        MINDSPEED_LLM, norm_offset, "`--apply-layernorm-1p`", older_name_of="--apply-layernorm-1p"
    ),
    "--router-gating-in-fp32": Entry(
        MINDSPEED_LLM,
        lambda given, line: Translated(("--moe-router-dtype", "fp32")),
        "`--moe-router-dtype fp32`",
    ),
    "--topk-softmax-in-fp32": Entry(MINDSPEED_LLM, softmax_type, "`--moe-router-dtype fp32`"),
    "--first-k-dense-replace": Entry(MINDSPEED_LLM, first_dense_layers, "`--moe-layer-freq` with a pattern"),
    "--moe-layer-freq": Entry(MINDSPEED_LLM, layer_frequency, "without a sign", ALWAYS),
    "--norm-topk-prob": Entry(MINDSPEED_LLM, normalized_weights, "no `--moe-router-pre-softmax`"),
    "--seq-aux": Entry(MINDSPEED_LLM, sequence_loss, "`--moe-router-load-balancing-type seq_aux_loss`"),
    "--moe-router-load-balancing-type": Entry(
        MINDSPEED_LLM,
        balancing_type,
        "pai_megatron_aux_loss as `aux_loss --moe-router-pre-softmax`, group_limited_greedy as these with "
        "`--moe-router-best-of-group`",
        NO_CHOICE,
    ),
    "--rope-scaling-type": Entry(
        MINDSPEED, rope_scaling, "yarn as `--rope-type yarn`, llama3 as `--use-rope-scaling`"
    ),
    "--rope-scaling-factor": Entry(
        MINDSPEED, rope_scaling_factor, "`--rotary-scaling-factor` with yarn", ALWAYS
    ),
    "--rope-scaling-original-max-position-embeddings": Entry(
        MINDSPEED, original_positions, "`--original-max-position-embeddings` with yarn"
    ),
    "--low-freq-factor": Entry(MINDSPEED_LLM, llama_constant, "Llama 3.1's constant"),
    "--high-freq-factor": Entry(MINDSPEED_LLM, llama_constant, "Llama 3.1's constant"),
    "--tokenizer-type": Entry(
        MINDSPEED_LLM, tokenizer_type, "PretrainedFromHF as HuggingFaceTokenizer", NO_CHOICE
    ),
    "--tokenizer-name-or-path": Entry(MINDSPEED, tokenizer_path, "`--tokenizer-model`"),
    "--shape-order": Entry(MINDSPEED_LLM, kernel_layout, "BNSD as the default", NO_CHOICE),
    "--fsdp2-config-path": Entry(
        MINDSPEED, fsdp2_file, "what the file says: `--torch-fsdp2-no-reshard-after-forward`, or nothing"
    ),
    "--use-custom-fsdp": Entry(MINDSPEED, custom_fsdp, "`--use-megatron-fsdp`"),
    "--no-position-embedding": Entry(MEGATRON_LM, position_embedding, "`--position-embedding-type none`"),
    "--ckpt-format": Entry(MEGATRON_LM, checkpoint_format, "torch and torch_dcp as torch_dist", NO_CHOICE),
    "--attention-backend": Entry(MEGATRON_LM, attention_backend, "flash as `--use-flash-attn`", ALWAYS),
    "--stage": Entry(MINDSPEED_LLM, stage, "sft as `--is-instruction-dataset`"),
    "--no-pad-to-seq-lengths": Entry(MINDSPEED_LLM, unpadded, "`--variable-seq-lengths`"),
    "--pack": Entry(MINDSPEED_LLM, packed, "`--pack-samples`, with `--neat-pack`"),
    "--neat-pack": Entry(MINDSPEED_LLM, packed_apart, "`--pack-samples`"),
    "--o2-optimizer": Entry(MINDSPEED_LLM, fewer_bits, "`--quant-states bf16`"),
    "--o2-gradient": Entry(MINDSPEED_LLM, gradients_of_16_bits, "`--quant-grads`"),
    **{
        name: Entry(MINDSPEED_LLM, prepared, "nothing: `mindspeed-models preprocess` takes it")
        for name in ("--handler-name", "--prompt-type", "--enable-thinking", "--workers")
    },
    **{
        name: Entry(MINDSPEED_LLM, noted_as(reason), "nothing")
        for name, reason in {
            "--padded-samples": "the last batch of an epoch is filled from the next one",
            "--pad-to-multiple-of": "what fills up is no token, however much it is",
            "--tokenizer-padding-side": "what fills up is no token, on whichever side",
            "--max-batch-size": "it is for generating text",
            "--model-type-hf": "config.json of the directory that is loaded says it",
            "--enable-hf2mg-convert": "--load reads a Hugging Face directory as it is",
            "--lora-fusion": "it chooses a kernel",
            "--lora-ckpt-filter": "checkpoints of adapters hold the adapters alone",
            "--loss-compute-mode": "the loss is the same; --lm-loss-chunks of mindspeed-tp saves its memory",
            "--loss-chunk-size": "the loss is the same; --lm-loss-chunks of mindspeed-tp saves its memory",
        }.items()
    },
    "--spec": Entry(MINDSPEED_LLM, specification, "names of MindSpeed-LLM's specifications"),
}
"""Translations by option string."""
