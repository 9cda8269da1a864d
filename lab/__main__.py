"""python3 -m lab: build a lab and use it. `python3 -m lab COMMAND --help` says more."""

import argparse
import contextlib
import os
import subprocess
import sys

from lab.lab import Lab, LabError, Options, all_labs, require_root
from lab.like import like


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="python3 -m lab", description="Real systemd hosts on this machine.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=what, description=what)
        sub.add_argument("--name", default="lab", help="which lab (default: lab)")
        return sub

    up = command("up", "build a lab and write its inventory")
    up.add_argument("--hosts", type=int, default=3, metavar="N", help="1 to 32 (default: 3)")
    up.add_argument(
        "--suite",
        default="",
        help="release of the hosts, such as trixie or noble (default: TRAINYARD_LAB_SUITE, or this machine's)",
    )
    up.add_argument(
        "--quota", action="append", default=[], metavar="NODE=CPUS", help="share of CPU: node1=0.8"
    )
    up.add_argument(
        "--rate", action="append", default=[], metavar="NODE=RATE", help="link rate each way: node2=20mbit"
    )
    up.add_argument("--offline", action="store_true", help="no internet, no package folders")
    up.add_argument(
        "--hostnames",
        default="",
        metavar="A,B,C",
        help="first names of the hosts (default: debian or ubuntu)",
    )
    up.add_argument(
        "--interfaces",
        action="append",
        default=[],
        metavar="[NODE=]IFACE",
        help="interface name (default: eth0)",
    )
    up.add_argument("--vms", action="store_true", help="virtual machines, with kernels of their own")
    up.add_argument("--memory", type=int, default=1024, metavar="MIB", help="of each of them (default: 1024)")
    up.add_argument(
        "--second", default="", metavar="IFACE", help="a second interface, on a switch of its own"
    )
    up.add_argument(
        "--like", default="", metavar="INVENTORY", help="the names, addresses and interfaces of its hosts"
    )
    up.add_argument(
        "--network", default="", metavar="NET", help="with --like: their network (default: cluster_network)"
    )
    up.add_argument("--unpinned", action="store_true", help="leave known_hosts empty: first contact is real")
    up.add_argument("--replace", action="store_true", help="take a running lab of this name down first")
    up.add_argument("--install", action="store_true", help="let apt install what this machine lacks")

    command("down", "take a lab down; nothing of it stays").add_argument(
        "--all", action="store_true", help="every lab"
    )
    command("status", "list the labs and their hosts")
    command("shell", "a root shell inside a host").add_argument("node")
    inside = command("exec", "run a command as root inside a host")
    inside.add_argument("node")
    inside.add_argument("argv", nargs="+", metavar="-- CMD")
    stranger = command("stranger", "run a command as a client on the lab's network that is nobody's peer")
    stranger.add_argument("argv", nargs="+", metavar="-- CMD")
    power = command("power", "cut a host's power, or switch it on")
    power.add_argument("node")
    power.add_argument("to", choices=("on", "off"))
    for name, what in (
        ("cut", "pull a host's wire out"),
        ("join", "plug it in again"),
        ("freeze", "stop all processes of a host"),
        ("thaw", "let them go on"),
        ("log", "what a host said on its console"),
    ):
        command(name, what).add_argument("node")
    rate = command("rate", "change the rate of a host's wire")
    rate.add_argument("node")
    rate.add_argument("to", metavar="RATE|off")
    quota = command("quota", "change a host's share of CPU")
    quota.add_argument("node")
    quota.add_argument("to", metavar="CPUS|off")
    return top


def pairs(words: list[str], option: str) -> dict[str, str]:
    """NODE=VALUE words, also separated by commas, as a mapping."""
    found = {}
    for word in (part for given in words for part in given.split(",")):
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise LabError(f"--{option} {word}: expected NODE=VALUE")
        found[name] = value
    return found


def number(text: str, option: str) -> float:
    """A number of CPUs."""
    try:
        return float(text)
    except ValueError:
        raise LabError(f"{option} {text}: expected a number of CPUs, such as 0.8") from None


def options(given: argparse.Namespace) -> Options:
    """The options of `up`."""
    if given.network and not given.like:
        raise LabError(f"--network {given.network}: only with --like; a lab's own network is 10.77.N.0/24")
    likeness = like(given.like, given.network) if given.like else {}
    hosts = likeness.get("names") or [f"node{i}" for i in range(1, given.hosts + 1)]
    interfaces = dict.fromkeys(hosts, given.interfaces.pop()) if _one_for_all(given.interfaces) else {}
    chosen = dict(
        name=given.name,
        hosts=given.hosts,
        suite=given.suite,
        quota={name: number(cpus, "--quota") for name, cpus in pairs(given.quota, "quota").items()},
        rate=pairs(given.rate, "rate"),
        offline=given.offline,
        hostnames=[name for name in given.hostnames.split(",") if name],
        interfaces=interfaces | pairs(given.interfaces, "interfaces"),
        unpinned=given.unpinned,
        vms=given.vms,
        memory=given.memory,
        second=given.second,
    )
    # What the inventory says of its hosts holds; an interface that is named besides it comes on top.
    likeness["interfaces"] = {**likeness.get("interfaces", {}), **chosen["interfaces"]}
    return Options(**{**chosen, **{name: value for name, value in likeness.items() if value}})


def _one_for_all(words: list[str]) -> bool:
    return bool(words) and "=" not in words[-1]


def status() -> None:
    """One line a host."""
    labs = all_labs()
    if not labs:
        print("No lab is up.")
    for lab in labs:
        try:
            hosts, network = lab.hosts, lab.network
        except LabError as error:
            print(error)
            continue
        print(f"{lab.name}: {network.subnet}, inventory {lab.inventory}")
        for host in hosts.values():
            print(f"  {host.name:8} {host.address:12} {host.interface:8} {'on' if host.running() else 'off'}")


def main() -> int:
    """Exit status: 0 done, 1 failed, 2 not possible as asked, 130 interrupted; or a command's own."""
    given = parser().parse_args()
    try:
        require_root(f"{os.environ.get('LAB_TYPED') or 'python3 -m lab ' + given.command}")
        return act(given)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lab: interrupted; nothing of it stays", file=sys.stderr)
        return 130


def act(given: argparse.Namespace) -> int:
    """Do what the command line says; the exit status."""
    lab = Lab(given.name)
    match given.command:
        case "up":
            lab.up(options(given), replace=given.replace, install=given.install)
        case "down":
            for each in all_labs() if given.all else [lab]:
                if each.state.exists():
                    print(f"Taking lab {each.name!r} down", flush=True)
                each.down()
        case "status":
            with contextlib.suppress(BrokenPipeError):  # who reads it has read enough
                status()
                sys.stdout.flush()
        case "shell":
            return subprocess.call(lab.host(given.node).shell())
        case "exec":
            return subprocess.call(lab.host(given.node).enter(*given.argv))
        case "stranger":
            return subprocess.call(lab.stranger_command(*given.argv))
        case "power":
            lab.power(given.node, on=given.to == "on")
        case "cut":
            lab.cut(given.node)
        case "join":
            lab.join(given.node)
        case "freeze" | "thaw":
            lab.freeze(given.node, frozen=given.command == "freeze")
        case "log":
            print((lab.host(given.node).state / "log").read_text(errors="replace"), end="")
        case "rate":
            lab.set_rate(given.node, None if given.to == "off" else given.to)
        case "quota":
            lab.set_cpus(given.node, None if given.to == "off" else number(given.to, "quota"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
