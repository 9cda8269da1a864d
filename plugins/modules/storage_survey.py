#!/usr/bin/python
"""What the role storage wants to know of a host, by one look."""

from __future__ import annotations

DOCUMENTATION = """
module: storage_survey
short_description: What lies and is mounted at a path, what the role storage has made, and what the kernel has of NFS
description:
  - Changes nothing, and mounts nothing. Where something is mounted at the path, it is not looked into, since the
    server may be dead.
options:
  path:
    description: The shared directory.
    type: path
    required: true
  user:
    description: The service user's name.
    type: str
    required: true
  exports:
    description: The file of exports that the role writes.
    type: path
    required: true
  before:
    description: The role's note of whether NFS was served here before.
    type: path
    required: true
  v4_files:
    description: The file by which the role has NFS 4 alone, and those that come before it.
    type: list
    elements: path
    required: true
"""

EXAMPLES = """
- name: See what the host has
  storage_survey:
    path: /srv/trainyard/shared
    user: trainyard
    exports: /etc/exports.d/trainyard.exports
    before: /etc/exports.d/trainyard.before
    v4_files: [/etc/nfs.conf.d/trainyard.conf]
  register: __storage_survey
"""

RETURN = """
survey:
  description: What was found.
  returned: always
  type: dict
  contains:
    user: {description: The service user's name., type: str}
    account: {description: "The service user's uid and gid; null without one.", type: dict}
    place:
      description: >-
        What lies at the path: nothing, directory (empty), full (a directory), link, file, mount, or ours: a mount by
        the role's units.
      type: str
    writable:
      description: >-
        Whether the service user, or where there is none yet, everybody, may write in what lies at the path; true where
        that is not looked into.
      type: bool
    read_only: {description: "What there is of the path, if it is mounted for reading alone; else empty.", type: str}
    parent: {description: Whether its parent directory is there and not the role's., type: bool}
    closed: {description: "The first directory above it that not everybody passes through, if any.", type: str}
    real: {description: "The path without links, where a directory above it is a link; else empty.", type: str}
    disk: {description: "Of the file system that it lies on: at, type, source.", type: dict}
    unmounted: {description: "The line of /etc/fstab for a directory above it that is not mounted, if any.", type: str}
    mounts: {description: "What is mounted there, as at, type and source; the last one is seen.", type: list}
    fstab: {description: "The line of /etc/fstab that mounts something there, if any.", type: str}
    strange_units: {description: "Files of units of somebody else's that mount there.", type: list}
    units: {description: "The role's mount points, whether mounted or not.", type: list}
    exports: {description: Whether the role's exports are there., type: bool}
    others: {description: "Other exports of the path, as file:line.", type: list}
    roots: {description: "Exports that are the root of NFS 4, as path, place (file:line) and clients.", type: list}
    above: {description: "Exports of directories above it whose options NFS 4 keeps to there, as roots.", type: list}
    taken: {description: "The program that has the port of NFS, other than the kernel's server; or empty.", type: str}
    other_nfs:
      description: "Settings of nfs.conf by which NFS 4 is not served at port 2049, as file:line (setting)."
      type: list
    foreign: {description: Whether the host exports anything else., type: bool}
    served: {description: Whether NFS was served here before the role came., type: bool}
    v4_alone: {description: "Whether the role has NFS 4 alone here, or was about to.", type: bool}
    rpcbind: {description: "Whether rpcbind runs, or will after a boot.", type: bool}
    exportfs: {description: Whether exportfs is installed., type: bool}
    kernel: {description: "Its release, and whether it has, or can load, nfs and nfsd.", type: dict}
"""

import glob
import os
import pwd
import re
import stat

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import nearest, sockets
from ansible.module_utils.managed_block import read
from ansible.module_utils.storage_units import (
    FOLDER,
    is_ours,
    is_roles,
    mount_table,
    mounts_at,
    our_units,
    storage_unit,
    unescaped,
    where,
)

