#!/usr/bin/env bash
# Builds llamac with profile-guided optimization into a folder of its own: bench/build_pgo.sh FOLDER [MODEL ...]. Use it with
# PYTHONPATH=FOLDER. An instrumented build runs `llamac bench` on the models (default: the built-in one, and small random ones of
# every dtype), then the same sources are compiled with what was counted. GCC, or another compiler that takes its options.
set -euo pipefail
folder=$(realpath -m "${1:?usage: bench/build_pgo.sh FOLDER [MODEL ...]}")
shift
models=()
for model in "$@"; do models+=("$(realpath "$model")"); done
cd "$(dirname "$0")/.."
here=$PWD
. bench/build_copy.sh
profile=$work/profile
export PYTHONDONTWRITEBYTECODE=1

echo "instrumented build" >&2
CFLAGS="-fprofile-generate=$profile -fprofile-update=atomic" LDFLAGS="-fprofile-generate=$profile" install_copy "$work/instrumented"
if [ ${#models[@]} = 0 ]; then
    for dtype in f32 f16 bf16 q8 q4 q4s; do
        model=$work/$dtype.bin
        (cd "$here" && "${PYTHON:-python}" -m bench.make_model --shape stories15m --dtype "$dtype" "$model")
        models+=("$model")
    done
fi
for model in "${models[@]}"; do
    echo "training on $model" >&2
    (cd "$work" && PYTHONPATH=$work/instrumented "${PYTHON:-python}" -m llamac bench "$model" --threads 1,2 --rounds 1 --prompt 128 --context 0,128 --batch 1,4 >&2)
done
echo "optimized build" >&2
CFLAGS="-fprofile-use=$profile -fprofile-partial-training -Wno-missing-profile -Wno-coverage-mismatch" install_copy "$folder"
