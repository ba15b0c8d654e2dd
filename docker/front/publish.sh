# shellcheck shell=bash
# `make publish`: build an image, describe it by attestations, and push it, in one step of `docker buildx bake`. The
# build is that of compose.yaml. The attestations are an SBOM, the list of the packages in the image, and provenance, how
# it was built. The engine's own image store cannot hold them, so the image goes to the registry and not to the engine.

publish_image() {
  require_registry publish
  choose_generation
  require_engine
  require_buildx
  image=$(built_image)
  require_disk_space
  write_settings
  local name=$REGISTRY/$image start=$SECONDS digest
  local facts=.cache/published-$generation.json bake=(docker buildx bake)
  # Bake of buildx 0.17 and newer has to be allowed the host's network, and files outside the checkout, which the secrets
  # of compose.yaml may be. Older ones do not know the option.
  export BUILDX_BAKE_ENTITLEMENTS_FS=0
  if [ "$(read_setting TUNEBOOK_BUILD_NETWORK)" = host ] && docker buildx bake --help 2>&1 | grep -q -- '--allow '; then
    bake+=(--allow network.host)
  fi
  bake+=(--file compose.yaml --set "train.tags=$name" --set "train.attest=type=provenance,mode=max"
    --set "train.attest=type=sbom${SBOM_GENERATOR:+,generator=$SBOM_GENERATOR}" --metadata-file "$facts" --push train)
  rm -f "$facts"
  say "building $name with the settings in .env"
  run_build "publishing $name" "${bake[@]}"
  digest=$(sed -n 's/.*"containerimage.digest": "\(sha256:[0-9a-f]\{64\}\)".*/\1/p' "$facts")
  require_attestations "$REGISTRY/tunebook@$digest"
  write_digest "$REGISTRY/tunebook@$digest"
  printf '%s\n' "$REGISTRY/tunebook@$digest"
  say "$name is published after $((SECONDS - start)) s"
}

require_attestations() { # require_attestations NAME_WITH_DIGEST; that the registry has both
  local found
  found=$(docker buildx imagetools inspect --format '{{if and .SBOM .Provenance}}both{{end}}' "$1" 2>&1) || true
  if [ "$found" = both ]; then return; fi
  end_with 1 "$1 was pushed, but the registry shows no SBOM or no provenance for it${found:+: ${found##*$'\n'}}" \
    "See what it has: docker buildx imagetools inspect $1" \
    "The image itself can be used: make pull GPU=$generation REGISTRY=$REGISTRY"
}
