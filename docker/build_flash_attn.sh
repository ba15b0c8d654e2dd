#!/usr/bin/env bash
# Give out the wheel of flash-attn 2 for one GPU generation: a ready one, or one compiled from its sdist. A build stage.
#   build_flash_attn.sh GENERATION WHEELS CACHE OUTPUT
# All are folders: docker/<generation>, the local wheels, what outlives the build, and where the wheel is to go. CACHE
# keeps the wheel, and of a build that was interrupted the objects, with which the next one goes on. Each combination of
# flash-attn, torch, Python, machine and architectures has a folder of its own: flash-attn-2/<combination>/ in WHEELS and
# OUTPUT, <combination>/ in CACHE. CUDA_HOME names the compiler.
set -euo pipefail

generation=$1 wheels=$2 cache=$3 output=$4
gib_per_job=8 # measured for one architecture: 6.0 GiB, and there are larger files than the one that was measured

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

give_out() { # give_out WHEEL
  mkdir -p "$output/flash-attn-2/$name"
  cp "$1" "$output/flash-attn-2/$name/"
}

fetch_sources() { # fetch_sources FOLDER
  if [ -f "$1/setup.py" ]; then return; fi
  # Asking the sdist for its name runs its setup.py, which is why torch and the compiler are there already.
  python -m pip download -qq --disable-pip-version-check --no-input --no-deps --no-binary flash-attn \
    --no-build-isolation --require-hashes -d "$work/sdist" -r "$generation/requirements-attention.lock"
  rm -rf "$1.part"
  mkdir "$1.part"
  tar -xzf "$work"/sdist/*.tar.gz --strip-components 1 -C "$1.part"
  # It would bring two packages that are not its own: an early state of flash-attn-4's folder, over which the real one
  # would be half overwritten, and a top-level package called hopper.
  rm -r "$1.part/flash_attn/cute" "$1.part/hopper"
  mv "$1.part" "$1"
}

compile() { # compile SOURCES
  local log=$work/build.log
  export FLASH_ATTENTION_FORCE_BUILD=TRUE # else setup.py looks for a ready-made wheel outside the package registry
  export FLASH_ATTN_CUDA_ARCHS NVCC_THREADS=1 # threads share out architectures, and there is one or two
  export MAX_JOBS
  MAX_JOBS=$(jobs)
  say "compiling 73 files for $FLASH_ATTN_CUDA_ARCHS, $MAX_JOBS at a time. This is done once: 6 minutes on 128 cores" \
    "with memory to match, hours on a few. It may be interrupted; the next build goes on from there."
  # In the sources' own folder, so that ninja finds the objects of an interrupted build. Only its counter is shown.
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
    say "using the wheel that was built before: $name"
    give_out "$found"
    exit
  fi
done
mkdir -p "$work"
fetch_sources "$work/sources"
compile "$work/sources"
give_out "$work"/wheel/*.whl
rm -rf "$work/sources" "$work/sdist" "$work/build.log"
