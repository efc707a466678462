#!/bin/sh
# A small model on real text: pretrained, finetuned on instructions, adapted to one kind of them. sh run.sh [WORK]
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

ask() {
    echo "== answers of $1"
    python "$here/answers.py" "$work" "$1"
}

step preprocess --corpus "$work/texts.jsonl" --instructions "$work/mixed.jsonl" \
    -- --chat-template "$here/questions.jinja"
step preprocess --instructions "$work/parts.jsonl" \
    -- --chat-template "$here/questions.jinja" --output-prefix "$work/data/parts"
step pretrain
ask pretrained
step finetune
ask finetuned
step lora -- --data-path "$work/data/parts"
step merge
ask merged
python "$here/curves.py" "$work"