NETWORK = ("autofs", "nfs", "nfs4")
NO = ("n", "no", "f", "false", "off", "0")
MODE = 0o2770  # of the directory that the role makes
PORT = 2049


def place(path: str, mounts: list[dict], units: list[str]) -> str:
    """What lies at `path`, in a word."""
    if mounts:
        ours = path in units and all(mount["type"] in NETWORK for mount in mounts)
        return "ours" if ours else "mount"
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    if stat.S_ISLNK(found.st_mode):
        return "link"
    if not stat.S_ISDIR(found.st_mode):
        return "file"
    return "full" if os.listdir(path) else "directory"


def writable(path: str, user: str | None) -> bool:
    """Whether `user` may make files in the directory `path`, or, where there is none yet, everybody may.

    Or nobody has its owner's number: so a reset leaves the role's, and the user made anew mostly has that number again.
    """
    if user is None:
        found = os.stat(path)
        left = stat.S_IMODE(found.st_mode) == MODE and not has_name(found.st_uid)
        return left or not ~found.st_mode & (stat.S_IWOTH | stat.S_IXOTH)
    with acting_as(user):
        return os.access(path, os.W_OK | os.X_OK, effective_ids=True)


def read_only(path: str) -> str:
    """`path`, or the first directory above it that is there, where nobody can write in it; else ""."""
    path = nearest(path)  # a link that leads nowhere is none; `real` tells of it
    return path if os.statvfs(path).f_flag & os.ST_RDONLY else ""


def has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def closed(path: str, gid: int | None) -> str:
    """The first directory above `path` that not everybody passes through, but for the role's own; "" without one."""
    parts = path.split("/")
    for above in ("/".join(parts[:count]) for count in range(2, len(parts))):
        if os.path.isdir(above) and not os.stat(above).st_mode & stat.S_IXOTH and not is_roles(above, gid):
            return above
    return ""


def real(path: str) -> str:
    """`path` without the links among the directories above it; "" where there is none."""
    found = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return found if found != path else ""


def lies_on(path: str, mounts: list[dict]) -> dict:
    """The one of `mounts` that `path` lies on: the deepest, of several at one place the last."""
    around = [mount for mount in reversed(mounts) if mount["at"] == path or below(path, mount["at"])]
    return max(around, key=lambda mount: len(mount["at"]), default={"at": "", "type": "", "source": ""})


def below(path: str, top: str) -> bool:
    return path.startswith(f"{top.rstrip('/')}/") and path != top


def account(user: str) -> dict | None:
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        return None
    return {"uid": found.pw_uid, "gid": found.pw_gid}


def exported(files: list[str]) -> list[tuple[str, str]]:
    """(path, "file:line") of every export in `files`, as exports(5) has it."""
    return [(path, place) for path, place, _ in exports_of(files)]


