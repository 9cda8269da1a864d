"""What the hosts of a run share: a few small JSON values, each changed only by who knows its newest revision.

A host's own record is tied to a lease: it is gone LEASE seconds after the host last renewed it; `renewed` is when that
was asked for (time.monotonic), so that the host knows when the others may count it out. Three stores do this: etcd
(TRAINYARD_STORE=http://10.0.0.1:2389,http://…), a directory for nodes that share a machine (a path), and this process's
memory for a run of one host. There is no consensus of our own.
"""

import base64
import contextlib
import fcntl
import http.client
import json
import os
import time
import urllib.parse
import zlib
from dataclasses import dataclass
from pathlib import Path

from trainer import disk
from trainer.errors import BadInput

# Seconds that a host's record outlives its last sign of life. etcd gives all leases that long, and 3 s more, whenever
# another member begins to lead it (the role etcd's --election-timeout).
LEASE = 10.0
KEPT = 400 * 86400  # seconds that a run's plan and its end are remembered, however long its attempts
# Seconds since it was renewed, after which the host must end its part: others may soon begin. An election, at most 6 s,
# is outlived.
OUT_OF_TOUCH = LEASE - 2
ANSWER = 3.0  # seconds for an answer of etcd, whichever of its members gives it
PATIENCE = 1.5  # of these, for each thing that is asked of one member
HASTE = 0.5  # seconds for an answer at least, when the time until OUT_OF_TOUCH is shorter


class Unreachable(OSError):
    """The store does not answer, or has no majority."""


@dataclass(frozen=True)
class Entry:
    """A value, and the revision that who changes it must name."""

    value: dict
    revision: int


def connect(place: str, run: str, own_address: str = ""):
    """The store at `place` (TRAINYARD_STORE), for one start of a run; "" is this process's memory."""
    if not place:
        return Memory()
    if place.startswith("/"):
        return Directory(Path(place), run)
    return Etcd(place, run, own_address)


class Memory:
    """The store of a run that has one host: nobody shares it."""

    def __init__(self):
        self._entries: dict[str, Entry] = {}
        self.renewed = 0.0

    def read(self) -> dict[str, Entry]:
        """All values, by key."""
        return dict(self._entries)

    def put_if(self, key: str, value: dict, revision: int) -> bool:
        """Set `key`, unless its revision is another (0: it is not there) by now; whether it was set."""
        known = self._entries.get(key)
        if (known.revision if known else 0) != revision:
            return False
        self._entries[key] = Entry(value, revision + 1)
        return True

    def live(self, key: str, value: dict) -> None:
        """Set this host's own record and renew its lease; call it more often than each LEASE seconds."""
        known = self._entries.get(key)
        self._entries[key] = Entry(value, known.revision + 1 if known else 1)
        self.renewed = time.monotonic()

    def leave(self, key: str) -> None:
        """Take this host's own record away."""
        self._entries.pop(key, None)


