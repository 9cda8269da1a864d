"""The shared directory: names, exports, refusals, and the modules on files. Its mounts need a kernel with NFS."""

import os
import pwd
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import jinja2
import pytest
import yaml

from plugins.filter.storage import storage_export_failed, storage_exports, storage_fault, storage_unit
from plugins.module_utils import storage_units

ROOT = Path(__file__).resolve().parents[2]
PATH = "/srv/trainyard/shared"
PATHS = {
    PATH: "srv-trainyard-shared",
    "/data": "data",
    "/mnt/big-disk/a_b": r"mnt-big\x2ddisk-a_b",
    "/srv/.hidden/.x": "srv-.hidden-.x",
    "/.top": r"\x2etop",
    "/srv/c++@1.2": r"srv-c\x2b\x2b\x401.2",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_unit_bears_the_name_that_systemd_wants(path):
    assert storage_unit(path) == PATHS[path]
    if tool := shutil.which("systemd-escape"):
        done = subprocess.run([tool, "--path", path], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == PATHS[path]


def test_the_peers_alone_may_mount_it_and_all_are_the_service_user():
    peers = [{"address": "10.77.0.12"}, {"address": "10.77.0.13"}]
    comment, line = storage_exports(PATH, peers, {"uid": 998, "gid": 997}).splitlines()
    options = "(rw,sync,no_subtree_check,all_squash,anonuid=998,anongid=997)"
    assert comment.startswith("# Written by Trainyard")
    assert line == f"{PATH} 10.77.0.12{options} 10.77.0.13{options}"


def test_a_cluster_of_one_exports_to_nobody():
    """A line with a path alone would export it to the world."""
    assert PATH not in storage_exports(PATH, [], {"uid": 998, "gid": 997})


@pytest.mark.parametrize(
    ("rc", "lines", "failed"),
    [
        (0, [], False),
        (0, [f"exportfs: {PATH} does not support NFS export"], False),
        (1, [f"exportfs: {PATH} does not support NFS export"], True),
        (1, [f"exportfs: {PATH} requires fsid= for NFS export"], True),
        (1, ["exportfs: Failed to stat /mnt/usb: No such file or directory"], False),
        (1, ["exportfs: Failed to stat /mnt/usb: No such file or directory", f"exportfs: {PATH} x"], True),
        (1, [f"exportfs: Failed to stat {PATH}: No such file or directory"], True),
        (1, ["exportfs: Failed to resolve tv.lan"], False),
        (1, [f"exportfs: {PATH}2 does not support NFS export"], False),
        (1, ['exportfs: /etc/exports:3: unknown keyword "rx"'], False),
        (127, [], True),
    ],
)
def test_an_export_of_somebody_elses_that_fails_is_not_ours(rc, lines, failed):
    """exportfs tells of them all, and fails by any: an old line for a disk that is gone stopped site.yml."""
    assert storage_export_failed({"rc": rc, "stderr_lines": lines}, PATH) is failed
    for name in ("server", "withdraw"):
        tasks = yaml.safe_load((ROOT / f"roles/storage/tasks/{name}.yml").read_text())
        (task,) = [task for task in tasks if task.get("ansible.builtin.command") == "exportfs -ra"]
        assert task["failed_when"] == "__storage_forced | storage_export_failed(storage_path)"


# ---- who is refused ----

GOOD = {
    "user": "trainer",
    "account": {"uid": 998, "gid": 998},
    "place": "nothing",
    "writable": True,
    "read_only": "",
    "parent": False,
    "closed": "",
    "real": "",
    "disk": {"at": "/", "type": "ext4", "source": "/dev/sda1"},
    "mounts": [],
    "fstab": "",
    "unmounted": "",
    "strange_units": [],
    "units": [],
    "exports": False,
    "others": [],
    "roots": [],
    "above": [],
    "taken": "",
    "other_nfs": [],
    "foreign": False,
    "v4_alone": False,
    "rpcbind": False,
    "exportfs": False,
    "served": False,
    "kernel": {"release": "6.1.0-31-amd64", "nfs": True, "nfsd": True},
}
NFS = [{"type": "autofs", "source": "systemd-1"}, {"type": "nfs4", "source": f"10.77.0.11:{PATH}"}]
DISK = [{"type": "ext4", "source": "/dev/sdb1"}]
NAS = [{"type": "nfs4", "source": "nas:/export"}]
FSTAB = "/etc/fstab:7 (nas:/x)"
NO_KERNEL = {"release": "6.18.44", "nfs": False, "nfsd": False}


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("server", {}, ()),
        ("client", {}, ()),
        ("server", {"place": "full"}, ()),  # what is there is shared
        ("server", {"place": "mount", "mounts": DISK}, ()),
        ("server", {"place": "ours", "mounts": NFS, "units": [PATH]}, ()),  # it was a client before
        ("client", {"place": "ours", "mounts": NFS, "units": [PATH]}, ()),
        ("client", {"place": "directory"}, ()),
        ("client", {"others": ["/etc/exports:1"]}, ()),
        (
            "server",
            {"place": "mount", "disk": {"at": PATH, **NAS[-1]}},
            ("mounted from nas:/export (nfs4)", "leave the group empty"),
        ),
        ("server", {"place": "link"}, ("to be a link", "Give the directory itself")),
        ("server", {"others": ["/etc/exports:3"]}, ("exported by /etc/exports:3, too", "Remove it there")),
        (  # which ZFS writes anew
            "server",
            {"others": ["/etc/exports.d/zfs.exports:4"]},
            ("Remove it there (by sharenfs of its dataset, such as zfs set sharenfs=off",),
        ),
        ("client", {"closed": "/srv"}, ()),
        ("server", {"closed": "/data"}, ("found /data, through which not everybody", "chmod o+x /data")),
        ("client", {"place": "directory", "writable": False}, ()),  # root's, below the mount
        ("server", {"place": "full", "writable": False}, ("may not write", f"Type chown trainer {PATH}, or")),
        ("server", {"writable": False, "account": None}, ("may not write", f"such as {PATH}/shared")),
        ("server", {"kernel": NO_KERNEL}, ("a kernel (6.18.44) that has no nfsd", "Boot that one")),
        ("client", {"kernel": NO_KERNEL}, ("a kernel (6.18.44) that has no nfs;", "leave the group")),
        ("client", {"place": "full"}, ("found files in", "Move them to node1")),
        ("client", {"place": "mount", "mounts": DISK}, ("/dev/sdb1 (ext4) mounted", "Unmount it")),
        ("client", {"place": "mount", "mounts": NAS}, ("nas:/export (nfs4) mounted", "Unmount it")),
        ("client", {"place": "file"}, ("to be a file", "Move it")),
        ("client", {"other_nfs": ["/etc/nfs.conf:9 (vers4=n)"]}, ()),
        (
            "server",
            {"other_nfs": ["/etc/nfs.conf:9 (vers4=n)"]},
            ("found /etc/nfs.conf:9 (vers4=n)", "port 2049"),
        ),
        ("client", {"fstab": FSTAB}, (f"found {FSTAB} to mount at {PATH}", "choose another")),
        (
            "client",
            {"place": "ours", "mounts": NFS, "fstab": FSTAB},
            (f"found {FSTAB}", "systemctl daemon-reload"),
        ),
        (
            "client",
            {"strange_units": ["/etc/systemd/system/x.mount"]},
            ("found /etc/systemd/system/x.mount to mount",),
        ),
        ("server", {"place": "mount", "mounts": DISK, "fstab": FSTAB}, ()),
        (
            "server",
            {"place": "directory", "fstab": FSTAB},
            (f"found {FSTAB} to mount", "nothing mounted there"),
        ),
        ("server", {"strange_units": ["/etc/systemd/system/x.mount"]}, ()),
        ("server", {"taken": "ganesha.nfsd (process 7)"}, ("found ganesha.nfsd (process 7) at port 2049",)),
        ("client", {"taken": "ganesha.nfsd (process 7)"}, ()),
        ("server", {"unmounted": f"{FSTAB} at /data"}, (f"found {FSTAB} at /data, and nothing", "Mount it")),
        ("client", {"unmounted": f"{FSTAB} at /data"}, ()),
        ("server", {"real": "/mnt/big/shared"}, ("to be /mnt/big/shared, by a link", "Set storage_path to")),
        ("client", {"real": "/mnt/big/shared"}, ("to be /mnt/big/shared, by a link", "Set storage_path to")),
        # A disk with faults: to give it to the service user would not help.
        (
            "server",
            {"place": "full", "writable": False, "read_only": PATH},
            (f"found {PATH} to be mounted for",),
        ),
        ("server", {"read_only": "/data"}, ("found /data to be mounted for reading alone", "dmesg")),
        ("client", {"read_only": "/data"}, ("found /data to be mounted for reading alone",)),
        ("client", {"place": "directory", "read_only": PATH}, ()),  # it is mounted over
        # A guide's automount for a disk that is not there, a directory within a share.
        ("server", {"disk": {"at": "/data", "type": "autofs", "source": "systemd-1"}}, ("(autofs)",)),
        ("client", {"disk": {"at": "/mnt", "type": "nfs4", "source": "nas:/x"}}, ()),
    ],
)
def test_a_host_that_cannot_take_its_part_is_told_why(part, changes, words):
    fault = storage_fault(GOOD | changes, part, PATH, "node1")
    assert bool(fault) == bool(words), fault
    for word in words:
        assert word in fault
    if fault:
        assert re.match(r"storage_(path|server): found .*; expected .*\. ", fault)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *(
            (kind, "")
            for kind in ("ext4", "xfs", "btrfs", "zfs", "f2fs", "vfat", "fuseblk", "ntfs3", "tmpfs")
        ),
        *((kind, "") for kind in ("ceph", "lustre", "beegfs", "gpfs", "gfs2")),  # served again, if it must be
        *((kind, "leave the group empty") for kind in ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs")),
        *((kind, "leave the group empty") for kind in ("fuse.glusterfs", "fuse.ceph-fuse", "fuse.mfs")),
        *((kind, "put another host") for kind in ("overlay", "exfat", "virtiofs", "fuse.mergerfs")),
        *(
            (kind, "put another host")
            for kind in ("fuse.rclone", "fuse.bindfs", "fuse.unionfs", "fuse.lxcfs")
        ),
    ],
)
def test_a_server_whose_disk_nfs_cannot_share_is_refused(kind, words):
    """Else exportfs said so, when all hosts were changed."""
    fault = storage_fault(GOOD | {"disk": {"at": "/d", "type": kind, "source": "s"}}, "server", PATH, "node1")
    assert bool(fault) is bool(words) and words in fault
    assert not fault or (f"found {PATH} " in fault and f"s ({kind}" in fault)


