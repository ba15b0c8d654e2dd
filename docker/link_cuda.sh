#!/usr/bin/env bash
# Make /usr/local/cuda, where DeepSpeed looks for CUDA, from the wheels that came with torch.
#   link_cuda.sh VENV [FOLDER]
# DeepSpeed's operator for offload to NVMe is plain C++, but on a machine with a GPU DeepSpeed links it with CUDA's
# libraries and asks nvcc for its version first. NVIDIA's compiler would add 0.3 GB for that, and the package registry
# has none for CUDA 12. So the nvcc made here prints the version and compiles nothing.
set -euo pipefail

venv=$1 folder=${2:-/usr/local/cuda}

# CUDA's runtime: the wheels of CUDA 13 share one folder, those of CUDA 12 have one each.
runtime=""
for home in "$venv"/lib/python3.*/site-packages/nvidia/{cu13,cuda_runtime}; do
  for library in "$home"/lib/libcudart.so.*; do
    if [ -f "$library" ]; then runtime=$library; fi
  done
done
if [ -z "$runtime" ]; then
  echo "There is no CUDA runtime in $venv: torch is not a CUDA build." >&2
  exit 1
fi
home=$(dirname "$(dirname "$runtime")")
version=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda)')

mkdir -p "$folder/bin" "$folder/lib64"
ln -s "$home/include" "$folder/include"
ln -s "$runtime" "$folder/lib64/libcudart.so"
# The driver's library comes into a container with the GPUs; its name is enough to link with.
gcc -shared -x c /dev/null -o "$folder/lib64/libcuda.so" -Wl,-soname,libcuda.so.1
cat > "$folder/bin/nvcc" << EOF
#!/bin/sh
# Not NVIDIA's compiler: see docker/link_cuda.sh. It prints the CUDA version of torch in the form that DeepSpeed reads.
if [ "\$*" = -V ] || [ "\$*" = --version ]; then
  echo "Cuda compilation tools, release $version, V$version"
  exit
fi
echo "error: this image has no CUDA compiler, so an operator with code for GPUs cannot be compiled in it." >&2
echo "Choose one that needs none: torch's own optimizers instead of DeepSpeed's fused ones." >&2
exit 1
EOF
chmod 755 "$folder/bin/nvcc"
