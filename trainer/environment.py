"""Where a run lies and who takes part, from the environment (RUN.env, torchrun's variables). No torch here."""

import contextlib
import ctypes
import fcntl
import glob
import io
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer import disk
from trainer.data.files import expanded
from trainer.errors import BadInput, Stopped

LOG_BYTES = 64 << 20  # of a rank's log, beyond which it goes aside
LOG_SECONDS = 5.0  # between two looks at its size
CLAIM = 3  # looks for the end of another process that trains in the run's directory
LOOK = 1.0  # seconds between two of them
AT_ONCE = 3.0  # seconds that an ending may take after a second Ctrl-C before the first step


CACHE = "the cache of tokenised data, unless TRAINYARD_CACHE_DIR names another: "
KEPT = "TRAINYARD_KEPT"  # there where this process is kept to its own
INFINIBAND = Path("/sys/class/infiniband")
BEGUN = "TRAINYARD_BEGUN"  # when the launcher was started, in seconds since 1970


@dataclass(frozen=True)
class Environment:
    """One process's place in the run."""

    run_dir: Path
    cache_dir: Path  # tokenised data, by content
    host: str  # the name that the operator knows this host by
    attempt: int  # how often the run was started
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    expected: int = 1  # hosts that the run was started on, where a launcher says so
    left_out: tuple[str, ...] = ()  # of these, the ones that take part no more
    launch: str = ""  # this start of the run by train.yml; of two, the later one is the greater

    @property
    def first_on_host(self) -> bool:
        return self.local_rank == 0

    @property
    def stop_file(self) -> Path:
        return self.run_dir / "stop"

    @property
    def leave_file(self) -> Path:
        """As the stop file, but for this host alone: it shuts down, and the others go on."""
        return leave_file(self.run_dir, self.host)

    @property
    def yield_file(self) -> Path:
        """As the stop file, but the run goes on in another attempt; the launcher's own."""
        return self.run_dir / "yield"

    def asked_to_stop(self, by: "StopSignal") -> bool:
        """Whether this rank was asked to end: by a signal, or its host by a file."""
        return by.received or any(file.exists() for file in (self.stop_file, self.yield_file))

    @property
    def turn_file(self) -> Path:
        """Has the start of the run (TRAINYARD_LAUNCH) that it is of, for which runs that waits, and if it has begun.

        Of this host alone: others, which may share the run's directory, wait for other runs.
        """
        return self.run_dir / f"turn-{self.host}"

    @property
    def untold_dir(self) -> Path:
        """Of the host: how its runs ended while their store was silent, until `trainer tell` has told it."""
        return self.run_dir.parent.parent / "untold"


class StopSignal:
    """Notes SIGTERM and SIGINT instead of dying from them: the ranks then agree to save and end.

    Before the first step there is nothing to save, and others' code may be at work for long, which asks nobody: as long
    as `nothing_to_save`, a second Ctrl-C is a KeyboardInterrupt; and where something holds that up, as threads that are
    waited for do, the process is left by `leave` all the same.
    """

    def __init__(self):
        self.received, self.nothing_to_save = False, True
        self.leave: Callable[[], None] = lambda: os._exit(Stopped.code)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number, frame) -> None:
        if number == signal.SIGINT and self.nothing_to_save:
            if self.received:
                threading.Thread(target=self._insist, daemon=True).start()
                raise KeyboardInterrupt
            with contextlib.suppress(OSError):
                os.write(2, b"it ends as soon as what it does now is done; Ctrl-C once more: at once\n")
        self.received = True

    def _insist(self) -> None:
        time.sleep(AT_ONCE)
        if self.nothing_to_save:
            self.leave()