@pytest.mark.parametrize(
    ("clients", "part", "refused"),
    [
        (["10.77.0.0/24"], "server", True),
        (["192.168.1.9", "10.77.0.0/255.255.255.0"], "server", True),
        (["*"], "server", True),
        (["*.lan"], "server", True),  # may be theirs
        (["node2"], "server", True),
        (["node2.lan"], "server", True),
        (["node?"], "server", True),
        (["@hosts"], "server", True),
        (["tv.lan", "nas"], "server", False),
        (["192.168.1.0/24", "fd00::/8"], "server", False),  # theirs is another root
        (["gss/krb5i"], "server", False),  # as in the example of Debian's /etc/exports
        (["gss/krb5", "*"], "server", True),
        (["*"], "client", False),
    ],
)
def test_a_server_whose_nfs_begins_elsewhere_is_refused(clients, part, refused):
    """As of old in guides; the other hosts would not find the directory, after all else was set up."""
    survey = GOOD | {"roots": [{"path": "/srv/nfs4", "place": "/etc/exports:3", "clients": clients}]}
    peers = [{"address": "10.77.0.12", "names": ["node2"]}]
    fault = storage_fault(survey, part, PATH, "node1", peers)
    assert ("found /srv/nfs4 to be the root of NFS 4 (/etc/exports:3, fsid=0)" in fault) is refused
    assert storage_fault(survey, part, PATH, "node1", []) == ""  # nobody mounts it
    fault = storage_fault(survey | {"roots": [], "above": survey["roots"]}, part, PATH, "node1", peers)
    assert ("found /srv/nfs4 exported to" in fault and "(/etc/exports:3); expected" in fault) is refused
    survey = survey | {"roots": [], "above": survey["roots"], "exports": True}
    assert storage_fault(survey, part, PATH, "node1", peers) == ""  # it has been shared from there before
    zfs = {"path": "/srv", "place": "/etc/exports.d/zfs.exports:4", "clients": clients}
    fault = storage_fault(GOOD | {"above": [zfs]}, part, PATH, "node1", peers)
    assert ("hosts out of it (by sharenfs of its dataset" in fault) is refused
    tasks = (ROOT / "roles/storage/tasks/precheck.yml").read_text()
    assert "storage_fault(_storage_part, storage_path, _storage_server, _storage_peers)" in tasks