def exports_of(files: list[str]) -> list[tuple[str, str, list[str]]]:
    """(path, "file:line", the words after it) of every export in `files`."""
    found: list[tuple[str, str, list[str]]] = []
    for name in files:
        with open(name, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
        goes_on = False
        for number, line in enumerate(lines, 1):
            text = line.removesuffix("\\")
            one = re.match(r'\s*(?:"([^"]*)"|([^\s#]\S*))', text)
            words, comment, _ = text[one.end() if one and not goes_on else 0 :].partition("#")
            if goes_on:
                found[-1][2].extend(words.split())
            elif one:
                path = unescaped(one[1] or one[2]).rstrip("/") or "/"
                found.append((path, f"{name}:{number}", words.split()))
            # A comment ends with its line; an empty line that goes on has no export to which the next could belong.
            goes_on = line.endswith("\\") and bool(one or goes_on) and not comment
    return found


def clients_of(words: list[str]) -> list[tuple[str, list[str]]]:
    """(client, options) of the words after an export's path; one without a client is everybody's."""
    usual, found = "", []
    for word in words:
        if word.startswith("-"):
            usual = word[1:]
            continue
        client, _, options = word.rstrip(")").partition("(")
        found.append((client or "*", f"{usual},{options}".split(",")))
    return found or [("*", usual.split(","))]


def roots(files: list[str]) -> list[dict]:
    """[{path, place, clients}] of the exports that are the root of NFS 4 for some clients (fsid=0), but for /."""
    found = []
    for path, place, words in exports_of(files):
        clients = []
        for client, options in clients_of(words):
            # The last of each counts.
            told = [one for one in options if one.startswith("fsid=")][-1:]
            if told and told[0] in ("fsid=0", "fsid=root"):
                clients.append(client)
        if clients and path != "/":
            found.append({"path": path, "place": place, "clients": clients})
    return found


def above(files: list[str], path: str, mounts: list[dict]) -> list[dict]:
    """[{path, place, clients}] of the exports of directories above `path` whose options NFS 4 keeps to at `path`.

    Within an export it looks for another one only where something is mounted, and not even there with crossmnt.
    """
    found = []
    for top, place, words in exports_of(files):
        between = [at for at in {mount["at"] for mount in mounts} if below(at, top) and below(path, at)]
        clients = [client for client, options in clients_of(words) if not between or "crossmnt" in options]
        if clients and below(path, top) and all(mount["at"] != path for mount in mounts):
            found.append({"path": top, "place": place, "clients": clients})
    return found


def taken(found: list[dict], port: int = PORT) -> str:
    """The program that listens at the port of NFS, of the host's sockets(); the kernel's own server is none."""
    owners = [
        owner
        for one in found
        if (one["proto"], one["state"], one["port"]) == ("tcp", "LISTEN", port)
        for owner in one["owners"]
    ]
    return "{} (process {})".format(*owners[0]) if owners else ""


def other_nfs(files: list[str]) -> list[str]:
    """The lines of nfs.conf, as "file:line (setting)", by which NFS 4 is not at its port: the last of each."""
    found: dict[str, str] = {}
    for name in files:
        section = ""
        for number, line in enumerate(read(name).splitlines(), 1):
            if head := re.match(r"\s*\[\s*([^\s\]]+)\s*\]", line):
                section = head[1].lower()
            elif section == "nfsd" and (
                one := re.match(r'\s*(vers4|port)\s*=\s*"?([^"#\s]*)', line, re.IGNORECASE)
            ):
                key, value = one[1].lower(), one[2].lower()
                well = value in ("", "2049") if key == "port" else value not in NO
                found[key] = "" if well else f"{name}:{number} ({key}={value})"
    return [one for one in found.values() if one]


def in_fstab(path: str, table: str = "/etc/fstab") -> str:
    """The line of /etc/fstab that has something mounted at `path`, at boot or later, as "file:line (what)"; or ""."""
    for number, line in enumerate(read(table).splitlines(), 1):
        words = line.split()
        if len(words) > 1 and not words[0].startswith("#") and unescaped(words[1]).rstrip("/") == path:
            return f"{table}:{number} ({words[0]})"
    return ""


def unmounted(path: str, mounts: list[dict], table: str = "/etc/fstab") -> str:
    """The line of /etc/fstab for a directory above `path` at which nothing is mounted, and that directory; or "".

    Not of one above the disk that `path` lies on, as cloud-init has it for /mnt, where a machine may have no disk for.
    """
    there, top = {mount["at"] for mount in mounts}, os.path.dirname(path)
    while top != "/" and top not in there:
        if line := in_fstab(top, table):
            return f"{line} at {top}"
        top = os.path.dirname(top)
    return ""


def strange_units(path: str, folder: str = FOLDER) -> list[str]:
    """Units of somebody else's that mount at `path`, where the role's are to be: their files."""
    there = [f"{folder}/{storage_unit(path)}.{kind}" for kind in ("mount", "automount")]
    return [name for name in there if os.path.lexists(name) and not is_ours(name)]


def kernel_has(module: AnsibleModule, name: str, filesystems: str = "/proc/filesystems") -> bool:
    """Whether the running kernel has the file system `name`, or a module for it."""
    with open(filesystems, encoding="ascii") as file:
        if name in file.read().split():
            return True
    modprobe = module.get_bin_path("modprobe", opt_dirs=["/sbin", "/usr/sbin"])
    return bool(modprobe) and module.run_command([modprobe, "--dry-run", "--quiet", name])[0] == 0


def runs(run_command, unit: str) -> bool:
    """Whether a unit runs, or will after a boot."""
    return any(
        run_command(["systemctl", verb, "--quiet", unit])[0] == 0 for verb in ("is-active", "is-enabled")
    )


def served(run_command, note: str, exports: str) -> bool:
    """Whether NFS was served before: by the role's note, which an earlier release did not make beside its exports."""
    if os.path.exists(note) or os.path.exists(exports):
        return read(note).strip() == "served"
    return runs(run_command, "nfs-server.service")


def main() -> None:
    options = {name: {"type": "path", "required": True} for name in ("path", "exports", "before")}
    options["v4_files"] = {"type": "list", "elements": "path", "required": True}
    options["user"] = {"type": "str", "required": True}
    module = AnsibleModule(argument_spec=options, supports_check_mode=True)
    try:
        module.exit_json(changed=False, survey=survey(module))
    except OSError as error:  # as of a mount above it whose server, or program, is gone
        if not error.filename:  # of `ss`, which is no matter of the path
            module.fail_json(msg=str(error))
        module.fail_json(
            msg=f"storage_path: found {error.filename}: {error.strerror}; expected "
            f"to see what is there. Where something is mounted above it, `mount` shows what: mount that anew, or "
            "choose another storage_path."
        )


def survey(module: AnsibleModule) -> dict:
    path, ours = module.params["path"], module.params["exports"]
    user = account(module.params["user"])
    gid = user["gid"] if user else None
    mounts = mounts_at(path)
    units = sorted({where(text) for text in our_units().values()})
    what = place(path, mounts, units)
    looks = what in ("directory", "full") or (what == "mount" and mounts[-1]["type"] not in NETWORK)
    files = [
        name for name in ("/etc/exports", *sorted(glob.glob("/etc/exports.d/*.exports"))) if name != ours
    ]
    files = [name for name in files if os.path.exists(name)]
    exports = exported(files)
    shut = closed(path, gid)
    table = mount_table()  # after a look at what is above it, by which an automount has it mounted
    return {
        "user": module.params["user"],
        "account": user,
        "place": what,
        "writable": not looks or writable(path, module.params["user"] if user else None),
        "read_only": read_only(path) if looks or what == "nothing" else "",
        "parent": os.path.isdir(os.path.dirname(path)) and not is_roles(os.path.dirname(path), gid),
        "closed": shut,
        "real": real(path),
        "disk": lies_on(os.path.dirname(path) if what == "ours" else path, table),
        "mounts": mounts,
        "fstab": in_fstab(path),
        "unmounted": unmounted(path, table),
        "strange_units": strange_units(path),
        "units": units,
        "exports": os.path.exists(ours),
        "others": [where for name, where in exports if name == path],
        "roots": roots(files),
        "above": above(files, path, [mount for mount in table if mount["at"] != path or what == "mount"]),
        "other_nfs": other_nfs(["/etc/nfs.conf", *sorted(glob.glob("/etc/nfs.conf.d/*.conf"))]),
        "taken": taken(sockets(module.run_command)),
        "foreign": bool(exports),
        "served": served(module.run_command, module.params["before"], ours),
        "v4_alone": any(map(os.path.exists, module.params["v4_files"])),
        "rpcbind": any(runs(module.run_command, f"rpcbind.{kind}") for kind in ("socket", "service")),
        "exportfs": bool(module.get_bin_path("exportfs", opt_dirs=["/sbin", "/usr/sbin"])),
        "kernel": {
            "release": os.uname().release,
            "nfs": kernel_has(module, "nfs"),
            "nfsd": kernel_has(module, "nfsd"),
        },
    }


if __name__ == "__main__":
    main()
