#!/bin/sh
# A small model on real text: pretrained, finetuned on instructions, adapted to one of them. sh run.sh [WORK]
set -eu
work=${1:-work}
here=$(cd "$(dirname "$0")" && pwd)
python "$here/texts.py" "$work"
mkdir -p "$work/model"
cp "$here/config.json" "$work/model/config.json"

step() {
    name=$1
    shift
    echo "== $name"
    mindspeed-models run "$here/small.toml" "$name" --work-dir "$work" --platform cpu --nproc 1 "$@"
}

step preprocess --corpus "$work/texts.jsonl" --instructions "$work/mixed.jsonl"
step preprocess --instructions "$work/parts.jsonl" --tokenizer "$work/tokenizer/text.tokenizer.json" \
    -- --output-prefix "$work/data/parts"
step pretrain
step finetune
step lora -- --data-path "$work/data/parts"
step merge
for folder in pretrained finetuned merged; do
    echo "== answers of $folder"
    python "$here/answers.py" "$work" "$folder"
done
python "$here/curves.py" "$work"
