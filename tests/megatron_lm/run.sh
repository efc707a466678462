#!/usr/bin/env bash
# Megatron-LM's own scripts with the adaptor's line: layouts, resume and every installed plugin, against
# mindspeed-train. MEGATRON_LM_PATH names a checkout of core_v0.16.1, MEGATRON_LM_PYTHON an interpreter with what
# it imports (by default python3). README.md beside this file says how to make one. Arguments are those of
# adaptor.py: --case NAME, --keep FOLDER.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
: "${MEGATRON_LM_PATH:?name a checkout of Megatron-LM}"
export MEGATRON_LM_PATH PYTHONWARNINGS=ignore
exec "${PYTHON:-python3}" "$here/adaptor.py" "$@"
