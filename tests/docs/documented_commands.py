"""Every shell command that the documentation shows, and what runs it.

A command that a test of this folder runs is in `READ_ONLY` or `TRAINED`; every other one is in `ELSEWHERE`,
with the reason why it is not run here and what does run it.
"""

from __future__ import annotations

DOCUMENTS = (
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/writing-a-plugin.md",
    "docs/faq.md",
    "docs/quick-start.md",
    "docs/quick-start.zh-CN.md",
    "docs/programs.md",
    "docs/training.md",
    "docs/models.md",
    "docs/data.md",
    "docs/checkpoints.md",
    "docs/monitoring.md",
    "docs/fault-tolerance.md",
    "docs/finetuning.md",
    "docs/clusters.md",
    "docs/fully-sharded.md",
    "docs/megatron-lm.md",
    "docs/library-sessions.md",
    "docs/plugin-recipes.md",
    "docs/optimizers.md",
    "docs/hook-versions.md",
    "docs/migration.md",
    "docs/migration.zh-CN.md",
)

READ_ONLY = {
    "mindspeed-features list": "fused-rmsnorm",
    "mindspeed-features plan -- --swiglu --normalization RMSNorm --use-fused-rmsnorm --use-fused-swiglu "
    "--use-flash-attn": "fills core-attention",
    "mindspeed-features plan --host megatron-lm -- --use-flash-attn --normalization RMSNorm "
    "--use-fused-rmsnorm": "fills norm",
    "mindspeed-features plan --host megatron-lm -- --normalization RMSNorm --use-fused-rmsnorm "
    "--use-flash-attn": "host megatron-lm",
    "mindspeed-features plan --host library -- --normalization RMSNorm --use-fused-rmsnorm": "host library",
    "mindspeed-features patches": "patches of",
    "mindspeed-features graph": "graph LR",
    "mindspeed-features doctor": "ready to train",
    "mindspeed-features show flash-attn": "--use-flash-attn",
    "mindspeed-features show flash-attn --all": "wraps build_layer_spec",
    "mindspeed-features show flash-attn --proofs": "without  ",
    "mindspeed-features show flash-attn --page": "# flash-attn",
    "mindspeed-features list --family cp --flags": "--ulysses-degree-in-cp",
    "mindspeed-features graph --around flash-attn": "core-attention",
    "mindspeed-train --help": "flags by family",
    "mindspeed-train --help checkpoints": "--save-interval",
    "mindspeed-train --help-flag lr-decay-style": "inverse-square-root",
    "mindspeed-train completion bash": "_MINDSPEED_TRAIN_COMPLETE",
}
"""Command as it stands: what its output contains."""

TRAINED = (
    "mindspeed-train prepare-text ",
    "mindspeed-train --nproc 2 --data-path ",
    "mindspeed-train --data-path ",
    "mindspeed-train inspect checkpoints",
    "mindspeed-train sample ",
    "torchrun --standalone ",
    "torchrun --nnodes 2 ",
)
"""Beginnings of commands that are run with smaller sizes, or planned where they need several machines."""

_INSTALLS = "downloads packages; noxfile.py installs the same for every session"
_SCAFFOLD = "writes and installs a package; tests/cli/test_scaffold.py does it in a folder of its own"
_RUN = "needs published weights; plugins/mindspeed_models/tests runs the same steps of tiny-llama2"
_TINY = "trains for a minute; plugins/mindspeed_models/tests runs the same steps"
_CLUSTER = "needs a cluster; packages/mindspeed_train/tests/clusters reads the options and the files"

