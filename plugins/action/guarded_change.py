"""Change files under the guard of the role guard, and confirm over a new connection.

The options are documented in plugins/modules/guarded_change.py.
"""

import contextlib
import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ansible import constants as C
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from known_hosts import first_file, pin, public_key

display = Display()

COMMANDS = {"type": "list", "elements": "list", "default": []}
CONNECT_TIMEOUT = 5  # s until the host's SSH has answered
# Of a change's timeout, until the login and sudo are through, which slow directories, names or processors may delay:
# confirming takes two logins.
LOGIN_SHARE = 1 / 3
LOGIN_TIMEOUT = 15  # s, where nothing is to be confirmed
RESTORE_LIMIT = 60  # s from the end of the timeout until the host must answer as before
GUARD_FILES = Path(__file__).resolve().parents[2] / "roles" / "guard" / "files"
UNITS = ("trainyard-guard@.service", "trainyard-guard-files.service", "trainyard-guard-boot.service")
# In files that everybody may read, as netplan's were for years: by these words they name wireless keys.
SECRET = re.compile("passw|psk|key", re.IGNORECASE)
LEFT_BEHIND = "an earlier run ended before it had confirmed the change"


class ActionModule(ActionBase):
    """Compare, arm and write, apply, confirm over a new connection; else wait for the undo and fail."""

    _requires_connection = True
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        self._vars = task_vars
        change = self._arguments()
        live, cuts_logins, addresses = (change.pop(key) for key in ("live", "cuts_logins", "addresses"))
        if self._connection.transport not in ("ssh", "local"):
            raise AnsibleActionFail(
                "guarded_change needs the ssh connection, to come back by a new one; "
                f"this host uses {self._connection.transport}"
            )
        here = self._connection.get_option("host") if self._connection.transport == "ssh" else "localhost"
        own = guard_files()
        digests = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in own.items()}
        found = self._host("compare", change=json.dumps(change), files=digests)
        if not change["files"]:
            if found["armed"] and not found["guard_current"] and not self._task.check_mode:
                self._host("install", files=own)  # an older one, or a damaged one, may not be able to undo
            return {**result, "address": here, "paths": [], **self._settle(here, found)}

        if found["armed"] and not self._task.check_mode:
            # What was planned may rest on a state that is about to go, whoever plans it.
            raise AnsibleActionFail(
                f"A change of {', '.join(found['armed'])} waits to be confirmed on this host: another playbook is at "
                "work here, or was ended a moment ago. Nothing was changed. When it has ended, run this one again: "
                "it begins by putting back what was left unconfirmed."
            )
        differing = [
            item for item, state in zip(change["files"], found["files"], strict=True) if state["differs"]
        ]
        changes = bool(differing) or not live
        paths = [item["path"] for item in differing]
        result.update(changed=changes, address=here, undone=[], paths=paths)
        if self._task.diff:
            result["diff"] = diffs(change["files"], found["files"])
        if changes and cuts_logins:
            self._refuse_insider(found)
        if not changes or self._task.check_mode:
            return result

        targets = (addresses if self._connection.transport == "ssh" else None) or [here]
        if not found["guard_current"]:
            self._host("install", files=own)
        keys = [key for one in found["host_keys"] if (key := public_key(one))]
        with self._known_hosts(keys) as known_hosts:
            for address in targets:
                if address != here:
                    self._refuse_foreign_key(address, keys)
            if here not in targets:
                self._say(
                    f"moves from {here} to {targets[0]}. Should this run be interrupted, look for it at both."
                )
            reached = self._change({**change, "files": differing}, here, targets, known_hosts)
        if reached != here:
            # At once: if another host fails, or this run is interrupted, no later task can say it.
            self._say(
                f"is at {reached} now. Before the next run, write for it in the inventory: ansible_host: {reached}"
            )
            self._learn_keys(reached, keys)
        result["address"] = reached
        return result

    def _arguments(self):
        item = {
            "path": {"type": "path", "required": True},
            "content": {"type": "str"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "link_to": {"type": "str"},
            "move_to": {"type": "path"},
            "mode": {"type": "str", "default": "0644"},
            "owner": {"type": "str", "default": "root"},
            "group": {"type": "str", "default": "root"},
        }
        _, given = self.validate_argument_spec(
            {
                "name": {"type": "str"},
                "why": {"type": "str"},
                "files": {"type": "list", "elements": "dict", "default": [], "options": item},
                "check": COMMANDS,
                "apply": COMMANDS,
                "verify": COMMANDS,
                "undo": {"type": "list", "elements": "list"},
                "addresses": {"type": "list", "elements": "str", "default": []},
                "timeout": {"type": "int", "default": 45},
                "live": {"type": "bool", "default": True},
                "cuts_logins": {"type": "bool", "default": False},
            }
        )
        if given["files"] and not (given["name"] and given["why"]):
            raise AnsibleActionFail("guarded_change needs name and why, unless it has no files")
        for file in given["files"]:
            said = [file.get(key) is not None for key in ("content", "link_to", "move_to")]
            if sum(said) + (file["state"] == "absent") != 1:
                raise AnsibleActionFail(
                    f"{file['path']}: say one of content, link_to, move_to and state: absent"
                )
        if not 20 <= given["timeout"] <= 600:
            raise AnsibleActionFail(f"timeout is {given['timeout']} s: it must be 20 to 600 s")
        if given["undo"] is None:
            given["undo"] = given["apply"]
        for commands in ("check", "apply", "verify", "undo"):
            given[commands] = [[str(word) for word in command] for command in given[commands]]
        return json.loads(json.dumps(given))  # plain values: tags of the templates stay here

    # Talking to the host.

    def _host(self, operation, **arguments):
        """The answer of module guard_host over the present connection."""
        answer = self._execute_module(
            module_name="guard_host", module_args={"operation": operation, **arguments}, task_vars=self._vars
        )
        if "guard" not in answer:
            raise AnsibleActionFail(
                answer.get("msg") or answer.get("module_stderr") or f"guard_host {operation} failed"
            )
        return answer["guard"]

    @contextlib.contextmanager
    def _new_connection(self, address, here, known_hosts, patience=LOGIN_TIMEOUT):
        """The block talks over a connection of its own to `address`; no socket of an earlier one is used.

        patience: seconds for the login and sudo.
        """
        old = self._connection
        new = copy.copy(old)
        new._options = dict(old._options)
        new._shell = copy.copy(old._shell)
        new._connected = False
        if old.transport == "ssh":
            arguments = (
                "-o ControlMaster=no -o ControlPath=none -o ServerAliveInterval=3 -o ServerAliveCountMax=3"
                f" -o ConnectTimeout={CONNECT_TIMEOUT}"
            )
            if address != here:
                arguments += (
                    f' -o "UserKnownHostsFile={known_hosts}" -o GlobalKnownHostsFile=/dev/null'
                    " -o StrictHostKeyChecking=yes -o HostKeyAlias=trainyard-guarded"
                )
            new.set_option("ssh_args", f"{arguments} {old.get_option('ssh_args') or ''}")
            new.set_option("host", address)
            new.set_option("timeout", max(CONNECT_TIMEOUT, int(patience)))
            new.set_option("reconnection_retries", 0)
        self._connection = new
        try:
            yield
        finally:
            self._connection = old

    def _ask(self, address, here, known_hosts, operation, patience=LOGIN_TIMEOUT, **arguments):
        """The answer over a new connection, or {state: unreachable, error}."""
        try:
            with self._new_connection(address, here, known_hosts, patience):
                return self._host(operation, **arguments)
        except AnsibleActionFail:
            raise
        except AnsibleError as error:
            return {"state": "unreachable", "error": " ".join(str(error).split())}

    def _forget_connection(self):
        """The shared socket may lead nowhere after the change; the next task opens another."""
        if self._connection.transport == "ssh":
            with contextlib.suppress(AnsibleError):
                self._connection.reset()

    # The course of a change.

    def _settle(self, here, found):
        """Have what an earlier run left armed put back, and tell what was undone when none could say it.

        Returns {changed, undone, warnings}.
        """
        armed = found["armed"]
        warnings = [f"of an earlier run, {one['at']}: {sentence(one)}" for one in found["untold"]]
        if armed and self._task.check_mode:
            later = f"{LEFT_BEHIND} of {', '.join(armed)}; without --check, it would be put back first"
            return {"changed": True, "undone": [], "warnings": [*warnings, later]}
        undone = self._finish_undo(here) if armed else []
        if (undone or warnings) and not self._task.check_mode:
            self._host("tell")
        warnings += [f"{LEFT_BEHIND}; this was put back first: {item}" for item in undone]
        return {"changed": bool(armed), "undone": undone, "warnings": warnings}

    def _note_told(self):
        """Have the host know that what was undone is told; else the next run says it once more."""
        with contextlib.suppress(AnsibleError):
            self._host("tell")

    def _refuse_insider(self, found):
        """Refuse where a new connection shows nothing: it is the host's own to itself, and others are there by SSH."""
        inside = self._connection.transport == "local" or not found["from_elsewhere"]
        if inside and found["logins"]:
            raise AnsibleActionFail(
                f"Somebody is logged in to this machine by SSH, from {', '.join(found['logins'])}, and this run's "
                "connection goes from the machine to itself: it would not notice if the change cut that login off. "
                "Nothing was changed. Run it from another machine, or at this one's own screen with no SSH login open."
            )

    def _say(self, text):
        display.display(f"{self._vars['inventory_hostname']} {text}", color=C.COLOR_CHANGED)

    def _finish_undo(self, here):
        """Have what an earlier run left armed restored. Returns what was put back, a list of sentences."""
        before = self._host("status")["armed"]
        self._host("restore", why=LEFT_BEHIND)
        end = time.monotonic() + RESTORE_LIMIT
        answer = {}
        while time.monotonic() < end:
            time.sleep(2)
            answer = self._ask(here, here, None, "status")
            if "armed" in answer and not answer["armed"]:
                self._forget_connection()
                return [sentence(answer["reports"].get(name)) for name in before]
        self._forget_connection()
        raise AnsibleConnectionFailure(
            f"{LEFT_BEHIND}; undoing it, the host did not answer at {here} within {RESTORE_LIMIT} s "
            f"({answer.get('error', 'still busy')}). If its address was to change, it is at the old one again: "
            "correct ansible_host. Run the playbook again when it answers."
        )

    def _change(self, change, here, targets, known_hosts):
        """Arm, apply and confirm. Returns the address that answered; raises with the undo's report."""
        name, timeout = change["name"], change["timeout"]
        end = time.monotonic() + timeout
        armed = self._host("change", name=name, change=json.dumps(change))
        if armed["state"] == "restored":
            self._note_told()
            raise AnsibleActionFail(f"Nothing was applied. {sentence(armed['report'])}")
        errors, report, proof = {}, None, None
        # Past the timeout nothing can be confirmed; the question is then when the host answers as before.
        while report is None and time.monotonic() < end + RESTORE_LIMIT:
            time.sleep(0.2 if proof else 1)
            for address in targets if time.monotonic() < end else []:
                known = {"name": name, "token": armed["token"], "proof": proof}
                patience = timeout * LOGIN_SHARE
                answer = self._ask(address, here, known_hosts, "confirm", patience, **known)
                if answer["state"] == "confirmed":
                    self._forget_connection()
                    return address
                # This connection may be older than the change; the next one, which shows the proof, is not.
                proof = answer.get("proof") or proof
                report = report or answer.get("report")
                if "error" in answer:
                    errors[address] = answer["error"]
                if "proof" in answer:
                    break
            if report is None and (here not in targets or time.monotonic() >= end):
                status = self._ask(here, here, known_hosts, "status")
                if "armed" in status and name not in status["armed"]:
                    report = status["reports"].get(name, {})
        self._forget_connection()
        tried = "; ".join(f"{address}: {error}" for address, error in errors.items())
        if report is None:
            raise AnsibleConnectionFailure(
                f"The change ({change['why']}) was not confirmed, and {timeout + RESTORE_LIMIT} s later the "
                f"host does not answer at {here} either. It undoes the change by itself, by its timer or at "
                "its next start; at its console, /usr/local/lib/trainyard/guard status tells more. "
                f"Tried: {tried or 'nothing'}"
            )
        self._note_told()
        raise AnsibleActionFail(
            f"The change was undone; the host answers at {here} as before. {sentence(report)}"
            + (f" Connecting anew had failed: {tried}" if tried else "")
        )

    # Host keys for a new address: the same keys, shown over the connection that is trusted already.

    @contextlib.contextmanager
    def _known_hosts(self, keys):
        with tempfile.NamedTemporaryFile("w", prefix="trainyard-known-hosts-") as file:
            file.writelines(f"trainyard-guarded {key}\n" for key in keys)
            file.flush()
            yield file.name

    def _ssh_settings(self, address):
        """(known-hosts file or None, the name of `address` in it), as the user's ssh has them."""
        with self._new_connection(address, address, None):
            connection = self._connection
            program = connection.get_option("ssh_executable")
            command = connection._build_command(program, "ssh", "-G", address)
            for end in (
                getattr(connection, "sshpass_pipe", None) or ()
            ):  # made for a password that -G does not ask for
                os.close(end)
        command = command[command.index(program.encode()) :]
        shown = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        ).stdout
        settings = dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)
        port = settings.get("port", "22")
        name = settings.get("hostkeyalias") or (address if port == "22" else f"[{address}]:{port}")
        return first_file(shown), name

    def _known_keys(self, file, name):
        if file is None:
            return []
        found = subprocess.run(
            ["ssh-keygen", "-F", name, "-f", str(file)], capture_output=True, text=True, check=False
        )
        lines = [
            line.split() for line in found.stdout.splitlines() if line and not line.startswith(("#", "@"))
        ]
        return [f"{fields[1]} {fields[2]}" for fields in lines if len(fields) >= 3]

    def _refuse_foreign_key(self, address, keys):
        if self._connection.transport != "ssh":
            return
        file, name = self._ssh_settings(address)
        types = {key.split()[0] for key in keys}
        foreign = [key for key in self._known_keys(file, name) if key.split()[0] in types and key not in keys]
        if foreign:
            raise AnsibleActionFail(
                f"{file} knows another machine at {name}, so the host could not be reached there; nothing "
                "was changed. Either the address is taken, or that machine is gone: then forget it with "
                f"ssh-keygen -R '{name}' -f '{file}'"
            )

    def _learn_keys(self, address, keys):
        """Pin the host's keys under its new address. The change is confirmed by then: what fails here is only told."""
        if self._connection.transport != "ssh":
            return
        file, name = self._ssh_settings(address)
        known = self._known_keys(file, name)
        lines = [f"{name} {key}" for key in keys if key not in known]
        if file is None or not lines:
            return
        try:
            pin(file, lines)
        except OSError as error:
            display.warning(
                f"{file} cannot be written ({error.strerror}), so {name} is not known yet. Make it writable, then log "
                f"in there by hand once. The host's key: {keys[0]}"
            )


