#!/usr/bin/env bash
# Fetches the wheels that benchmarks/gpu.py needs on a machine with Python 3.12, torch and numpy, and prints their sizes.
#
#     benchmarks/gpu_wheels.sh wheels
#
# There: python3 -m pip install --no-index --no-deps --target site wheels/*.whl && PYTHONPATH=site python3 benchmarks/gpu.py
set -euo pipefail
folder=$(realpath -m "${1:?the folder to put them into}")
cd "$(dirname "$0")/.."
fetch() {
    python3 -m pip download --quiet --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -c constraints.txt -d "$folder" "$@"
}
mkdir -p "$folder"
fetch diffusers transformers psutil
fetch --no-deps accelerate  # whose needs are torch, numpy and what is there
rm -f "$folder"/numpy-*.whl
ls -lS "$folder"/*.whl | awk '{ total += $5; printf "%8.1f KiB  %s\n", $5 / 1024, $9 } END { printf "%8.1f MiB together\n", total / 1048576 }'
