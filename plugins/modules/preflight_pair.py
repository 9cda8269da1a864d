#!/usr/bin/python
"""What one host of a cluster measures of the way to its peers, while they measure theirs. Changes nothing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_pair
short_description: Measure the network between this host and its peers
description:
  - "Runs on all hosts at once. Each listens on its cluster address, and finds of its peers: whether their ports are
    open to it, loss, latency, whether packets of the interface's size arrive whole, the clock's offset, and bandwidth."
  - Needs no program, leaves no process and no file; whoever is not a peer gets one word and nothing else.
  - In round C(r) each host sends to the one that stands C(r) places after it, so that a link carries one stream a way.
options:
  host: {type: str, required: true, description: This host's name.}
  hosts:
    type: list
    elements: dict
    required: true
    description: "Who takes part: name, address, port (free), rdma (a device, or none)."
  port: {type: int, required: true, description: The port on which the ranks will meet.}
  rounds: {type: list, elements: int, required: true, description: "How many places after this host the peers stand."}
  mtu: {type: int, required: true, description: Bytes of a packet that the interface sends.}
  streams: {type: int, default: 1, description: Connections that measure bandwidth together.}
  packets: {type: int, default: 200, description: Echo requests to each peer.}
  seconds: {type: float, default: 1.0, description: How long bandwidth is measured in each round.}
  passes: {type: int, default: 1, description: "How often all rounds are gone through, and with RDMA again."}
  patience: {type: float, default: 15.0, description: Seconds to wait for a peer that has not begun yet.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Measure the ways
  preflight_pair:
    host: node1
    hosts: [{name: node1, address: 10.77.0.11, port: 40001}, {name: node2, address: 10.77.0.12, port: 40002}]
    port: 29500
    rounds: [1]
    mtu: 1500
  become: true
"""

RETURN = r"""
pairs:
  description: >-
    By peer: C(ports) ({port: open, other (somebody else listens), refused, dropped or why}), C(sent), C(lost),
    C(rtt_ms) (median), C(mtu_arrives), C(mtu_most) (where it does not, a size that does), C(mbit) (the least of all
    passes), C(offset) (s, the peer's clock less this one's), C(offset_error),
    C(rdma_gbit) (likewise, where all have a device), C(note), C(rdma_note), C(no_stream) where the port is open and
    nothing came through it.
  type: dict
  returned: always
heard: {description: The peers from which this host's measured port was reached., type: list, returned: always}
time: {description: This host's clock at the end., type: float, returned: always}
"""

import contextlib
import errno
import os
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.echo import ECHO_INTERVAL, ECHO_SECONDS, echoes, median
from ansible.module_utils.perftest import RDMA_SECONDS, rdma_command, rdma_gbit, unprivileged

GREETING = b"trainyard preflight\n"
CONNECT_SECONDS = 2.0  # after which a packet without an answer counts as dropped: two repeats of a SYN
AT_ONCE = 4  # peers whose answers are timed together; more would wait for each other
CHUNK = bytes(1 << 20)
CLOCK_TURNS = 12
RDMA_START = 1.0  # seconds that perftest takes to listen
NO_PERFTEST = "perftest is not installed on both ends: apt-get install perftest"
QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
WARM_UP = 0.2  # seconds of a stream that do not count
IPV4_MOST = 65535  # bytes of a packet
# MTUs that there are: jumbo frames, Ethernet, PPPoE, VXLAN over Ethernet, WireGuard, tunnels in tunnels, IPv6's least.
SIZES = (8900, 4000, 1500, 1492, 1450, 1420, 1400, 1380, 1350, 1280)


