#!/usr/bin/env bash
# Fetch what a machine with a GPU, torch and transformers lacks, where no package index is in reach: wheels for its
# Python, and kernels that are compiled already, if an environment with its torch and Triton is named (gpu_env.txt).
#
#     benchmarks/gpu_bundle.sh DIR [PYTHON]
set -euo pipefail
bundle=$1
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$bundle" && bundle=$(cd "$bundle" && pwd)
elsewhere=(--only-binary=:all: --python-version 3.12 --implementation cp)
for glibc in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1; do elsewhere+=(--platform "${glibc}_x86_64"); done
pip download --quiet "${elsewhere[@]}" -d "$bundle" pydantic
pip download --quiet "${elsewhere[@]}" --no-deps -d "$bundle" gguf tomli-w zstandard
if [ $# -gt 1 ]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  cd "$root/tests"
  PYTHONPATH="$root" TRITON_CACHE_DIR="$scratch/triton" "$2" triton_compile.py --check 90
  tar cJf "$bundle/triton.tar.xz" -C "$scratch" triton
fi
