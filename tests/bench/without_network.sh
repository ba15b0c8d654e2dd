#!/usr/bin/env bash
# The commands of container_runs.py on a GPU machine that has neither Docker nor a network, in folders carried there.
#   without_network.sh pack FOLDER [PIECE_MIB]   here: write the engine, the image and the checkout into it
#   without_network.sh start FOLDER              there: unpack the engine and start it, with the GPUs by CDI
#   without_network.sh load FOLDER CHECKOUT      there: clone the bundle into CHECKOUT, load the image and choose it, as
#                                                soon as FOLDER/image/index.json is there; pieces may come later
#   without_network.sh runs FOLDER CHECKOUT OUTPUT NAME ... there: the cases; OUTPUT/finished is written last
# Here the engine of .ci/engine must be up, and the image tunebook:hopper built. CUDA libraries that torch 2.11.0 for
# CUDA 13.0 has, too, are left out, and taken from there. FOLDER/wheels must have what tunebook needs there.
set -euo pipefail

engine=/tmp/tunebook-engine  # the same path on both machines: the wrappers name it
same_libraries=('libcufft.so*' 'libcurand.so*' 'libcusolver.so*' 'libcusolverMg.so*' 'libcusparse.so*' 'libcufile.so*'
  'libnvrtc.so*' 'libnvrtc-builtins.so*' 'libnvrtc.alt.so*' 'libnvshmem_host.so*')

pack() { # pack FOLDER [PIECE_MIB]
  local folder=$1 piece_mib=${2:-60} program
  rm -rf "$engine"
  mkdir -p "$folder" "$engine"/{programs,plugins,lib,bin}
  for program in dockerd containerd containerd-shim-runc-v2 docker runc; do
    cp "$(command -v "$program")" "$engine/programs/"
  done
  cp "$(command -v tini-static)" "$engine/programs/docker-init"
  cp -L "${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins/docker-compose" "$engine/plugins/"
  # The other machine's own C library must be as new as this one's.
  for program in "$engine"/programs/* "$engine"/plugins/*; do ldd "$program" 2> /dev/null || true; done \
    | awk '$2 == "=>" && $3 !~ /\/(libc|libm|libpthread|libdl|librt|libresolv)\.so/ { print $3 }' | sort -u \
    | xargs -r cp -L -t "$engine/lib"
  for program in "$engine"/programs/*; do
    program=$(basename "$program")
    cat > "$engine/bin/$program" << END
#!/bin/sh
LD_LIBRARY_PATH=$engine/lib exec $engine/programs/$program "\$@"
END
    chmod +x "$engine/bin/$program"
  done
  tar --create --directory "$engine" . | xz -T0 -2 | split --bytes="${piece_mib}M" - "$folder/engine-"
  python3 docker/carry_image.py pack tunebook:hopper "$folder/image" --piece-mib "$piece_mib" \
    --there "${same_libraries[@]}"
  git bundle create --quiet "$folder/head.bundle" HEAD
}

start() { # start FOLDER
  mkdir -p "$engine" /tmp/tunebook-docker /etc/docker /etc/cdi ~/.docker/cli-plugins
  cat "$1"/engine-* | xz --decompress | tar --extract --directory "$engine"
  cp "$engine"/plugins/* ~/.docker/cli-plugins/
  # Docker's own network would need iptables; containers of these cases need none.
  cat > /etc/docker/daemon.json << 'END'
{"data-root": "/tmp/tunebook-docker", "iptables": false, "ip6tables": false, "bridge": "none", "userland-proxy": false,
 "features": {"cdi": true}, "cdi-spec-dirs": ["/etc/cdi"], "log-level": "warn"}
END
  python3 - << 'END'
import glob, json
patterns = ("[0-9]*", "ctl", "-uvm", "-uvm-tools", "-caps/*")
devices = [name for pattern in patterns for name in sorted(glob.glob(f"/dev/nvidia{pattern}"))]
edits = {
    "deviceNodes": [{"path": name} for name in devices],
    "mounts": [{"hostPath": "/usr/local/nvidia", "containerPath": "/usr/local/nvidia", "options": ["ro", "rbind"]}],
    "env": ["LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib"],
}
kind = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "all", "containerEdits": edits}]}
with open("/etc/cdi/nvidia.json", "w") as file:
    json.dump(kind, file)
END
  setsid dockerd > /tmp/tunebook-dockerd.log 2>&1 < /dev/null &
  for _ in $(seq 1 80); do
    if docker info > /dev/null 2>&1; then return; fi
    sleep 0.25
  done
  tail -n 20 /tmp/tunebook-dockerd.log >&2
  exit 1
}

load() { # load FOLDER CHECKOUT
  local folder packages
  folder=$(realpath "$1")
  packages=$(python3 -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1] / "nvidia")')
  git clone --quiet "$folder/head.bundle" "$2"
  cd "$2"
  python3 docker/carry_image.py unpack "$folder/image" --libraries "$packages" --wait-s 300 | docker load
  make env ATTENTION=none  # without it, make would build an image with flash-attn
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$folder/site" "$folder"/wheels/*.whl
}

runs() { # runs FOLDER CHECKOUT OUTPUT NAME ...
  local folder checkout output name
  mkdir -p "$3"
  folder=$(realpath "$1") checkout=$(realpath "$2") output=$(realpath "$3")
  shift 3
  cd "$checkout"
  for name in "$@"; do # one after the other, so that the run folders are packed after each
    PYTHONPATH=$folder/site:$checkout/src python3 tests/bench/container_runs.py "$output" --only "$name" || true
  done
  touch "$output/finished"
}

case ${1:-} in
  pack | start | load | runs)
    if [ "$1" != pack ]; then export PATH=$engine/bin:$PATH HF_HUB_OFFLINE=1; fi
    "$@"
    ;;
  *)
    sed -n '2,9p' "$0"
    exit 2
    ;;
esac
