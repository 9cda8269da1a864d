#!/usr/bin/python
"""What the role identity wants to know of a host, by one look."""

from __future__ import annotations

DOCUMENTATION = """
module: identity_survey
short_description: A host's names, its machine-id, its service user with its key, and what lies at that user's home
description:
  - Changes nothing. Where all is as it is wanted, this one look is all that the roles identity and ssh_mesh take; those
    that come later go by it, too.
options:
  hosts:
    description: As the module etc_hosts has them.
    type: list
    elements: dict
    default: []
    options:
      name: {type: str, description: "The inventory's name for it"}
      address: {type: str, required: true, description: IPv4 address}
      names: {type: list, elements: str, required: true, description: "The names, the canonical one first"}
  own: {type: str, default: "", description: "Which of O(hosts) this one is, by the inventory's name."}
  taken: {type: list, elements: str, default: [], description: As the module machine_id has them.}
  user:
    description: The service user's name, which is its group's, too.
    type: str
    required: true
  home:
    description: The service user's home.
    type: path
    required: true
  login:
    description: The user that Ansible logs in as.
    type: str
    required: true
"""

EXAMPLES = """
- name: See what the host has
  identity_survey:
    user: trainyard
    home: /var/lib/trainyard
    login: "{{ ansible_facts['user_id'] }}"
  register: __identity_survey
"""

RETURN = """
survey:
  description: What was found.
  returned: always
  type: dict
  contains:
    account: {description: "The user's uid, gid, comment, home and shell; null without one.", type: dict}
    group: {description: "The gid of the user's group; null without one.", type: int}
    login_lacks:
      description: Groups that the login user is to be in and is not, the user's and that which reads the journal.
      type: list
    login_here: {description: "Whether the login user is one of /etc/passwd; else a directory has it.", type: bool}
    place:
      description: >-
        What lies at the home: whether that is a directory, its owner (its uid where that has no name), uid, gid
        and mode; null where nothing is.
      type: dict
    disk: {description: "What the home is on a disk of the network; empty where it is on one of the host's.", type: str}
    host_names: {description: "The host's name now, and at its next boot.", type: list}
    named_by: {description: "Programs that run here, and know the machine by its host name, sorted.", type: list}
    hosts:
      description: "O(hosts), with the full name of this one first, where its /etc/hosts alone has one."
      type: list
    hosts_lacking:
      description: "/etc/hosts, and cloud-init's template of it where one is, which lack these hosts, or contradict."
      type: list
      elements: path
    machine_id: {description: The machine-id., type: str}
    machine_id_stands: {description: "Whether it is one, and not in O(taken).", type: bool}
    public_key: {description: "The service user's public key, as type and base64; empty if there is none.", type: str}
    cloud_init: {description: Whether cloud-init is there., type: bool}
    init: {description: "The name of the first process, where that is not systemd.", type: str}
    etcd_unit: {description: "The unit of the memory of runs (roles/etcd); empty without one.", type: str}
    units_up:
      description: "Those of Trainyard's units that run, will at boot, and are loaded as their files are."
      type: list
    kept_awake: {description: "Whether a site.yml that installs, or was killed then, keeps it awake.", type: bool}
    groups: {description: "The groups that the user is in, by name; none without one.", type: list}
    sshd:
      description: >-
        Which of sshd's settings hold for the user who comes from the last of O(hosts), by sshd's own names, the values
        of each as words; empty without sshd, and with fewer than two hosts.
      type: dict
"""

import contextlib
import glob
import grp
import os
import pwd
import re
import socket
import stat
from collections.abc import Callable

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_identity import (
    HOST,
    TEMPLATE,
    hosts_file,
    key_of,
    needs_new,
    public_key,
    stale_copy,
    with_full_name,
)
from ansible.module_utils.host_survey import ssh_session, sshd_asked
from ansible.module_utils.managed_block import endless, read
from ansible.module_utils.same_files import on_network

