"""Carry an image to a machine that reaches no registry, in pieces small enough for the way there.

    carry_image.py pack IMAGE FOLDER [--piece-mib 60] [--there 'libcufft*' ...]     where the image is
    carry_image.py unpack FOLDER ... [--libraries FOLDER ...] | docker load          where it is needed

`pack` writes FOLDER/index.json and FOLDER/piece-000 and so on. Files of the image that match a pattern of `--there` do
not travel: the other machine has the same ones, such as those of a package of the same version. `unpack` finds them
below `--libraries` by name, size and hash. It takes the pieces from all FOLDERs, checks that every one is there, and
writes what `docker save` wrote, byte for byte: the loaded image has the digest of the first one. Needs only Python.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import IO, Any

INDEX = "index.json"
_MIB = 1 << 20
_CHUNK_BYTES = 16 * _MIB  # compressed and decompressed as a whole, each in a process of its own
_LEVEL = 6  # of zlib: CUDA libraries shrink to about half; its levels above cost time and gain nothing
_LEAST_BYTES = 1 * _MIB  # of a file that need not travel: smaller ones cost less than finding them

Part = dict[str, Any]


class CarryError(Exception):
    """What stops a command, and what to do."""


class _Window(io.RawIOBase):
    """A part of a file as a file of its own, so that an archive in an archive can be read."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        wanted = max(0, min(len(buffer), self._size - self._at))
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def find_left_out(archive: IO[bytes], patterns: Sequence[str]) -> list[Part]:
    """Files in the layers of a saved image that match a pattern: name, size, SHA-256 and place in the archive."""
    found = []
    with tarfile.open(fileobj=archive) as outer:
        layers = [member for member in outer if member.isfile()] if patterns else []
    for layer in layers:
        window = io.BufferedReader(_Window(archive, layer.offset_data, layer.size))
        try:
            inner = tarfile.open(fileobj=window)  # noqa: SIM115  # closed below
        except tarfile.ReadError:  # a manifest
            continue
        with inner:
            for member in inner:
                name = Path(member.name).name
                if member.isreg() and member.size >= _LEAST_BYTES and any(fnmatch(name, each) for each in patterns):
                    start = layer.offset_data + member.offset_data
                    place = {"name": name, "bytes": member.size, "start": start}
                    found.append(place | {"sha256": _hash_range(archive, start, member.size)})
    return sorted(found, key=lambda part: part["start"])


def _hash_range(file: IO[bytes], start: int, size: int) -> str:
    digest = hashlib.sha256()
    file.seek(start)
    while size > 0:
        data = file.read(min(size, _CHUNK_BYTES))
        size -= len(data)
        digest.update(data)
    return digest.hexdigest()


