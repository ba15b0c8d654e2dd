"""The operating system: shared memory, limits, host memory, swap and clock."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from tunebook.config.schema import RunConfig
from tunebook.doctor.findings import Finding, Kind, Level
from tunebook.facts.sharing import uses_nvme
from tunebook.hardware.detect import Machine
from tunebook.hardware.disk import size_text

GIB, MIB = 2**30, 2**20
SHARED_MEMORY = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")

# Docker's default of 64 MB ends in a bus error. NCCL takes about 10 MB for each pair of ranks without a direct PCIe
# path, and data loaders pass whole batches through it.
_TOO_LITTLE_SHM, _ENOUGH_SHM = 128 * MIB, GIB
_ENOUGH_FILES = 4096  # each shard of weights and data, socket between ranks and tensor of a loader is one
_ENOUGH_STACK = 8 * MIB  # Linux's own default
_SWAPPED_SHARE = 0.25
_CLOCK_S = 2.0  # file systems round to a second


def check_system(
    machine: Machine, config: RunConfig | None, outputs: Path, *, has_cards: bool, of_host: list[Finding]
) -> list[Finding]:
    """Return the findings, including host memory. `has_cards`: RDMA network cards, which need locked memory."""
    findings = [_shared_memory(SHARED_MEMORY, num_gpus=len(machine.gpus)), *limits(config, has_cards=has_cards)]
    return [*findings, *of_host, *clock(outputs, config)]


def _shared_memory(folder: Path, num_gpus: int) -> Finding:
    try:
        facts = os.statvfs(folder)
    except OSError as error:
        return Kind.system.warning(
            id="shm-size",
            what=f"{folder} cannot be inspected: {error.strerror}; NCCL and data loaders need it",
            fix=f"sudo mount -t tmpfs -o size=16g tmpfs {folder}",
        )
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    return shared_memory(size, free, num_gpus=num_gpus)


def shared_memory(size: int, free: int, *, num_gpus: int) -> Finding:
    """Return the total and free bytes of /dev/shm. Too little is an error only if several GPUs share it."""
    what = f"/dev/shm has {size_text(size)}, {size_text(free)} of them free"
    data = {"size_gib": round(size / GIB, 3), "free_gib": round(free / GIB, 3)}
    if free >= _ENOUGH_SHM:
        return Kind.system.ok(id="shm-size", what=what, data=data)
    is_error = free < _TOO_LITTLE_SHM and num_gpus > 1
    return Finding(
        id="shm-size",
        kind=Kind.system,
        level=Level.error if is_error else Level.warning,
        what=f"{what}; a run of several ranks can end in a bus error",
        fix="docker run --shm-size=16g (in compose.yaml TUNEBOOK_SHM_SIZE); on a host: sudo mount -o "
        "remount,size=16g /dev/shm, and remove what programs left in it",
        data=data,
    )


def limits(config: RunConfig | None, *, has_cards: bool) -> list[Finding]:
    """Check the limits of locked memory, open files and stack, which the ranks inherit."""
    kinds = (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
    found = [resource.getrlimit(kind)[0] for kind in kinds]
    locked, files, stack = (None if limit == resource.RLIM_INFINITY else limit for limit in found)
    needed_by = _locks_memory(config, has_cards=has_cards)
    enough = "" if needed_by or locked is None else "; nothing here needs more"
    return [
        _limit(
            id="limit-memlock",
            text=f"ulimit -l (locked memory): {'unlimited' if locked is None else size_text(locked)}{enough}",
            data={"bytes": locked, "needed_by": needed_by},
            too_little=f"{needed_by} locks gigabytes" if needed_by and locked is not None else None,
            fix="ulimit -l unlimited; for good: `* - memlock unlimited` in /etc/security/limits.conf; in Docker: "
            "--ulimit memlock=-1",
        ),
        _limit(
            id="limit-nofile",
            text=f"ulimit -n (open files): {'unlimited' if files is None else files}",
            data={"limit": files},
            too_little=None
            if files is None or files >= _ENOUGH_FILES
            else "many ranks, data workers and shards can need more than that",
            fix="ulimit -n 65536; for good: `* - nofile 65536` in /etc/security/limits.conf",
        ),
        _limit(
            id="limit-stack",
            text=f"ulimit -s (stack): {'unlimited' if stack is None else size_text(stack)}",
            data={"bytes": stack},
            too_little=None
            if stack is None or stack >= _ENOUGH_STACK
            else f"less than the {size_text(_ENOUGH_STACK)} that libraries expect causes a crash without a message",
            fix="ulimit -s 8192; in Docker: --ulimit stack=67108864",
        ),
    ]


def _locks_memory(config: RunConfig | None, *, has_cards: bool) -> str | None:
    """Return this run's feature that locks host memory; None without one."""
    if config is not None and uses_nvme(config):
        return "offload to NVMe"
    return "InfiniBand" if has_cards else None


