#!/usr/bin/env bash
# Builds llamac with link-time optimization into FOLDER: bench/build_lto.sh FOLDER. Use it with PYTHONPATH=FOLDER.
set -euo pipefail
folder=$(realpath -m "${1:?usage: bench/build_lto.sh FOLDER}")
cd "$(dirname "$0")/.."
. bench/build_copy.sh
LLAMAC_LTO=1 install_copy "$folder"
