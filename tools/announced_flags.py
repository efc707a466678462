"""Write ``mindspeed_core/flags/announced.json``: which distribution ships which flag and feature.

The core knows no feature by name, yet a user who types a flag of a package that is not installed should be
given its name. The table is therefore generated: from the declarations of the plugins in this repository,
and from the flags that the plugin families have announced. Usage:
``python tools/announced_flags.py [--check]``.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "mindspeed_core" / "flags" / "announced.json"

ANNOUNCED_FLAGS = {
    "mindspeed-cp": """
        --context-parallel-algo --cp-attention-mask-type --use-cp-send-recv-overlap --megatron-cp-in-bnsd
        --cp-window-size --ulysses-degree-in-cp --context-parallel-kv-cache-policy
        --context-parallel-cache-interval --use-ulysses-allgather-kv --adaptive-cp-only-reschedule
        --adaptive-cp-dynamic-attn-mask --adaptive-cp-manually-set-mask-list --adaptive-cp-without-coarse
        --fix-sub-seq-length --attention-mask-type""",
    "mindspeed-kernels": """
        --ops-backend --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-flash-attn
        --pre-tockens --next-tockens --sparse-mode --shape-order --use-fusion-attn-v2 --attention-mask-on-cpu
        --alibi-fusion-attn-type --alibi-diagonal-opposite --square-alibi-mask --fill-neg-inf --triangle-attn
        --triangle-block-size --use-fused-ring-attention-update --gemm-gradient-accumulation-fusion
        --npu-deterministic --deterministic-ops""",
    "mindspeed-tp": """
        --tp-2d --tp-x --tp-y --enable-overlap-ag-with-matmul --enable-overlap-matmul-with-rs
        --enable-backward-overlap-ag-with-matmul --use-ascend-coc --coc-mode --coc-parallel-num
        --coc-fused-kernel --use-ascend-mc2 --optimize-recomp-communication-level
        --optimize-recompute-communication-level --unaligned-linear --use-nd-matmul --nd1-dim1-size
        --nd2-dim1-size --lm-loss-chunks --mlp-layer-fusion --coc-config --comm-overlap-type
        --async-log-allreduce --hccl-slice-size --hccl-group-buffer --hccl-group-buffer-adaptive
        --hccl-ep-group-buffer-adaptive-factor --hccl-op-mode""",
    "mindspeed-pp": """
        --pipeline-schedule --use-nanopipe --use-nanopipe-swap --schedules-method --dualpipev-dw-detach
        --noop-layers --pipeline-num-transformer-layers --num-layer-list
        --use-multiparameter-pipeline-model-parallel --optimize-send-recv-comm --optimize-vpp-send-recv-comm
        --optimized-pipeline --manual-mbs --automated-pipeline-perf --optimized-mbs-list --pp-schedule-list
        --optimized-mbs-mode --mbs-idx --foldx-mode --fold-mode""",
    "mindspeed-moe": """
        --moe-permutation-async-comm --use-fused-moe-token-permute-and-unpermute --moe-alltoall-overlap-comm
        --moe-allgather-overlap-comm --moe-zero-memory --moe-zero-memory-num-layers --moe-tp-extend-ep
        --n-shared-experts --moe-hierarchical-alltoallv --moe-zerc --moe-experts-pipeline-degree
        --moe-adaptive-recompute-activation --moe-adaptive-recompute-activation-scale --moe-fb-overlap
        --moe-unperm2-mem-optim-swap --moe-unperm2-mem-optim --balanced-moe-experts
        --balanced-moe-hot-expert-num --trans-hot-expert-group-num --enable-expert-placement
        --expert-placement-freq --enable-fine-grained-expert-placement --fine-grained-expert-placement-thre
        --print-expert-load --moe-alltoall-mc2 --moe-bmm-mc2 --fix-router --moe-model-type --expert-interval
        --moe-train-capacity-factor --noisy-gate-policy --no-use-rts --moe-use-sinkhorn
        --enable-token-rearrange-opt --moe-no-drop --moe-dynamic-padding --use-pipe-experts
        --pipe-experts-multi-data --pipe-experts-multi-stream --ampipe-degree --ampipe-tp-sp-comm-overlap
        --moe-comm-plan --moe-node-size --moe-dropless""",
    "mindspeed-memory": """
        --recompute-activation-function --recompute-activation-function-num-layers --recompute-norm
        --recompute-norm-num-layers --enable-recompute-layers-per-pp-rank --recompute-in-bubble
        --recompute-in-advance --recompute-in-advance-depth --reduce-recompute-for-last-chunk
        --reuse-fp32-param --release-fp32-grad --swap-attention --swap-modules --swap-layer-input --smart-swap
        --swap-optimizer --swap-optimizer-times --swap-min-bytes --virtual-optimizer
        --adaptive-recompute-device-swap --adaptive-recompute-device-size --adaptive-recompute-profiling-step
        --adaptive-memory-optimization --checkpoint-activations --checkpoint-policy
        --auto-recompute-device-size --auto-recompute-profiling-step --memory-fragmentation
        --compress-activation --compress-dense --compress-optimizer --memory-report""",
    "mindspeed-optim": """
        --optimizer-selection --ema-decay --quant-states --quant-grads --muon-momentum --muon-no-split-qkv
        --muon-nesterov --muon-scale-mode --muon-fp32-matmul-prec --muon-coefficient-type
        --muon-num-ns-steps --muon-tp-mode --muon-extra-scale-factor --muon-scalar-optimizer --zero-stage""",
    "mindspeed-profile": """
        --profile-level --profile-with-cpu --profile-with-stack --profile-with-memory --profile-record-shapes
        --profile-save-path --profile-export-type --profile-aic-metrics --profile-analyse --op-cal-tflops
        --peak-tflops --flops-mode --log-step-breakdown --log-comm-bytes --npu-datadump
        --record-memory-history --memory-snapshot-path --log-memory-interval --log-device-memory-used""",
    "mindspeed-tune": """
        --auto-settings --auto-settings-work-dir --auto-settings-ranks --auto-settings-log-level
        --auto-settings-type --target-nnodes --prof-file --auto-tuning --auto-tuning-work-dir
        --auto-tuning-ranks --auto-tuning-log-level --auto-parallel --auto-parallel-mm --simulated-nnodes
        --simulated-nproc-per-node --tune-budget-minutes --tune-trials --tune-hardware --tune-space
        --automated-pipeline --save-memory-ratio --recompute-module-list --recompute-type""",
    "mindspeed-models": """
        --model --model-config --embed-layernorm --lm-norm-weight --z-loss-weight --no-add-gate
        --row-col-parallel-linear-bias --pad-vocab-size-to --input-model-dir --output-model-dir
        --orig-vocab-size --is-instruction-dataset --keep-last-token --dataset-format --chat-template
        --train-on --pack-samples --lora-target-modules --lora-load --lora-r --lora-alpha
        --lora-modules-to-save --lora-register-forward-hook --lora-adapter-name --task --task-data-path
        --max-new-tokens --ds-inference --variable-seq-lengths""",
}

ANNOUNCED_CHOICES = {
    "mindspeed-kernels": ("--position-embedding-type alibi",),
    "mindspeed-optim": ("--optimizer cadam", "--optimizer muon", "--optimizer dist_muon"),
}

ANNOUNCED_FEATURES = {
    "mindspeed-cp": """cp-core cp-ulysses cp-ring cp-double-ring cp-hybrid cp-kvallgather cp-kv-cache
        cp-adaptive cp-hybrid-adaptive cp-eod-reset cp-alibi cp-mask""",
    "mindspeed-kernels": """fused-rmsnorm fused-swiglu fused-rope flash-attn fusion-attn-v2 generate-mask
        triangle-attn masked-softmax ring-attention-update""",
    "mindspeed-tp": "tp-2d coc mc2 recompute-comm unaligned-linear nd-matmul chunked-lm-loss",
    "mindspeed-pp": "pp-engine nanopipe dualpipev noop-layers unaligned-pipeline num-layer-list send-recv",
    "mindspeed-moe": """moe-core moe-permute-fusion moe-async-comm moe-alltoall-overlap
        moe-allgather-overlap moe-zero-memory moe-adaptive-recompute moe-tp-extend-ep moe-shared-experts
        moe-comm-plan moe-experts-pipeline moe-fb-overlap moe-pipe-experts moe-ampipe
        moe-expert-placement moe-balanced-experts moe-mc2 moe-deepspeed moe-dropless moe-fix-router""",
    "mindspeed-memory": """recompute-activation recompute-norm recompute-in-bubble recompute-in-advance
        reuse-fp32-param release-fp32-grad swap-attention swap-layer-input smart-swap swap-optimizer
        virtual-optimizer adaptive-recompute memory-fragmentation compress-activation compress-optimizer""",
    "mindspeed-optim": "opt-fused-adamw opt-ema opt-cadam opt-quant-states opt-quant-grads opt-muon opt-zero",
    "mindspeed-profile": "profile tflops step-breakdown comm-bytes npu-datadump memory-history memory-log",
    "mindspeed-tune": "auto-settings auto-parallel",
    "mindspeed-models": "llm-models llm-instruction-data llm-variable-length llm-lora llm-generate",
}


def plugins_in_the_tree() -> dict[str, tuple[set[str], set[str]]]:
    """Collect flags and feature names that the plugins of this repository declare, installed or not."""
    from mindspeed_core.discovery.feature_checks import declared_features

    found: dict[str, tuple[set[str], set[str]]] = {}
    for metadata in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        package = metadata.parent.name
        sys.path.insert(0, str(metadata.parent / "src"))
        flags, names = found.setdefault(package.replace("_", "-"), (set(), set()))
        if (
            not (metadata.parent / "src" / package / "features").with_suffix(".py").exists()
            and not (metadata.parent / "src" / package / "features").is_dir()
        ):
            continue  # a package of tools
        for feature in declared_features(import_module(f"{package}.features").DECLARATIONS):
            names.add(feature.name)
            flags.update(option for flag in feature.flags for option in flag.options)
    return found


def table() -> dict[str, dict[str, list[str]]]:
    """Build the whole table; a flag that a plugin in the tree declares belongs to that plugin."""
    flags = {name: dist for dist, names in ANNOUNCED_FLAGS.items() for name in names.split()}
    features = {name: dist for dist, names in ANNOUNCED_FEATURES.items() for name in names.split()}
    for dist, (declared, names) in plugins_in_the_tree().items():
        flags.update(dict.fromkeys(declared, dist))
        features.update(dict.fromkeys(names, dist))
    # What the host defines is there without any plugin; other hosts are asked about their flags first.
    always = _host_flags()
    flags = {flag: dist for flag, dist in flags.items() if flag not in always}
    choices = {dist: sorted(values) for dist, values in ANNOUNCED_CHOICES.items()}
    return {
        "choices": choices,
        "features": _by_owner(features),
        "flags": _by_owner(flags),
    }


def _host_flags() -> set[str]:
    from mindspeed_core.registry import Registry

    return {option for flag in Registry.of(()).host_flags("standalone") for option in flag.options}


def _by_owner(owners: dict[str, str]) -> dict[str, list[str]]:
    return {
        owner: sorted(name for name, other in owners.items() if other == owner)
        for owner in sorted(set(owners.values()))
    }


def main(argv: list[str]) -> int:
    """Write the table, or with ``--check`` say whether the written one is current."""
    text = json.dumps(table(), indent=1, sort_keys=True) + "\n"
    if "--check" in argv:
        current = TABLE.is_file() and TABLE.read_text(encoding="utf-8") == text
        if not current:
            print(f"{TABLE.name} is out of date: run python tools/announced_flags.py", file=sys.stderr)
        return 0 if current else 1
    TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