# ---- what is looked at ----


@pytest.fixture(scope="module")
def survey(load_module):
    return load_module("storage_survey")


def test_what_lies_at_the_path_is_a_word(survey, tmp_path):
    assert survey.place(str(tmp_path / "none" / "x"), [], []) == "nothing"
    assert survey.place(str(tmp_path), [], []) == "directory"
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    assert survey.place(str(tmp_path), [], []) == "full"
    assert survey.place(str(tmp_path / "file"), [], []) == "file"
    assert survey.place(str(tmp_path / "link"), [], []) == "link"


def test_who_may_write_is_asked_as_the_service_user(survey):
    with tempfile.TemporaryDirectory() as place:  # pytest's own are below one that is closed
        os.chmod(place, 0o755)
        me, other = ("root", "nobody") if os.geteuid() == 0 else (pwd.getpwuid(os.geteuid()).pw_name, None)
        assert survey.writable(place, me)
        assert not survey.writable(place, other)
        assert not survey.writable(place, None)
        if os.geteuid() == 0:  # as `reset.yml` leaves it
            nobodys = next(uid for uid in range(54321, 60000) if not survey.has_name(uid))
            os.chown(place, nobodys, nobodys)
            assert not survey.writable(place, None)  # as of a disk from another machine
            os.chmod(place, 0o2770)
            assert survey.writable(place, None) and not survey.writable(place, other)
        os.chmod(place, 0o1777)
        assert survey.writable(place, other)
        assert survey.writable(place, None)


