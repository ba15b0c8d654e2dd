"""The checks of this machine: driver, image, torch, links, NCCL, shared memory and disks.

NVML, torch and NCCL can hang or crash. They are asked in processes with a time limit; those of torch and NCCL are this
module, run as a program.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunebook.config.schema import HardwareConfig
from tunebook.errors import Problem, RequestError, counted
from tunebook.files import cache_root
from tunebook.hardware.detect import VISIBLE_VARIABLE, Machine, detect_machine
from tunebook.hardware.disk import existing, size_text
from tunebook.hardware.image import IMAGE_FILE_VARIABLE, read_image
from tunebook.hardware.links import BETWEEN_SOCKETS, links_text, read_links
from tunebook.processes import Answer, ask
from tunebook.train.requirements import image_problem, torch_problems

_NVML_TIMEOUT_S = 40.0  # 8 GPUs without persistence mode take 10 s or more
_TORCH_TIMEOUT_S = 120.0  # importing torch takes 30 s from a cold network disk, NCCL looks at the machine for 20 s
_SIZE = 512  # rows of the product that each GPU computes
_REDUCED_BYTES = 2**28  # the size of a large layer's gradients
_GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED_MEMORY = _GIB  # NCCL takes about 10 MB for each pair of ranks; data loaders pass batches through it
_ENOUGH_DISK = 20 * _GIB  # a few checkpoints of a small model


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check. Without a fix nothing is wrong. With an error a run fails on this machine."""

    id: str
    what: str
    fix: str | None = None
    is_error: bool = False

    @property
    def level(self) -> str:
        """`ok`, `warning` or `error`."""
        if self.fix is None:
            return "ok"
        return "error" if self.is_error else "warning"


def finding_of(problem: Problem) -> Finding:
    """A rule's problem as a finding."""
    what = f"{problem.key}: {problem.message}"
    return Finding(id=problem.id, what=what, fix=problem.fix, is_error=problem.is_error)


