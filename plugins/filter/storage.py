"""The shared directory: its units' names, who may mount it, and why a host cannot have it."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from same_files import NETWORK
from storage_units import storage_unit

# Types of file systems that the kernel's NFS server refuses to share as the export stands (exportfs: "requires fsid=",
# "does not support NFS export").
UNSERVED = ("autofs", "nfs", "cifs", "smb3", "9p", "virtiofs", "fuse.", "overlay", "exfat")


def storage_exports(path: str, peers: Iterable[Mapping[str, Any]], account: Mapping[str, int] | None) -> str:
    """The text of the server's exports: `path` for the addresses of `peers`, as the service user `account`.

    `account` is None in check mode on a host that was never touched, where there is no such user yet.
    """
    ids = account or {"uid": "?", "gid": "?"}
    # sync: what a client was told is written lies on the disk. all_squash: everybody there, root too, is the service
    # user here, whatever its number is there.
    options = f"rw,sync,no_subtree_check,all_squash,anonuid={ids['uid']},anongid={ids['gid']}"
    clients = [f"{peer['address']}({options})" for peer in peers]
    # A path without clients would be everybody's.
    line = f"{path} {' '.join(clients)}\n" if clients else ""
    return f"# Written by Trainyard (the role storage): the other hosts of the cluster.\n{line}"


def storage_fault(
    survey: Mapping[str, Any], part: str, path: str, server: str, peers: Iterable[Mapping[str, Any]] = ()
) -> str:
    """Why a host cannot be the `server` or a `client` of the shared directory; "" where it can.

    `survey`: what the module storage_survey found there. `peers`: the other hosts, whose addresses count.
    """
    module = "nfsd" if part == "server" else "nfs"
    if not survey["kernel"][module]:
        return (
            f"storage_server: found a kernel ({survey['kernel']['release']}) that has no {module}; expected one that "
            f"can be {'the server' if part == 'server' else 'a client'} of NFS, as the distribution's can. Boot that "
            "one (a container has its machine's); or leave the group storage_server empty, and nothing is shared."
        )
    if part == "server":
        peers = list(peers)
        return _nfs_fault(survey, path, peers) or _server_fault(survey, path, peers)
    return _client_fault(survey, path, server)


def _nfs_fault(survey: Mapping[str, Any], path: str, peers: list[Mapping[str, Any]]) -> str:
    if survey["taken"]:
        return (
            f"storage_server: found {survey['taken']} at port 2049; expected it to be free for the kernel's NFS "
            "server. End that program, or put another host into the group; or leave the group empty, if all hosts "
            "mount what that one shares."
        )
    if root := _root_of(survey["roots"], peers):
        return (
            f"storage_path: found {root['path']} to be the root of NFS 4 ({root['place']}, fsid=0); expected none but "
            f"/, for the other hosts ask for {path}, and would look for that below {root['path']}. Take fsid=0 out "
            "there, and exportfs -ra (its clients then mount it by its whole path); or leave the group empty."
        )
    if survey["other_nfs"]:
        return (
            f"storage_server: found {' and '.join(survey['other_nfs'])}; expected NFS 4 at port 2049, by which the "
            "other hosts mount the directory. Take that out, and systemctl restart nfs-server; or put another host "
            "into the group."
        )
    return ""


def _root_of(roots: Iterable[Mapping[str, Any]], peers: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first of `roots` that one of the peers is a client of; a pattern or a netgroup may be anybody's."""
    names = {name for peer in peers for name in peer.get("names", [])}

    def concerns(client: str) -> bool:
        if client.startswith("gss/"):  # those who mount by Kerberos, as the other hosts do not
            return False
        try:
            network = ipaddress.ip_network(client, strict=False)
            return any(ipaddress.ip_address(peer["address"]) in network for peer in peers)
        except ValueError:
            return bool({"*", "?", "[", "@"} & {*client}) or bool({client, client.split(".")[0]} & names)

    return next((root for root in roots if peers and any(map(concerns, root["clients"]))), None)