def read_line(connection: socket.socket) -> bytes:
    """Up to a line's end; b"" where the other side closed before. Reads nothing beyond it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 200:
        byte = connection.recv(1)
        if not byte:
            return b""
        line += byte
    return line


class Exchange:
    """One host's part. Threads of it end with the process; nothing waits longer than its time."""

    def __init__(self, options: dict):
        self.options = options
        self.name = options["host"]
        self.order = [host["name"] for host in options["hosts"]]
        self.places = {host["name"]: (host["address"], int(host["port"])) for host in options["hosts"]}
        self.own = self.places[self.name][0]
        self.devices = {host["name"]: host.get("rdma") for host in options["hosts"]}
        self.streams = options["streams"]
        self.turn = 0  # the round that is under way, counted over all passes
        self.turned = threading.Condition()
        self.missing: dict[int, int] = {}  # round -> streams that have not come to their end
        self.heard: set[str] = set()
        self.found: dict[str, dict] = {}
        self.absent: set[str] = set()  # peers that cannot be sent to
        self.silent: set[str] = set()  # peers that do not send

    def run(self) -> dict[str, dict]:
        """All of it: {peer: what was found}. Raises OSError where this host cannot listen."""
        begin = time.monotonic()
        listeners = []
        with contextlib.suppress(OSError):  # somebody has the ranks' port: that is another check's
            listeners.append(self.listen(self.options["port"], self.greet))
        # The measured port is the last, so that whoever finds it open finds all of them ready.
        listeners.append(self.listen(self.places[self.name][1], self.serve))
        place = self.order.index(self.name)
        offsets = [offset for offset in self.options["rounds"] if 0 < offset < len(self.order)]
        peers = [self.order[(place + offset) % len(self.order)] for offset in offsets]
        self.found = {peer: {"ports": {}} for peer in peers}
        patience = begin + self.options["patience"]
        # What a peer needs at most from its first sign to its first stream.
        groups = -(-len(peers) // AT_ONCE)
        self.slack = 2 + groups * (
            2 * CONNECT_SECONDS + 3 * ECHO_SECONDS + self.options["packets"] * ECHO_INTERVAL
        )
        for start in range(0, len(peers), AT_ONCE):
            in_parallel(
                [lambda peer=peer: self.look(peer, patience) for peer in peers[start : start + AT_ONCE]]
            )
        rdma_passes = self.options["passes"] if self.devices and all(self.devices.values()) else 0
        for index in range((self.options["passes"] + rdma_passes) * len(offsets)):
            offset = offsets[index % len(offsets)]
            after = self.order[(place + offset) % len(self.order)]
            before = self.order[(place - offset) % len(self.order)]
            rdma = index >= self.options["passes"] * len(offsets)
            self.round(index + 1, after, before, patience, rdma)
        for listener in listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept, and so holds it open
            listener.close()
        return self.found

    # ---- the listening side ----

    def listen(self, port: int, answer) -> socket.socket:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((self.own, port))
            server.listen(64)
        except OSError:
            server.close()
            raise

        def accept():
            while True:
                try:
                    connection, (address, _) = server.accept()
                except OSError:
                    return  # closed: it is over
                peers = {name for name, place in self.places.items() if place[0] == address}
                self.heard |= peers
                # A stranger is greeted, and no more.
                threading.Thread(
                    target=self.answered, args=(answer if peers else self.greet, connection), daemon=True
                ).start()

        threading.Thread(target=accept, daemon=True).start()
        return server

    def answered(self, answer, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(CONNECT_SECONDS)
            try:
                connection.sendall(GREETING)
                answer(connection)
            except (OSError, ValueError):
                return

    def greet(self, connection: socket.socket) -> None:
        """The greeting was all."""

    def serve(self, connection: socket.socket) -> None:
        """Take one stream of a peer whose turn it is, after telling it the time; then say how much came, how fast."""
        words = read_line(connection).decode("ascii", "replace").split()
        if len(words) == 2 and words[0] == "rdma":
            self.serve_rdma(connection, int(words[1]))
        if len(words) != 3 or words[0] != "hello":
            return
        turn, streams = int(words[1]), int(words[2])
        if not self.wait_for_turn(turn):
            return
        connection.settimeout(self.options["seconds"] + 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"go\n")
        for _ in range(CLOCK_TURNS):
            if not connection.recv(1):
                return
            connection.sendall(struct.pack("!d", time.time()))
        buffer = bytearray(1 << 20)
        first = last = None
        total = 0
        while count := connection.recv_into(buffer):
            last = time.monotonic()
            if first is None:
                first = last
            if last >= first + WARM_UP:
                total += count
        measured = (last or 0) - (first or 0) - WARM_UP
        connection.sendall(struct.pack("!dd", total, max(measured, 0.0)))
        self.one_less(turn, streams)

    def serve_rdma(self, connection: socket.socket, turn: int) -> None:
        """Have perftest listen for one measurement of a peer whose turn it is."""
        if not self.wait_for_turn(turn):
            return
        with socket.socket() as probe:
            probe.bind((self.own, 0))
            port = probe.getsockname()[1]
        try:
            process = subprocess.Popen(rdma_command(self.devices[self.name], port), **QUIET, **unprivileged())
        except OSError:
            connection.sendall(b"0\n")
            self.one_less(turn, 1)
            return
        try:
            time.sleep(RDMA_START)
            connection.sendall(f"{port}\n".encode())
            connection.settimeout(RDMA_SECONDS + 20)
            connection.recv(1)  # until the peer is done
        finally:
            process.kill()
            process.wait()
            self.one_less(turn, 1)

    def wait_for_turn(self, turn: int) -> bool:
        with self.turned:
            return self.turned.wait_for(lambda: self.turn >= turn, self.options["patience"])

    def one_less(self, turn: int, streams: int) -> None:
        """One of the streams of a turn came to its end."""
        with self.turned:
            self.missing[turn] = self.missing.get(turn, streams) - 1
            self.turned.notify_all()

    # ---- the asking side ----

    def most(self, address: str, identity: int) -> int | None:
        """The largest of the usual sizes of packets that arrives there; all are tried at once."""
        sizes = [one for one in SIZES if one < self.options["mtu"]]

        def arrives(number: int) -> bool:
            return bool(echoes(address, self.own, 2, sizes[number], identity ^ number)[1])

        with ThreadPoolExecutor(len(SIZES)) as pool:
            found = pool.map(arrives, range(len(sizes)))
            return next((size for size, here in zip(sizes, found, strict=True) if here), None)

    def look(self, peer: str, patience: float) -> None:
        """Ports, loss, latency and packet size of the way to a peer."""
        address, own_port = self.places[peer]
        found = self.found[peer]
        for port in (own_port, self.options["port"]):
            found["ports"][str(port)] = knock(address, port, self.own, patience if port == own_port else 0)
        try:
            identity = (os.getpid() * 31 + self.order.index(peer)) & 0xFFFF
            count, times = echoes(address, self.own, self.options["packets"], 84, identity)
            found["sent"], found["lost"] = count, count - len(times)
            found["rtt_ms"] = round(median(times) * 1000, 3) if times else None
            _, times = echoes(address, self.own, 5, min(self.options["mtu"], IPV4_MOST), identity ^ 0x8000)
            found["mtu_arrives"] = bool(times)
            if not times and found["lost"] < count:
                found["mtu_most"] = self.most(address, identity ^ 0x4000)
        except OSError as error:
            found["note"] = f"echo requests: {error.strerror or error}"
        if found["ports"][str(own_port)] != "open":
            self.absent.add(peer)

    def round(self, turn: int, after: str, before: str, patience: float, rdma: bool) -> None:
        """Send to one peer while another sends here."""
        with self.turned:
            self.turn = turn
            self.turned.notify_all()
        if after not in self.absent and rdma:
            self.send_rdma(after, turn)
        elif after not in self.absent:
            sent = in_parallel([lambda: self.send(after, turn, patience)] * self.streams)
            rates = [one["mbit"] for one in sent if one]
            if len(rates) == self.streams:
                found, best = self.found[after], min(sent, key=lambda one: one["offset_error"])
                found["mbit"] = min(sum(rates), found.get("mbit", float("inf")))
                found["offset"], found["offset_error"] = best["offset"], best["offset_error"]
            else:
                self.absent.add(after)
                self.found[after]["no_stream"] = True  # though its port is open
        if before in self.absent and before not in self.heard:
            self.silent.add(before)
        if before not in self.silent:
            # One that has been heard of may still be at its echo requests; of any other nobody knows.
            begun = time.monotonic() if before in self.heard else max(time.monotonic(), patience)
            seconds = (
                begun
                + (RDMA_SECONDS + 10 if rdma else self.options["seconds"])
                + self.slack
                - time.monotonic()
            )
            with self.turned:
                if not self.turned.wait_for(lambda: self.missing.get(turn) == 0, seconds):
                    self.silent.add(before)

    def send(self, peer: str, turn: int, patience: float) -> dict | None:
        """{mbit, offset, offset_error} of one stream to a peer; None where it came to nothing."""
        try:
            with connect(self.places[peer], self.own) as connection:
                connection.settimeout(max(patience - time.monotonic(), 0) + self.options["seconds"] + 5)
                if read_line(connection) != GREETING:
                    return None
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(f"hello {turn} {self.streams}\n".encode())
                if read_line(connection) != b"go\n":
                    return None
                offset, error = clock_offset(connection)
                connection.settimeout(self.options["seconds"] + 10)
                end = time.monotonic() + self.options["seconds"] + WARM_UP
                while time.monotonic() < end:
                    connection.send(CHUNK)
                connection.shutdown(socket.SHUT_WR)
                answer = b""
                while len(answer) < 16 and (more := connection.recv(16 - len(answer))):
                    answer += more
                total, seconds = struct.unpack("!dd", answer)
        except (OSError, struct.error):
            return None
        rate = total * 8 / seconds / 1e6 if seconds > 0 else 0.0
        return {"mbit": round(rate, 1), "offset": offset, "offset_error": error}

    def send_rdma(self, peer: str, turn: int) -> None:
        """What RDMA carries to a peer, Gbit/s, by perftest on both ends."""
        found = self.found[peer]
        try:
            with connect(self.places[peer], self.own) as connection:
                connection.settimeout(self.options["patience"] + 10)
                read_line(connection)
                connection.sendall(f"rdma {turn}\n".encode())
                port = int(read_line(connection) or 0)
                command = rdma_command(self.devices[self.name], port, self.places[peer][0])
                options = {"timeout": RDMA_SECONDS + 15, "check": False, **unprivileged()}
                done = port and subprocess.run(command, capture_output=True, text=True, **options)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            found["rdma_note"] = (
                NO_PERFTEST if isinstance(error, FileNotFoundError) else f"ib_write_bw: {error}"
            )
            return
        rate = rdma_gbit(done.stdout) if done else None
        if rate is not None:
            found["rdma_gbit"] = min(rate, found.get("rdma_gbit", rate))
        elif done:
            found["rdma_note"] = f"ib_write_bw: {(done.stderr or done.stdout).strip()[-200:]}"
        else:
            found["rdma_note"] = NO_PERFTEST


def clock_offset(connection: socket.socket) -> tuple[float, float]:
    """(the other clock less this one, half the round trip it was taken from), s, of the quickest of some questions."""
    best = (0.0, float("inf"))
    for _ in range(CLOCK_TURNS):
        before, start = time.time(), time.monotonic()
        connection.sendall(b"?")
        answer = b""
        while len(answer) < 8 and (more := connection.recv(8 - len(answer))):
            answer += more
        half = (time.monotonic() - start) / 2
        best = min(best, (struct.unpack("!d", answer)[0] - before - half, half), key=lambda pair: pair[1])
    return best


def connect(place: tuple[str, int], own: str) -> socket.socket:
    return socket.create_connection(place, timeout=CONNECT_SECONDS, source_address=(own, 0))


def knock(address: str, port: int, own: str, patience: float) -> str:
    """How a port answers: open (the preflight of that host), other, refused, dropped, or why not.

    Until `patience` (monotonic s) a refusal is taken for a peer that has not begun.
    """
    while True:
        try:
            with connect((address, port), own) as connection:
                try:
                    return "open" if read_line(connection) == GREETING else "other"
                except OSError:
                    return "other"
        except ConnectionRefusedError:
            answer = "refused"
        except TimeoutError:
            return "dropped"
        except OSError as error:
            answer = error.strerror or str(error)
        if time.monotonic() >= patience:
            return answer
        time.sleep(0.1)


def in_parallel(tasks: list) -> list:
    """The results of the functions `tasks`, run at once, None for one that raised."""
    results: list = [None] * len(tasks)

    def fill(index: int) -> None:
        results[index] = tasks[index]()

    threads = [threading.Thread(target=fill, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "hosts": {"type": "list", "elements": "dict", "required": True},
            "port": {"type": "int", "required": True},
            "rounds": {"type": "list", "elements": "int", "required": True},
            "mtu": {"type": "int", "required": True},
            "streams": {"type": "int", "default": 1},
            "packets": {"type": "int", "default": 200},
            "seconds": {"type": "float", "default": 1.0},
            "passes": {"type": "int", "default": 1},
            "patience": {"type": "float", "default": 15.0},
        },
        supports_check_mode=True,
    )
    exchange = Exchange(module.params)
    try:
        found = exchange.run()
    except OSError as error:
        cure = (
            "Is it this host's cluster address? Correct cluster_address, or run site.yml to set the address."
        )
        if error.errno == errno.EADDRINUSE:
            cure = "A program took the port meanwhile: run preflight.yml again."
        module.fail_json(msg=f"{exchange.own}: cannot listen there: {error.strerror or error}. {cure}")
    module.exit_json(changed=False, pairs=found, heard=sorted(exchange.heard), time=time.time())


if __name__ == "__main__":
    main()
