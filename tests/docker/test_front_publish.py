"""`make publish`: one bake with SBOM and provenance, the digest that it writes, and a failure."""

from __future__ import annotations

import pytest

DIGEST = "sha256:" + "b" * 64
# What bake writes into --metadata-file, shortened; other digests come before the one that is wanted.
METADATA = f'''{{
  "train": {{
    "containerimage.config.digest": "sha256:{"a" * 64}",
    "containerimage.descriptor": {{"digest": "sha256:{"a" * 64}"}},
    "containerimage.digest": "{DIGEST}",
    "image.name": "host/path/tunebook:hopper"
  }}
}}'''
BAKE = f"""\
if [ "$3" = --help ]; then
  if [ -f "$FAKE/has-allow" ]; then echo "      --allow stringArray   Allow build to access specified resources"; fi
  exit 0
fi
echo "entitlements of files: $BUILDX_BAKE_ENTITLEMENTS_FS" >> "$FAKE/calls"
while [ "$1" != --metadata-file ]; do shift; done
cat > "$2" << 'END'
{METADATA}
END
"""


@pytest.fixture
def publishing(machine):
    """A machine whose builder and registry hold attestations."""
    machine.act("docker-buildx-bake", BAKE)
    machine.tell("docker-buildx-bake")
    machine.tell("docker-buildx-imagetools", "both")
    return machine


def test_an_image_is_built_described_and_pushed_in_one_step(publishing):
    done = publishing.front("publish", GPU="hopper", REGISTRY="host/path/")
    assert done.returncode == 0, done.stderr
    name = f"host/path/tunebook@{DIGEST}"
    assert done.stdout == f"{name}\n"
    assert (publishing.checkout / "docker" / "hopper" / "image.digest").read_text() == f"{name}\n"
    (bake,) = publishing.calls("buildx bake")
    assert bake == (
        "buildx bake --file compose.yaml --set train.tags=host/path/tunebook:hopper "
        "--set train.attest=type=provenance,mode=max --set train.attest=type=sbom "
        "--metadata-file .cache/published-hopper.json --push train"
    )
    assert publishing.calls("entitlements") == ["entitlements of files: 0"]
    (asked,) = publishing.calls("buildx imagetools")
    assert asked.endswith(name)
    assert publishing.setting("TUNEBOOK_GENERATION") == "hopper"
    assert publishing.setting("TUNEBOOK_TARGET") == "image"
    assert publishing.calls("push") == publishing.calls("compose build") == []


def test_a_site_names_its_own_sbom_generator(publishing):
    done = publishing.command("make", "publish", "GPU=cpu", "REGISTRY=host/path", "SBOM_GENERATOR=host/scanner:1")
    assert done.returncode == 0, done.stderr
    assert "--set train.attest=type=sbom,generator=host/scanner:1 " in publishing.calls("buildx bake")[0]


def test_the_hosts_network_is_allowed_where_bake_asks_for_it(publishing):
    options = {"GPU": "cpu", "REGISTRY": "host/path", "NETWORK": "host"}
    assert publishing.front("publish", **options).returncode == 0
    assert "--allow" not in publishing.calls("buildx bake")[-1]  # 0.13 does not know it
    (publishing.fake / "has-allow").touch()
    assert publishing.front("publish", **options).returncode == 0
    assert publishing.calls("buildx bake")[-1].startswith("buildx bake --allow network.host --file compose.yaml")
    assert publishing.front("publish", **options | {"NETWORK": ""}).returncode == 0
    assert "--allow" not in publishing.calls("buildx bake")[-1]


def test_publish_needs_a_registry(machine, refused):
    refused(machine.front("publish", GPU="cpu"), "publish needs a registry", "make publish REGISTRY=host/path")


def test_a_failed_bake_writes_no_digest(machine, refused):
    machine.tell("docker-buildx-bake", err="ERROR: Attestation is not supported for the docker driver.\n", code=1)
    done = machine.front("publish", GPU="cpu", REGISTRY="host/path")
    refused(done, "Attestation is not supported", "error: publishing host/path/tunebook:cpu failed", code=1)
    assert not (machine.checkout / "docker" / "cpu" / "image.digest").exists()


def test_a_registry_that_drops_the_attestations_is_named(publishing, refused):
    publishing.tell("docker-buildx-imagetools", "")
    done = publishing.front("publish", GPU="cpu", REGISTRY="host/path")
    refused(
        done, f"host/path/tunebook@{DIGEST} was pushed, but the registry shows no SBOM", "imagetools inspect", code=1
    )
    assert not (publishing.checkout / "docker" / "cpu" / "image.digest").exists()
