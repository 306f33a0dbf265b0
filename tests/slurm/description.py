"""The files that describe the test cluster to its daemons and clients."""

from __future__ import annotations

import random
import secrets
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.slurm.processes import NoCluster

CLUSTER_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting_port}
AccountingStoragePass={folder}/munge/socket
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=256
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=300
GresTypes=gpu
NodeName=n[1-{n_nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_node}-{last_node}] CPUs={cpus} RealMemory={memory} Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 MaxTime=INFINITE
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE
"""  # noqa: E501  a line of slurm.conf is not folded

ACCOUNTING_CONF = """\
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={accounting_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
PidFile={folder}/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


def describe(folder: Path, n_nodes: int, cpus: int) -> None:
    """Makes the cluster's folder: slurm.conf and its like, and empty folders for state and logs.

    Raises:
        NoCluster: There are no ports for it.
    """
    for name in ("state", "spool", "log", "munge"):
        (folder / name).mkdir(parents=True, mode=0o755)
    (folder / "db").mkdir(mode=0o700)
    port = free_ports(n_nodes + 2)
    values = {
        "folder": folder,
        "host": socket.gethostname().split(".")[0],
        "port": port,
        "accounting_port": port + 1,
        "first_node": port + 2,
        "last_node": port + 1 + n_nodes,
        "n_nodes": n_nodes,
        "cpus": cpus,
        "memory": _memory_mib() * 8 // 10 // n_nodes,
    }
    (folder / "slurm.conf").write_text(CLUSTER_CONF.format(**values))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    # Devices that are no GPUs, so that requests for GPUs can be granted and seen.
    for index in range(8):
        (folder / f"gpu{index}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    _secret(folder / "slurmdbd.conf", ACCOUNTING_CONF.format(**values).encode())
    _secret(folder / "munge" / "key", secrets.token_bytes(128))


def _secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def free_ports(n: int) -> int:
    """The first of `n` ports in a row that nobody listens at."""
    for _ in range(100):
        first = random.randrange(20000, 32000)
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + n):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise NoCluster(f"no {n} free ports in a row")


def _memory_mib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemTotal")) // 1024