def test_a_mount_is_ours_by_its_unit_and_its_kind(survey):
    assert survey.place(PATH, NFS, [PATH]) == "ours"
    assert survey.place(PATH, NFS, []) == "mount"
    assert survey.place(PATH, NFS, ["/srv/else"]) == "mount"
    assert survey.place(PATH, [*NFS, *DISK], [PATH]) == "mount"  # somebody's over it


def test_the_mount_table_is_read_without_a_look_at_the_mounts(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 0:41 / {PATH} rw,relatime shared:1 - autofs systemd-1 rw,fd=51\n"
        f"3 2 0:52 / {PATH} rw,relatime shared:2 - nfs4 10.77.0.11:{PATH} rw,vers=4.2\n"
        f"4 1 8:2 / {PATH}2 rw - ext4 /dev/sdb1 rw\n"
        "5 1 8:2 / /with\\040space rw master:7 propagate_from:2 - ext4 /dev/sdc1 rw\n"
    )
    assert storage_units.mounts_at(PATH, str(table)) == [{"at": PATH, **mount} for mount in NFS]
    found = [{"at": "/with space", "type": "ext4", "source": "/dev/sdc1"}]
    assert storage_units.mounts_at("/with space", str(table)) == found
    assert storage_units.mounts_at("/srv", str(table)) == []


def test_exports_of_others_are_found_with_their_line(survey, tmp_path):
    file = tmp_path / "exports"
    file.write_text(f"# {PATH} *\n\n/home 10.0.0.0/8(rw)\n{PATH}/ *(ro) # mine\n")
    assert survey.exported([str(file)]) == [("/home", f"{file}:3"), (PATH, f"{file}:4")]


def test_exports_are_read_as_exports_has_them(survey, tmp_path):
    file = tmp_path / "exports"
    lines = [
        f'  "{PATH}" 10.0.0.0/8(rw)',
        "/my\\040data -sync 10.0.0.1 \\",
        f"  {PATH}/x(ro) \\",
        "  10.0.0.3",
        "# x",
    ]
    file.write_text("\n".join([*lines, '"/a b"\t*(ro)', f"{PATH}\\", "  *(ro)"]))
    assert survey.exported([str(file)]) == [
        (PATH, f"{file}:1"),
        ("/my data", f"{file}:2"),
        ("/a b", f"{file}:6"),
        (PATH, f"{file}:7"),
    ]


@pytest.mark.parametrize("before", ["\\", " \\", "# /old *(ro) \\"])
def test_a_line_without_an_export_does_not_go_on(survey, tmp_path, before):
    """Else the next one's path was a client of the export above, and nobody saw it."""
    file = tmp_path / "exports"
    file.write_text(f"/a *(ro)\n{before}\n/b \\\n  \\\n  *(rw,fsid=0)\n{before}\n{before}\n/c *\n")
    assert survey.exports_of([str(file)]) == [
        ("/a", f"{file}:1", ["*(ro)"]),
        ("/b", f"{file}:3", ["*(rw,fsid=0)"]),
        ("/c", f"{file}:8", ["*"]),
    ]


def test_a_comment_ends_with_its_line(survey, tmp_path):
    file = tmp_path / "exports"
    file.write_text('/a h(ro) # x \\\n/b h(rw)\n"/c#d" h(ro) \\\n # h2(ro,fsid=0)\n/e *\n')
    assert survey.exports_of([str(file)]) == [
        ("/a", f"{file}:1", ["h(ro)"]),
        ("/b", f"{file}:2", ["h(rw)"]),
        ("/c#d", f"{file}:3", ["h(ro)"]),
        ("/e", f"{file}:5", ["*"]),
    ]


