#!/bin/sh
# From raw text to a finetuned model in transformers' format, on two processes of a CPU: sh run.sh [FAMILY] [WORK]
set -eu
family=${1:-llama2}
work=${2:-work}
here=$(cd "$(dirname "$0")" && pwd)
python "$here/texts.py" "$work"
for step in convert preprocess pretrain finetune lora merge export; do
    echo "== $step"
    mindspeed-models run "tiny-$family" "$step" --work-dir "$work" --platform cpu --nproc 2 \
        --corpus "$work/texts.jsonl" --instructions "$work/questions.jsonl"
done
