#!/bin/sh
# From a training command to its fastest layout: the numbers of this machine, a search, and short runs.
set -e
OUT=${OUT:-found}
PROCESSES=${PROCESSES:-2}

set -- mindspeed-train --nproc "$PROCESSES" \
  --mock-data --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --vocab-size 512 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8 \
  --train-iters 100 --lr 1e-3 --eval-iters 0 "$@"

# Its status is 1 where rounds disagree, on a busy machine for instance; the file says so.
mindspeed-tune calibrate --tune-out "$OUT/machine.toml" --tune-work-dir "$OUT/calibration" -- "$@" || test -s "$OUT/machine.toml"

mindspeed-tune search --tune-hardware "$OUT/machine.toml" --tune-space "$(dirname "$0")/space.toml" \
  --tune-work-dir "$OUT/journal" --tune-out "$OUT" --tune-trials "${TRIALS:-6}" --no-tune-features -- "$@"

mindspeed-tune measure --tune-work-dir "$OUT/runs" --tune-trials "${MEASURED:-4}" --tune-out "$OUT" "$OUT/search.json"