def test_which_exports_are_the_root_of_nfs_4(survey, tmp_path):
    file = tmp_path / "exports"
    file.write_text(
        "/srv/nfs4 gss/krb5i(rw,sync,fsid=0,crossmnt) 10.0.0.0/8(ro,fsid=7) \\\n 10.1.0.1(fsid=root)\n"
        "/a -ro,fsid=0 x y(fsid=3) # (fsid=0)\n/b (ro,fsid=0)\n/c *(rw,no_subtree_check)\n/ *(fsid=0)\n"
        "# /d *(fsid=0)\n"
    )
    assert survey.roots([str(file)]) == [
        {"path": "/srv/nfs4", "place": f"{file}:1", "clients": ["gss/krb5i", "10.1.0.1"]},
        {"path": "/a", "place": f"{file}:3", "clients": ["x"]},
        {"path": "/b", "place": f"{file}:4", "clients": ["*"]},
    ]


def mounted(*places):
    return [{"at": at, "type": kind, "source": "s"} for at, kind in places]


@pytest.mark.parametrize(
    ("line", "at", "clients"),
    [
        ("/srv *(ro)", (), ["*"]),
        ("/srv/ 10.0.0.0/8(rw,no_root_squash) nas(ro)", (), ["10.0.0.0/8", "nas"]),
        ("/ *(ro,fsid=0,crossmnt)", (), ["*"]),
        ("/srv/trainyard -ro a b(rw)", (), ["a", "b"]),
        ('"/srv" (ro)', (), ["*"]),
        ("/srv", (), ["*"]),
        ("/srv -ro", (), ["*"]),
        ("/srv *(ro)", ("/mnt", "/srv", "/srv/trainyard/sha"), ["*"]),  # mounted elsewhere
        ("/srv *(ro)", (PATH,), []),  # a disk of its own: its export begins there
        ("/srv *(ro,crossmnt)", (PATH,), []),
        ("/srv *(ro)", ("/srv/trainyard",), []),
        ("/srv *(ro,crossmnt) x(ro)", ("/srv/trainyard",), ["*"]),
        ("/srv -crossmnt x", ("/srv/trainyard",), ["x"]),
        ("/ *(ro,fsid=0)", ("/srv",), []),
        ("/sr *(ro)", (), []),
        ("/srv/trainyard/shared2 *(ro)", (), []),
        ("/srv/trainyard/shared/models *(ro)", (), []),
        (f"{PATH} *(ro)", (), []),  # told of by itself
        ("# /srv *(ro)", (), []),
    ],
)
def test_exports_of_what_is_above_count_unless_a_mount_is_between(survey, tmp_path, line, at, clients):
    """The kernel looks for another export within one only at a mount; else a client gets the upper one's options."""
    (tmp_path / "exports").write_text(f"{line}\n")
    mounts = mounted(("/", "ext4"), *((place, "xfs") for place in at))
    found = survey.above([str(tmp_path / "exports")], PATH, mounts)
    assert [client for one in found for client in one["clients"]] == clients


@pytest.mark.parametrize(
    ("path", "at"),
    [
        ("/", "/"),
        (PATH, "/srv"),
        ("/srv", "/srv"),
        ("/srv2/x", "/"),
        ("/mnt/nas/a b/c", "/mnt/nas/a b"),
        ("/mnt/nas/x", "/mnt/nas"),
    ],
)
def test_which_disk_a_path_lies_on_is_known_by_the_mount_table(survey, path, at):
    table = mounted(("/", "rootfs"), ("/", "ext4"), ("/srv", "autofs"), ("/srv", "xfs"), ("/mnt/nas", "nfs4"))
    table += mounted(("/mnt/nas/a b", "fuse.mergerfs"))
    found = survey.lies_on(path, table)
    assert found == [mount for mount in table if mount["at"] == at][-1]


def test_a_line_of_fstab_for_what_is_above_and_not_mounted_is_seen(survey, tmp_path):
    """A disk with nofail that did not come up: the shared directory would be made on the system's own."""
    table = tmp_path / "fstab"
    table.write_text(
        "UUID=1 / ext4\nUUID=2 /data ext4 nofail\nUUID=3 none swap sw\nnas:/x /data/shared/x nfs\n"
    )
    root, disk = mounted(("/", "ext4")), mounted(("/", "ext4"), ("/data", "ext4"))
    assert survey.unmounted("/data/shared", root, str(table)) == f"{table}:2 (UUID=2) at /data"
    assert survey.unmounted("/data/shared", disk, str(table)) == ""
    assert survey.unmounted("/data", root, str(table)) == ""  # told of by itself
    assert survey.unmounted("/srv/shared", root, str(table)) == ""
    # As cloud-init writes it for a disk that some machines have: what is mounted below it is no less there.
    table.write_text("UUID=1 / ext4\n/dev/disk/cloud/resource-part1 /mnt auto nofail,x-systemd.after=x\n")
    within = mounted(("/", "ext4"), ("/mnt/big", "ext4"))
    assert survey.unmounted("/mnt/big/a/shared", within, str(table)) == ""
    assert survey.unmounted("/mnt/other/shared", within, str(table)).endswith("at /mnt")


