#!/usr/bin/env bash
# Provide the wheel of flash-attn 2 for one GPU generation: an existing one, or one compiled from its sdist. A build
# stage of the image runs this.
#   build_flash_attn.sh GENERATION WHEELS CACHE OUTPUT
# All are folders: docker/<generation>, the local wheels, a cache that outlives the build, and the target. CACHE keeps the
# wheel, and the objects of an interrupted build, from which the next one continues. Each combination of flash-attn,
# torch, Python, machine and architectures has its own folder: flash-attn-2/<combination>/ in WHEELS and OUTPUT,
# <combination>/ in CACHE. CUDA_HOME names the compiler.
set -euo pipefail

generation=$1 wheels=$2 cache=$3 output=$4
gib_per_job=8 # measured for one architecture: 6.0 GiB, and other files are larger than the measured one

# shellcheck source=/dev/null
. "$generation/generation.env"

say() { printf 'flash-attn: %s\n' "$*"; }

combination() {
  local version
  version=$(sed -n 's/^flash-attn==\([^ ]*\).*/\1/p' "$generation/requirements-attention.lock")
  python - "$version" "$FLASH_ATTN_CUDA_ARCHS" << 'PYTHON'
import importlib.metadata, platform, sys
flash_attn, architectures = sys.argv[1:]
python = f"cp{sys.version_info.major}{sys.version_info.minor}"
kernels = "-".join(f"sm{name}" for name in architectures.split(";"))
torch = importlib.metadata.version("torch")
print(f"{flash_attn}-torch{torch}-{python}-{platform.machine()}-{kernels}")
PYTHON
}

jobs() { # as many compilers as there are cores, and as their memory allows
  local cores memory_kib by_memory
  cores=$(nproc)
  memory_kib=$(sed -n 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo)
  by_memory=$((memory_kib / 1024 / 1024 / gib_per_job))
  echo $((by_memory < 1 ? 1 : by_memory < cores ? by_memory : cores))
}

provide() { # provide WHEEL
  mkdir -p "$output/flash-attn-2/$name"
  cp "$1" "$output/flash-attn-2/$name/"
}

fetch_sources() { # fetch_sources FOLDER
  if [ -f "$1/setup.py" ]; then return; fi
  # pip runs the sdist's setup.py to learn its name, so torch and the compiler must be installed already.
  python -m pip download -qq --disable-pip-version-check --no-input --no-deps --no-binary flash-attn \
    --no-build-isolation --require-hashes -d "$work/sdist" -r "$generation/requirements-attention.lock"
  rm -rf "$1.part"
  mkdir "$1.part"
  tar -xzf "$work"/sdist/*.tar.gz --strip-components 1 -C "$1.part"
  # It contains two other packages: an early state of flash-attn-4's folder, which would partly overwrite the real one,
  # and a top-level package called hopper.
  rm -r "$1.part/flash_attn/cute" "$1.part/hopper"
  mv "$1.part" "$1"
}

compile() { # compile SOURCES
  local log=$work/build.log
  export FLASH_ATTENTION_FORCE_BUILD=TRUE # else setup.py looks for a ready-made wheel outside the package registry
  export FLASH_ATTN_CUDA_ARCHS NVCC_THREADS=1 # threads are per architecture, and there is one or two
  export MAX_JOBS
  MAX_JOBS=$(jobs)
  say "compiling 73 files for $FLASH_ATTN_CUDA_ARCHS, $MAX_JOBS at a time. This is done once: 6 minutes on 128 cores" \
    "with enough memory, hours on a few. It may be interrupted; the next build continues from there."
  # In the folder of the sources, so that ninja finds the objects of an interrupted build. Only its counter is shown.
  if ! python -m pip wheel -v --disable-pip-version-check --no-input --no-deps --no-build-isolation \
    --wheel-dir "$work/wheel" "$1" 2>&1 | tee "$log" | sed -un 's/^ *\(\[[0-9]*\/[0-9]*\]\).*\/\([a-z0-9_]*\)\.o\.d .*/  \1 \2/p'; then
    tail -n 40 "$log" >&2
    say "compiling failed (above). If a compiler was killed, memory ran out: close other programs and build again." >&2
    return 1
  fi
}

name=$(combination)
work=$cache/$name
for found in "$wheels/flash-attn-2/$name"/*.whl "$work/wheel"/*.whl; do
  if [ -f "$found" ]; then
    say "using an existing wheel: $name"
    provide "$found"
    exit
  fi
done
mkdir -p "$work"
fetch_sources "$work/sources"
compile "$work/sources"
provide "$work"/wheel/*.whl
rm -rf "$work/sources" "$work/sdist" "$work/build.log"