def check_driver() -> tuple[Machine, Finding]:
    """Detect this machine's GPUs. NVML is not asked in this process if it did not answer in another one."""
    answer = ask([sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"], timeout_s=_NVML_TIMEOUT_S)
    if answer.is_late:
        machine = detect_machine(no_gpu_because=f"the NVIDIA driver gave {answer.problem}")
        fix = "nvidia-smi; if it hangs too, a GPU has failed: sudo dmesg | grep -i nvrm, then sudo reboot"
        return machine, Finding(id="gpus-found", what=machine.notes[0], fix=fix, is_error=True)
    machine = detect_machine()
    return machine, _gpus_found(machine)


def _gpus_found(machine: Machine) -> Finding:
    kinds = {f"{gpu.name}, {gpu.memory_gib:g} GiB" for gpu in machine.gpus}
    names = " and ".join(sorted(kinds)) or "no GPU"
    what = "; ".join([f"{len(machine.gpus)} x {names}" if machine.gpus else names, *machine.notes])
    if machine.driver is None:
        is_ok = not any(Path("/dev").glob("nvidia[0-9]*"))  # else there are GPUs that do not answer
        fix = "nvidia-smi says more; after an update of the driver: sudo reboot"
    else:
        is_ok = all(note.startswith(VISIBLE_VARIABLE) for note in machine.notes)  # which is what the user asked for
        fix = f"nvidia-smi -L lists all GPUs; {VISIBLE_VARIABLE}=ID,ID in front of the command selects some"
    driver = f", driver {machine.driver}" if machine.driver else ""
    return Finding(id="gpus-found", what=f"{what}{driver}", fix=None if is_ok else fix)


def check_image(machine: Machine) -> Iterator[Finding]:
    """Check the image, the driver and the packages, for any run on the GPUs of this machine."""
    try:
        image = read_image()
    except RequestError as error:
        yield Finding(id="image-file-broken", what=error.message, fix="make image", is_error=True)
        return
    what = f"not in one of Tunebook's images ({IMAGE_FILE_VARIABLE} is not set)"
    if image is not None:
        what = f"the {image.generation} image: torch {image.torch}, CUDA {image.cuda or 'none'}"
    yield Finding(id="container", what=what)
    if image is not None:
        problem = image_problem(HardwareConfig(gpus_per_node=len(machine.gpus)), None, machine, image)
        problems = [problem] if problem is not None else []
    else:
        problems = [*torch_problems(machine.gpus[0].generation, machine)] if machine.gpus else []
    yield from map(finding_of, problems)


def check_torch(machine: Machine) -> Finding:
    """Load torch, and compute a product on every GPU."""
    answer = ask(_program("torch"), timeout_s=_TORCH_TIMEOUT_S)
    if answer.problem is not None:
        fix = "python -c 'import torch' shows all of it; install the lock again: make setup"
        return Finding(id="torch-works", what=f"torch: {answer.failure}", fix=fix, is_error=True)
    facts = json.loads(answer.text)
    cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "a CPU build"
    gpus = f", computes on {facts['num_gpus']} of {counted(len(machine.gpus), 'GPU')}" if machine.gpus else ""
    what = f"torch {facts['version']}, {cuda}{gpus}"
    if facts["problem"] is None and facts["num_gpus"] >= len(machine.gpus):
        return Finding(id="torch-works", what=what)
    what += f": {facts['problem']}" if facts["problem"] else ""
    fix = "sudo dmesg | grep -i xid; with NVSwitches start nvidia-fabricmanager; or the image of this GPU: make image"
    return Finding(id="torch-works", what=what, fix=fix, is_error=True)


def check_links(machine: Machine) -> Finding | None:
    """How the GPUs are connected; None for fewer than two."""
    links = read_links(machine.gpus)
    if not links:
        return None
    fix = None
    if BETWEEN_SOCKETS in links:
        fix = f"{VISIBLE_VARIABLE}=... for GPUs of one socket, or parallelism=ddp or zero2, which communicate less"
    return Finding(id="links", what=f"links between the GPUs: {links_text(links)}", fix=fix)


def check_nccl(num_ranks: int, backend: str = "nccl") -> Finding:
    """Run one all-reduce over so many GPUs, or processes on the CPU with the backend gloo."""
    with tempfile.TemporaryDirectory(prefix="tunebook-doctor-") as folder:
        answer = ask(_program("nccl", str(num_ranks), backend, f"{folder}/ranks"), timeout_s=_TORCH_TIMEOUT_S)
    names = sorted(name for name in os.environ if name.startswith("NCCL_"))
    variables = "".join(f", {name}={os.environ[name]}" for name in names)
    what = f"all-reduce over {num_ranks} ranks by {backend}{variables}"
    if answer.problem is None:
        return Finding(id="nccl", what=f"{what}: {answer.text.strip()} GB/s (bus bandwidth)")
    fix = (
        "NCCL_DEBUG=INFO tunebook doctor says where it stops; the usual causes are a small /dev/shm (below), and PCIe "
    )
    fix += "access control (ACS) or an IOMMU, if NCCL_P2P_DISABLE=1 tunebook doctor works"
    return Finding(id="nccl", what=f"{what}: {_reason(answer)}", fix=fix, is_error=True)


def _reason(answer: Answer) -> str:
    return answer.problem or "" if answer.is_late else answer.last_words


def check_shared_memory(num_gpus: int, folder: Path = SHARED_MEMORY) -> Finding:
    """Check /dev/shm. Docker's default of 64 MB ends the ranks of several GPUs in a bus error."""
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    what, fix = f"{folder} has {size_text(free)} free", None
    if free < _ENOUGH_SHARED_MEMORY:
        fix = "docker run --shm-size=16g (in compose.yaml TUNEBOOK_SHM_SIZE); on a host: sudo mount -o "
        fix += f"remount,size=16g {folder}"
    return Finding(id="shm-size", what=what, fix=fix, is_error=num_gpus > 1)


def check_disks(outputs: Path) -> Iterator[Finding]:
    """Check the folders of runs, downloads and prepared data."""
    from huggingface_hub import constants

    folders = {
        "outputs=FOLDER": outputs,
        "HF_HOME=FOLDER": Path(constants.HF_HUB_CACHE),
        "TUNEBOOK_CACHE=FOLDER": cache_root(),
    }
    for setting, folder in folders.items():
        parent = existing(folder)
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            fix = f"sudo chown $(id -u) {parent}, or another folder: {setting}"
            yield Finding(id="folder-not-writable", what=f"{folder} cannot be written to", fix=fix, is_error=True)
            continue
        free = shutil.disk_usage(parent).free
        advice = None if free >= _ENOUGH_DISK else f"free some space, or take another disk: {setting}"
        yield Finding(id="disk-space", what=f"{size_text(free)} free for {folder}", fix=advice)


def _program(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tunebook.doctor.checks", *arguments]


def _compute() -> None:
    """Compute a product of small integers, which has one right answer in every format, on each GPU."""
    import torch

    rows = (torch.arange(float(_SIZE)) % 5).repeat(_SIZE, 1)
    num_gpus, problem = 0, None
    try:
        for index in range(torch.cuda.device_count()):
            product = rows.to(f"cuda:{index}") @ torch.eye(_SIZE, device=f"cuda:{index}")
            if not torch.equal(product.cpu(), rows):
                raise RuntimeError(f"GPU {index} computed a wrong product")
            num_gpus += 1
    except RuntimeError as error:  # torch's errors of CUDA are subclasses
        problem = str(error).splitlines()[0]
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "num_gpus": num_gpus, "problem": problem}
    print(json.dumps(facts))


def _all_reduce(rank: int, num_ranks: int, backend: str, file: str) -> None:
    """What each rank runs. Rank 0 prints the bus bandwidth as nccl-tests defines it."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=num_ranks)
    numbers = torch.full((_REDUCED_BYTES // 4,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    if not bool((numbers == num_ranks * (num_ranks + 1) / 2).all()):
        raise RuntimeError(f"rank {rank} received a wrong sum: a training over these links is invalid")
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(numbers)
    numbers[0].item()  # waits for the GPU
    seconds = time.perf_counter() - start
    if rank == 0:
        print(f"{2 * (num_ranks - 1) / num_ranks * _REDUCED_BYTES / seconds / 1e9:.3g}", flush=True)
    dist.destroy_process_group()


def main(name: str, *arguments: str) -> None:
    """Run the part of a check that runs in its own process."""
    if name == "torch":
        _compute()
        return
    from torch.multiprocessing.spawn import spawn

    num_ranks, backend, file = arguments
    spawn(_all_reduce, args=(int(num_ranks), backend, file), nprocs=int(num_ranks))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(*sys.argv[1:])
