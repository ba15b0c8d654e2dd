#!/usr/bin/env bash
# Run one command of an image build with the site's own certificates and configuration, and leave no trace of them.
#   with_site.sh COMMAND ARGUMENT...
# They are BuildKit secrets, each optional, mounted for this step only; an empty one counts as missing:
#   ca         the certificates to trust on https, all of them in one file (a site's own root among them)
#   pip_conf   a pip.conf: another package registry, a proxy
#   apt_conf   an apt.conf: a proxy, or `Dir::Etc::SourceList` naming a list of another mirror
set -euo pipefail

secrets=${TUNEBOOK_SECRETS:-/run/secrets}

if [ -s "$secrets/ca" ]; then
  export PIP_CERT=$secrets/ca SSL_CERT_FILE=$secrets/ca
  # apt has no variable for it, so it gets a file in /dev/shm, which is never part of an image.
  site_conf=$(mktemp -p /dev/shm)
  trap 'rm -f "$site_conf"' EXIT
  printf 'Acquire::https::CAInfo "%s";\n' "$secrets/ca" > "$site_conf"
  if [ -s "$secrets/apt_conf" ]; then cat "$secrets/apt_conf" >> "$site_conf"; fi
  export APT_CONFIG=$site_conf
elif [ -s "$secrets/apt_conf" ]; then
  export APT_CONFIG=$secrets/apt_conf
fi
if [ -s "$secrets/pip_conf" ]; then export PIP_CONFIG_FILE=$secrets/pip_conf; fi

"$@"
