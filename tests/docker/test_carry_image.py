"""docker/carry_image.py: what it puts together is what `docker save` wrote, and what is missing is named first."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SPEC = importlib.util.spec_from_file_location("carry_image", DOCKER / "carry_image.py")
assert SPEC is not None and SPEC.loader is not None
carry_image: Any = importlib.util.module_from_spec(SPEC)
sys.modules["carry_image"] = carry_image  # the pool's processes look its functions up
SPEC.loader.exec_module(carry_image)

MIB = 1 << 20
LIBRARY = random.Random(1).randbytes(2 * MIB)  # does not compress
SMALL = b"\x7fELF" + b"x" * 1000


def archive_of(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return written.getvalue()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An image of two layers, as `docker save` writes it."""
    packages = {f"opt/venv/{name}": content for name, content in {
        "nvidia/lib/libcufft.so.12": LIBRARY, "torch/libtorch.so": b"torch" * MIB, "libcufft_small.so": SMALL,
    }.items()}  # fmt: skip
    files = {
        "blobs/sha256/aa": archive_of({"usr/bin/python3": b"python" * 1000}),
        "blobs/sha256/bb": archive_of(packages),
        "index.json": json.dumps({"manifests": []}).encode(),
    }
    path = tmp_path / "image.tar"
    path.write_bytes(archive_of(files))
    return path


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """Packages on the other machine: the same library, and another of its name and size."""
    folder = tmp_path / "site-packages"
    for name, content in (("a", LIBRARY[::-1]), ("b/lib", LIBRARY)):
        (folder / name).mkdir(parents=True)
        (folder / name / "libcufft.so.12").write_bytes(content)
    return folder


def unpacked(*folders: Path, libraries: tuple[Path, ...] = ()) -> bytes:
    out = io.BytesIO()
    carry_image.unpack(folders, libraries, out)
    return out.getvalue()


def test_the_image_comes_back_byte_for_byte(saved: Path, tmp_path: Path) -> None:
    index = carry_image.pack(saved, tmp_path / "pieces", [], 3 * MIB)
    assert index["sha256"] == hashlib.sha256(saved.read_bytes()).hexdigest()
    assert unpacked(tmp_path / "pieces") == saved.read_bytes()


def test_pieces_have_the_size_that_was_asked_for(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry_image, "_CHUNK_BYTES", MIB)
    carry_image.pack(saved, tmp_path / "pieces", [], 1_200_000)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "pieces").glob("piece-*"))]
    assert len(sizes) == 2, "2 MiB of noise, and text that is gone"
    assert max(sizes) <= 1_200_000
    assert unpacked(tmp_path / "pieces") == saved.read_bytes()


def test_a_piece_may_be_smaller_than_a_chunk(saved: Path, tmp_path: Path) -> None:
    carry_image.pack(saved, tmp_path / "pieces", [], MIB)
    sizes = [path.stat().st_size for path in (tmp_path / "pieces").glob("piece-*")]
    assert len(sizes) > 1
    assert max(sizes) <= MIB
    assert unpacked(tmp_path / "pieces") == saved.read_bytes()


def test_a_reader_that_ends_early_is_no_traceback(saved: Path, tmp_path: Path) -> None:
    carry_image.pack(saved, tmp_path / "pieces", [], 60 * MIB)
    words = f"{sys.executable} {DOCKER / 'carry_image.py'} unpack {tmp_path / 'pieces'} | true; "
    done = subprocess.run(
        ["bash", "-c", f"{words} exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_files_that_are_there_already_do_not_travel(saved: Path, tmp_path: Path, libraries: Path) -> None:
    index = carry_image.pack(saved, tmp_path / "pieces", ["libcufft*"], 60 * MIB)
    left_out = [part for part in index["parts"] if "name" in part]
    assert [(part["name"], part["bytes"]) for part in left_out] == [("libcufft.so.12", len(LIBRARY))]
    assert sum(path.stat().st_size for path in (tmp_path / "pieces").iterdir()) < 200_000
    assert unpacked(tmp_path / "pieces", libraries=(libraries,)) == saved.read_bytes()


def test_what_is_missing_is_named_before_anything_is_written(saved: Path, tmp_path: Path, libraries: Path) -> None:
    pieces, elsewhere = tmp_path / "pieces", tmp_path / "elsewhere"
    carry_image.pack(saved, pieces, ["libcufft*"], 60 * MIB)
    (libraries / "b/lib/libcufft.so.12").unlink()
    out = io.BytesIO()
    with pytest.raises(carry_image.CarryError, match=r"not there: libcufft\.so\.12; pack without --there"):
        carry_image.unpack([pieces], [libraries], out)
    elsewhere.mkdir()
    (pieces / "piece-000").rename(elsewhere / "piece-000")
    with pytest.raises(carry_image.CarryError, match=r"missing: piece-000; carry them, too"):
        carry_image.unpack([pieces], [libraries], out)
    with pytest.raises(carry_image.CarryError, match=r"there is no index\.json in .*elsewhere"):
        carry_image.unpack([elsewhere], [libraries], out)
    assert out.getvalue() == b""


def test_pieces_in_several_folders_are_one_image(saved: Path, tmp_path: Path) -> None:
    carry_image.pack(saved, tmp_path / "pieces", [], 60 * MIB)
    (tmp_path / "more").mkdir()
    (tmp_path / "pieces" / "piece-000").rename(tmp_path / "more" / "piece-000")
    assert unpacked(tmp_path / "pieces", tmp_path / "more") == saved.read_bytes()


def test_unpacking_waits_for_pieces_that_are_on_their_way(saved: Path, tmp_path: Path) -> None:
    pieces, elsewhere = tmp_path / "pieces", tmp_path / "elsewhere"
    carry_image.pack(saved, pieces, [], MIB)
    elsewhere.mkdir()
    later = sorted(pieces.glob("piece-*"))[1:]
    for piece in later:
        piece.rename(elsewhere / piece.name)
    out = io.BytesIO()
    with pytest.raises(carry_image.CarryError, match=r"piece-001 has not come in 0\.1 s; carry it"):
        carry_image.unpack([pieces], [], out, wait_s=0.1)
    words = [sys.executable, DOCKER / "carry_image.py", "unpack", pieces, "--wait-s", "60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as unpacking:
        assert unpacking.stdout is not None
        start = unpacking.stdout.read(1)  # it has the first piece, and needs the others
        for piece in later:
            (elsewhere / piece.name).rename(piece)
        assert start + unpacking.stdout.read() == saved.read_bytes()
    assert unpacking.returncode == 0


def test_a_damaged_piece_is_an_error(saved: Path, tmp_path: Path) -> None:
    index = carry_image.pack(saved, tmp_path / "pieces", [], 60 * MIB)
    index["sha256"] = "0" * 64
    (tmp_path / "pieces" / "index.json").write_text(json.dumps(index))
    with pytest.raises(carry_image.CarryError, match="carry the pieces again"):
        unpacked(tmp_path / "pieces")


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert carry_image.main(["unpack", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: there is no index.json in ")
    assert carry_image.main(["pack", "tunebook:cpu", str(tmp_path / "new"), "--piece-mib", "0"]) == 2
    assert "a piece has 1 MiB or more" in capsys.readouterr().err
    (tmp_path / "other").touch()
    saved = tmp_path / "saved.tar"
    saved.write_bytes(archive_of({}))
    with pytest.raises(carry_image.CarryError, match="is not empty; name another folder"):
        carry_image.pack(saved, tmp_path, [], MIB)
