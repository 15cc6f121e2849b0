#!/usr/bin/env bash
# One node: every GPU is a context-parallel rank of one replica.  Needs the environment that `make serve` has made.
#   launch/one_node.sh MODEL_FOLDER [further flags of jaxinfer.serve]
set -euo pipefail

model=$(realpath "${1:?expected the folder of a model}")
shift
gpus=$(nvidia-smi --list-gpus | wc -l)

cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/python -m jaxinfer.serve --model "$model" --mesh "cp=$gpus" "$@"