def test_a_disk_for_reading_alone_is_seen(survey, tmp_path, monkeypatch):
    assert survey.read_only(f"{tmp_path}/a/b") == ""
    flags = type("Flags", (), {"f_flag": os.ST_RDONLY})
    monkeypatch.setattr(survey.os, "statvfs", lambda path: flags)
    assert survey.read_only(f"{tmp_path}/a/b") == survey.read_only(str(tmp_path)) == str(tmp_path)


def test_a_link_that_leads_nowhere_is_told_as_a_link(survey, tmp_path):
    """The disk that /srv leads to is not there."""
    (tmp_path / "srv").symlink_to("/nowhere/at/all")
    assert survey.read_only(f"{tmp_path}/srv/shared") == ""
    assert survey.real(f"{tmp_path}/srv/shared") == "/nowhere/at/all/shared"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(5, "Input/output error", "/data"),
            "storage_path: found /data: Input/output error; expected to",
        ),
        (OSError("`ss` failed: Permission denied"), "`ss` failed: Permission denied"),
    ],
)
def test_what_cannot_be_looked_at_is_named(survey, monkeypatch, error, words):
    class Module:
        def __init__(self, **given):
            pass

        def exit_json(self, **found):
            pass

        def fail_json(self, msg):
            raise SystemExit(msg)

    def fails(module):
        raise error

    monkeypatch.setattr(survey, "AnsibleModule", Module)
    monkeypatch.setattr(survey, "survey", fails)
    with pytest.raises(SystemExit) as told:
        survey.main()
    assert str(told.value).startswith(words)
    assert ("storage_path" in str(told.value)) is bool(error.filename)


