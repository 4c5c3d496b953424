"""Pods of a rendered Indexed Job on the test bed's hosts: each launcher is the first process of its
own namespaces.

A pod has the hostname, the variables, the command and the /etc/hosts that kubelet gives it.
``name`` adds the names of the headless Service to these files, in place of DNS.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.hosts import Cluster, RunningOnHost, Started, until
from tests.cluster.launchers_on_hosts import HostLaunchers
from tests.unit.render.cluster import NAMESPACE, Pod

CONTAINER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec unshare --pid --fork --mount-proc "$@"'


class Pods(HostLaunchers):
    """The pods of a job by their index; by default on n1, n2, and so on."""

    def __init__(self, hosts: Cluster, pods: list[Pod]) -> None:
        super().__init__(hosts)
        self.pods = pods
        self._files: dict[int, Path] = {}
        self._host_names: dict[int, str] = {}
        self._count = 0

    def begin(self, index: int, *more: str, host: str | None = None) -> RunningOnHost:
        """Start a pod; ``more`` goes before the script."""
        pod, host_name = self.pods[index], host or f"n{index + 1}"
        hostname = pod.environ["HOSTNAME"]
        own = self.hosts.work / f"pod-{self._count}"
        self._count += 1
        own.mkdir()
        address = self.hosts.address(host_name)
        file = self._files[index] = own / "hosts"
        file.write_text(f"127.0.0.1\tlocalhost\n{address}\t{self._names(index)[0]}\t{hostname}\n")
        self._host_names[index] = host_name
        argv = [sys.executable, "-m", *pod.argv[:2], *more, *pod.argv[2:]]
        environ = {**pod.environ, "SIGN_DIR": str(self.hosts.work), "XDG_STATE_HOME": str(own)}
        out, err = own / "out", own / "err"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            started = self.hosts.popen(
                host_name,
                [
                    "unshare",
                    "--mount",
                    "--uts",
                    "sh",
                    "-c",
                    CONTAINER,
                    "sh",
                    os.fspath(file),
                    hostname,
                    *argv,
                ],
                cwd=self.hosts.work,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
            )
        launcher = until(lambda: _child_in_namespace(started), f"pod {hostname}")
        running = InPod(started, launcher, out, err, own / "distlaunch" / "jobs")
        self.hosts._running.append(running)
        self.by_rank[index] = running
        return running

    def name(self, *indices: int) -> None:
        """Make DNS in all pods know the present addresses of these pods."""
        known = {index: "\t".join(self._names(index)) for index in indices}
        lines = [
            f"{self.hosts.address(self._host_names[index])}\t{names}\n"
            for index, names in known.items()
        ]
        for file in self._files.values():
            before = file.read_text().splitlines(keepends=True)
            kept = [
                line
                for line in before
                if not line.endswith(tuple(f"\t{names}\n" for names in known.values()))
            ]
            file.write_text("".join(kept + lines))

    def _names(self, index: int) -> tuple[str, str]:
        pod = self.pods[index]
        name = f"{pod.environ['HOSTNAME']}.{pod.spec['spec']['subdomain']}"
        return f"{name}.{NAMESPACE}", name


class InPod(RunningOnHost):
    """A launcher that is process 1 of its pod. Signals come from outside, as kubelet sends them."""

    def __init__(self, started: Started, launcher: int, out: Path, err: Path, jobs: Path) -> None:
        super().__init__(started, out, err, jobs, set())
        self.pid = launcher

    def send_signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.kill(self.pid, number)


def _child_in_namespace(started: Started) -> int:
    """Return the pid of the process 1 that ``started`` has made, or 0 while there is none."""
    try:
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        for child in children:
            status = Path(f"/proc/{child}/status").read_text()
            [pids] = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
            if pids[-1] == "1" and Path(f"/proc/{child}/cmdline").read_bytes().startswith(
                sys.executable.encode()
            ):
                return int(child)
    except (FileNotFoundError, ProcessLookupError):
        pass
    assert started.poll() is None, "the pod has ended at once"
    return 0