class Directory:
    """A file that the nodes of one machine share (inventory/local, tests); leases by the machine's own clock."""

    def __init__(self, folder: Path, run: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{run}.json"
        self.lock = folder / f"{run}.lock"
        self.renewed = 0.0

    @contextlib.contextmanager
    def _opened(self, write: bool = True):
        """The file's content, locked; written back when the block ends."""
        with _asked(self.file), self.lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            try:
                content = json.loads(self.file.read_text())
            except (OSError, ValueError):
                content = {"boot": boot, "entries": {}}
            now = time.monotonic()
            entries = {
                key: one
                for key, one in content["entries"].items()
                if one["until"] is None or (content["boot"] == boot and one["until"] > now)
            }
            yield entries
            if write:
                text, temporary = (
                    json.dumps({"boot": boot, "entries": entries}),
                    self.file.with_suffix(".new"),
                )
                try:
                    temporary.write_text(text)
                    os.replace(temporary, self.file)
                except OSError as error:
                    # Whoever reads holds the lock, too.
                    if not disk.is_full(error) or not disk.overwrite(self.file, text):
                        raise

    def read(self) -> dict[str, Entry]:
        """As `Memory.read`."""
        with self._opened(write=False) as entries:
            return {key: Entry(one["value"], one["revision"]) for key, one in entries.items()}

    def put_if(self, key: str, value: dict, revision: int) -> bool:
        """As `Memory.put_if`."""
        with self._opened() as entries:
            if entries.get(key, {"revision": 0})["revision"] != revision:
                return False
            entries[key] = {"value": value, "revision": revision + 1, "until": None}
            return True

    def live(self, key: str, value: dict) -> None:
        """As `Memory.live`."""
        with self._opened() as entries:
            now = time.monotonic()
            revision = entries.get(key, {"revision": 0})["revision"] + 1
            entries[key] = {"value": value, "revision": revision, "until": now + LEASE}
        self.renewed = now

    def leave(self, key: str) -> None:
        """As `Memory.leave`."""
        with self._opened() as entries:
            entries.pop(key, None)


class Etcd:
    """etcd by its JSON gateway (Ubuntu 22.04 has 3.3, which calls it v3beta); any member that answers will do.

    places: members' addresses, by commas. own_address: this host's; its member, if it has one, is asked first.
    """

    def __init__(self, places: str, run: str, own_address: str = ""):
        self.members = []
        for place in places.split(","):
            url = urllib.parse.urlsplit(place)
            if url.scheme != "http" or not url.hostname or not url.port:
                raise BadInput(
                    f"environment variable TRAINYARD_STORE: expected a path or http://ADDRESS:PORT,…, found '{place}'"
                )
            self.members.append((url.hostname, url.port))
        # Else each begins with another one: the first would have the looks of all hosts.
        first = zlib.crc32(own_address.encode()) % len(self.members)
        self.members = self.members[first:] + self.members[:first]
        self.members.sort(key=lambda member: member[0] != own_address)
        self.prefix = f"/trainyard/{run}/"
        self._connection: http.client.HTTPConnection | None = None
        self._api = "v3"
        self._read: dict[str, Entry] = {}  # what was read last
        self._read_at = "", 0  # of which cluster, and its revision then
        self._own_lease: str | None = None
        self._told: tuple[str, dict] | None = None  # the record as it stands there, with that lease
        self.renewed = 0.0

    def read(self) -> dict[str, Entry]:
        """As `Memory.read`.

        What has changed since the last time is all that is sent, of a thousand records mostly none; that others are
        gone shows in their number. Members that have begun anew are a cluster of their own, with other revisions.
        """
        cluster, revision = self._read_at
        changed, count, at = self._range({"min_mod_revision": str(revision + 1)} if self._read else {})
        entries = {**self._read, **changed}
        if self._read and (at[0] != cluster or at[1] < revision or len(entries) != count):
            entries, _, at = self._range({})
        self._read, self._read_at = entries, at
        return dict(entries)

    def _range(self, only: dict) -> tuple[dict[str, Entry], int, tuple[str, int]]:
        """The values, by key, or some of them; how many keys there are; of which cluster, and its revision."""
        last = self.prefix[:-1] + chr(ord("/") + 1)
        answer = self._ask("kv/range", {"key": _packed(self.prefix), "range_end": _packed(last), **only})
        found = {
            base64.b64decode(one["key"]).decode().removeprefix(self.prefix): Entry(
                json.loads(base64.b64decode(one["value"])), int(one["mod_revision"])
            )
            for one in answer.get("kvs", ())
        }
        header = answer["header"]
        return found, int(answer.get("count", 0)), (header["cluster_id"], int(header["revision"]))

    def put_if(self, key: str, value: dict, revision: int) -> bool:
        """As `Memory.put_if`."""
        name = _packed(self.prefix + key)
        lease = self._ask("lease/grant", {"TTL": KEPT})["ID"]
        put = {"key": name, "value": _packed(json.dumps(value)), "lease": lease}
        known = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        answer = self._ask("kv/txn", {"compare": [known], "success": [{"request_put": put}]})
        return bool(answer.get("succeeded"))

    def live(self, key: str, value: dict) -> None:
        """As `Memory.live`."""
        now = time.monotonic()
        if self._own_lease is not None and now - self.renewed >= LEASE / 5:
            answer = self._ask("lease/keepalive", {"ID": self._own_lease})
            if int(answer.get("result", {}).get("TTL", 0)) > 0:
                self.renewed = now
            else:
                self._own_lease = self._told = None
        if self._own_lease is None:
            self._own_lease = self._ask("lease/grant", {"TTL": int(LEASE)})["ID"]
        if self._told != (key, value):
            put = {
                "key": _packed(self.prefix + key),
                "value": _packed(json.dumps(value)),
                "lease": self._own_lease,
            }
            try:
                self._ask("kv/put", put)
            except Unreachable:
                self._own_lease = self._told = None  # it may have run out meanwhile
                raise
            if self._told is None:  # only now does the record have this lease
                self.renewed = now
            self._told = key, value

    def leave(self, key: str) -> None:
        """As `Memory.leave`."""
        self._ask("kv/deleterange", {"key": _packed(self.prefix + key)})

    def _ask(self, path: str, message: dict) -> dict:
        """One request, to each member in turn until one answers; raises Unreachable where none does in time.

        The next request begins with the member that has had no time for this one.
        """
        said = "no answer"
        deadline = self._deadline()
        for _ in range(len(self.members) + 1):
            if time.monotonic() >= deadline:
                break
            try:
                if self._connection is None:
                    self._connection = http.client.HTTPConnection(*self.members[0])
                    version = json.loads(self._answer(deadline, "GET", "/version").read())["etcdserver"]
                    self._api = "v3beta" if version.startswith("3.3.") else "v3"
                answer = self._answer(deadline, "POST", f"/{self._api}/{path}", json.dumps(message))
                content = json.loads(answer.read())
                if answer.status == 200:
                    return content
                said = f"{content.get('error', answer.status)}"
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                said = f"{type(error).__name__}: {error}"
            self._connection.close()
            self._connection = None
            self.members.append(self.members.pop(0))
        where = ", ".join(f"{address}:{port}" for address, port in sorted(self.members))
        raise Unreachable(f"etcd at {where} does not answer ({said})")

    def _deadline(self) -> float:
        """Until when to wait for an answer: not much beyond the moment at which this host must end its part."""
        now = time.monotonic()
        left = self.renewed + OUT_OF_TOUCH - now
        return now + (min(ANSWER, max(HASTE, left)) if left > 0 else ANSWER)

    def _answer(self, deadline: float, *request: str) -> http.client.HTTPResponse:
        """What the member says to a request, by `deadline` and within PATIENCE; raises TimeoutError."""
        self._set_timeout(deadline)
        self._connection.request(*request)
        self._set_timeout(deadline)
        return self._connection.getresponse()

    def _set_timeout(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time is left for it")
        self._connection.timeout = min(PATIENCE, left)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(self._connection.timeout)


@contextlib.contextmanager
def _asked(file: Path):
    """What goes wrong with the file of a Directory is no answer of it."""
    try:
        yield
    except OSError as error:
        raise Unreachable(f"{file}: {error}") from None


def _packed(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
