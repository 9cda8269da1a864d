#!/usr/bin/python3
"""Undo a change of network, firewall or sshd unless it is confirmed in time.

One change at a time goes by one name. `change` keeps the old state, starts a timer, writes the new files and
applies them from a unit of its own; `confirm` ends the guard. Whatever dies in between (the controller, the
connection, the host itself), the timer or the next boot puts the old state back. It needs Python and systemd.

    guard change NAME < CHANGE.json      arm, write, check, and apply a moment later
    guard confirm NAME --token TOKEN [--proof PROOF]
                                         the change is good: forget the old state
    guard restore NAME | --all           put the old state back now
    guard status                         what is armed, and what was undone

For the commands of a change:

    guard reachable ADDRESS INTERFACE    exit 0 if a neighbour answers there
    guard holds ADDRESS/PREFIX INTERFACE exit 0 if the interface has the address, or is up without a carrier
    guard rename OLD NEW                 give the interface OLD the name NEW; exit 0 also if there is no OLD
    guard remove NAME                    delete the bond, bridge or VLAN NAME; exit 0 also if there is none

The first five print one JSON object. Exit 1: the message on stderr says what is wrong.
"""

import argparse
import contextlib
import datetime
import fcntl
import grp
import ipaddress
import json
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time

STATE_DIR = "/var/lib/trainyard-guard"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
APPLY_DELAY = 1  # s: the answer to `change` must be out before the network under it goes
SETTLE = 1  # s between the last command and "applied", so that a confirming connection meets the new state
COMMAND_LIMIT = 30  # s
CONFIRM = 25  # s of a guard's time that are left to the commands before, and to the connection that confirms
UNDO_TRIES = 3


class GuardError(Exception):
    """What is wrong and what to do, for a person to read."""


def verify_limit(timeout):
    """Seconds in which what a change leads to must come true, of a guard's `timeout`."""
    return max(min(12, timeout / 2), timeout - CONFIRM)


def run(command, limit=COMMAND_LIMIT):
    """Run `command` (a list of words). Returns {command, rc, output}, never raises for its failure."""
    # Not a pipe: a daemon that the command leaves behind (ifup's DHCP client) may hold it open for ever.
    with open(os.memfd_create("output"), "w+b") as out:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
            )
            rc, fault = done.returncode, b""
        except subprocess.TimeoutExpired:
            rc, fault = 124, b"\nstill running after %d s" % limit
        except OSError as error:
            rc, fault = 127, str(error).encode()
        out.seek(0)
        output = (out.read() + fault).decode(errors="replace")
    # Of a file that it refuses it shows the line, with a mark below: there may be a wireless key in it.
    if command[0] == "netplan":
        output = re.sub(r"\n[^\n]*\n *\^", "", output)
    return {"command": " ".join(command), "rc": rc, "output": output.strip()[-2000:]}


