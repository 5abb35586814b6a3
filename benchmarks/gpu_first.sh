#!/usr/bin/env bash
# Run gpu.py on a machine with a GPU where no package index is in reach, from a folder that gpu_bundle.sh made.
#
#     benchmarks/gpu_first.sh DIR [options of gpu.py]
set -euo pipefail
bundle=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if compgen -G "$bundle/*.whl" > /dev/null; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/packages" "$bundle"/*.whl
fi
if [ -f "$bundle/triton.tar.xz" ]; then
  tar xJf "$bundle/triton.tar.xz" -C "$scratch"
  export TRITON_CACHE_DIR="$scratch/triton"
fi
export PYTHONPATH="$scratch/packages:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python3 benchmarks/gpu.py "$@"
