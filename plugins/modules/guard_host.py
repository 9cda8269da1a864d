"""The host's end of the action guarded_change: compare files, and talk to the installed guard."""

import glob
import grp
import hashlib
import json
import os
import pwd

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import (
    from_elsewhere,
    sockets,
    ssh_logins,
    ssh_ports,
    ssh_session,
    sshd_asked,
)

DOCUMENTATION = r"""
module: guard_host
short_description: The host's end of guarded_change
description: Internal; use guarded_change.
options:
  operation:
    description: What to do.
    type: str
    required: true
    choices: [compare, install, change, confirm, status, restore, tell]
  name: {description: The name of the change., type: str}
  token: {description: The token of the change to confirm., type: str}
  proof: {description: What a connection after the change was applied has learned., type: str}
  change: {description: The change as JSON (see guard change)., type: str}
  why: {description: The reason for a restore., type: str}
  files: {description: The guard's own files, for compare path to sha256 and for install path to text., type: dict}
"""

GUARD = "/usr/local/lib/trainyard/guard"
STATE_DIR = "/var/lib/trainyard-guard"
BOOT_UNITS = ("trainyard-guard-files.service", "trainyard-guard-boot.service")


def differs(item):
    """Whether something would change at `item` (path, content | state | move_to, mode, owner, group)."""
    path = item["path"]
    if item.get("link_to"):
        return not os.path.islink(path) or os.readlink(path) != item["link_to"]
    if item.get("move_to") or item.get("state") == "absent":
        return os.path.lexists(path)
    if os.path.islink(path) or not os.path.isfile(path):
        return True
    found = os.stat(path)
    with open(path, "rb") as source:
        content = source.read()
    wanted = (
        item["content"].encode(errors="surrogateescape"),
        int(item["mode"], 8),
        account(pwd.getpwnam, item["owner"]).pw_uid,
    )
    group = account(grp.getgrnam, item["group"]).gr_gid
    return (content, found.st_mode & 0o7777, found.st_uid, found.st_gid) != (*wanted, group)


def account(lookup, name):
    try:
        return lookup(name)
    except KeyError:
        raise ValueError(f"there is no user or group '{name}' on this host") from None


def shown(item):
    """The present text at the item's path for a diff, or None where it is private, binary or large."""
    try:
        with open(item["path"], "rb") as source:
            content = source.read(100_000)
            private = not os.fstat(source.fileno()).st_mode & 0o044
        return None if private else content.decode()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError):
        return None


def host_keys(module):
    """The public host keys that this host's sshd shows: a list of `type base64` strings."""
    sshd = module.get_bin_path("sshd", opt_dirs=["/usr/sbin"])
    files = []
    if sshd:
        rc, out, _ = module.run_command(sshd_asked(sshd))
        files = (
            [line.split(None, 1)[1] + ".pub" for line in out.splitlines() if line.startswith("hostkey ")]
            if not rc
            else []
        )
    keys = []
    for path in files or sorted(glob.glob("/etc/ssh/ssh_host_*_key.pub")):
        try:
            with open(path) as source:
                keys.append(" ".join(source.read().split()[:2]))
        except OSError:
            continue  # a configured key that does not exist is not shown either
    return keys


def compare(module, change, own):
    """Which files differ, what is armed, what was undone and not told, the host's keys, whether the guard's `own` files
    (path: sha256) stand and count, whether this very session comes from another machine, and from which ones people are
    logged in by SSH.
    """
    files = [{"path": item["path"], "differs": differs(item)} for item in change["files"]]
    if module._diff:
        for item, result in zip(change["files"], files, strict=True):
            result["before"] = shown(item)
    current = all(digest(path) == expected for path, expected in own.items()) and enabled(module)
    found = sockets(module.run_command)
    session = ssh_session()
    return {
        "files": files,
        "armed": armed(),
        "untold": untold(),
        "host_keys": host_keys(module),
        "guard_current": current,
        "from_elsewhere": session is None or from_elsewhere(session["client"], session["address"]),
        "logins": ssh_logins(found, ssh_ports(module.run_command, found)),
    }


def armed(state_dir=STATE_DIR):
    """The names of the changes that wait, sorted: guard.py's Guard.armed() says the same."""
    return sorted(
        path.split(os.sep)[-2] for path in glob.glob(os.path.join(state_dir, "[!.]*", "manifest.json"))
    )