def sync_dir(path):
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path, content, mode, uid, gid):
    """Put `content` (bytes) at `path` so that a power cut leaves the old file or the new one."""
    directory, base = os.path.split(path)
    temporary = os.path.join(directory, f".{base}.guard-{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            os.fchown(out.fileno(), uid, gid)
            os.fchmod(out.fileno(), mode)
            out.flush()
            os.fsync(out.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_dir(directory)


def missing_parents(path):
    """The directories above `path` that are not there, deepest first."""
    missing, parent = [], os.path.dirname(path)
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    return missing


def keep(path, copy):
    """Record what is at `path` now; a file's bytes go to `copy`. Returns the entry for `put_back`."""
    entry = {"path": path, "made": missing_parents(path)}
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return {**entry, "kind": "absent"}
    entry.update(uid=found.st_uid, gid=found.st_gid, mode=found.st_mode & 0o7777)
    if os.path.islink(path):
        return {**entry, "kind": "link", "target": os.readlink(path)}
    if not os.path.isfile(path):
        raise GuardError(f"{path} is neither a file nor a link: name the files themselves")
    with open(path, "rb") as source:
        write_file(copy, source.read(), 0o600, os.geteuid(), os.getegid())
    return {**entry, "kind": "file", "copy": os.path.basename(copy)}


def put_back(entry, directory):
    """Undo what happened at one path. Returns what was done, or None if it is as it was."""
    path = entry["path"]
    if entry["kind"] == "absent":
        done = None
        if os.path.lexists(path):
            os.unlink(path)
            sync_dir(os.path.dirname(path))
            done = "removed"
        for parent in entry["made"]:
            with contextlib.suppress(OSError):  # not ours alone any more, or never made
                os.rmdir(parent)
        return done
    now = keep_like(path)
    if entry["kind"] == "link":
        if now.get("target") == entry["target"]:
            return None
        temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.guard-{os.getpid()}")
        os.symlink(entry["target"], temporary)
        os.lchown(temporary, entry["uid"], entry["gid"])
        os.rename(temporary, path)
        sync_dir(os.path.dirname(path))
        return "put back"
    with open(os.path.join(directory, entry["copy"]), "rb") as copy:
        content = copy.read()
    if now == {"content": content, "uid": entry["uid"], "gid": entry["gid"], "mode": entry["mode"]}:
        return None
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_file(path, content, entry["mode"], entry["uid"], entry["gid"])
    return "put back"


def keep_like(path):
    """What is at `path`, in the words of an entry, to compare with one."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return {}
    if os.path.islink(path):
        return {"target": os.readlink(path)}
    with open(path, "rb") as source:
        content = source.read()
    return {"content": content, "uid": found.st_uid, "gid": found.st_gid, "mode": found.st_mode & 0o7777}


class Systemd:
    """The three things that the guard wants of the service manager."""

    def check_ready(self):
        for unit in ("trainyard-guard-files.service", "trainyard-guard-boot.service"):
            if run(["systemctl", "is-enabled", unit])["rc"]:
                raise GuardError(
                    f"{unit} is not enabled, so a restart would not undo the change: run the playbook again"
                )

    def start_timer(self, name, seconds):
        unit = f"trainyard-guard@{name}"
        run(["systemctl", "stop", f"{unit}.timer"])
        run(["systemctl", "reset-failed", f"{unit}.service"])
        command = [
            "systemd-run",
            f"--on-active={seconds}",
            "--timer-property=AccuracySec=200ms",
            f"--unit={unit}.service",
        ]
        done = run(command)
        if done["rc"]:
            raise GuardError(f"the timer that would undo the change cannot be started: {done['output']}")

    def stop_timer(self, name):
        run(["systemctl", "stop", f"trainyard-guard@{name}.timer"])

    def start_apply(self, name):
        unit = f"trainyard-guard-apply-{name}"
        run(["systemctl", "reset-failed", f"{unit}.service"])
        program = [os.path.abspath(__file__), "apply", name]
        command = [
            "systemd-run",
            "--collect",
            f"--on-active={APPLY_DELAY}",
            "--timer-property=AccuracySec=100ms",
        ]
        done = run([*command, f"--unit={unit}", *program])
        if done["rc"]:
            raise GuardError(f"the change cannot be applied: {done['output']}")

    def stop_apply(self, name):
        run(
            [
                "systemctl",
                "stop",
                f"trainyard-guard-apply-{name}.timer",
                f"trainyard-guard-apply-{name}.service",
            ]
        )

    def start_restore(self, name):
        run(["systemctl", "start", "--no-block", f"trainyard-guard@{name}.service"])


class Guard:
    """All guards of one host. `state_dir` is root's alone; `systemd` is replaced in tests."""

    def __init__(self, state_dir=STATE_DIR, systemd=None):
        self.state_dir = state_dir
        self.systemd = systemd or Systemd()

    # The state on disk.

    def directory(self, name):
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,40}", name):
            raise GuardError(f"'{name}' cannot name a guard: use a lower-case word such as network")
        return os.path.join(self.state_dir, name)

    @contextlib.contextmanager
    def lock(self):
        """Confirming and restoring exclude one another. No command runs inside: it might hang."""
        os.makedirs(self.state_dir, mode=0o700, exist_ok=True)
        with open(os.path.join(self.state_dir, ".lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def read(self, name):
        """The manifest of an armed guard, or None."""
        return self._json(os.path.join(self.directory(name), "manifest.json"))

    def report(self, name):
        """What the last undo under this name did, or None."""
        return self._json(self.directory(name) + ".report.json")

    @staticmethod
    def _json(path):
        try:
            with open(path) as source:
                return json.load(source)
        except FileNotFoundError:
            return None

    @staticmethod
    def _write_json(path, value):
        write_file(path, json.dumps(value, indent=1).encode(), 0o600, os.geteuid(), os.getegid())

    def save(self, name, manifest):
        self._write_json(os.path.join(self.directory(name), "manifest.json"), manifest)

    def armed(self):
        """The names of all armed guards, sorted; the module guard_host judges in the same way."""
        try:
            names = os.listdir(self.state_dir)
        except FileNotFoundError:
            return []
        return sorted(
            name
            for name in names
            if not name.startswith(".")
            and os.path.exists(os.path.join(self.state_dir, name, "manifest.json"))
        )

    def sweep(self):
        """Remove what a power cut left of a guard that was not armed yet, or had ended: copies of old files."""
        with self.lock():
            for name in os.listdir(self.state_dir):
                directory = os.path.join(self.state_dir, name)
                if name.startswith(".") and os.path.isdir(directory):
                    shutil.rmtree(directory, ignore_errors=True)

    # The commands.

    def change(self, name, change):
        """Arm, write and check now; have it applied a moment later. Returns {state, token, timeout}.

        `change`: why, timeout (s), files [{path, content | link_to | state: absent | move_to, mode, owner, group}], and
        the lists of commands check (before anything is applied), apply, verify (repeated for a while) and
        undo (after the files are back). A failing check: {state: restored, report}.
        """
        self.systemd.check_ready()
        target = self.directory(name)
        self.sweep()
        with self.lock():
            if name in self.armed():
                raise GuardError(
                    f"a change of {name} is waiting to be confirmed or undone: see `guard status`"
                )
            shutil.rmtree(
                target, ignore_errors=True
            )  # without a manifest there is nothing in it to go back to
            manifest = self._arm(name, target, change)
        try:
            self.systemd.start_timer(name, change["timeout"])
        except GuardError:
            shutil.rmtree(target)
            raise
        try:
            for item in change["files"]:
                self._write(item)
        except (OSError, KeyError) as error:
            self.restore(name, f"writing failed: {error}", commands=False)
            return {"state": "restored", "report": self.report(name)}
        for command in change.get("check", []):
            done = run(command)
            if done["rc"]:
                self.restore(name, f"`{done['command']}` refused it: {done['output']}", commands=False)
                return {"state": "restored", "report": self.report(name)}
        try:
            self.systemd.start_apply(name)
        except GuardError as error:
            self.restore(name, str(error), commands=False)
            raise
        return {"state": "armed", "token": manifest["token"], "timeout": change["timeout"]}

    def _arm(self, name, target, change):
        temporary = os.path.join(self.state_dir, f".{name}.new")
        shutil.rmtree(temporary, ignore_errors=True)
        os.mkdir(temporary, 0o700)
        paths = []
        for item in change["files"]:
            for path in filter(None, (item["path"], item.get("move_to"))):
                if (
                    not os.path.isabs(path)
                    or os.path.normpath(path) != path
                    or path.startswith(self.state_dir)
                ):
                    raise GuardError(f"'{path}' cannot be guarded: an absolute path without '..' is needed")
                if path not in paths:
                    paths.append(path)
        manifest = {
            "name": name,
            "token": secrets.token_hex(8),
            "why": change.get("why", ""),
            "state": "armed",
            "timeout": change["timeout"],
            "armed_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "armed_uptime": time.monotonic(),
            "boot_id": boot_id(),
            "entries": [
                keep(path, os.path.join(temporary, f"{number}.old")) for number, path in enumerate(paths)
            ],
            **{key: change.get(key, []) for key in ("apply", "verify", "undo")},
        }
        self._write_json(os.path.join(temporary, "manifest.json"), manifest)
        sync_dir(temporary)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target + ".report.json")
        os.rename(temporary, target)
        sync_dir(self.state_dir)
        return manifest

    @staticmethod
    def _write(item):
        path = item["path"]
        for parent in reversed(missing_parents(item.get("move_to") or path)):
            os.mkdir(parent, 0o755)
        if item.get("move_to"):
            os.rename(path, item["move_to"])
            sync_dir(os.path.dirname(item["move_to"]))
            sync_dir(os.path.dirname(path))
        elif item.get("link_to"):
            temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.guard-{os.getpid()}")
            os.symlink(item["link_to"], temporary)
            os.rename(temporary, path)
            sync_dir(os.path.dirname(path))
        elif item.get("state") == "absent":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            sync_dir(os.path.dirname(path))
        else:
            uid, gid = (
                pwd.getpwnam(item.get("owner", "root")).pw_uid,
                grp.getgrnam(item.get("group", "root")).gr_gid,
            )
            # Somebody's own may be in any encoding.
            content = item["content"].encode(errors="surrogateescape")
            write_file(path, content, int(item.get("mode", "0644"), 8), uid, gid)

    def apply(self, name):
        """Run the commands of an armed change; a failure undoes it at once, not only when the time is up."""
        manifest = self.read(name)
        if manifest is None or manifest["state"] != "armed":
            return {"state": "none"}
        for command in manifest["apply"]:
            done = run(command)
            if done["rc"]:
                return self._give_up(
                    name, manifest, f"`{done['command']}` failed: {done['output'] or done['rc']}"
                )
        deadline = time.monotonic() + verify_limit(manifest["timeout"])
        for command in manifest["verify"]:
            while (done := run(command))["rc"]:
                if time.monotonic() > deadline:
                    return self._give_up(
                        name,
                        manifest,
                        f"`{done['command']}` failed afterwards: {done['output'] or done['rc']}",
                    )
                time.sleep(1)
        time.sleep(SETTLE)
        with self.lock():
            if (self.read(name) or {}).get("state") != "armed":
                return {"state": "none"}
            self.save(name, {**manifest, "state": "applied", "proof": secrets.token_hex(8)})
        return {"state": "applied"}

    def _give_up(self, name, manifest, fault):
        self.save(name, {**manifest, "fault": fault})
        self.systemd.start_restore(name)  # a unit of its own, for it stops this one
        return {"state": "failed", "fault": fault}

    def confirm(self, name, token, proof=None):
        """End the guard. Returns {state}: confirmed, pending (not applied yet), restored (with report), or applied.

        With `applied` comes a proof, and only who shows it confirms: it is given out when the change is in effect, so a
        connection that is opened afterwards has gone through the change. One that was opened before proves nothing.
        """
        target = self.directory(name)
        with self.lock():
            manifest = self.read(name)
            if manifest is None or manifest["token"] != token:
                return {"state": "restored", "report": self.report(name)}
            if manifest["state"] != "applied":
                return {"state": "pending"}  # not applied yet, or being undone
            if proof is None or manifest["proof"] != proof:
                return {"state": "applied", "proof": manifest["proof"]}
            done = os.path.join(self.state_dir, f".{name}.confirmed")
            shutil.rmtree(done, ignore_errors=True)
            os.rename(target, done)
            sync_dir(self.state_dir)
        self.systemd.stop_timer(name)
        shutil.rmtree(done, ignore_errors=True)
        return {"state": "confirmed"}

    def restore(self, name, why=None, commands=True):
        """Put the old state back and run the undo commands (`commands`: True, False or "later").

        Raises GuardError where a file could not be put back; the guard then stays armed.
        """
        self.systemd.stop_apply(name)
        target = self.directory(name)
        with self.lock():
            manifest = self.read(name)
            if manifest is None:
                return {"state": "none"}
            report = {
                "name": name,
                "token": manifest["token"],
                "change": manifest["why"],
                "why": why or reason(manifest),
                "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "undone": manifest.get("undone", []),
                "commands": [],
            }
            faults = []
            for entry in reversed(manifest["entries"]):
                try:
                    done = put_back(entry, target)
                except OSError as error:
                    faults.append(f"{entry['path']}: {error}")
                    continue
                if done:
                    report["undone"].append(f"{entry['path']} {done}")
            self.save(name, {**manifest, "state": "restoring", "undone": report["undone"]})
        if faults:
            raise GuardError(f"the old state of {name} could not be put back: {'; '.join(faults)}")
        if commands == "later":
            return {"state": "armed"}
        for command in manifest["undo"] if commands else []:
            for _ in range(UNDO_TRIES):
                done = run(command)
                if not done["rc"]:
                    break
                time.sleep(2)
            report["commands"].append(done)
        with self.lock():
            if self.read(name) is None:  # another restore was as fast
                return {"state": "restored", "report": self.report(name)}
            self._write_json(target + ".report.json", report)
            gone = os.path.join(self.state_dir, f".{name}.restored")
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(target, gone)
            sync_dir(self.state_dir)
        self.systemd.stop_timer(name)
        shutil.rmtree(gone, ignore_errors=True)
        return {"state": "restored", "report": report}

    def status(self):
        """{armed: {name: {state, token, why, seconds_left}}, reports: {name: report}}."""
        armed = {}
        for name in self.armed():
            manifest = self.read(name)
            if manifest:
                age = time.monotonic() - manifest["armed_uptime"]
                left = max(0, round(manifest["timeout"] - age)) if manifest["boot_id"] == boot_id() else 0
                armed[name] = {
                    **{key: manifest[key] for key in ("state", "token", "why")},
                    "seconds_left": left,
                }
        names = os.listdir(self.state_dir) if os.path.isdir(self.state_dir) else []
        ends = sorted(name[: -len(".report.json")] for name in names if name.endswith(".report.json"))
        return {"armed": armed, "reports": {name: self.report(name) for name in ends}}


def boot_id():
    with open(BOOT_ID) as source:
        return source.read().strip()


def reason(manifest):
    """Why an armed change is undone, from its manifest alone."""
    if manifest.get("fault"):
        return manifest["fault"]
    if manifest["boot_id"] != boot_id():
        return "the host was restarted before the change was confirmed"
    return f"no new connection from the controller confirmed it within {manifest['timeout']} s"


def reachable(address, interface, limit=3.0):
    """Whether a neighbour at `address` answers ARP or ND on `interface` within `limit` seconds."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
            probe.sendto(b"", (address, 9))  # discard: only the address resolution counts
        time.sleep(0.5)
        shown = run(["ip", "-json", "neigh", "show", "to", address, "dev", interface])
        for neighbour in json.loads(shown["output"] or "[]") if not shown["rc"] else []:
            if neighbour.get("lladdr") and "FAILED" not in neighbour.get("state", []):
                return True
    return False


def link(interface):
    """What `ip` says of the interface, a mapping, or None if it does not exist."""
    shown = run(["ip", "-json", "-details", "address", "show", "dev", interface])
    # Old versions of ip give empty mappings for what they leave out.
    return next((item for item in json.loads(shown["output"]) if item), None) if not shown["rc"] else None


def holds(address, interface):
    """Raises GuardError unless `interface` has `address` (with its prefix).

    One that is up and has no carrier passes: no manager sets it an address. One that is down is nobody's.
    """
    wanted, found = ipaddress.ip_interface(address), link(interface)
    if found is None:
        raise GuardError(f"there is no interface {interface}")
    if "UP" not in found["flags"]:
        raise GuardError(
            f"{interface} is down: nothing that manages it brings it up; see `networkctl status {interface}`"
        )
    if "LOWER_UP" not in found["flags"]:
        return
    present = [ipaddress.ip_interface(f"{item['local']}/{item['prefixlen']}") for item in found["addr_info"]]
    if wanted not in present:
        raise GuardError(
            f"{interface} does not have {wanted} but {', '.join(map(str, present)) or 'no address'}; does another "
            "file speak for it? `networkctl status` names the one that counts"
        )


def rename(old, new):
    """Give the interface `old` the name `new`; nothing if it is gone, for then it has that name."""
    if link(old) is None:
        return
    for words in (["dev", old, "down"], ["dev", old, "name", new], ["dev", new, "up"]):
        done = run(["ip", "link", "set", *words])
        if done["rc"]:
            raise GuardError(f"`{done['command']}`: {done['output']}")


def remove(name):
    """Delete the bond, bridge or VLAN `name`; nothing if there is none. What a bond lets go of is down afterwards."""
    found = link(name)
    if found is None or found.get("linkinfo", {}).get("info_kind") not in ("bond", "bridge", "vlan"):
        return
    done = run(["ip", "link", "delete", "dev", name])
    if done["rc"]:
        raise GuardError(f"`{done['command']}`: {done['output']}")


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("change", "apply", "confirm", "restore"):
        command = commands.add_parser(name)
        command.add_argument("name", nargs="?" if name == "restore" else None)
        if name == "confirm":
            command.add_argument("--token", required=True)
            command.add_argument("--proof")
        if name == "restore":
            command.add_argument("--all", action="store_true", help="every armed change")
            command.add_argument(
                "--files-only", action="store_true", help="early at boot: the commands come later"
            )
            command.add_argument("--why", help="the reason for the report")
    commands.add_parser("status")
    for name, words in (
        ("reachable", ("address", "interface")),
        ("holds", ("address", "interface")),
        ("rename", ("old", "new")),
        ("remove", ("interface",)),
    ):
        command = commands.add_parser(name)
        for word in words:
            command.add_argument(word)
    given = parser.parse_args(arguments)

    guard = Guard()
    if given.command == "reachable":
        if not reachable(given.address, given.interface):
            raise GuardError(
                f"nobody answers at {given.address} on {given.interface}. A switch that looks for loops first "
                "(spanning tree without portfast) lets nothing through for 30 s or more: guard_timeout: 90 waits for it"
            )
        return
    if given.command == "holds":
        return holds(given.address, given.interface)
    if given.command == "rename":
        return rename(given.old, given.new)
    if given.command == "remove":
        return remove(given.interface)
    if given.command == "change":
        result = guard.change(given.name, json.load(sys.stdin))
    elif given.command == "apply":
        result = guard.apply(given.name)
    elif given.command == "confirm":
        result = guard.confirm(given.name, given.token, given.proof)
    elif given.command == "status":
        result = guard.status()
    elif given.all == bool(given.name):
        parser.error("restore needs a NAME or --all")
    else:
        result, faults = {}, []
        for name in guard.armed() if given.all else [given.name]:
            try:
                result[name] = guard.restore(name, given.why, commands="later" if given.files_only else True)
            except GuardError as error:  # the others are put back all the same
                faults.append(str(error))
        if faults:
            raise GuardError("; ".join(faults))
        guard.sweep()
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except (GuardError, OSError, ValueError, KeyError) as error:
        sys.exit(f"guard: {error}")
