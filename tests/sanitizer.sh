#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over every Triton kernel, at small sizes (tests/test_sanitize.py):
#   memcheck    reads and writes outside of a tensor; PyTorch gives each an allocation of its own
#   racecheck   hazards in shared memory
# PYTHON and COMPUTE_SANITIZER name other programs than those on the path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
sanitizer=${COMPUTE_SANITIZER:-$(PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" command -v compute-sanitizer || true)}
if [[ -z $sanitizer ]]; then
    cat >&2 <<'EOF'
sanitizer.sh: compute-sanitizer not found; COMPUTE_SANITIZER=path names it.  It is part of the CUDA toolkit (of NVIDIA's
packages, cuda-sanitizer-13-0), or: pip install nvidia-cuda-sanitizer-api, into site-packages/nvidia/cu13/bin.
EOF
    exit 2
fi

tests=("$python" -m pytest -q -p no:cacheprovider tests/test_sanitize.py)
options=(
    --error-exitcode 1
    --target-processes application-only     # Triton starts its compiler and assembler
    --kernel-name-exclude 'regex=^_Z'       # C++ names: PyTorch's own kernels
    --report-api-errors no                  # PyTorch and Triton ask the driver what it has; the tests see real errors
)
"${tests[@]}"    # compiles, into Triton's cache
PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool memcheck --padding 256 "${options[@]}" "${tests[@]}"
"$sanitizer" --tool racecheck "${options[@]}" "${tests[@]}"
