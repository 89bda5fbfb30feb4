#!/usr/bin/env bash
# Builds llamac with profile-guided optimization into FOLDER: bench/build_pgo.sh FOLDER [MODEL ...]. Use it with
# PYTHONPATH=FOLDER. An instrumented build runs `llamac bench` on the models (default: small random models of every
# dtype). Then the same sources are compiled with the profile. Needs GCC, or a compiler with the same options.
set -euo pipefail
folder=$(realpath -m "${1:?usage: bench/build_pgo.sh FOLDER [MODEL ...]}")
shift
models=()
for model in "$@"; do models+=("$(realpath "$model")"); done
cd "$(dirname "$0")/.."
here=$PWD
. bench/build_copy.sh
profile=$work/profile
cc=${CC:-cc}   # the options go into CC, because setup.py also links programs to probe the compiler
export PYTHONDONTWRITEBYTECODE=1

echo "instrumented build" >&2
CC="$cc -fprofile-generate=$profile -fprofile-update=atomic" install_copy "$work/instrumented"
if [ ${#models[@]} = 0 ]; then
    for dtype in f32 f16 bf16 q8 q4 q4s; do
        model=$work/$dtype.bin
        (cd "$here" && "${PYTHON:-python}" -m bench.make_model --shape stories15m --dtype "$dtype" "$model")
        models+=("$model")
    done
fi
for model in "${models[@]}"; do
    echo "training on $model" >&2
    (cd "$work" && PYTHONPATH=$work/instrumented "${PYTHON:-python}" -m llamac bench "$model" \
        --threads 1,2 --rounds 1 --prompt 128 --context 0,128 --batch 1,4 >&2)
done
echo "optimized build" >&2
CC="$cc -fprofile-use=$profile -fprofile-partial-training -Wno-missing-profile" install_copy "$folder"
