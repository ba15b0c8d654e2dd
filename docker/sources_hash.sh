#!/usr/bin/env bash
# One hash over everything of a checkout that an image is made of. Prints 64 hexadecimal digits.
#   sources_hash.sh [CHECKOUT]     the working directory if none is named
# The build writes it into the image; the entry point compares it with the mounted checkout, so that nobody trains with
# other code than the one in front of them. It leaves out what Dockerfile.dockerignore leaves out, and LICENSE.
set -euo pipefail

cd "${1:-.}"
# Sorted by bytes, since the order of the names counts; names are hashed with the contents.
find src hydra_configs recipes docker pyproject.toml \( -name __pycache__ -o -path docker/front \) -prune -o -type f \
  ! -name '*.pyc' ! -path docker/front.sh ! -path 'docker/*/image.digest' -print0 \
  | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1