def read(run: str) -> Environment:
    """The environment of a rank of run `run`; without any variables: a run of one process below ./runs."""
    managed = os.environ.get("TRAINYARD_RUN_DIR")
    run_dir = Path(managed or Path("runs") / run).absolute()
    if "TRAINYARD_CACHE_DIR" in os.environ:
        cache_dir = Path(os.environ["TRAINYARD_CACHE_DIR"])
    elif managed:
        cache_dir = run_dir.parent.parent / "cache"  # a host's layout: docs/architecture.md
    else:
        caches = os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache", CACHE)
        cache_dir = Path(caches) / "trainyard"
    launched = "RANK" in os.environ  # by torchrun; RUN.env's own WORLD_SIZE says nothing of this process
    return Environment(
        run_dir=run_dir,
        cache_dir=cache_dir.absolute(),
        host=host(),
        attempt=number("TRAINYARD_ATTEMPT", 1),
        rank=number("RANK", 0) if launched else 0,
        world_size=number("WORLD_SIZE", 1) if launched else 1,
        local_rank=number("LOCAL_RANK", 0) if launched else 0,
        local_world_size=number("LOCAL_WORLD_SIZE", 1) if launched else 1,
        node_rank=number("GROUP_RANK", number("NODE_RANK", 0)) if launched else 0,
        expected=number("TRAINYARD_EXPECTED", 1),
        left_out=tuple(filter(None, os.environ.get("TRAINYARD_LEFT_OUT", "").split(","))),
        launch=os.environ.get("TRAINYARD_LAUNCH", ""),
    )


def host() -> str:
    """The name that the operator knows this host by."""
    return os.environ.get("TRAINYARD_HOST") or socket.gethostname()


def leave_file(run_dir: Path, of: str) -> Path:
    """`Environment.leave_file` of the host `of`. Hosts that share the run's directory may leave one by one."""
    return run_dir / f"leave-{of}"


def number(name: str, default: int | None = None) -> int:
    """The whole number in environment variable `name`; raises BadInput where it is missing or something else."""
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise BadInput(f"environment variable {name}: expected a whole number, found '{text}'")
    return int(text)


def resident_bytes() -> int:
    """This process's memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rdma() -> bool:
    """Whether this host has an RDMA port that NCCL may use, and that can carry a run."""
    return bool(rdma_ports())


def rdma_ports() -> dict[str, tuple[str, float]]:
    """This host's RDMA ports that can carry a run, as DEVICE:PORT: (InfiniBand or Ethernet, Gbit/s).

    As the role rdma has it: up, and on Ethernet with an IPv4 address by RoCE v2, which iWARP has not; none without the
    library by which NCCL has them. A port that goes while it is looked at is none: an error of one rank would be the
    others' lost peer. Those that NCCL_IB_HCA names by itself are not judged.
    """
    if os.environ.get("NCCL_IB_DISABLE", "0") == "1" or not _has_verbs():
        return {}
    found = {}
    # Path.glob raises where a folder is gone by now.
    for port in sorted(glob.glob("*/ports/*", root_dir=INFINIBAND)):
        place, (device, _, number) = INFINIBAND / port, port.split("/")
        kind, rate = _said(place / "link_layer"), _said(place / "rate").partition(" ")[0]
        well = kind == "InfiniBand" or (
            kind == "Ethernet" and ("NCCL_IB_HCA" in os.environ or _has_roce(place))
        )
        if well and _said(place / "state").endswith(" ACTIVE"):
            found[f"{device}:{number}"] = kind, float(rate) if rate.replace(".", "", 1).isdigit() else 0.0
    return found


def keep_nccl_to(kind: str) -> None:
    """Have NCCL take this host's good RDMA ports of one kind, or none where that is "".

    By itself it takes every port that is up, also one without an address, and those of both kinds.
    """
    if not kind:
        os.environ["NCCL_IB_DISABLE"] = "1"
    elif "NCCL_IB_HCA" not in os.environ:
        names = [name for name, (one, _) in rdma_ports().items() if one == kind]
        os.environ["NCCL_IB_HCA"] = f"={','.join(names)}"


def _has_verbs() -> bool:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True


def _has_roce(port: Path) -> bool:
    """Whether a port on Ethernet has an IPv4 address by RoCE v2."""
    mapped = "0000:0000:0000:0000:0000:ffff:"
    return any(
        _said(port / "gids" / index).startswith(mapped)
        and _said(port / "gid_attrs/types" / index) == "RoCE v2"
        for index in glob.glob("*", root_dir=port / "gids")
    )


def _said(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def keep_freed_memory(at_once: int = 1 << 30) -> None:
    """Have the C library keep what this process frees, up to a GiB in all, instead of giving it back to the kernel.

    at_once: bytes; what is larger is given back. On a CPU each step allocates what the one before has freed. Getting it
    anew, page by page, takes a twentieth of a step; keeping it costs a few percent more memory. Only glibc can do it.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    with contextlib.suppress(AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_MMAP_THRESHOLD, at_once)
        set_option(M_TRIM_THRESHOLD, 1 << 30)