def test_a_link_above_the_path_is_seen(survey, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    assert survey.real(f"{tmp_path}/data/a/shared") == f"{tmp_path}/disk/a/shared"
    assert survey.real(f"{tmp_path}/disk/a/shared") == survey.real(f"{tmp_path}/data") == ""


def test_another_server_at_the_port_of_nfs_is_seen(survey):
    """NFS-Ganesha, or one in a container; the kernel's own has no process."""

    def at(port, owners, state="LISTEN"):
        return {"proto": "tcp", "state": state, "port": port, "owners": owners}

    kernels = [at(2049, []), at(22, [("sshd", 1)]), at(2049, [("python3", 9)], "ESTAB")]
    assert survey.taken(kernels) == ""
    assert survey.taken([*kernels, at(2049, [("ganesha.nfsd", 7)])]) == "ganesha.nfsd (process 7)"


def test_what_cannot_be_looked_at_is_told_with_a_cure(run_module, tmp_path):
    """A stale handle, sshfs without its program; here, links that lead nowhere."""
    (tmp_path / "loop").symlink_to("loop")
    asked = {
        "path": f"{tmp_path}/loop/shared",
        "user": "root",
        "exports": "/x",
        "before": "/x",
        "v4_files": [],
    }
    said = run_module("storage_survey", **asked)["msg"]
    assert said.startswith(
        f"storage_path: found {asked['path']}: Too many levels of symbolic links; expected "
    )
    assert "`mount` shows what" in said


@pytest.mark.parametrize(
    ("text", "more", "found"),
    [  # as nfsconf of nfs-utils 2.6.2 reads them
        ("[nfsd]\n# vers4=n\n", "", []),
        ("[nfsd]\n vers4 = no # c\n", "", ["a:2 (vers4=no)"]),
        ('[ NFSD ]\n\nVERS4="n"\nport=2050\n', "", ["a:3 (vers4=n)", "a:4 (port=2050)"]),
        ("[nfsd]\nvers4=n\nport=2049\n", "[nfsd]\nvers4=y\nvers3=n\n", []),
        ("[nfsd]\nvers4=y\n", "[nfsd]\nvers4=off\n", ["b:2 (vers4=off)"]),
        ("[mountd]\nport=892\n[nfsd]\nvers4.2=n\n", "vers4=n\n", []),
    ],
)
def test_a_server_that_speaks_no_nfs_4_at_its_port_is_known_by_nfs_conf(survey, tmp_path, text, more, found):
    (tmp_path / "a").write_text(text)
    (tmp_path / "b").write_text(more)
    files = [str(tmp_path / name) for name in ("a", "b", "none")]
    assert survey.other_nfs(files) == [f"{tmp_path}/{one}" for one in found]


def test_what_the_owner_has_mounted_there_at_boot_is_seen(survey, tmp_path):
    """A unit of ours would take its place, unsaid: those of /etc come before what is made of /etc/fstab."""
    table = tmp_path / "fstab"
    table.write_text(
        "# nas:/y /srv/trainyard/shared nfs\nUUID=1-2 / ext4 defaults 0 1\n\nbroken\n"
        f"nas:/x\t{PATH}/  nfs noauto,x-systemd.automount 0 0\nLABEL=b /with\\040blank xfs\n"
    )
    assert survey.in_fstab(PATH, str(table)) == f"{table}:5 (nas:/x)"
    assert survey.in_fstab("/with blank", str(table)) == f"{table}:6 (LABEL=b)"
    assert survey.in_fstab("/srv", str(table)) == survey.in_fstab("/srv", f"{table}.none") == ""
    units = [tmp_path / f"srv-trainyard-shared.{kind}" for kind in ("mount", "automount")]
    assert survey.strange_units(PATH, str(tmp_path)) == []
    units[0].write_text(f"[Mount]\nWhat=nas:/x\nWhere={PATH}\n")
    units[1].symlink_to("/dev/null")  # masked
    assert survey.strange_units(PATH, str(tmp_path)) == [*map(str, units)]
    units[0].write_text(f"{storage_units.MARK}.\n[Mount]\n")
    assert survey.strange_units(PATH, str(tmp_path)) == [str(units[1])]


@pytest.mark.parametrize("enabled", [True, False])
def test_who_served_before_is_noted_once(survey, tmp_path, enabled):
    """Ours has the server run: what is noted stays, and an earlier release's exports without a note tell nothing."""
    note, exports = tmp_path / "before", tmp_path / "exports"

    def served(runs):
        return survey.served(lambda words: (0 if runs else 3, "", ""), str(note), str(exports))

    assert served(enabled) is enabled
    exports.write_text("")
    assert served(True) is False
    for text in ("served", "not served"):
        note.write_text(f"{text}\n")
        assert {served(True), served(False)} == {text == "served"}
    exports.unlink()  # ended before they were written
    assert served(True) is False


def test_a_kernel_without_it_and_without_a_module_for_it_has_it_not(survey, tmp_path):
    class Module:
        def __init__(self, program, rc=0):
            self.program, self.rc = program, rc

        def get_bin_path(self, name, opt_dirs):
            return self.program

        def run_command(self, command):
            return self.rc, "", ""

    table = tmp_path / "filesystems"
    table.write_text("nodev\tproc\n\text4\nnodev\tnfsd\n")
    assert survey.kernel_has(Module(None), "nfsd", str(table))
    assert not survey.kernel_has(Module(None), "nfs", str(table))
    assert not survey.kernel_has(Module("/sbin/modprobe", rc=1), "nfs", str(table))
    assert survey.kernel_has(Module("/sbin/modprobe"), "nfs", str(table))


# ---- units ----


def rendered(name, **variables):
    folder = ROOT / "roles/storage/templates"
    template = jinja2.Template((folder / name).read_text(), undefined=jinja2.StrictUndefined)
    values = {"storage_path": PATH, "_storage_server": "node1", "_storage_address": "10.77.0.11"}
    return template.render(**values | variables) + "\n"


def test_the_roles_units_are_known_by_their_first_line(tmp_path):
    mount = rendered("shared.mount.j2")
    (tmp_path / "srv-trainyard-shared.mount").write_text(mount)
    (tmp_path / "srv-trainyard-shared.automount").write_text(rendered("shared.automount.j2"))
    (tmp_path / "data.mount").write_text("[Mount]\nWhere=/data\n")
    (tmp_path / "masked.mount").symlink_to("/dev/null")
    (tmp_path / "trainyard.service").write_text(mount)
    found = storage_units.our_units(str(tmp_path))
    assert list(found) == ["srv-trainyard-shared.automount", "srv-trainyard-shared.mount"]
    assert {storage_units.where(text) for text in found.values()} == {PATH}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
@pytest.mark.parametrize("path", PATHS)
def test_systemd_takes_the_units(tmp_path, path):
    files = []
    for kind in ("mount", "automount"):
        files.append(tmp_path / f"{PATHS[path]}.{kind}")
        files[-1].write_text(rendered(f"shared.{kind}.j2", storage_path=path))
    done = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if tmp_path.name in line or PATHS[path] in line]
    assert said == [] and done.returncode == 0, done.stderr
    files[0].write_text(files[0].read_text().replace(f"Where={path}", "Where=/elsewhere"))
    broken = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    assert broken.returncode != 0 or "doesn't match unit name" in broken.stderr


def test_who_uses_the_directory_is_named(load_module, tmp_path):
    users_of = load_module("storage_mount").users_of
    assert users_of(str(tmp_path)) == []
    with open(tmp_path / "open", "w"):
        (user,) = users_of(str(tmp_path))
    assert user.endswith(f"({os.getpid()})")
    assert users_of(str(tmp_path / "ope")) == []