def pack(archive: Path, folder: Path, patterns: Sequence[str], piece_bytes: int) -> Part:
    """Write the pieces and the index of a saved image; return the index. Raises: CarryError if FOLDER has files."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CarryError(f"{folder} is not empty; name another folder")
    with archive.open("rb") as file:
        left_out = find_left_out(file, patterns)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    parts: list[Part] = []
    chunk_bytes = min(_CHUNK_BYTES, piece_bytes * 15 // 16)  # what does not compress grows a little
    at = 0
    for hole in [*left_out, {"start": archive.stat().st_size, "bytes": 0}]:
        while at < hole["start"]:
            size = min(chunk_bytes, hole["start"] - at)
            parts.append({"start": at, "bytes": size})
            at += size
        if hole["bytes"]:
            parts.append(hole)
            at += hole["bytes"]
    _write_pieces(archive, folder, [part for part in parts if "name" not in part], piece_bytes)
    index = {"sha256": digest, "bytes": archive.stat().st_size, "parts": parts}
    (folder / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")
    return index


def _write_pieces(archive: Path, folder: Path, parts: list[Part], piece_bytes: int) -> None:
    """Compress the parts side by side, and note in each where it is."""
    number, filled = 0, 0
    with ProcessPoolExecutor() as pool:
        for part, data in zip(parts, pool.map(partial(_compress, archive), parts), strict=True):
            if filled and filled + len(data) > piece_bytes:
                number, filled = number + 1, 0
            name = f"piece-{number:03}"
            with (folder / name).open("ab") as piece:
                piece.write(data)
            part |= {"piece": name, "at": filled, "packed": len(data)}
            filled += len(data)


def _compress(archive: Path, part: Part) -> bytes:
    with archive.open("rb") as file:
        file.seek(part["start"])
        return zlib.compress(file.read(part["bytes"]), _LEVEL)


def unpack(folders: Sequence[Path], libraries: Sequence[Path], out: IO[bytes]) -> None:
    """Write the saved image. Raises: CarryError if a piece or a file is missing, before anything is written."""
    index = _read_index(folders)
    parts = [_located(part, folders) for part in index["parts"]]
    missing = sorted({part["piece"] for part in parts if "piece" in part and part["file"] is None})
    if missing:
        raise CarryError(f"missing: {', '.join(missing)}; carry them, too")
    _find_libraries([part for part in parts if "name" in part], libraries)
    digest = hashlib.sha256()
    for data in _contents(parts):
        digest.update(data)
        out.write(data)
    if digest.hexdigest() != index["sha256"]:
        raise CarryError("what was put together is not what was packed; carry the pieces again")


def _read_index(folders: Sequence[Path]) -> Part:
    for folder in folders:
        if (folder / INDEX).is_file():
            found: Part = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            return found
    raise CarryError(f"there is no {INDEX} in {' or '.join(map(str, folders))}; carry it, too")


def _located(part: Part, folders: Sequence[Path]) -> Part:
    if "piece" not in part:
        return dict(part)
    file = next((folder / part["piece"] for folder in folders if (folder / part["piece"]).is_file()), None)
    return part | {"file": file}


def _find_libraries(parts: Sequence[Part], libraries: Sequence[Path]) -> None:
    """Give each file that did not travel its place on this machine. Raises: CarryError if one is not here."""
    wanted = {part["sha256"]: part for part in parts}
    there = {path.resolve() for folder in libraries for part in parts for path in folder.rglob(part["name"])}
    candidates = [path for path in sorted(there) if path.stat().st_size in {part["bytes"] for part in parts}]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(pool.map(_hash_file, candidates), candidates, strict=True))
    if absent := sorted(part["name"] for sha256, part in wanted.items() if sha256 not in found):
        raise CarryError(
            f"not as in the image below --libraries, or not there: {', '.join(absent)}; pack without --there for them"
        )
    for part in parts:
        part["file"] = found[part["sha256"]]


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _contents(parts: Sequence[Part]) -> Iterator[bytes]:
    """The parts in order: pieces are decompressed by processes that are a few chunks ahead, files are read here."""
    with ProcessPoolExecutor() as pool:
        ahead = 2 * (os.cpu_count() or 1)
        waiting: deque[Part | Future[bytes]] = deque()
        for part in parts:
            waiting.append(part if "name" in part else pool.submit(_decompress, part))
            if len(waiting) > ahead:
                yield from _content(waiting.popleft())
        for one in waiting:
            yield from _content(one)


def _content(one: Part | Future[bytes]) -> Iterator[bytes]:
    if isinstance(one, Future):
        yield one.result()
        return
    with one["file"].open("rb") as file:
        yield from iter(partial(file.read, _CHUNK_BYTES), b"")


def _decompress(part: Part) -> bytes:
    with part["file"].open("rb") as file:
        file.seek(part["at"])
        return zlib.decompress(file.read(part["packed"]))


def pack_image(image: str, folder: Path, patterns: Sequence[str], piece_bytes: int) -> Iterator[str]:
    """Save an image and pack it; yield what to print. Raises: CarryError if Docker cannot save it."""
    with tempfile.TemporaryDirectory(prefix="tunebook-image-") as temporary:
        archive = Path(temporary) / "image.tar"
        done = subprocess.run(
            ["docker", "save", "--output", archive, image], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise CarryError(f"docker save {image} failed: {done.stderr.strip()}")
        index = pack(archive, folder, patterns, piece_bytes)
    left_out = [part for part in index["parts"] if "name" in part]
    packed = sum(part.get("packed", 0) for part in index["parts"])
    pieces = len({part["piece"] for part in index["parts"] if "piece" in part})
    yield f"{index['bytes'] / 1e9:.2f} GB: {pieces} pieces of {packed / 1e9:.2f} GB in {folder}"
    if left_out:
        size = sum(part["bytes"] for part in left_out)
        yield f"{len(left_out)} files of {size / 1e9:.2f} GB stay: {', '.join(part['name'] for part in left_out)}"


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; problems go to standard error, with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("image")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--piece-mib", type=int, default=60, help="the most that a piece has")
    packing.add_argument(
        "--there", nargs="*", default=[], metavar="PATTERN", help="names of files that need not travel"
    )
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    unpacking.add_argument("--libraries", type=Path, nargs="*", default=[], metavar="FOLDER")
    arguments = parser.parse_args(words)
    try:
        if arguments.command == "pack" and arguments.piece_mib < 1:
            raise CarryError(f"--piece-mib {arguments.piece_mib}: a piece has 1 MiB or more")
        if arguments.command == "pack":
            for line in pack_image(arguments.image, arguments.folder, arguments.there, arguments.piece_mib * _MIB):
                print(line)
        else:
            unpack(arguments.folders, arguments.libraries, sys.stdout.buffer)
    except CarryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # what reads the image has ended, and says why
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own end would fail, too
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
