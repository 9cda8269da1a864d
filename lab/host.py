"""One host of a lab: its files before the first boot, starting it, and getting into it."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

from lab.cgroup import Group
from lab.network import Network
from lab.shell import LabError, run, wait_until

# Keeps a host running across its own reboots (nspawn then ends with status 133), in mount and network namespaces that
# vanish with it. What it writes goes to the host's log.
KEEPER = r"""
set -eu
for file in $KEEP_PROCS; do echo $$ > "$file"; done
mkdir -p /run/systemd/nspawn
mount -t tmpfs -o mode=0755 tmpfs /run/systemd/nspawn
mount -t overlay -o "lowerdir=$BASE,upperdir=$DISK/upper,workdir=$DISK/scratch" lab-root "$DISK/root"
while :; do
  ip link delete "$PORT" 2>/dev/null || true  # of the last boot: it would go with that one's namespace, some time later
  sh -c 'for file in $RUN_PROCS; do echo $$ > "$file"; done; exec "$@"' - "$@" &
  until ip link set "$PORT" master "$BRIDGE" up 2>/dev/null; do
    kill -0 $! 2>/dev/null || break
    sleep 0.05
  done
  status=0; wait $! || status=$?
  echo "=== nspawn ended with status $status"
  test "$status" -eq 133 || exit "$status"
