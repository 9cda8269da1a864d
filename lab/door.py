"""Commands as root inside a virtual machine, by another way than its network. Both ends of that way are here.

Inside, `door.py` without words waits at the machine's virtio ports. Outside, `door.py FOLDER [--tty] CMD …` takes one
that is free, whose socket lies in FOLDER, and behaves as CMD does. Lines of JSON travel, each with the number of its
call: a caller may be killed, and what its call left in the port is not the next one's.
"""

import base64
import contextlib
import fcntl
import json
import os
import queue
import select
import shlex
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import tty
import uuid
from pathlib import Path

PORTS = 8  # so many commands at a time
CHUNK = 1 << 14  # as a line it stays below the 32 KiB that a virtio port takes in one piece
ANSWER_SECONDS = 60


def write_all(fd: int, data: bytes) -> None:
    """os.write may take less than it is given."""
    while data:
        data = data[os.write(fd, data) :]


def say(fd: int, call: str, **words: object) -> None:
    """One line. The line feed before it ends what a killed caller may have begun."""
    write_all(fd, f"\n{json.dumps({'call': call, **words})}\n".encode())


def hear(lines: list[bytes]) -> list[dict]:
    """What was said whole."""
    heard = []
    for line in lines:
        with contextlib.suppress(ValueError):
            heard.append(json.loads(line))
    return heard


# --- inside ----------------------------------------------------------------------------------------------------------


class Command:
    """A command under way, for the call of that number."""

    def __init__(self, port: int, call: str, argv: list[str], env: dict[str, str]):
        self.port, self.call, self.input = port, call, queue.SimpleQueue()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(argv, env=env, cwd="/", start_new_session=True, **pipes)
        out = threading.Thread(target=self._pass_on, args=("out", self.process.stdout), daemon=True)
        err = threading.Thread(target=self._pass_on, args=("err", self.process.stderr), daemon=True)
        for thread in (out, err, threading.Thread(target=self._feed, daemon=True)):
            thread.start()
        threading.Thread(target=self._finish, args=(out, err), daemon=True).start()

    def _pass_on(self, name: str, pipe) -> None:
        while data := os.read(pipe.fileno(), CHUNK):
            say(self.port, self.call, **{name: base64.b64encode(data).decode()})

    def _feed(self) -> None:
        with contextlib.suppress(OSError), self.process.stdin:  # it need not read what it is given
            while data := self.input.get():
                write_all(self.process.stdin.fileno(), data)

    def _finish(self, *threads: threading.Thread) -> None:
        for thread in threads:
            thread.join()
        status = self.process.wait()
        say(self.port, self.call, status=status if status >= 0 else 128 - status)

    def end(self) -> None:
        """Its caller is gone: it goes, too, unless it has ended and left something behind on purpose."""
        self.input.put(b"")
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def serve(path: Path) -> None:
    """Answer at one port, once it is there."""
    while not path.exists():
        time.sleep(0.2)
    answer(os.open(path, os.O_RDWR))


def answer(port: int) -> None:
    """One call after the other, for ever."""
    command, rest = None, b""
    somebody = select.epoll()
    somebody.register(
        port, select.EPOLLIN | select.EPOLLET
    )  # by edge: a port at which nobody is says so all the time
    while True:
        data = os.read(port, CHUNK)
        *lines, rest = (rest + data).split(b"\n")
        heard = hear(lines)
        if command and (not data or any("argv" in words for words in heard)):
            command.end()
            command = None
        if not data:  # nobody is there
            rest = b""
            somebody.poll()
        for words in heard:
            if "argv" in words:
                try:
                    command = Command(port, words["call"], words["argv"], words["env"])
                    say(port, words["call"])
                except OSError as error:
                    text = f"{words['argv'][0]}: {error.strerror}\n".encode()
                    say(port, words["call"], err=base64.b64encode(text).decode(), status=127)
            elif command and command.call == words.get("call"):
                command.input.put(base64.b64decode(words["in"]))


# --- outside ---------------------------------------------------------------------------------------------------------


def knock(folder: Path) -> tuple[socket.socket, object]:
    """A connection to a port that nobody uses, and the lock that says so, which ends with this process."""
    while True:
        for number in range(PORTS):
            lock = (folder / f"door.{number}.lock").open("w")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                peer = socket.socket(socket.AF_UNIX)
                peer.connect(str(folder / f"door.{number}"))
                return peer, lock
        time.sleep(0.1)


def pass_in(peer: socket.socket, call: str) -> None:
    """Standard input, to its end."""
    with contextlib.suppress(OSError):  # the machine went off: the other thread says so
        while data := os.read(0, CHUNK):
            say(peer.fileno(), call, **{"in": base64.b64encode(data).decode()})
        say(peer.fileno(), call, **{"in": ""})


def ask(folder: Path, argv: list[str]) -> int:
    """Run ARGV inside; its exit status, or 255 where the machine gave none."""
    peer, _lock = knock(folder)
    call = uuid.uuid4().hex
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "TERM": os.environ.get("TERM", "dumb"),
    }
    say(peer.fileno(), call, argv=argv, env=env)
    peer.settimeout(ANSWER_SECONDS)
    rest = b""
    try:
        while data := peer.recv(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for words in hear(lines):
                if words.get("call") != call:
                    continue
                if peer.gettimeout() is not None:  # the first words: it has begun
                    peer.settimeout(None)
                    threading.Thread(target=pass_in, args=(peer, call), daemon=True).start()
                for name, fd in (("out", 1), ("err", 2)):
                    write_all(fd, base64.b64decode(words.get(name, "")))
                if "status" in words:
                    return words["status"]
        print("the machine went off", file=sys.stderr)
    except TimeoutError:
        print(f"the machine has not answered for {ANSWER_SECONDS} s: is it up yet?", file=sys.stderr)
    return 255


def ask_on_terminal(folder: Path, argv: list[str]) -> int:
    """The same on a terminal inside, of the size of the one here, which passes every key on."""
    size = os.get_terminal_size(0)
    script = f"stty rows {size.lines} cols {size.columns}; exec {shlex.join(argv)}"
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        return ask(folder, ["script", "-qefc", script, "/dev/null"])
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def main(folder: str = "", *argv: str) -> int:
    if folder:
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if argv[0] == "--tty":
            return (ask_on_terminal if os.isatty(0) else ask)(Path(folder), list(argv[1:]))
        return ask(Path(folder), list(argv))
    ports = [Path(f"/dev/virtio-ports/door.{number}") for number in range(PORTS)]
    for port in ports[1:]:
        threading.Thread(target=serve, args=(port,), daemon=True).start()
    serve(ports[0])
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