def _limit(*, id: str, text: str, data: dict[str, Any], too_little: str | None, fix: str) -> Finding:
    """Return an ok finding unless `too_little` says why the limit is too small."""
    if too_little is None:
        return Kind.system.ok(id=id, what=text, data=data)
    return Kind.system.warning(id=id, what=f"{text}; {too_little}", fix=fix, data=data)


def read_meminfo(file: Path) -> dict[str, int]:
    """Return bytes by the kernel's names; empty if there is no such file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdecimal():
            found[name] = int(number[0]) * 1024
    return found


def swap(memory: dict[str, int]) -> Finding:
    """Report swap usage. A swapped page slows the rank that accesses it."""
    total = memory.get("SwapTotal", 0)
    used = total - memory.get("SwapFree", total)
    data = {"total_gib": round(total / GIB, 2), "used_gib": round(used / GIB, 2)}
    if total == 0:
        return Kind.system.ok(id="swap", what="no swap", data=data)
    what = f"swap: {used / GIB:.1f} of {total / GIB:.1f} GiB in use"
    if used <= _SWAPPED_SHARE * total:
        return Kind.system.ok(id="swap", what=what, data=data)
    return Kind.system.warning(
        id="swap",
        what=f"{what}, so memory was short; a rank whose pages are there delays all others",
        fix="end what took it, then: sudo swapoff -a && sudo swapon -a",
        data=data,
    )


def clock(folder: Path, config: RunConfig | None) -> list[Finding]:
    """Compare this machine's clock with that of the run folders' file system, which may be a server's."""
    difference = clock_difference(folder)
    num_nodes = config.hardware.num_nodes if config is not None else 1
    others = num_nodes - 1
    unchecked = f"; the clocks of {others} other node{'s' if others > 1 else ''} were not checked" if others else ""
    if difference is None:
        return []
    data = {"difference_s": round(difference, 3), "nodes_not_checked": others}
    if abs(difference) > _CLOCK_S:
        finding = Kind.system.warning(
            id="clock",
            what=f"the file system of {folder} is {abs(difference):.1f} s {'ahead of' if difference > 0 else 'behind'} "
            f"this machine's clock{unchecked}",
            fix="timedatectl set-ntp true here and on the file server; chronyc tracking shows the difference",
            data=data,
        )
    else:
        what = f"the clock agrees with the file system's to {_CLOCK_S:g} s{unchecked}"
        if unchecked:
            what += " (chronyc tracking on each)"
        finding = Kind.system.ok(id="clock", what=what, data=data)
    return [finding]


def clock_difference(folder: Path) -> float | None:
    """Return the seconds that the file system's clock is ahead of this machine's; None if nothing can be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tunebook-doctor-") as stream:
            before = time.time()
            stream.write(b"clock")
            stream.flush()
            os.fsync(stream.fileno())
            written = os.fstat(stream.fileno()).st_mtime
            after = time.time()
    except OSError:
        return None
    # A timestamp between both readings agrees. Coarse timestamps may be slightly earlier.
    return written - before if written < before else max(0.0, written - after)