def guard_files():
    """Path on the host to the text of what the guard is made of."""
    files = {f"/etc/systemd/system/{unit}": (GUARD_FILES / unit).read_text() for unit in UNITS}
    return {"/usr/local/lib/trainyard/guard": (GUARD_FILES / "guard.py").read_text(), **files}


def sentence(report):
    """What the guard undid and why, as text."""
    if not report:
        return "The host has no report of what it undid."
    undone = ", ".join(report["undone"]) or "no file differed"
    failed = [
        f"`{done['command']}`: {done['output'] or done['rc']}" for done in report["commands"] if done["rc"]
    ]
    text = f"{report['change']}: {report['why']}. Undone: {undone}."
    return text + (f" Commands that failed while undoing: {'; '.join(failed)}." if failed else "")


def diffs(files, states):
    """Ansible's diff entries for the files that differ; private ones by name alone."""
    entries = []
    for item, state in zip(files, states, strict=True):
        if not state["differs"]:
            continue
        texts = (state.get("before"), item.get("content") or "")
        private = None in texts or not int(item["mode"], 8) & 0o044 or any(map(SECRET.search, texts))
        entries.append(
            {
                "before_header": item["path"],
                "after_header": item.get("move_to") or item["path"],
                "before": "(private)\n" if private else state["before"],
                "after": "(private, changed)\n"
                if private
                else item.get("content") or item.get("link_to") or "",
            }
        )
    return entries
