"""The lab's network: a namespace of its own with one switch, a wire from each host, and at most one way out.

    host's eth0 ══ p1 ─ b1 ─ d1 ══ u1 ─ br0 ── up0 ══ ty-NAME ── the machine's uplink
    (its own ns)        └── the lab's namespace ──────┘            (masqueraded twice)

Everything of a host's wire that a test may touch (cutting it, slowing it) lies outside the host, so it survives a
reboot and whatever the host does to its own network. The machine itself gets no route to the lab's subnet, and the
namespace none to private ranges.
"""

import ipaddress
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lab import machine
from lab.shell import LabError, run

PREFIX = "trainyard"
STRANGER = 200  # its last octet
FIRST_HOST = 11
BURST = 128 << 10  # bytes that a slow wire lets through at once after a pause


def exists(netns: str) -> bool:
    """Is there a namespace of that name?"""
    return Path(f"/run/netns/{netns}").exists()


class Network:
    """The namespace of lab NAME, number INDEX on this machine."""

    def __init__(self, name: str, index: int, subnet: str = "", addresses: Sequence[str] = ()):
        """SUBNET and the hosts' ADDRESSES in it, where they are not the lab's own choice."""
        self.netns = f"{PREFIX}-{name}"
        self.stranger_netns = f"{PREFIX}-{name}-stranger"
        self.uplink = f"ty-{name}"
        self.table = f"{PREFIX}_{name.replace('-', '_')}"
        self.subnet = ipaddress.ip_network(subnet or f"10.77.{index}.0/24")
        self.addresses = addresses
        self.gateway = str(self.subnet[1])
        transfer = ipaddress.ip_network(f"198.18.77.{index * 4}/30") if index < 64 else None
        if transfer is None:
            raise LabError("64 labs are up already: take one down (`python3 -m lab status` lists them)")
        self.machine_end, self.lab_end = str(transfer[1]), str(transfer[2])

    def address(self, number: int) -> str:
        """The address of host NUMBER (1, 2, …)."""
        return self.addresses[number - 1] if self.addresses else str(self.subnet[FIRST_HOST + number - 1])

    def with_prefix(self, address: str) -> str:
        """The address as ip(8) and networkd want it on an interface, such as 10.77.0.11/24."""
        return f"{address}/{self.subnet.prefixlen}"

    def enter(self, *argv: str | Path) -> list[str]:
        """The command line that runs ARGV in the lab's namespace."""
        return ["nsenter", f"--net=/run/netns/{self.netns}", *map(str, argv)]

    def ip(self, *argv: str) -> str:
        """Run ip(8) in the lab's namespace."""
        return run(*self.enter("ip", *argv))

    def create(self, hosts: int, second: bool = False) -> None:
        """The switch, one wire a host, and the stranger: a client on the switch that is nobody's peer.

        SECOND: another switch beside it, from which no way leads anywhere, for the hosts' second interfaces.
        """
        run("ip", "netns", "add", self.netns)
        run("ip", "netns", "add", self.stranger_netns)
        batch = [
            "link set lo up",
            "link add br0 type bridge",
            "link set br0 up",
            f"address add {self.with_prefix(self.gateway)} dev br0",
        ]
        for i in range(1, hosts + 1):
            batch += [
                f"link add u{i} type veth peer name d{i}",
                f"link add b{i} type bridge",
                f"link set u{i} master br0 up",
                f"link set d{i} master b{i} up",
                f"link set b{i} up",
            ]
        if second:
            batch += ["link add br1 type bridge", "link set br1 up"]
        batch += [
            f"link add s0 type veth peer name eth0 netns {self.stranger_netns}",
            "link set s0 master br0 up",
        ]
        run(*self.enter("ip", "-batch", "-"), stdin="\n".join(batch))
        stranger = self.with_prefix(str(self.subnet[STRANGER]))
        inside = ["link set lo up", f"address add {stranger} dev eth0", "link set eth0 up"]
        run(
            "nsenter", f"--net=/run/netns/{self.stranger_netns}", "ip", "-batch", "-", stdin="\n".join(inside)
        )
        # Nothing speaks IPv6 here: no way out by it either. And what a switch passes on is none of the router's
        # business: where bridges call iptables, a packet's address translation is settled before it is routed.
        self._sysctl("net/ipv6/conf/all/disable_ipv6", "1")
        self._sysctl("net/bridge/bridge-nf-call-iptables", "0")

    def connect(self, endpoints: list[tuple[str, int]]) -> None:
        """A way out, for public addresses and the private ENDPOINTS (address, port) alone.

        The machine's own uplink must forward, too.
        """
        run("ip", "link", "add", self.uplink, "type", "veth", "peer", "name", "up0", "netns", self.netns)
        Path(f"/proc/sys/net/ipv6/conf/{self.uplink}/disable_ipv6").write_text("1")
        run("ip", "address", "add", f"{self.machine_end}/30", "dev", self.uplink)
        run("ip", "link", "set", self.uplink, "up")
        batch = [
            f"address add {self.lab_end}/30 dev up0",
            "link set up0 up",
            f"route add default via {self.machine_end}",
        ]
        batch += [f"route add unreachable {network}" for network in machine.PRIVATE]
        batch += [
            f"route add {address}/32 via {self.machine_end}" for address in sorted({a for a, _ in endpoints})
        ]
        run(*self.enter("ip", "-batch", "-"), stdin="\n".join(batch))
        run(*self.enter("nft", "-f", "-"), stdin=self._namespace_rules(endpoints))
        self._sysctl("net/ipv4/ip_forward", "1")
        run("nft", "-f", "-", stdin=self._machine_rules(endpoints))
        Path(f"/proc/sys/net/ipv4/conf/{self.uplink}/forwarding").write_text("1")

    def _sysctl(self, path: str, value: str) -> None:
        """Set it in the namespace, if this kernel has it."""
        run(
            *self.enter(
                "sh", "-c", 'test ! -e "/proc/sys/$1" || echo "$2" > "/proc/sys/$1"', "-", path, value
            )
        )

    def _out_rules(self, endpoints: list[tuple[str, int]]) -> str:
        allowed = "".join(
            f"    ip daddr {address} meta l4proto {{ tcp, udp }} th dport {port} accept\n"
            for address, port in endpoints
        )
        return f"""  chain out {{
{allowed}    ip daddr {{ {", ".join(machine.PRIVATE)} }} reject with icmp host-prohibited
    ip daddr 224.0.0.0/4 drop
  }}
"""

    def _namespace_rules(self, endpoints: list[tuple[str, int]]) -> str:
        return f"""table ip lab {{
{self._out_rules(endpoints)}
  chain forward {{
    type filter hook forward priority 0; policy accept;
    iifname "up0" ct state != {{ established, related }} drop
    tcp flags syn tcp option maxseg size set rt mtu
    oifname "up0" jump out
  }}
  chain output {{ type filter hook output priority 0; policy accept; oifname "up0" jump out; }}
  chain postrouting {{ type nat hook postrouting priority 100; oifname "up0" masquerade; }}
}}
"""

    def _machine_rules(self, endpoints: list[tuple[str, int]]) -> str:
        return f"""table ip {self.table} {{
{self._out_rules(endpoints)}
  chain forward {{
    type filter hook forward priority 0; policy accept;
    oifname "{self.uplink}" ct state != {{ established, related }} drop
    tcp flags syn iifname "{self.uplink}" tcp option maxseg size set rt mtu
    iifname "{self.uplink}" jump out
  }}
  chain input {{
    type filter hook input priority 0; policy accept;
    iifname "{self.uplink}" ct state != {{ established, related }} drop
  }}
  chain postrouting {{ type nat hook postrouting priority 100; ip saddr {self.lab_end} masquerade; }}
}}
"""

    # --- while it runs -----------------------------------------------------------------------------------------------

    def wire(self, number: int, up: bool) -> None:
        """Plug a host's wire in, or pull it out."""
        self.ip("link", "set", f"u{number}", "up" if up else "down")

    def set_rate(self, number: int, rate: str | None) -> None:
        """At most RATE (tc's words: 20mbit) in each direction of a host's wire; None lifts the limit.

        With as much room for what waits as a small switch has: in much more, a sender's acknowledgements stand behind
        its data (hosts have fair queues, which not every kernel brings along); in less, a few of TCP's largest
        segments that come from several peers at once are lost and sent again. BURST is two of them.
        """
        for end in (f"u{number}", f"d{number}"):
            if rate is None:
                subprocess.run(self.enter("tc", "qdisc", "del", "dev", end, "root"), capture_output=True)
            else:
                shaping = ("tbf", "rate", rate, "burst", f"{BURST}b", "limit", "512kb")
                run(*self.enter("tc", "qdisc", "replace", "dev", end, "root", *shaping))

    # --- the end -----------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Take all of it away, also what a broken start left; says nothing where there is nothing."""
        subprocess.run(["nft", "delete", "table", "ip", self.table], capture_output=True)
        subprocess.run(["ip", "link", "delete", self.uplink], capture_output=True)
        for netns in (self.stranger_netns, self.netns):
            if exists(netns):
                run("ip", "netns", "delete", netns)

    def pids(self) -> list[int]:
        """Processes that use the lab's namespaces from outside its hosts: SSH's relays, a test's client."""
        wanted = {
            Path(f"/run/netns/{netns}").stat().st_ino
            for netns in (self.netns, self.stranger_netns)
            if exists(netns)
        }
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "ns/net").stat().st_ino in wanted:
                    found.append(int(process.name))
            except OSError:
                continue  # it has just ended
        return found