def untold(state_dir=STATE_DIR):
    """What was undone that no run has told yet, as where the controller was gone: the guard's reports."""
    found = []
    for path in sorted(glob.glob(os.path.join(state_dir, "*.report.json"))):
        with open(path) as source:
            report = json.load(source)
        if digest(told_mark(path)) != hashlib.sha256(report["token"].encode()).hexdigest():
            found.append(report)
    return found


def tell(state_dir=STATE_DIR):
    """Note that all there is was told."""
    for report in untold(state_dir):
        with open(told_mark(os.path.join(state_dir, f"{report['name']}.report.json")), "w") as out:
            out.write(report["token"])
    return {}


def told_mark(path):
    return f"{path.removesuffix('.json')}.told"


def enabled(module):
    """Whether systemd knows the guard's files as they are now, and starts it at every boot."""
    _, out, _ = module.run_command(
        ["systemctl", "show", "--property=UnitFileState,NeedDaemonReload", *BOOT_UNITS]
    )
    said = out.split()
    return said.count("UnitFileState=enabled") == said.count("NeedDaemonReload=no") == len(BOOT_UNITS)


def digest(path):
    """The sha256 of a file, or None where it is not there."""
    try:
        with open(path, "rb") as source:
            return hashlib.sha256(source.read()).hexdigest()
    except FileNotFoundError:
        return None


def install(module, own):
    """Install the guard's `own` files (path: text), and have it look for interrupted changes at every boot."""
    os.makedirs(STATE_DIR, mode=0o700, exist_ok=True)
    for path, text in own.items():
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        temporary = f"{path}.new"
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w"
        ) as out:
            out.write(text)
            os.fchmod(out.fileno(), 0o755 if path == GUARD else 0o644)
            out.flush()
            os.fsync(out.fileno())
        os.rename(temporary, path)
    for command in (["daemon-reload"], ["enable", *BOOT_UNITS]):
        rc, out, err = module.run_command(["systemctl", *command])
        if rc:
            module.fail_json(
                msg=f"the guard cannot be installed: systemctl {command[0]}: {(err or out).strip()}"
            )
    # A power cut from now on finds the guard on disk, with the links that start it.
    wants = glob.glob("/etc/systemd/system/*.wants")
    for directory in [
        *{os.path.dirname(path) for path in own},
        *wants,
        STATE_DIR,
        os.path.dirname(STATE_DIR),
    ]:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return {}


def guard(module, *arguments, data=None):
    """Run the installed guard; its JSON answer."""
    if not os.path.exists(GUARD):
        module.fail_json(
            msg=f"{GUARD} was removed from this host while the change was made: run the playbook again"
        )
    rc, out, err = module.run_command([GUARD, *arguments], data=data)
    if rc:
        module.fail_json(msg=err.strip() or f"{GUARD} {arguments[0]} ended with {rc}")
    return json.loads(out)


def restore_soon(module, why):
    """Have everything that is armed restored a moment later, for this connection may not outlive it."""
    command = ["systemd-run", "--collect", "--on-active=1", "--timer-property=AccuracySec=100ms"]
    command.append("--property=KillMode=process")  # as in trainyard-guard@.service
    rc, out, err = module.run_command([*command, GUARD, "restore", "--all", "--why", why])
    if rc:
        module.fail_json(msg=f"the unfinished change cannot be undone: {(err or out).strip()}")
    return {}


def main():
    module = AnsibleModule(
        argument_spec={
            "operation": {
                "type": "str",
                "required": True,
                "choices": ["compare", "install", "change", "confirm", "status", "restore", "tell"],
            },
            "name": {"type": "str"},
            "token": {"type": "str", "no_log": False},
            "proof": {"type": "str"},
            "change": {"type": "str", "no_log": True},
            "why": {"type": "str"},
            "files": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        if given["operation"] == "compare":
            result = compare(module, json.loads(given["change"]), given["files"])
        elif given["operation"] == "install":
            result = install(module, given["files"])
        elif given["operation"] == "change":
            result = guard(module, "change", given["name"], data=given["change"])
        elif given["operation"] == "confirm":
            proof = ["--proof", given["proof"]] if given["proof"] else []
            result = guard(module, "confirm", given["name"], "--token", given["token"], *proof)
        elif given["operation"] == "tell":
            result = tell()
        elif given["operation"] == "status":
            result = guard(module, "status")
        else:
            result = restore_soon(module, given["why"])
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, guard=result)


if __name__ == "__main__":
    main()