def follow_launcher() -> bool:
    """Be told (SIGTERM) when the launcher dies, however it dies: no rank is left behind alone. Whether there is one."""
    parent = os.environ.get("TRAINYARD_LAUNCHER")
    if not parent:
        return False
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the launcher is gone")
    # Where memory runs out, the kernel is to take a rank, and leave the launcher, which sees to it and says why.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    return True


def keep_to_its_own() -> bool | None:
    """Have a service's process, and all that it starts, look into no other process; whether they are kept from it.

    /proc/PID/root shows what process PID sees, to whoever is the same user. So a model's own code would get at what its
    unit hides: the key for the peers, a fetch's token. Linux's Landlock denies such looks to a process with any rule at
    all; the one here takes no file away. The kernel must know the right to move files between directories (5.19), for
    it would deny that otherwise. None: it is so by now, or this is no service, whose user may see what is theirs.
    """
    CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on all processors
    PR_GET_NO_NEW_PRIVS, VERSION, PATH_BENEATH, REFER = 39, 1, 1, 1 << 13
    libc = ctypes.CDLL(None)
    if os.environ.keys() & {"TRAINYARD_LAUNCHER", KEPT} or libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        return None
    if libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION) < 2:
        return False
    handled = struct.pack("=Q", REFER)
    rules = libc.syscall(CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return False
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = struct.pack("=Qi", REFER, root)
        if libc.syscall(ADD_RULE, rules, PATH_BENEATH, allowed, 0) or libc.syscall(RESTRICT_SELF, rules, 0):
            return False
    finally:
        os.close(root)
        os.close(rules)
    os.environ[KEPT] = "1"  # a launcher that begins anew would have one more each time, of 16 at most
    return True


def let_the_first_speak(seconds: float = 5.0) -> None:
    """Before a rank says that it cannot begin: all of this host say the same, and torchrun ends them after the first.

    Who is still there after that has something of its own to say.
    """
    if "TRAINYARD_LAUNCHER" not in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(seconds)


class Stamped:
    """A stream whose lines begin with date and time of day, to the second."""

    def __init__(self, stream):
        self.stream, self._within = stream, False

    def write(self, text: str) -> int:
        stamp, parts = time.strftime("%Y-%m-%d %H:%M:%S "), []
        for line in text.splitlines(keepends=True):
            parts.append(line if self._within else stamp + line)
            self._within = not line.endswith("\n")
        self.stream.write("".join(parts))
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def stamp_errors() -> None:
    """Give the lines of stderr their times where it is a file; the journal has its own, and a terminal needs none."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            sys.stderr = Stamped(sys.stderr)


def log_to(environment: Environment, run: str) -> None:
    """Send this process's output to its log.

    A rank itself writes a line in ten seconds; it is libraries' debug output that fills a disk. What Python prints on a
    full one is kept until there is room; libraries' own output is lost.
    """
    sys.stdout = sys.stderr = _log(environment, run, copies=(1, 2))


class Both:
    """A log, whose words a terminal shows, too."""

    def __init__(self, log, terminal):
        self.log, self.terminal = log, terminal

    def write(self, text: str) -> int:
        self.terminal.write(text)
        return self.log.write(text)

    def flush(self) -> None:
        self.terminal.flush()
        self.log.flush()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def __getattr__(self, name: str):
        return getattr(self.log, name)


@contextlib.contextmanager
def claimed(environment: Environment, run: str) -> Iterator[None]:
    """Within it no other process trains in the run's directory.

    Two would write one metrics.jsonl, and take each other's checkpoints for leftovers. Raises BadInput where another
    is at work there, which a launcher sees to by itself.
    """
    try:
        environment.run_dir.mkdir(parents=True, exist_ok=True)
        found = os.open(environment.run_dir, os.O_RDONLY)
    except OSError:  # of which the run will say more
        yield
        return
    try:
        for look in range(CLAIM):
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if look + 1 == CLAIM:
                    where = environment.run_dir
                    raise BadInput(
                        f"{where}: another process trains there, and goes on. Wait for it, or have it save and end "
                        f"(trainer stop {where}); or give this run a name of its own (run=…, found {run})"
                    ) from None
                time.sleep(LOOK)  # torchrun begins anew as soon as it has killed
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(found)


def log_beside(environment: Environment, run: str) -> None:
    """Keep what this process prints in its log, too, where no launcher does: a host's first rank has the terminal.

    Libraries' own output, which is not Python's, stays where torchrun has it.
    """
    log = _log(environment, run)
    if not environment.first_on_host:
        sys.stdout = sys.stderr = log
        return
    others = environment.local_world_size - 1
    if others:
        which = "the other rank's output is" if others == 1 else f"the output of the other {others} ranks is"
        print(f"{which} in {environment.run_dir}/logs/rank-N.log; this one's is there, too", flush=True)
    sys.stdout, sys.stderr = Both(log, sys.stdout), Both(log, sys.stderr)


class RankLog(disk.Growing):
    """logs/rank-N.log, to be written after what earlier attempts wrote. LOG_BYTES and more go aside, as rank-N.log.1.

    Not at Python's next word: what libraries write by themselves may fill a disk while Python has nothing to say.
    """

    def __init__(self, path: Path, title: str):
        """title: what each file begins with, and each attempt."""
        self._path, self._title = path, title
        self.copies: tuple[int, ...] = ()  # descriptors that lead here, too
        # A descriptor of its own, and not 1, which whoever had it as a file may close.
        super().__init__(io.FileIO(self._open(path), "a"))
        self._put_aside()
        self._say_title("")

    def watch(self) -> None:
        """Look after its size, until this process ends."""
        while True:
            time.sleep(LOG_SECONDS)
            if self._put_aside():
                self._say_title(f"what was before is in {self._path.name}.1, ")

    def _put_aside(self) -> bool:
        """Begin a new file if this one is large; on a full disk, later. No word to a descriptor is lost."""
        with self._lock, contextlib.suppress(OSError):
            if os.fstat(self.fileno()).st_size < LOG_BYTES:
                return False
            begun = self._open(self._path.with_suffix(".log.new"))
            self._path.replace(self._path.with_suffix(".log.1"))
            self._path.with_suffix(".log.new").replace(self._path)
            for descriptor in (self.fileno(), *self.copies):
                os.dup2(begun, descriptor, inheritable=descriptor in self.copies)
            os.close(begun)
            return True
        return False

    def _say_title(self, more: str) -> None:
        self.write(f"=== {self._title}, {more}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)


def _log(environment: Environment, run: str, copies: tuple[int, ...] = ()) -> io.TextIOWrapper:
    """This rank's log, whose size a thread looks after; the descriptors `copies` lead there, too."""
    folder = environment.run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    rank = f"rank {environment.rank} of {environment.world_size} on {environment.host}"
    log = RankLog(
        folder / f"rank-{environment.rank}.log", f"run {run}, attempt {environment.attempt}, {rank}"
    )
    for descriptor in copies:
        os.dup2(log.fileno(), descriptor)
    log.copies = copies
    threading.Thread(target=log.watch, name="log", daemon=True).start()
    return io.TextIOWrapper(log, encoding="utf-8", errors="backslashreplace", write_through=True)
