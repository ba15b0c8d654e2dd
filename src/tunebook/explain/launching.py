"""The texts for errors of the launchers, by `problem_id`."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

LAUNCHING: dict[str, Explanation] = {
    "inside-launcher": Explanation(
        summary="The command runs inside torchrun, accelerate launch, deepspeed, mpirun or srun.",
        why="Those start a command once for each process. Tunebook is a launcher itself: every copy would prepare the "
        "data and start ranks of its own, or a single rank would wait for others that never come. What those launchers "
        "say about precision and strategy is not read: it would be in no record of the run.",
        advice="Type the command without the other launcher and say the number of ranks with hardware.gpus_per_node, "
        "the strategy with parallelism and the precision with precision.compute. mpirun and srun may start one copy on "
        "each node of a run on several, each with its own launcher.node_rank. Where no launcher is at work, unset the "
        "variable that the message names.",
    ),
    "port-in-use": Explanation(
        summary="The port that the nodes of a run call is in use on node 0.",
        why="Another program listens there, often another run.",
        advice="Type another launcher.master_port on every node, or wait for the other run.",
    ),
    "launcher-out-of-reach": Explanation(
        summary="A node cannot reach the launcher on node 0.",
        why="Nothing answers at launcher.master_address and launcher.master_port: the command for node 0 does not run, "
        "the name is wrong, or a firewall is between. Or what answers there is no launcher: another program, or one "
        "that was killed.",
        advice="Start node 0, try the address from this node (ping, nc -z HOST PORT), and open the port. Where "
        "something answers, look on node 0 for the port that its launcher was given.",
    ),
    "launcher-lost": Explanation(
        summary="The launcher on node 0 is gone.",
        why="It was killed or its machine failed, or it ended while this node still waited for the data to be prepared."
        " Ranks without a launcher save, if they can, and end: nobody would record what they do.",
        advice="Look at node 0; start again on all nodes, without training.resume=never, and the run goes on from its "
        "newest checkpoint.",
    ),
    "node-refused": Explanation(
        summary="A node cannot take part in the run.",
        why="All nodes need the same software, the same base model, GPUs of the generation the run is set up for, and "
        "numbers of their own; one that differs would fail or slow the others in every step, or train something else.",
        advice="Correct on the named node what the message says, then start again on all. While node 0 still prepares "
        "start that node alone again; a run that is at work without it goes on.",
    ),
    "rank-stalled": Explanation(
        summary="A rank stood still, and the others waited for it in vain.",
        why="Every step needs every rank. One that was stopped (SIGSTOP, a debugger), whose machine hangs, or that "
        "waits for a disk, a network file system or a driver that does not answer, fails nothing itself; the others "
        "give up after launcher.timeout_s. Each rank writes every few seconds how far it is (logs/pulse-*.json in the "
        "run folder): the one that stood still is named by that, with the last step it reported.",
        advice="Look at the named process on its host: `ps -o pid,stat,wchan:32,cmd -p PROCESS` (T: stopped, D: in an "
        "uninterruptible wait), `dmesg`, the disk and the network file systems that it uses. The same command goes on "
        "from the newest checkpoint. Where a rank is only slow, raise launcher.timeout_s.",
    ),
    "node-missing": Explanation(
        summary="A node did not come up, or was lost.",
        why="Every step needs every rank, so the run ends for all of them, saved where that was possible.",
        advice="Look at the named node; start again, without training.resume=never, and the run goes on from its "
        "newest checkpoint. Slow starts (an image to pull, a cold disk) need a longer launcher.start_timeout_s.",
    ),
    "container-not-started": Explanation(
        summary="Docker could not start a container of the run on a node.",
        why="The image is not there, Docker's daemon does not answer or does not let this user, or the image has no "
        "such Python. An image without a registry's name is never looked for on Docker Hub: what anybody put there "
        "under the same name would get the run's folders and tokens.",
        advice="Make or fetch the image on every node (`make image`, `make pull`), or name one with its registry: "
        "launcher.container_image=REGISTRY.EXAMPLE/NAME:TAG. launcher.container_python names the Python in it.",
    ),
    "container-mount": Explanation(
        summary="A folder cannot be named to a container.",
        why="pyxis separates mounts by commas and the two sides of one by a colon, docker by a colon. A folder with "
        "one of these signs in its name would be cut there, and the run would get another folder, or an empty one.",
        advice="Use a folder without commas and colons in its path; a link to it is enough.",
    ),
    "folder-not-shared": Explanation(
        summary="A node does not see the run folder or the prepared data.",
        why="The launcher writes both before the ranks start, and every node reads them.",
        advice="Put outputs=FOLDER and TUNEBOOK_CACHE on a file system that all nodes share.",
    ),
    "operator-build-stuck": Explanation(
        summary="An operator of DeepSpeed's is being compiled elsewhere, and that did not come to an end.",
        why="Only one process compiles an operator at a time; the others wait for its lock file for "
        "launcher.start_timeout_s. A program that was killed while it compiled leaves its lock file behind. Tunebook "
        "takes that away where it can tell: if it was its own once no compiler is at work in the folder, else once "
        "nothing has changed for 10 minutes.",
        advice="If nothing compiles any more, do what the message says: remove the lock file, or end the process that "
        "hangs. If a compiler is at work, raise launcher.start_timeout_s.",
    ),
    "slurm-not-found": Explanation(
        summary="Slurm's commands are not on this machine.",
        why="launcher=slurm hands a job script to sbatch.",
        advice="Type the command on a login node of the cluster, or use launcher=local.",
    ),
    "slurm-out-of-reach": Explanation(
        summary="Slurm's controller does not answer.",
        why="It is down, busy, or this machine is configured for another cluster.",
        advice="Look with `scontrol ping` and `sinfo`; check SLURM_CONF.",
    ),
    "slurm-refused": Explanation(
        summary="Slurm refuses the job.",
        why="The partition or account does not exist, may not be used or takes no jobs now, no such nodes exist, or "
        "Slurm cannot write to such a path: that is asked before anything is prepared. Or the job was taken and can "
        "never run (BadConstraints, DependencyNeverSatisfied, a node that could not start it); where its end is waited "
        "for, it is taken back after half a minute of that.",
        advice="Change the key that the message names; `sinfo` lists partitions, `sacctmgr show assoc user=$USER` "
        "accounts.",
    ),
    "slurm-job-lost": Explanation(
        summary="A Slurm job ended without writing how.",
        why="Its node failed, it was killed for memory or time, or the nodes do not see the run folder or this Python.",
        advice="Look at the job's output file and at `scontrol show job`; submit again, without "
        "training.resume=never, and it goes on from its newest checkpoint.",
    ),
    "ray-out-of-reach": Explanation(
        summary="No Ray cluster answers at launcher.address.",
        why="The cluster is not running, the address is wrong, or a firewall is between.",
        advice="Look with `ray status --address HOST:PORT`, or start one here with launcher.address=local.",
    ),
    "ray-too-small": Explanation(
        summary="The Ray cluster cannot hold the run's workers.",
        why="A worker takes launcher.cpus_per_worker cores and, on GPUs, one GPU; all of them start together.",
        advice="Lower what is asked for, or use a larger cluster.",
    ),
}
