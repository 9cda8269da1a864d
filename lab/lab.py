"""A lab: its options, its state on this machine, and everything that can be done with it."""

import contextlib
import ipaddress
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lab import base, machine, vm
from lab.cgroup import Group
from lab.host import Host
from lab.like import way_in_holds, within
from lab.network import STRANGER, Network, exists
from lab.shell import LabError, inside_netns, locked, run, wait_until

STATE = Path("/run/trainyard-lab")
DISK = Path("/var/lib/trainyard-lab")
CHECKOUT = Path(__file__).resolve().parent.parent
MAX_HOSTS = 32

# A host takes about ten of root's inotify instances, which all hosts share with the machine; its default is 128 in all.
INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_INSTANCES = 8192

# Debian's package for each tool that the lab needs on this machine.
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "setsid": "util-linux",
    "ssh-keygen": "openssh-client",
}


@dataclass
class Options:
    """What `up` builds. Mappings are by host name; `quota` is in CPUs, `rate` in tc's words (20mbit).

    `vms`: virtual machines instead of containers, each of `memory` MiB, with a `second` interface of that name, if any.
    `like`, `names`, `addresses`, `subnet`: an inventory whose hosts these are, and theirs by it (lab.like).
    """

    name: str = "lab"
    hosts: int = 3
    suite: str = ""
    quota: dict[str, float] = field(default_factory=dict)
    rate: dict[str, str] = field(default_factory=dict)
    offline: bool = False
    hostnames: list[str] = field(default_factory=list)
    interfaces: dict[str, str] = field(default_factory=dict)
    unpinned: bool = False
    vms: bool = False
    memory: int = 1024
    second: str = ""
    like: str = ""
    names: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    subnet: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,11}", self.name) or self.name.endswith(("-", "-stranger")):
            raise LabError(f"--name {self.name}: 1 to 12 small letters, digits and hyphens, a letter first")
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise LabError(f"--hosts {self.hosts}: a lab has 1 to {MAX_HOSTS} hosts")
        names = self.host_names()
        for option in ("quota", "rate", "interfaces"):
            for name in getattr(self, option):
                if name not in names:
                    raise LabError(f"--{option} {name}=…: there is no such host; they are {', '.join(names)}")
        for name, cpus in self.quota.items():
            if not 0.01 <= cpus <= 1024:
                raise LabError(f"--quota {name}={cpus}: a number of CPUs from 0.01 up")
        for name, rate in self.rate.items():
            if not re.fullmatch(r"\d+(\.\d+)?[kmg]?bit", rate):
                raise LabError(f"--rate {name}={rate}: a number and kbit, mbit or gbit, such as 20mbit")
        named = {f"--interfaces {name}={interface}": interface for name, interface in self.interfaces.items()}
        if self.second:
            named[f"--second {self.second}"] = self.second
        for option, interface in named.items():
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", interface):
                raise LabError(f"{option}: 1 to 15 letters, digits, dots, hyphens")
        if self.second and not self.vms:
            raise LabError(
                f"--second {self.second}: only virtual machines have a second interface: add --vms"
            )
        if self.second in [self.interfaces.get(name, "eth0") for name in names]:
            raise LabError(f"--second {self.second}: the first interface has that name")
        if self.memory < 512:
            raise LabError(f"--memory {self.memory}: MiB for each virtual machine, 512 or more")
        if len(self.hostnames) > self.hosts:
            raise LabError(f"--hostnames names {len(self.hostnames)} hosts, but --hosts is {self.hosts}")
        self._check_likeness()
        self.suite = (
            self.suite
            or os.environ.get("TRAINYARD_LAB_SUITE")
            or machine.os_release().get("VERSION_CODENAME", "bookworm")
        )
        if not re.fullmatch(r"[a-z]+", self.suite):
            raise LabError(f"--suite {self.suite}: the code name of a release, such as bookworm")
        if self.vms and self.suite in machine.UBUNTU:
            raise LabError(f"--suite {self.suite}: virtual machines boot Debian's kernel; leave --vms out")

    def host_names(self) -> list[str]:
        """node1, node2, … as the inventory has them; or those of the inventory that it is like."""
        return self.names or [f"node{i}" for i in range(1, self.hosts + 1)]

    def _check_likeness(self) -> None:
        """Names that are safe as a file's and a control group's, and addresses that nothing else in the lab has."""
        for name in self.names:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", name):
                raise LabError(f"--like: host {name!r}: letters, digits, underscores, dots and hyphens")
        if not self.subnet:
            return
        try:
            subnet = ipaddress.IPv4Network(self.subnet)
        except ValueError as error:
            raise LabError(f"--network {self.subnet}: {error}; expected one such as 192.168.1.0/24") from None
        if not (16 <= subnet.prefixlen <= 24 and machine.is_private(str(subnet[0]))):
            raise LabError(f"--network {self.subnet}: expected a private network, from /16 to /24")
        taken = {str(subnet[1]): "the lab's router", str(subnet[STRANGER]): "its stranger"}
        for name, address in zip(self.names, self.addresses, strict=True):
            if address in taken:
                raise LabError(f"--like: {name} has the address of {taken[address]}, {address}")
            taken[address] = name