def test_what_nobody_passes_through_above_the_directory_is_found(survey):
    with tempfile.TemporaryDirectory() as folder:  # all of pytest's are closed
        os.chmod(folder, 0o751)
        os.makedirs(f"{folder}/a/b")
        assert survey.closed(f"{folder}/a/b/c", None) == ""
        os.chmod(f"{folder}/a", 0o750)
        assert survey.closed(f"{folder}/a/b/c", None) == f"{folder}/a"
        assert survey.closed(f"{folder}/a", None) == ""  # itself does not count
        if os.geteuid() == 0:
            assert survey.closed(f"{folder}/a/b/c", 0) == ""  # the role's own


def test_a_directory_is_the_roles_by_owner_and_group(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, whose directory it must be")
    assert storage_units.is_roles(str(tmp_path), 0)
    assert not storage_units.is_roles(str(tmp_path), 1)
    assert not storage_units.is_roles(str(tmp_path), None)
    assert not storage_units.is_roles(str(tmp_path / "none"), 0)


# ---- the word ----


@pytest.fixture(scope="module")
def probe(load_module):
    return load_module("storage_probe")


def test_the_word_is_written_read_and_gone(probe, tmp_path):
    place = str(tmp_path)
    probe.written(place, "old")
    assert probe.written(place, "word") == ""
    assert os.listdir(place) == [".trainyard-probe-word"]  # what was left of an earlier one is gone
    assert probe.readable(place, "word") == ""
    assert os.listdir(place) == [".trainyard-probe-word"]
    (tmp_path / ".trainyard-probe-word").write_text("other")
    assert probe.readable(place, "word") == "'other' in it"
    probe.removed(place, "word")
    assert os.listdir(place) == []


def test_what_hangs_or_fails_in_the_process_aside_is_told(probe, tmp_path):
    me = __import__("pwd").getpwuid(os.geteuid()).pw_name
    started = time.monotonic()
    said = probe.aside(lambda *_: time.sleep(60), me, str(tmp_path), "w", 0.3)
    assert said == "no answer within 0 s" and time.monotonic() - started < 10
    said = probe.aside(probe.readable, me, str(tmp_path), "w", 10)
    assert said == f"No such file or directory ({tmp_path}/.trainyard-probe-w)"
    assert probe.aside(lambda *_: 1 / 0, me, str(tmp_path), "w", 10) == "a fault of this module"
    assert probe.aside(probe.written, "no-such-user", str(tmp_path), "w", 10) == "no user no-such-user"
    assert probe.aside(probe.written, me, str(tmp_path), "w", 10) == ""


def test_the_servers_port_is_asked_first(probe, monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(probe, "PORT", server.getsockname()[1])
        thread = threading.Thread(target=server.accept)
        thread.start()
        assert probe.knock("127.0.0.1") == ("127.0.0.1", "")
        thread.join()
    assert probe.knock("127.0.0.1") == ("", "refused")


def test_a_fault_names_host_address_and_cure(probe):
    said = probe.unreachable("refused", "node1", "10.77.0.11")
    assert "found no way to node1 (10.77.0.11), port 2049: refused" in said
    assert "On node1, `systemctl status nfs-server`" in said
    assert "playbooks/preflight.yml" in probe.unreachable("no answer", "node1", "10.77.0.11")
    where = ("10.99.0.12", "node1", "10.77.0.11", PATH)
    said = probe.unreadable("No such device", *where, "mount.nfs: access denied by server")
    assert "This host comes from 10.99.0.12" in said and "cluster_address" in said
    said = probe.unreadable("'x' in it", *where, "")
    assert f"expected to read in {PATH} what node1 (10.77.0.11) has written" in said and "exportfs -v" in said


# ---- the role ----


def test_the_roles_words_agree_with_its_modules():
    """Marks and names that stand in two places."""
    for template in (ROOT / "roles/storage/templates").glob("*.j2"):
        assert template.read_text().startswith(f"{storage_units.MARK}.\n")
    variables = yaml.safe_load((ROOT / "roles/storage/vars/main.yml").read_text())
    # The last to go, of which the survey knows that there is something to undo.
    file, notes = variables["_storage_made_files"][-2:]
    assert file["path"] == "{{ _storage_v4_file }}" and notes["path"] == "{{ _storage_notes }}"
    units = [unit["name"] for unit in variables["_storage_masks"]]
    assert units[0] == max(units)  # its note is made first, and goes last
    assert variables["_storage_made"].endswith(" + _storage_made_files }}")