# What decides on who gets in by a key.
SSHD = (
    *("allowgroups", "allowusers", "denygroups", "denyusers"),
    *("authenticationmethods", "authorizedkeysfile", "pubkeyauthentication", "pubkeyacceptedalgorithms"),
    *("chrootdirectory", "forcecommand"),
)
# Programs to which the machine is another one under another name, or none: by their process's name, whose they are.
BY_NAME = {
    **dict.fromkeys(("kubelet", "k3s-server", "k3s-agent", "kubelite"), "Kubernetes"),
    **dict.fromkeys(("slurmd", "slurmctld"), "Slurm"),
    **dict.fromkeys(("ceph-mon", "ceph-osd"), "Ceph"),
    "pmxcfs": "Proxmox VE",
    "nova-compute": "OpenStack",
    "pbs_mom": "PBS",
}
# That the roles etcd and trainer have running wherever they put them.
UNITS = ("trainyard-etcd.service", "trainyard-tell.path")
JOURNAL = "systemd-journal"  # a launcher speaks into the journal, and logs.yml reads it without root


def account(user: str) -> dict | None:
    """The user's line in passwd, wherever that comes from."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return None
    return {
        "uid": entry.pw_uid,
        "gid": entry.pw_gid,
        "comment": entry.pw_gecos,
        "home": entry.pw_dir,
        "shell": entry.pw_shell,
    }


NEW = ("lost+found", ".bash_logout", ".bashrc", ".profile")


def place(path: str) -> dict | None:
    """What lies at `path`; a link is none of the things that a home can be."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    return {
        "directory": stat.S_ISDIR(found.st_mode),
        "owner": owner,
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mode": f"{stat.S_IMODE(found.st_mode):04o}",
        "holds": held(path) if stat.S_ISDIR(found.st_mode) else "",
    }


def held(path: str) -> str:
    """Names of what is in a directory, two at most; "" for no more than a new disk or a new user's home has."""
    names = []
    with (
        contextlib.suppress(PermissionError),
        os.scandir(path) as entries,
    ):  # root is nobody on some network disks
        for one in sorted(entries, key=lambda entry: entry.name):
            # As is one that another disk is mounted at.
            empty = one.is_dir(follow_symlinks=False) and not {*os.listdir(one.path)} - {*NEW}
            if one.name not in NEW and not empty:
                names.append(one.name)
    return ", ".join([*names[:2], *(["…"] if len(names) > 2 else [])])


def group_of(user: str) -> int | None:
    """The gid of the group `user`, None without one."""
    try:
        return grp.getgrnam(user).gr_gid
    except KeyError:
        return None


def groups_of(user: str) -> list[str]:
    """The names of all groups that the user is in; none without one."""
    try:
        numbers = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except KeyError:
        return []
    found = []
    for number in numbers:
        with contextlib.suppress(KeyError):
            found.append(grp.getgrgid(number).gr_name)
    return found


def lacks(login: str, group: str) -> bool:
    """Whether `login` may not what the group may; root may anyway, and where there is none it is not lacking."""
    try:
        found = grp.getgrnam(group)
    except KeyError:
        return False
    return login != "root" and login not in found.gr_mem and pwd.getpwnam(login).pw_gid != found.gr_gid


def hosts_lacking(hosts: list[dict], hosts_path: str = "/etc/hosts", template: str = TEMPLATE) -> list[str]:
    """The files of which the module etc_hosts would have something to do, or to say."""
    there = [hosts_path, *([template] if os.path.exists(template) else [])]
    return [path for path in there if hosts_file(text := read(path), hosts) != (text, [])]


def own_key(module: AnsibleModule, user: str, home: str) -> str:
    """The user's public key at the home that it is to have, or "" while it has none there."""

    def as_user(*command: str) -> str:
        return module.run_command(["runuser", "-u", user, "--", *command], cwd="/")[1]

    try:
        key = key_of(user)
        wanted = os.path.join(home, os.path.relpath(key, pwd.getpwnam(user).pw_dir))
        return public_key(as_user, wanted) if os.path.exists(wanted) else ""
    except KeyError:
        return ""


