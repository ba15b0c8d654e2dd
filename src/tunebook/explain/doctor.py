"""The texts for the findings of `tunebook doctor`, by id; the rules that it reports have their own."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

_GPUS: dict[str, Explanation] = {
    "gpus-found": Explanation(
        summary="Which GPUs this process sees.",
        why="A run uses those that CUDA_VISIBLE_DEVICES and the container leave; without any it trains on the CPU.",
        advice="nvidia-smi -L lists all GPUs of the machine.",
    ),
    "nvidia-smi": Explanation(
        summary="nvidia-smi is on this machine, and Python finds no GPU.",
        why="Both ask the same library. Where only one gets an answer a package is missing; where neither does, the "
        "driver was updated and not loaded again, or a GPU is broken.",
        advice="pip install nvidia-ml-py, or restart the machine; nvidia-smi by itself says more.",
    ),
    "gpu-note": Explanation(
        summary="Something unusual about the GPUs.",
        why="GPUs that do not answer, are hidden or are of different kinds change what `auto` plans for.",
        advice="Restrict a run to GPUs of one kind with CUDA_VISIBLE_DEVICES, and restart a machine whose GPUs do not "
        "answer.",
    ),
    "driver-silent": Explanation(
        summary="The NVIDIA driver was asked and did not answer properly.",
        why="A GPU that fell off the bus blocks everything that asks for it, often in a state that no kill ends. So "
        "the question is put in a process of its own, with a time limit. Or the driver's kernel module is not loaded, "
        "such as after an update of the kernel for which it was not built.",
        advice="Try sudo modprobe nvidia; install the driver again where there is no such module. Else look for Xid "
        "and `fallen off the bus` in sudo dmesg, and restart the machine.",
    ),
    "gpu-in-use": Explanation(
        summary="Whether something else takes memory of the GPUs.",
        why="A plan counts on the whole memory. What another process holds is missing at the first large batch, and "
        "its work slows every rank.",
        advice="End it, or name other GPUs with CUDA_VISIBLE_DEVICES. Processes outside of a container are not seen "
        "inside.",
    ),
    "gpu-compute-mode": Explanation(
        summary="The GPU is set so that no program may use it.",
        why="An administrator can forbid computing on a GPU (compute mode `prohibited`).",
        advice="sudo nvidia-smi -c 0 allows it again.",
    ),
    "gpu-split": Explanation(
        summary="The GPU is split into slices (MIG).",
        why="A slice has a share of the memory and the speed, a process sees one of them, and NCCL connects none.",
        advice="Train on one slice with parallelism=single, or turn MIG off.",
    ),
    "gpu-memory-errors": Explanation(
        summary="Memory errors that error correction could not mend, and repairs that wait for a restart.",
        why="An uncorrected error ends the process that meets it, hours into a run; the same cells fail again.",
        advice="Reset the GPU or restart the machine; have a GPU replaced on which it comes back.",
    ),
    "gpu-persistence": Explanation(
        summary="The driver forgets the GPU whenever nobody uses it.",
        why="Without persistence mode each first use initialises the GPU again, which takes seconds per GPU.",
        advice="sudo nvidia-smi -pm 1, or run nvidia-persistenced.",
    ),
    "gpu-pcie-width": Explanation(
        summary="The GPU uses fewer PCIe lanes than it has.",
        why="Half of the lanes is half of the speed of offloading, loading, and of NCCL where there is no NVLink.",
        advice="Look at the slot's own width with lspci -vv; if it has more, seat the card again.",
    ),
}

_SOFTWARE: dict[str, Explanation] = {
    "container": Explanation(
        summary="Whether this runs in one of Tunebook's images, and in which.",
        why="An image is made for one generation of GPUs and says in image.json what was checked when it was built.",
        advice="make train picks the image by the GPUs; outside of one the packages of .venv count.",
    ),
    "driver": Explanation(
        summary="The NVIDIA driver against what the installed torch needs.",
        why="CUDA 12 runs on driver 525 and newer, CUDA 13 on 580 and newer.",
        advice="See tunebook explain driver-too-old where it is older.",
    ),
    "torch-import": Explanation(
        summary="Whether torch can be loaded, and what it was built for.",
        why="Every command that trains needs it; a broken installation fails with a library's name and nothing else.",
        advice="Install the lock again with make setup, and let no other package change torch.",
    ),
    "torch-architectures": Explanation(
        summary="The GPUs that torch was compiled for.",
        why="Machine code runs on GPUs of the same major compute capability from its minor one on. Without it the "
        "first kernel fails with `no kernel image is available`.",
        advice="Use the image of the GPU's generation.",
    ),
    "cuda-works": Explanation(
        summary="Whether each GPU gives the right answer to a small product.",
        why="A driver that lists a GPU may still be unable to use it: other libraries, a fabric manager that does not "
        "run, a GPU that another process has to itself.",
        advice="Do what the message says; nvidia-smi and sudo dmesg | grep -i xid say more.",
    ),
    "nccl": Explanation(
        summary="The version of NCCL in torch, and the variables that change what it does.",
        why="Variables left from an earlier trial, such as NCCL_P2P_DISABLE, slow every run without a word.",
        advice="Unset those that you did not mean.",
    ),
}

_LINKS: dict[str, Explanation] = {
    "topology": Explanation(
        summary="How the GPUs are connected, as nvidia-smi topo -m says.",
        why="NVLink carries 50 to 900 GB/s, PCIe 10 to 50; the way between two CPU sockets is the slowest.",
        advice="Prefer GPUs on one socket, and over slow links strategies that communicate once a step.",
    ),
    "network-cards": Explanation(
        summary="The network cards, and which is nearest to each GPU.",
        why="A run on several nodes sends from GPU to card; over the other CPU socket that is slower.",
        advice="NCCL_IB_HCA names the cards to use.",
    ),
    "bandwidth": Explanation(
        summary="The bandwidth measured between the GPUs.",
        why="Bus bandwidth is counted as nccl-tests does, so that it compares with what others publish: for n ranks "
        "2(n-1)/n of size by time for all-reduce, (n-1)/n for all-gather. Half of what a link can do means a detour.",
        advice="NCCL_DEBUG=INFO shows which way NCCL takes. Where it hangs, try NCCL_P2P_DISABLE=1: PCIe access "
        "control (ACS) or an IOMMU between the GPUs is the usual cause.",
    ),
    "wrong-sums": Explanation(
        summary="Numbers that NCCL moved arrived changed.",
        why="A virtual machine's IOMMU can redirect what GPUs write to each other. Training goes on, with nonsense.",
        advice="Try NCCL_P2P_DISABLE=1; if that is right keep it, or turn ACS and IOMMU off.",
    ),
    "sharding-advice": Explanation(
        summary="ZeRO-2 or ZeRO-3 (or FSDP with or without resharding) on these links.",
        why="With one pass a step ZeRO-3 moves 1.5 times as much as ZeRO-2, with more up to three times. It costs no "
        "time as long as that takes no longer than the pass computes, at the peak of the GPU; the message shows the "
        "arithmetic. That is its best case: each layer also waits for its own weights. On 8 H200 Qwen2.5-3B made "
        "17,289 tokens a second on each GPU with ZeRO-2 and 7,969 with ZeRO-3.",
        advice="Take the one that keeps whole weights if it fits. If not, compute more tokens per pass.",
    ),
    "slow-links": Explanation(
        summary="ZeRO-3 or FSDP over links that `tunebook doctor` measured to be too slow for them.",
        why="Divided weights are gathered before each layer, forward and backward. Where that takes longer than the "
        "layer computes, the GPUs wait; the message shows the arithmetic with the bandwidth measured here.",
        advice="Take what the message names. After a change of cards or cables `tunebook doctor` measures again; a run "
        "is not stopped by this.",
    ),
}

_SYSTEM: dict[str, Explanation] = {
    "shm-size": Explanation(
        summary="The size of /dev/shm.",
        why="NCCL and data loaders pass memory between processes through it. Docker's default of 64 MB ends in a bus "
        "error.",
        advice="Start containers with --shm-size=16g; it is a ceiling, nothing is taken before it is used.",
    ),
    "limit-memlock": Explanation(
        summary="How much memory a process may lock.",
        why="InfiniBand and offload to NVMe lock the memory that they transfer from, and fail at this limit.",
        advice="ulimit -l unlimited, or --ulimit memlock=-1 for a container.",
    ),
    "limit-nofile": Explanation(
        summary="How many files a process may have open.",
        why="Shards, sockets between ranks and tensors of data workers are files; at the limit a run fails with "
        "`Too many open files`.",
        advice="ulimit -n 65536.",
    ),
    "limit-stack": Explanation(
        summary="The size of a thread's stack.",
        why="Libraries expect the usual 8 MiB; with less, a deep call ends the process without a message.",
        advice="ulimit -s 8192.",
    ),
    "host-memory": Explanation(
        summary="The host's memory against what a recipe offloads to it.",
        why="Offloaded states take 16 bytes per parameter of the node's share. When memory is short the system kills a "
        "rank, by signal 9.",
        advice="Offload less, offload to NVMe, or use more nodes.",
    ),
    "swap": Explanation(
        summary="Memory that the system has moved to disk.",
        why="A rank that meets such a page waits for the disk, and all others for it.",
        advice="Free memory, then empty the swap with swapoff and swapon.",
    ),
    "clock": Explanation(
        summary="This machine's clock against that of the file system.",
        why="The newest run and checkpoint are told by time; on a network file system the server's clock writes it. "
        "Certificates are refused by a clock that is far off.",
        advice="Keep all clocks by NTP: timedatectl set-ntp true.",
    ),
}

_STORAGE: dict[str, Explanation] = {
    "disk-space": Explanation(
        summary="Free disk space against what a recipe writes and downloads.",
        why="A checkpoint holds the weights and two moments per parameter; one more than are kept is on the disk while "
        "it is written. A disk that fills up ends the run.",
        advice="Keep fewer checkpoints, or put outputs and HF_HOME on another disk.",
    ),
    "folder-not-writable": Explanation(
        summary="A folder that runs write to cannot be written to.",
        why="Runs, prepared data and downloads belong to the user who started them.",
        advice="Change the owner, or name other folders: outputs=FOLDER, TUNEBOOK_CACHE, HF_HOME.",
    ),
    "hub-model": Explanation(
        summary="A model that is not in the hub's cache yet.",
        why="The first run downloads it, which takes its time and needs a network.",
        advice="Download it beforehand with hf download NAME.",
    ),
    "hub-token": Explanation(
        summary="Whether there is a token for the hub, which is never printed.",
        why="Gated models and private data sets are only given to an account that may read them. A file for the token "
        "that is there and cannot be read fails every request, also for what is public.",
        advice="hf auth login, or HF_TOKEN in the environment.",
    ),
}

_RECIPE: dict[str, Explanation] = {
    "recipe": Explanation(
        summary="Whether the recipe composes for this machine.",
        why="Everything else that is looked at for a recipe follows from its resolved configuration.",
        advice="tunebook plan with the same words shows it whole.",
    ),
    "other-machines": Explanation(
        summary="Machines that the run uses and that were not looked at.",
        why="Each machine has its own driver, limits, disks and clock.",
        advice="Type tunebook doctor on each, on Slurm with srun --nodes=N --ntasks-per-node=1.",
    ),
    "tokenizer": Explanation(
        summary="Whether the recipe's tokenizer can be loaded, and its special tokens.",
        why="A missing end of text is a model that never stops; it is better known before a run than after.",
        advice="Set the tokens that the message names with model.eos_token and model.pad_token.",
    ),
    "tokenizer-template": Explanation(
        summary="Whether the assistant's words are found in what the chat template writes.",
        why="Only they are trained on. A template marks them with {% generation %}, or they are found by comparing, "
        "which fails where a template writes earlier answers in another way.",
        advice="Name a template with markers by model.chat_template=FILE.",
    ),
    "tokenizer-adds-bos": Explanation(
        summary="Whether template and tokenizer both begin a text with the BOS token.",
        why="Then a program that renders a conversation and tokenises the text gets two, which no model was pretrained "
        "on. Tunebook tokenises rendered conversations without adding any.",
        advice="Pass add_special_tokens=False wherever else rendered conversations are tokenised.",
    ),
}

DOCTOR: dict[str, Explanation] = {**_GPUS, **_SOFTWARE, **_LINKS, **_SYSTEM, **_STORAGE, **_RECIPE}
