#!/usr/bin/env bash
# Print one SHA-256 of all files of a checkout that an image is built from.
#   sources_hash.sh [CHECKOUT]     the working directory by default
# The build writes it into the image, and the entry point compares it with the mounted checkout, so that nobody trains
# with other code than they see. It leaves out the files that Dockerfile.dockerignore leaves out, and LICENSE.
set -euo pipefail

cd "${1:-.}"
# Sorted by bytes, because the order counts; names are hashed with the contents.
find src hydra_configs recipes docker pyproject.toml \( -name __pycache__ -o -path docker/front \) -prune -o -type f \
  ! -name '*.pyc' ! -path docker/front.sh ! -path docker/venv.sh \
  ! -path 'docker/*/image.digest' -print0 \
  | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1
