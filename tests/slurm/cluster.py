"""A real Slurm of several nodes on one machine: installed, started and ended as root, without systemd.

    python -m tests.slurm.cluster up [folder]     prints `export SLURM_CONF=...`
    python -m tests.slurm.cluster down [folder]

Munge, slurmdbd on a MariaDB of its own, slurmctld, and a slurmd for each node, all on 127.0.0.1. Everything
they write lies in one folder; only processes recorded there are ever ended. Accounting is not optional:
without it a killed job stays in an unknown state, and whoever waits for it waits for ever.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.slurm.description import describe
from tests.slurm.processes import NoCluster, command_of, descendants, wait_until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge", "mariadb-server-core")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "slurmdbd", "munged", "mariadbd")
START_SECONDS = 40.0


class Cluster:
    """The daemons, and the means to hurt them.

    Args:
        folder: State, logs and process ids; made by `up`, removed by `down`.
        n_nodes: Nodes.
        cpus: Cores of a node; the machine's, shared out, where None.
    """

    def __init__(self, folder: Path, n_nodes: int = 2, cpus: int | None = None) -> None:
        self.folder = Path(folder)
        self.n_nodes = n_nodes
        self.cpus = cpus or max(1, (os.cpu_count() or 1) // n_nodes)
        # What the clients need: where the cluster is described, and where the daemons' programs are.
        self.environment = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def up(self) -> None:
        """Installs what is missing and starts every daemon.

        Raises:
            NoCluster: with the reason.
        """
        install()
        if self.folder.exists():
            self.down()
        describe(self.folder, self.n_nodes, self.cpus)
        try:
            self._start_all()
        except (NoCluster, OSError, subprocess.SubprocessError) as error:
            logs = self.logs()
            self.down()
            raise NoCluster(f"{error}\n{logs}") from error

    def _start_all(self) -> None:
        munge, database = self.folder / "munge", self.folder / "db"
        self._start(
            "munged",
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={munge}/seed",
        )
        self._start(
            "mariadbd",
            "--no-defaults",
            "--user=root",
            f"--datadir={database}",
            f"--socket={database}/socket",
            f"--pid-file={self.folder}/mariadbd.pid",
            f"--log-error={self.folder}/log/mariadbd.log",
            "--skip-grant-tables",
            "--skip-networking",
            "--innodb-log-file-size=16M",
            "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900",
            "--innodb-flush-log-at-trx-commit=0",
            stays=True,
        )
        wait_until(lambda: (database / "socket").exists(), START_SECONDS, "MariaDB")
        self._start("slurmdbd")
        wait_until(lambda: self.succeeds("sacctmgr", "-n", "show", "cluster"), START_SECONDS, "slurmdbd")
        self.run("sacctmgr", "-iQ", "add", "cluster", "test")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        wait_until(self.is_whole, START_SECONDS, "all nodes")

    @property
    def nodes(self) -> list[str]:
        """The nodes' names."""
        return [f"n{index + 1}" for index in range(self.n_nodes)]

    def is_whole(self) -> bool:
        """Whether the controller answers and every node takes jobs."""
        answer = self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle,mix,alloc", "-o", "%N", check=False)
        return set(answer.split()) == set(self.nodes)

    def start_controller(self) -> None:
        """Starts slurmctld; with the jobs it knew, where it ran before."""
        self._start("slurmctld", "-i")

    def kill_controller(self) -> None:
        """SIGKILL."""
        self._kill("slurmctld")

    def start_node(self, node: str) -> None:
        """Starts a node's slurmd."""
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        self._start("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """SIGKILL to a node's slurmd and to all that runs there, as if its power had failed."""
        self._kill(f"slurmd-{node}")
        self._kill_steps([node])

    def processes_of(self, job: str) -> list[int]:
        """Ids of the python processes that run a job's steps, such as `12` or `12_3`."""
        number = self.run("squeue", "-h", "-r", "-j", job, "-o", "%A", check=False).strip()
        steps = [step for node in self.nodes for step in self._steps(node)]
        ours = [step for step in steps if f"[{number}." in command_of(step)]
        below = [pid for step in ours for pid in descendants(step)]
        return [pid for pid in below if re.match(r"\S*python\S* .*submitit\.core\._submit", command_of(pid))]

    def run(self, *command: str, check: bool = True) -> str:
        """What a Slurm client prints."""
        result = subprocess.run(
            command,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if check and result.returncode:
            raise NoCluster(f"{' '.join(command)}: {result.stderr.strip() or result.stdout.strip()}")
        return result.stdout

    def succeeds(self, *command: str) -> bool:
        """Whether a client finds whom it asks."""
        with suppress(subprocess.TimeoutExpired):
            return (
                subprocess.run(
                    command,
                    env=os.environ | self.environment,
                    capture_output=True,
                    timeout=5,
                    check=False,
                    stdin=subprocess.DEVNULL,
                ).returncode
                == 0
            )
        return False

    def logs(self, lines: int = 15) -> str:
        """The ends of the daemons' logs."""
        parts = []
        for path in sorted((self.folder / "log").glob("*.log")):
            end = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *end]))
        return "\n".join(parts)

    def down(self) -> None:
        """Ends the jobs and every daemon, and removes the folder."""
        if self._pid("slurmctld"):
            with suppress(NoCluster, subprocess.TimeoutExpired):
                self.run("scancel", "-Q", "-u", "root", check=False)
                wait_until(lambda: not self.run("squeue", "-h", check=False).strip(), 10.0, "the jobs' end")
        daemons = [f"slurmd-{node}" for node in self.nodes]
        for name in [*daemons, "slurmctld", "slurmdbd", "mariadbd", "munged"]:
            self._kill(name, signal.SIGTERM)
        self._kill_steps(self.nodes)  # what is left of a job whose node or controller had been killed
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, program: str, *arguments: str, stays: bool = False) -> None:
        """Starts a daemon. It must not inherit our output, or whoever reads that waits for its end."""
        environment = os.environ | self.environment | {"MYSQL_UNIX_PORT": str(self.folder / "db" / "socket")}
        command = [shutil.which(program, path=self.environment["PATH"]) or program, *arguments]
        with open(self.folder / "log" / f"{program}.out.log", "ab") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        if not stays and process.wait(START_SECONDS):
            raise NoCluster(f"{' '.join(command)} exited with {process.returncode}")

    def _pid(self, name: str) -> int | None:
        """The id of a daemon that lives; a process that got its id later is not it."""
        try:
            pid = int((self.folder / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return None
        return pid if name.split("-")[0] in command_of(pid) else None

    def _kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        pid = self._pid(name)
        if pid is None:
            return
        os.kill(pid, how)
        with suppress(NoCluster):
            wait_until(lambda: self._pid(name) is None, 8.0, name)
        if self._pid(name) is not None:
            os.kill(pid, signal.SIGKILL)
        (self.folder / f"{name}.pid").unlink(missing_ok=True)

    def _kill_steps(self, nodes: Sequence[str]) -> None:
        """SIGKILL to all that runs on some nodes, stopped first: nobody is left to report another's end."""
        steps = [step for node in nodes for step in self._steps(node)]
        pids = [pid for step in steps for pid in [*descendants(step), step]]
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, how)

    def _steps(self, node: str) -> list[int]:
        """The step daemons of this cluster on a node: they write to its log."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        steps = [pid for pid in pids if command_of(pid).startswith("slurmstepd:")]
        return [pid for pid in steps if self._node_of(pid) == node]

    def _node_of(self, pid: int) -> str | None:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                log = os.readlink(descriptor)
                if log.startswith(f"{self.folder}/log/slurmd-"):
                    return log.rsplit("slurmd-", 1)[1].removesuffix(".log")
        return None


def install() -> None:
    """Installs Slurm through apt where its programs are missing.

    Raises:
        NoCluster: Not root, not Linux, or apt could not.
    """
    if platform.system() != "Linux" or os.geteuid() != 0:
        raise NoCluster("a test cluster needs Linux and root")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if all(shutil.which(program, path=path) for program in PROGRAMS):
        return
    if shutil.which("apt-get") is None:
        raise NoCluster(f"{', '.join(PROGRAMS)} are needed, and there is no apt-get to install them with")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-yqq", "--no-install-recommends", *PACKAGES],
    ):
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if result.returncode and "install" in command:
            raise NoCluster(f"{' '.join(command)}: {result.stderr[-500:]}")


def main(arguments: Sequence[str]) -> int:
    """The command line: `up` or `down`, and the folder."""
    folder = Path(arguments[1]) if len(arguments) > 1 else Path(tempfile.gettempdir()) / "kvmap-slurm"
    cluster = Cluster(folder)
    if arguments[:1] == ["down"]:
        cluster.down()
        return 0
    if arguments[:1] != ["up"]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        cluster.up()
    except NoCluster as error:
        print(f"no Slurm: {error}", file=sys.stderr)
        return 1
    print(f"export SLURM_CONF={json.dumps(cluster.environment['SLURM_CONF'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