class Lab:
    """Lab NAME, up or not. `up` builds it; every other method wants it up, except `down`."""

    def __init__(self, name: str = "lab"):
        Options(name=name)  # refuses a bad name
        self.name = name
        self.state = STATE / name
        self.disk = DISK / name

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def inventory(self) -> Path:
        """The inventory directory that `up` writes: for `ansible-playbook -i`."""
        default = CHECKOUT / "inventory/lab"
        return default if self.name == "lab" else CHECKOUT / ".trainyard/labs" / self.name / "inventory"

    @property
    def known_hosts(self) -> Path:
        return self.state / "known_hosts"

    def record(self) -> dict:
        """What `up` wrote down: options, index, base, password, binds. Raises LabError when it is not up."""
        file = self.state / "state.json"
        if not file.exists():
            raise LabError(f"there is no lab {self.name!r}: `python3 -m lab up --name {self.name}` makes one")
        record = json.loads(file.read_text())
        if not record["ready"]:
            raise LabError(
                f"lab {self.name!r} did not come up whole: `python3 -m lab down --name {self.name}` clears it away"
            )
        return record

    @property
    def options(self) -> Options:
        return Options(**self.record()["options"])

    @property
    def password(self) -> str:
        """What `ops` logs in with, and gives to sudo."""
        return self.record()["password"]

    @property
    def network(self) -> Network:
        return self._network(self.options, self.record()["index"])

    def _network(self, options: Options, index: int) -> Network:
        return Network(self.name, index, options.subnet, options.addresses)

    @property
    def hosts(self) -> dict[str, Host]:
        """The hosts by their inventory names."""
        return {host.name: host for host in self._hosts(self.options, self.network)}

    def _hosts(self, options: Options, network: Network) -> list[Host]:
        kind, more = Host, {}
        if options.vms:
            kind, more = vm.VirtualMachine, {"memory": options.memory, "second": options.second}
        return [
            kind(
                self.name,
                name,
                i,
                network,
                self.state / name,
                self.disk / name,
                options.interfaces.get(name, "eth0"),
                **more,
            )
            for i, name in enumerate(options.host_names(), start=1)
        ]

    def host(self, name: str) -> Host:
        """One host; raises LabError with the names there are."""
        hosts = self.hosts
        if name not in hosts:
            raise LabError(f"lab {self.name!r} has no host {name!r}; it has {', '.join(hosts)}")
        return hosts[name]

    # --- up and down -------------------------------------------------------------------------------------------------

    def up(self, options: Options, replace: bool = False, install: bool = False) -> None:
        """Build it: returns when every host answers SSH and has finished booting. On any failure nothing stays.

        REPLACE takes a running lab of the name down first; INSTALL lets apt install what this machine lacks.
        """
        if install:
            install_missing_tools(options.vms)
        reasons = obstacles(options.vms)
        if reasons:
            raise LabError("; ".join(reasons))
        with self._locked():
            if not replace and self._is_whole():
                raise LabError(
                    f"lab {self.name!r} is up already. `python3 -m lab down --name {self.name}` takes it down, "
                    "`up --replace` builds it anew"
                )
            with _interruptible():
                try:
                    self._remove()
                    self._build(options)
                except BaseException:
                    self._remove()
                    self._remove_empty()
                    raise

    def _is_whole(self) -> bool:
        with contextlib.suppress(LabError, ValueError):
            return self.record()["ready"]
        return False

    def _build(self, options: Options) -> None:
        started = time.monotonic()
        root = base.ready(options.suite, *([vm.KERNEL] if options.vms else []))
        kind = "hosts"
        if options.vms:
            accelerator = vm.accelerator(vm.image(root))
            kind = f"virtual machines ({accelerator})"
            if accelerator == "tcg":
                print("KVM does not work here: the machines are emulated, and boot in minutes …", flush=True)
        pip, endpoints, binds, servers = machine.Pip(), [], [], []
        if not options.offline:
            pip = machine.pip_configuration()
            sources = machine.distribution_sources(options.suite)
            servers = machine.name_servers()
            endpoints = [(server, 53) for server in servers if machine.is_private(server)]
            endpoints += machine.private_endpoints(pip.urls + machine.apt_urls(sources))
            binds = pip.folders + machine.apt_folders(sources)
        inside = [address for address, _ in endpoints if within(address, options.subnet)]
        if inside:
            raise LabError(
                f"--like: {inside[0]}, from where this machine has names or packages, is in {options.subnet}, as are "
                "the lab's hosts: use a copy of the inventory with another network, or --offline"
            )
        password = secrets.token_urlsafe(12)
        record = {
            "ready": False,
            "options": asdict(options),
            "base": str(root),
            "password": password,
            "binds": [str(path) for path in binds],
        }
        self._claim_index(record)
        network = self._network(options, record["index"])
        _set_on_machine({INOTIFY: str(INOTIFY_INSTANCES)}, at_least=True)
        network.create(options.hosts, second=bool(options.second))
        if not options.offline:
            network.connect(endpoints)
            _set_on_machine({_forwarding(interface): "1" for interface in machine.uplinks()})
        self._prepare_hosts(options, network, root, password, pip.text, servers)
        self._write_inventory(options, network, password)
        hosts = self._hosts(options, network)
        for host in hosts:
            host.group.create()
            host.group.set_cpus(options.quota.get(host.name))
            if host.name in options.rate:
                network.set_rate(host.number, options.rate[host.name])
            host.start(root, self._hostname(options, host), binds)
        self._wait_for(hosts)
        record["ready"] = True
        self._save(record)
        print(
            f"Lab {self.name!r} is up after {time.monotonic() - started:.0f} s: {options.hosts} {kind}, "
            f"{network.subnet}, inventory {self.inventory}"
        )
        shown = os.path.relpath(self.inventory)
        print(f"Next: make venv; . .venv/bin/activate; ansible-playbook -i {shlex.quote(shown)} site.yml")

    def _prepare_hosts(
        self, options: Options, network: Network, root: Path, password: str, pip: str, servers: list[str]
    ) -> None:
        hash_it = [
            "perl",
            "-e",
            'chomp(my $word = <STDIN>); print crypt($word, "\\$6\\$$ARGV[0]\\$")',
            secrets.token_hex(8),
        ]
        password_hash = run("chroot", root, *hash_it, stdin=password)
        known = ""
        for host in self._hosts(options, network):
            name = self._hostname(options, host)
            known += host.prepare(root, name, password_hash, not options.offline, pip, servers)
        self.known_hosts.write_text("" if options.unpinned else known)
        (self.state / "host_keys").write_text(known)
        shutil.copy(Path(__file__).with_name("relay.py"), self.state / "relay.py")

    def _hostname(self, options: Options, host: Host) -> str:
        if host.number <= len(options.hostnames):
            return options.hostnames[host.number - 1]
        return "ubuntu" if options.suite in machine.UBUNTU else "debian"

    def _wait_for(self, hosts: list[Host]) -> None:
        """Until each of HOSTS answers on its SSH port and systemd has finished starting."""
        for host in hosts:
            seconds = host.BOOT_SECONDS + 10 * len(hosts)
            answered = wait_until(lambda host=host: self._answers(host) or not host.running(), seconds)
            if not answered or not host.running():
                said = f"did not answer SSH within {seconds} s" if host.running() else "ended while it booted"
                raise LabError(
                    f"{host.name} {said}. The end of its log:\n{host.log_tail()}\n{host.complaints()}"
                )
        for host in hosts:
            subprocess.run(
                host.enter("systemctl", "is-system-running", "--wait"),
                capture_output=True,
                timeout=host.BOOT_SECONDS,
            )

    @staticmethod
    def _answers(host: Host) -> bool:
        with inside_netns(host.network.netns):
            try:
                with socket.create_connection((host.address, 22), timeout=1) as peer:
                    return peer.recv(4) == b"SSH-"
            except OSError:
                return False

    def _write_inventory(self, options: Options, network: Network, password: str) -> None:
        relay = shlex.join(
            ["nsenter", f"--net=/run/netns/{network.netns}", _python(), "-I", str(self.state / "relay.py")]
        )
        common = [
            *("-o", f"ProxyCommand={relay} %h %p"),
            *("-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "GlobalKnownHostsFile=/dev/null"),
        ]
        hosts = {
            host.name: {"ansible_host": host.address, "cluster_address": host.address}
            for host in self._hosts(options, network)
        }
        head, *workers = options.host_names()
        way_in = {
            "ansible_user": "ops",
            "ansible_password": password,
            "ansible_become_password": password,
            "ansible_ssh_common_args": shlex.join(common),
        }
        children = {
            "head": {"hosts": {head: hosts[head]}},
            "workers": {"hosts": {name: hosts[name] for name in workers}},
        }
        of_its_own = {"cluster_name": self.name, "cluster_network": str(network.subnet), **way_in}
        inventory = {"all": {"vars": of_its_own, "children": {"cluster": {"children": children}}}}
        self.inventory.mkdir(parents=True, exist_ok=True)
        self.inventory.chmod(0o700)
        name = "hosts.yml"
        if options.like:
            # That inventory as it stands, and beside it the way in alone, as variables of every host, for a group's
            # would give way. Ansible reads the files in their names' order.
            way_in["ansible_control_path_dir"] = str(self.state / "connections")
            inventory, name = {"all": {"hosts": dict.fromkeys(hosts, way_in)}}, "zz-way-in.yml"
            source = Path(options.like)
            beside = [source, *(source.with_name(f"{kind}_vars") for kind in ("group", "host"))]
            for file in sorted(source.iterdir()) if source.is_dir() else filter(Path.exists, beside):
                (self.inventory / file.name).symlink_to(file)
        text = f"# Written by the lab {self.name!r}; it goes when the lab goes.\n{json.dumps(inventory, indent=2)}\n"
        _write_secret(self.inventory / name, text)
        if options.like:
            way_in_holds(self.inventory, way_in, options.names)

    def down(self) -> None:
        """Take it down, whole or not; nothing stays, and nothing is said where there was nothing."""
        with self._locked():
            self._remove()
        self._remove_empty()

    def _remove(self) -> None:
        network = Network(self.name, 0)  # its names do not depend on the number
        Group(self.name).kill()
        for pid in network.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not network.pids(), 5)
        Group(self.name).remove()
        network.remove()
        shutil.rmtree(self.disk, ignore_errors=True)
        if self.inventory.is_dir():
            shutil.rmtree(self.inventory)
        with locked(STATE / ".lock"):
            shutil.rmtree(self.state, ignore_errors=True)
            _restore_machine()

    def _remove_empty(self) -> None:
        for directory in (DISK, *self.inventory.parents[:3]):
            if directory not in (CHECKOUT / "inventory", CHECKOUT):
                with contextlib.suppress(OSError):  # another lab is there
                    directory.rmdir()

    # --- bookkeeping between labs -------------------------------------------------------------------------------------

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return locked(
            STATE / f".lock-{self.name}", waiting=f"Waiting for another command on lab {self.name!r} …"
        )

    def _save(self, record: dict) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        self.state.chmod(0o700)
        _write_secret(self.state / "state.json", json.dumps(record, indent=2))

    def _claim_index(self, record: dict) -> None:
        """The smallest number that no other lab has; the subnet is named for it."""
        with locked(STATE / ".lock"):
            taken = {json.loads(file.read_text())["index"] for file in STATE.glob("*/state.json")}
            record["index"] = min(set(range(len(taken) + 1)) - taken)
            self._save(record)

    # --- using it ----------------------------------------------------------------------------------------------------

    def exec(self, name: str, *argv: str, check: bool = True) -> str:
        """Run ARGV as root inside a host and return its standard output."""
        return run(*self.host(name).enter(*argv), check=check)

    def stranger(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run ARGV on this machine's files, but with the network of a client on the switch that is nobody's peer."""
        return subprocess.run(self.stranger_command(*argv), capture_output=True, text=True)

    def stranger_command(self, *argv: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.network.stranger_netns}", *argv]

    def power(self, name: str, on: bool) -> None:
        """Off is a power cut: no farewell, no clean shutdown. On waits until the host answers."""
        with self._locked():
            host, record = self.host(name), self.record()
            if not on:
                host.power_off()
            elif not host.running():
                host.network.wire(host.number, up=True)
                host.start(
                    Path(record["base"]),
                    self._hostname(self.options, host),
                    [Path(p) for p in record["binds"]],
                )
                self._wait_for([host])

    def cut(self, name: str) -> None:
        """Pull the host's wire out; it goes on running."""
        host = self.host(name)
        host.network.wire(host.number, up=False)

    def join(self, name: str) -> None:
        """Plug the host's wire in again."""
        host = self.host(name)
        host.network.wire(host.number, up=True)

    def freeze(self, name: str, frozen: bool = True) -> None:
        """Stop all of a host's processes; its kernel still holds the connections and answers nothing but ACKs."""
        self.host(name).group.freeze(frozen)

    def set_rate(self, name: str, rate: str | None) -> None:
        """Change the rate of a host's wire, both directions; None lifts it."""
        host = self.host(name)
        host.network.set_rate(host.number, rate)

    def set_cpus(self, name: str, cpus: float | None) -> None:
        """Change a host's share of CPU; None lifts the limit."""
        self.host(name).group.set_cpus(cpus)

    def set_memory(self, name: str, more: int | None) -> None:
        """Leave a host so many more bytes than it has in use now; None lifts the limit."""
        self.host(name).group.set_memory(more)


def all_labs() -> list[Lab]:
    """Every lab that has left a state on this machine."""
    return [Lab(file.parent.name) for file in sorted(STATE.glob("*/state.json"))]


def require_root(command: str) -> None:
    """Raises LabError with what to type."""
    if os.geteuid() != 0:
        raise LabError(
            f"the lab makes network namespaces and boots hosts, which needs root. Type: sudo {command}"
        )


def _missing_packages(vms: bool) -> dict[str, str]:
    tools = {**TOOLS, **(vm.TOOLS if vms else {})}
    return {tool: package for tool, package in tools.items() if not shutil.which(tool)}


def obstacles(vms: bool = False) -> list[str]:
    """Why this machine cannot have a lab (of virtual machines) as it is, each with its cure; empty where it can."""
    if os.geteuid() != 0:
        return ["the lab makes network namespaces and boots hosts, which needs root"]
    missing = _missing_packages(vms)
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        return [f"this machine lacks {', '.join(missing)}. Type: sudo apt-get install {packages}"]
    found = []
    if subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode != 0:
        found.append(
            "this root may not make namespaces (a container without CAP_SYS_ADMIN?): use a virtual machine"
        )
    if "\toverlay\n" not in Path("/proc/filesystems").read_text():
        found.append("this kernel has no overlayfs. Type: sudo modprobe overlay")
    if not any(line.split()[2] == "cgroup2" for line in Path("/proc/self/mounts").read_text().splitlines()):
        found.append("this machine mounts no cgroup v2 tree, neither alone nor beside v1")
    return found + (vm.obstacles() if vms else [])


def install_missing_tools(vms: bool = False) -> None:
    """Let apt install what the lab needs here, saying so first; one at a time, as two tests may begin labs at once."""
    if not _missing_packages(vms):
        return
    with locked(STATE / ".packages", waiting="Waiting for packages that another lab installs …"):
        if missing := _missing_packages(vms):
            packages = sorted(set(missing.values()))
            print(
                f"This machine lacks {', '.join(missing)}; installing {', '.join(packages)} with apt …",
                flush=True,
            )
            run("apt-get", "update")
            # The machine's own upgrades may hold dpkg's lock.
            install = ["apt-get", "-o", "DPkg::Lock::Timeout=600", "install", "--yes"]
            run("env", "DEBIAN_FRONTEND=noninteractive", *install, "--no-install-recommends", *packages)


def _python() -> str:
    """A Python for the relay whose path has nothing that a shell or SSH would stumble over."""
    return "/usr/bin/python3" if Path("/usr/bin/python3").exists() else os.path.realpath(sys.executable)


def _forwarding(interface: str) -> Path:
    return Path(f"/proc/sys/net/ipv4/conf/{interface}/forwarding")


def _set_on_machine(settings: dict[Path, str], at_least: bool = False) -> None:
    """Change the machine's own kernel settings, having noted the old values, so that the last lab can restore them.

    AT_LEAST leaves a number alone that is higher already.
    """
    with locked(STATE / ".lock"):
        note = STATE / ".machine.json"
        before = json.loads(note.read_text()) if note.exists() else {}
        for path, value in settings.items():
            now = path.read_text().strip()
            if not (at_least and int(now) >= int(value)):
                before.setdefault(str(path), now)
                _write_secret(note, json.dumps(before))
                path.write_text(value)


def _restore_machine() -> None:
    """Once no lab is left, the machine is set as it was before the first."""
    note = STATE / ".machine.json"
    if note.exists() and not list(STATE.glob("*/state.json")):
        for path, value in json.loads(note.read_text()).items():
            if Path(path).exists():
                Path(path).write_text(value)
        note.unlink()


def _write_secret(file: Path, text: str) -> None:
    """Whole or not at all, and readable by its owner alone."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".new-", delete=False) as new:
        new.write(text)  # NamedTemporaryFile makes it 0600
    os.replace(new.name, file)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A closed terminal and a polite kill end the block as Ctrl-C does, so that it can clean up."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    wanted = (signal.SIGTERM, signal.SIGHUP)
    try:
        before = {number: signal.signal(number, interrupt) for number in wanted}
    except ValueError:  # not in the main thread: there, signals are somebody else's
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["CHECKOUT", "Lab", "LabError", "Options", "all_labs", "exists", "require_root"]