def sshd(module: AnsibleModule, user: str, hosts: list[dict], own: str = "") -> dict[str, list[str]]:
    """As `sshd -T` tells them, of the port by which the controller comes. own: this one of `hosts`, by its name."""
    program = module.get_bin_path("sshd", opt_dirs=["/usr/sbin"])
    if not program or len(hosts) < 2:
        return {}
    address = hosts[-1]["address"]
    here = next((host["address"] for host in hosts if own and host["name"] == own), "127.0.0.1")
    port = (ssh_session() or {"port": 22})["port"]
    code, out, _ = module.run_command(sshd_asked(program, user, address, here, port))
    found: dict[str, list[str]] = {}
    for key, *words in filter(None, map(str.split, out.splitlines() if code == 0 else ())):
        found.setdefault(key.lower(), []).extend(words)
    return {key: words for key, words in found.items() if key in SSHD}


def name_at_boot() -> str:
    """What /etc/hostname says, "" where it says nothing."""
    try:
        with open("/etc/hostname", encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    except FileNotFoundError:
        lines = []
    return lines[0] if lines else ""


def named_by(proc: str = "/proc") -> list[str]:
    """Those of BY_NAME that run here. Those in containers, as minikube's, have a host name of their own.

    Not by the namespace of names: with ProtectHostname, as Ceph's units have it, each service has one.
    """
    found, here = set(), os.readlink(f"{proc}/self/ns/pid")
    for path in glob.glob(f"{proc}/[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            name = read(path).strip()
            if name in BY_NAME and os.readlink(f"{os.path.dirname(path)}/ns/pid") == here:
                found.add(f"{BY_NAME[name]} ({name})")
    return sorted(found)


def init(root: str = "/") -> str:
    """The first process's name, where systemd has not booted the machine (sd_booted(3)); else ""."""
    return "" if os.path.isdir(f"{root}run/systemd/system") else read(f"{root}proc/1/comm").strip()


def units_up(run_command: Callable) -> list[str]:
    """Those of UNITS with which systemd has nothing left to do. To ask here saves each role a module's start."""
    properties = {"ActiveState": "active", "UnitFileState": "enabled", "NeedDaemonReload": "no"}
    wanted = [f"{name}={value}" for name, value in properties.items()]
    code, out, _ = run_command(["systemctl", "show", f"--property={','.join(['Id', *properties])}", *UNITS])
    found = [one.splitlines() for one in out.split("\n\n")] if code == 0 else []
    return [unit for unit in UNITS if any({f"Id={unit}", *wanted} <= set(lines) for lines in found)]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "home": {"type": "path", "required": True},
            "login": {"type": "str", "required": True},
            "hosts": {"type": "list", "elements": "dict", "default": [], "options": HOST},
            "own": {"type": "str", "default": ""},
            "taken": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    for path in ("/etc/hosts", TEMPLATE):
        if fault := endless(path, read(path)):
            module.fail_json(msg=fault)
    user, home, login = (module.params[name] for name in ("user", "home", "login"))
    hosts = with_full_name(module.params["hosts"], module.params["own"], read("/etc/hosts"))
    group = group_of(user)
    lacking = [user] if group is None and login != "root" else []  # it is yet to be made
    machine_id = read("/etc/machine-id").strip()
    stale = stale_copy("/var/lib/dbus/machine-id", machine_id)
    module.exit_json(
        changed=False,
        survey={
            "account": account(user),
            "group": group,
            "login_lacks": lacking + [one for one in (user, JOURNAL) if lacks(login, one)],
            "login_here": re.search(rf"(?m)^{re.escape(login)}:", read("/etc/passwd")) is not None,
            "place": place(home),
            "disk": on_network(home),
            "host_names": [socket.gethostname(), name_at_boot()],
            "named_by": named_by(),
            "hosts": hosts,
            "hosts_lacking": hosts_lacking(hosts),
            "machine_id": machine_id,
            "machine_id_stands": not stale and not needs_new(machine_id, module.params["taken"]),
            "public_key": own_key(module, user, home),
            "groups": groups_of(user),
            "sshd": sshd(module, user, hosts, module.params["own"]),
            "cloud_init": os.path.isdir("/etc/cloud/cloud.cfg.d"),
            "init": init(),
            "etcd_unit": read("/etc/systemd/system/trainyard-etcd.service").encode(errors="replace").decode(),
            "units_up": [] if init() else units_up(module.run_command),
            "kept_awake": os.path.exists("/run/systemd/transient/trainyard-setup.service"),
        },
    )


if __name__ == "__main__":
    main()