ELSEWHERE = {
    "python3 bootstrap.py demo": "trains for minutes; a session of its own",
    "python3 bootstrap.py tests": "this suite itself",
    "python3 bootstrap.py affected": "a part of this suite; tests/core/test_affected_tests.py chooses it",
    "python3 bootstrap.py lint typecheck": "sessions of their own",
    "python3 bootstrap.py gpu": "a session of its own; tests/gpu runs the same program",
    "python3 bootstrap.py docs": "a session of its own; tests/docs/test_site.py builds the same site",
    "git clone <this repository> && cd mindspeed-core": "needs the network; whoever runs this has done it",
    "python3 -m venv .venv && . .venv/bin/activate": "bootstrap.py makes such an environment",
    "pip install -c constraints.txt torch": _INSTALLS,
    "pip install -c constraints.txt -e '.[dev]' -e packages/mindspeed_megatron -e packages/mindspeed_train "
    "-e plugins/mindspeed_testing": _INSTALLS,
    "pip install -c constraints.txt -e . -e packages/mindspeed_megatron -e packages/mindspeed_train "
    "-e plugins/mindspeed_testing": _INSTALLS,
    "pip install -c constraints.txt -e plugins/mindspeed_kernels -e plugins/mindspeed_profile": _INSTALLS,
    "pytest tests/core/test_resolver.py": "a part of this suite",
    "torchrun --nproc-per-node 8 pretrain_gpt.py YOUR_FLAGS --normalization RMSNorm --use-fused-rmsnorm "
    "--use-flash-attn": "needs a checkout of Megatron-LM; tests/megatron_lm/run.sh runs its scripts",
    "mindspeed-tune search --tune-hardware ascend-910b -- torchrun --nnodes 2 --nproc-per-node 8 "
    "pretrain_gpt.py YOUR_FLAGS": "needs a checkout of Megatron-LM; plugins/mindspeed_tune/tests searches",
    "mindspeed-train --nproc 2 --max-restarts 3 --save ckpt --save-interval 5 FLAGS": (
        "packages/mindspeed_train/tests/faults starts such jobs and kills their workers"
    ),
    "mindspeed-features plan -- --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --lrr 1e-3 "
    "--use-fused-rmsnorm": "is refused, as the page shows; tests/core reads such lines",
    "mindspeed-train --save checkpoints --save-interval 500 --load checkpoints FLAGS": (
        "packages/mindspeed_train/tests/host saves and resumes in every layout"
    ),
    "mindspeed-train FLAGS --run-dir runs/first --log-throughput": (
        "packages/mindspeed_train/tests/host reads what a run writes"
    ),
    "tail -n 1 runs/first/metrics.jsonl": "a program of every system",
    "cp examples/clusters/slurm/train.sbatch .": "a program of every system",
    "mindspeed-train --nproc 2 --use-torch-fsdp2 --untie-embeddings-and-output-weights FLAGS": (
        "packages/mindspeed_train/tests/host trains so, against one process"
    ),
    "mindspeed-train --nproc 2 --use-megatron-fsdp --use-distributed-optimizer "
    "--data-parallel-sharding-strategy optim_grads_params FLAGS": (
        "packages/mindspeed_train/tests/host trains so, against one process"
    ),
    "mindspeed-models run llama2-13b preprocess --hf-dir Llama-2-13b-hf/ "
    "--instructions alpaca_data.json": _RUN,
    "mindspeed-models run llama2-13b convert --hf-dir Llama-2-13b-hf/": _RUN,
    "mindspeed-models run llama2-13b finetune": _RUN,
    "mindspeed-models run llama2-13b lora": _RUN,
    "mindspeed-models run llama2-13b merge": _RUN,
    "mindspeed-models run llama2-13b export": _RUN,
    "mindspeed-models run tiny-llama2 preprocess --corpus books.jsonl --instructions alpaca_data.json": _TINY,
    "mindspeed-models run tiny-llama2 convert": _TINY,
    "mindspeed-models run tiny-llama2 pretrain": _TINY,
    "mindspeed-models run tiny-llama2 finetune -- --train-iters 60": _TINY,
    "mindspeed-models run tiny-llama2 lora": _TINY,
    "mindspeed-models run tiny-llama2 merge": _TINY,
    "mindspeed-models run tiny-llama2 export": _TINY,
    "mindspeed-models preprocess --input alpaca_data.json --handler-name GeneralInstructionHandler "
    "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path llama --append-eod "
    "--output-prefix data/alpaca": ("plugins/mindspeed_models/tests prepares such records"),
    "mindspeed-train --pretrained-checkpoint Llama-2-13b-hf/ --load adapters --save adapters "
    "--tokenizer-model llama --data-path data/alpaca --is-instruction-dataset --variable-seq-lengths "
    "--lora-target-modules linear_qkv linear_proj FLAGS": (
        "plugins/mindspeed_models/tests trains adapters on instruction data"
    ),
    "python examples/library/plain_megatron_core.py": "packages/mindspeed_megatron/tests/library runs it",
    "mindspeed-train --optimizer acme-lion --lr 1e-4 FLAGS": "tests/plugins/acme_five trains with it",
    "mindspeed-features verify acme-lion": "tests/plugins/acme_five runs the same proofs",
    "pip install 'mindspeed-core[fsspec]' s3fs": _INSTALLS,
    "mindspeed-train data check data/text --full": (
        "packages/mindspeed_train/tests/host/test_data_files.py runs it on a dataset"
    ),
    "mindspeed-train --save s3://bucket/run --load s3://bucket/run --checkpoint-staging /local/disk FLAGS": (
        "needs a bucket; packages/mindspeed_train/tests/host/test_store_runs.py has one of its own"
    ),
    "PLATFORM=cuda sbatch --nodes=4 --gres=gpu:8 train.sbatch --data-path /data/text --save-interval 500 "
    "FLAGS": _CLUSTER,
    "PLATFORM=npu sbatch --nodes=4 --gres=npu:8 train.sbatch --data-path /data/text --save-interval 500 "
    "FLAGS": _CLUSTER,
    "PLATFORM=cpu sbatch --nodes=1 --gres=none --ntasks-per-node=2 --cpus-per-task=1 train.sbatch "
    "--mock-data FLAGS": "needs Slurm; packages/mindspeed_train/tests/clusters runs it with a stand-in",
    "kubectl apply -f storage.yaml -f network.yaml": _CLUSTER,
    "kubectl apply -f cuda.yaml": _CLUSTER,
    "kubectl logs -f job/pretrain-workers-0": _CLUSTER,
    "kubectl delete -f cuda.yaml": _CLUSTER,
    "pip install 'mindspeed-core[torchx]'": _INSTALLS,
    "PACKAGE=$(python -c 'import mindspeed_train as m; print(*m.__path__)')": (
        "packages/mindspeed_train/tests/clusters finds it there"
    ),
    "COMPONENT=$PACKAGE/launch/torchx_component.py:train": (
        "packages/mindspeed_train/tests/clusters finds it there"
    ),
    "torchx run -s local_cwd $COMPONENT -j 1x2 --platform cpu -- --mock-data FLAGS": (
        "packages/mindspeed_train/tests/clusters runs the component on this machine"
    ),
    "torchx run -s slurm $COMPONENT -j 4x8 --platform cuda -- --data-path /data/text FLAGS": _CLUSTER,
    "torchx run -s kubernetes -cfg queue=default $COMPONENT -j 4x8 --platform npu --image IMAGE -- "
    "--data-path /data/text FLAGS": _CLUSTER,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 4 --nproc-per-node 8 --max-restarts 10 "
    "--rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400 --rdzv-id JOB -m mindspeed_core.train FLAGS": (
        "packages/mindspeed_train/tests/faults/test_lost_nodes.py starts such jobs and kills their nodes"
    ),
    "pip uninstall mindspeed": "takes a package of somebody else away",
    "pip install 'mindspeed-core[train]' mindspeed-kernels mindspeed-profile": _INSTALLS,
    "mindspeed-features verify fused-swiglu": "plugins/mindspeed_kernels/tests runs the same proofs",
    "mindspeed-features migrate pretrain.sh --write new.sh": "tests/cli/test_migrate.py writes such a script",
    "mindspeed-features migrate pretrain.sh --host megatron-lm": "tests/cli/test_migrate.py reads one for it",
    "mindspeed-features new acme-tools": _SCAFFOLD,
    "pip install -e ./acme-tools": _SCAFFOLD,
    "mindspeed-features verify acme-tools-loss-average": _SCAFFOLD,
    "pytest ./acme-tools": _SCAFFOLD,
}
"""Command: why it is not run here, and what runs it."""