def _server_fault(survey: Mapping[str, Any], path: str, peers: list[Mapping[str, Any]]) -> str:
    disk = survey["disk"]
    served = not disk["type"].startswith(UNSERVED)
    if not served and disk["type"] in ("autofs", *NETWORK):
        return (
            f"storage_path: found {path} mounted from {disk['source']} ({disk['type']}); expected a directory of this "
            "host's own disks, for it is in the group storage_server. Choose another storage_path; or leave the group "
            "empty, if all hosts have that mount anyway."
        )
    if survey["place"] in ("link", "file"):
        return (
            f"storage_path: found {path} to be a {survey['place']}; expected a directory, or nothing. "
            "Give the directory itself, or move what lies there."
        )
    if survey["real"]:
        return _linked(survey, path)
    if not served:
        return (
            f"storage_path: found {path} on {disk['source']} ({disk['type']}, mounted at {disk['at']}); expected a "
            "file system that NFS can share, such as ext4, xfs, btrfs or zfs. Choose another storage_path, of mergerfs "
            "one on a single disk of its own; or put another host into the group."
        )
    if survey["read_only"]:
        return _read_only(survey)
    if survey["closed"]:
        return (
            f"storage_path: found {survey['closed']}, through which not everybody passes; expected that of every "
            f"directory above {path}, for NFS 4 goes down from /, and is nobody until it is there. Type chmod o+x "
            f"{survey['closed']}, or choose another storage_path."
        )
    if not survey["writable"]:
        user = survey["user"]
        cure = f"Type chown {user} {path}, or choose" if survey["account"] else "Choose"
        return (
            f"storage_path: found {path}, where the service user {user} may not write; expected that it may, or "
            f"nothing, and then the directory is made. {cure} another storage_path, such as {path}/shared."
        )
    if survey["fstab"] and survey["place"] != "mount":
        return (
            f"storage_path: found {survey['fstab']} to mount at {path}, and nothing mounted there; expected it to be, "
            f"for else what lies below it would be shared. Type mount {path}, and see why it was not; or take the line "
            "out, and systemctl daemon-reload; or choose another storage_path."
        )
    if survey["unmounted"]:
        return (
            f"storage_path: found {survey['unmounted']}, and nothing mounted there; expected it to be, for else {path} "
            "would be made on the disk below it, and hidden once it is mounted. Mount it, and see why it was not; or "
            "take the line out; or choose another storage_path."
        )
    if survey["others"]:
        return (
            f"storage_path: found {path} exported by {', '.join(survey['others'])}, too; expected this role's export "
            f"alone, for the cluster's hosts. Remove it there{_by_zfs(survey['others'])}, or choose another "
            "storage_path."
        )
    # With the role's own there already it may have worked so, as where users' numbers agree: the role's end tells.
    if not survey["exports"] and (top := _root_of(survey["above"], peers)):
        return (
            f"storage_path: found {top['path']} exported to {', '.join(top['clients'])} ({top['place']}); expected no "
            f"directory above {path} to be exported to the cluster's hosts: NFS 4 comes down from there, and keeps to "
            f"the options of that export. Take the cluster's hosts out of it{_by_zfs([top['place']])}, and "
            f"exportfs -ra; or choose a storage_path that is not below {top['path']}, or where a disk of its own is "
            "mounted."
        )
    return ""


def _by_zfs(places: Iterable[str]) -> str:
    """How an export is changed that does not stay as a file is edited."""
    zfs = any("/zfs.exports:" in place for place in places)
    return (
        " (by sharenfs of its dataset, such as zfs set sharenfs=off tank/data: ZFS writes that file)"
        if zfs
        else ""
    )


def _read_only(survey: Mapping[str, Any]) -> str:
    return (
        f"storage_path: found {survey['read_only']} to be mounted for reading alone; expected a disk to write to. The "
        "kernel does so with a disk whose file system has faults: `dmesg --level=err,crit` says that, and a boot "
        "checks it; else see /etc/fstab, or choose another storage_path."
    )


def _linked(survey: Mapping[str, Any], path: str) -> str:
    return (
        f"storage_path: found {path} to be {survey['real']}, by a link; expected a path without links, for NFS shares "
        f"it by that one, and systemd mounts at no other. Set storage_path to {survey['real']}, where that is the same "
        "on all hosts; or choose another one."
    )


def _client_fault(survey: Mapping[str, Any], path: str, server: str) -> str:
    expected = f"nothing, for {server}'s directory is mounted there"
    if owners := [*filter(None, [survey["fstab"]]), *survey["strange_units"]]:
        return (
            f"storage_path: found {' and '.join(owners)} to mount at {path}; expected {expected}, by units that would "
            "take that one's place. Take it out (and unmount what is there, and systemctl daemon-reload); or choose "
            "another storage_path."
        )
    if survey["place"] == "mount":
        top = survey["mounts"][-1]
        return (
            f"storage_path: found {top['source']} ({top['type']}) mounted at {path}; expected {expected}. "
            "Unmount it, at boot, too (/etc/fstab); or choose another storage_path."
        )
    if survey["place"] == "full":
        return (
            f"storage_path: found files in {path}; expected {expected}. They would be hidden. Move them to {server}, "
            "or elsewhere; or choose another storage_path."
        )
    if survey["place"] in ("link", "file"):
        return (
            f"storage_path: found {path} to be a {survey['place']}; expected {expected}. "
            "Move it, or choose another storage_path."
        )
    if survey["real"]:
        return _linked(survey, path)
    return _read_only(survey) if survey["read_only"] and survey["place"] == "nothing" else ""


def storage_export_failed(done: Mapping[str, Any], path: str) -> bool:
    """Whether `exportfs -ra` left the export of `path` out, by its result.

    It fails by any export as well that is somebody else's, as of a disk that is not there, and goes on with the others.
    """
    said = done.get("stderr_lines") or []
    return done.get("rc", 0) != 0 and (not said or any({path, f"{path}:"} & {*line.split()} for line in said))


class FilterModule:
    def filters(self):
        return {
            "storage_export_failed": storage_export_failed,
            "storage_exports": storage_exports,
            "storage_fault": storage_fault,
            "storage_unit": storage_unit,
        }