done
"""

# Number 1 of a host until it becomes systemd. nspawn leaves /sys and /proc/sys read-only but for the network's part of
# the latter, so that no role changes the machine itself. udev, and with it netplan, needs a /sys that can be written:
# the host's own network devices are opened, and of all others the lists are taken away, for udev stops at the first.
# TCP hands the wire large segments, as if its card cut them: a slow wire costs this machine a timer for each, and what
# eight wires took of two cores was as much as what their hosts did.
INIT = r"""
set -e
echo 40 > /proc/sys/net/ipv4/tcp_min_tso_segs
mount -t sysfs -o nosuid,nodev,noexec sysfs /mnt
mount -o remount,rw /mnt
mount -o remount,rw /sys
umount /sys/bus /sys/class
mkdir /sys/class/net
mount --bind /mnt/class/net /sys/class/net
mount --bind /mnt/devices/virtual/net /sys/devices/virtual/net
umount /mnt
exec /usr/lib/systemd/systemd
"""


@dataclass
class Host:
    """Host NAME, number NUMBER (1, 2, …) of a lab; STATE is where its log lies, DISK where what it writes does."""

    lab: str
    name: str
    number: int
    network: Network
    state: Path
    disk: Path
    interface: str = "eth0"

    BOOT_SECONDS = 120

    @property
    def address(self) -> str:
        return self.network.address(self.number)

    @property
    def group(self) -> Group:
        return Group(self.lab, self.name)

    # --- before the first boot ---------------------------------------------------------------------------------------

    def prepare(
        self, base: Path, hostname: str, password_hash: str, online: bool, pip: str, servers: list[str]
    ) -> str:
        """Write what makes it itself into its layer of the file system. Returns its lines for known_hosts."""
        upper = self.disk / "upper"
        for directory in (upper, self.disk / "scratch", self.disk / "root"):
            directory.mkdir(parents=True)
        # What lies below is the host's own: no user of this machine gets at its setuid programs.
        self.disk.chmod(0o700)
        upper.chmod(0o755)
        self.state.mkdir(parents=True)

        def write(path: str, text: str, mode: int = 0o644) -> Path:
            return self._write(base, path, text, mode)

        write("etc/hostname", f"{hostname}\n")
        write("etc/hosts", f"127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n")
        write("etc/machine-id", f"{uuid.uuid4().hex}\n", 0o444)
        self._write_network(base, online, servers)
        if pip:
            write("etc/pip.conf", pip)
        shadow = (base / "etc/shadow").read_text().splitlines()
        shadow = [
            f"ops:{password_hash}:{line.split(':', 2)[2]}" if line.startswith("ops:") else line
            for line in shadow
        ]
        shadow_file = write("etc/shadow", "\n".join(shadow) + "\n", 0o640)
        os.chown(shadow_file, 0, (base / "etc/shadow").stat().st_gid)
        return self._host_keys(upper / "etc/ssh")

    def _write_network(self, base: Path, online: bool, servers: list[str]) -> None:
        """Its address, gateway and name servers, as the release's installer leaves them: by netplan or by networkd."""
        address, gateway = self.network.with_prefix(self.address), self.network.gateway
        if (base / "usr/sbin/netplan").exists():
            mine = {"addresses": [address], "link-local": []}
            if online:
                mine |= {"routes": [{"to": "default", "via": gateway}], "nameservers": {"addresses": servers}}
            plan = {"network": {"version": 2, "ethernets": {self.interface: mine}}}
            self._write(base, "etc/netplan/50-cloud-init.yaml", json.dumps(plan) + "\n", 0o600)
            return
        self._write(base, "etc/resolv.conf", "".join(f"nameserver {server}\n" for server in servers))
        self._write(
            base,
            f"etc/systemd/network/10-{self.interface}.network",
            f"[Match]\nName={self.interface}\n\n[Network]\nAddress={address}\n"
            + (f"Gateway={gateway}\n" if online else "")
            + "LinkLocalAddressing=no\n",
        )

    def _write(self, base: Path, path: str, text: str, mode: int = 0o644) -> Path:
        """Write PATH in its layer; directories get the mode and owner they have below, for the upper one's count."""
        upper = self.disk / "upper"
        file = upper / path
        missing = [parent for parent in Path(path).parents if not (upper / parent).exists()]
        for parent in reversed(missing):
            (upper / parent).mkdir()
            below = base / parent
            if below.is_dir():
                shutil.copystat(below, upper / parent)
                os.chown(upper / parent, below.stat().st_uid, below.stat().st_gid)
        file.touch(mode=0o600)
        file.write_text(text)
        file.chmod(mode)
        return file

    def _host_keys(self, folder: Path) -> str:
        folder.mkdir(mode=0o755, parents=True)
        known = ""
        for kind in ("ed25519", "ecdsa"):
            file = folder / f"ssh_host_{kind}_key"
            run("ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "root@debian", "-f", file)
            known += f"{self.address} {' '.join(file.with_suffix('.pub').read_text().split()[:2])}\n"
        return known

    # --- on and off --------------------------------------------------------------------------------------------------

    def start(self, base: Path, hostname: str, binds: list[Path]) -> None:
        """Switch it on. It belongs to no terminal and outlives this process."""
        group = self.group
        # nspawn refuses a name that a user may well have given a host; /etc/hostname takes any.
        acceptable = hostname if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", hostname) else "debian"
        port = f"p{self.number}"
        nspawn = [
            *("systemd-nspawn", "--quiet", f"--directory={self.disk / 'root'}", f"--machine={self.name}"),
            *(
                f"--hostname={acceptable}",
                "--register=no",
                "--keep-unit",
                "--settings=no",
                "--resolv-conf=off",
                # As on a machine of its own: nspawn lets these through from 257 on.
                "--system-call-filter=landlock_create_ruleset landlock_add_rule landlock_restrict_self",
            ),
            *("--timezone=off", "--link-journal=no", "--console=read-only"),
            f"--network-veth-extra={port}:{self.interface}",
            *(f"--bind-ro={str(path).replace(':', chr(92) + ':')}" for path in binds),
            *("--", "/bin/sh", "-c", INIT),
        ]
        environment = {
            "BASE": str(base),
            "DISK": str(self.disk),
            "PORT": port,
            "BRIDGE": f"b{self.number}",
            "KEEP_PROCS": " ".join(map(str, group.procs_files("keep"))),
            "RUN_PROCS": " ".join(map(str, group.procs_files("run"))),
        }
        own_mounts = ["unshare", "--mount", "--propagation", "private"]
        self._launch(self.network.enter(*own_mounts, "sh", "-c", KEEPER, "keeper", *nspawn), environment)

    def _launch(self, command: list[str], environment: dict[str, str]) -> None:
        """Start what runs the host, in a session of its own; what it writes goes to the host's log."""
        with (self.state / "log").open("ab") as log:
            done = subprocess.run(
                ["setsid", "--fork", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ.get("PATH", os.defpath), **environment},
            )
        if done.returncode != 0 or not wait_until(self.running, 10):
            raise LabError(f"{self.name} did not start. The end of its log:\n{self.log_tail()}")

    def log_tail(self, lines: int = 15) -> str:
        """What it said last on its console."""
        file = self.state / "log"
        return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else ""

    def complaints(self) -> str:
        """What it says about its own state, where it can still be asked: for an error message."""
        ask = (
            "ip -brief address; networkctl --no-pager; "
            "systemctl list-jobs --no-pager; journalctl -b -p notice -n 30 --no-pager"
        )
        try:
            return subprocess.run(self.enter("sh", "-c", ask), capture_output=True, text=True).stdout
        except LabError:  # it is off
            return ""

    def power_off(self) -> None:
        """A power cut: the wire goes dead first, so that nobody hears a farewell."""
        self.network.wire(self.number, up=False)
        self.group.kill()

    def running(self) -> bool:
        return bool(self.group.pids())

    # --- inside ------------------------------------------------------------------------------------------------------

    def leader(self) -> int | None:
        """The process that is number 1 inside; None while it is off."""
        for pid in self.group.pids():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
                if len(numbers) == 2 and numbers[1] == "1":
                    return pid
        return None

    def enter(self, *argv: str) -> list[str]:
        """The command line that runs ARGV inside as root, counted against the host's own share of CPU."""
        leader = self.leader()
        if leader is None:
            raise self.is_off()
        join = 'for file in $1; do echo $$ > "$file"; done; shift; exec "$@"'
        clean = [
            "env",
            "-i",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME=/root",
            "LANG=C.UTF-8",
        ]
        inside = [
            "nsenter",
            f"--target={leader}",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--cgroup",
            "--root",
            "--wd",
        ]
        procs = " ".join(map(str, self.group.procs_files("exec")))
        return [
            "sh",
            "-c",
            join,
            "-",
            procs,
            *inside,
            *clean,
            f"TERM={os.environ.get('TERM', 'dumb')}",
            *argv,
        ]

    def shell(self) -> list[str]:
        """The command line of a root shell inside, for a terminal."""
        return self.enter("bash", "-l")

    def is_off(self) -> LabError:
        """What to say to whoever wants to get in."""
        return LabError(
            f"{self.name} is off: `python3 -m lab power --name {self.lab} {self.name} on` starts it"
        )

    def erase(self) -> None:
        """Its layer of the file system and its log."""
        shutil.rmtree(self.disk, ignore_errors=True)
        shutil.rmtree(self.state, ignore_errors=True)
