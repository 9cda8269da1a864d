"""Words that several of the playbooks' texts share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex

import yaml
from ansible import constants as C
from ansible.errors import AnsibleError
from ansible.parsing.splitter import parse_kv

SHOWN_HOSTS = 8
# Options of ansible-playbook that another one needs, too, with their names in context.CLIARGS and, where ansible.cfg or
# the environment has said so already, what that is.
ASKING = (("-K", "become_ask_pass"), ("-k", "ask_pass"), ("-J", "ask_vault_pass"))
LOGIN = (
    ("-u", "remote_user", C.DEFAULT_REMOTE_USER),
    ("--private-key", "private_key_file", C.DEFAULT_PRIVATE_KEY_FILE),
    ("-c", "connection", C.DEFAULT_TRANSPORT),
    ("--ssh-common-args", "ssh_common_args", None),
    ("--ssh-extra-args", "ssh_extra_args", None),
    ("--become-method", "become_method", C.DEFAULT_BECOME_METHOD),
    ("--become-password-file", "become_password_file", C.BECOME_PASSWORD_FILE),
    ("--connection-password-file", "connection_password_file", C.CONNECTION_PASSWORD_FILE),
)


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as they must be, two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def timed_out(result: dict) -> re.Match | None:
    """Whether a host let us in, and the task then took longer (seconds, as group 1) than is waited for it."""
    return re.search(r"Timed out after (\d+) second", str(result.get("msg") or ""))


def silence(host: str, result: dict) -> str:
    """Why a host has nothing to show; `result`: what its task registered."""
    lines = str(result.get("msg") or "it was not asked").strip().splitlines()
    if late := timed_out(result):
        return f"{host}: no answer within {late[1]} s, though it lets us in: a disk or a mount that hangs? (`dmesg`)"
    return f"{host}: no answer: {lines[-1][:200]}"


def not_asked(cluster, results) -> list[str]:
    """The hosts of `cluster` that -l leaves out of a play: those that are none of `results`."""
    return [host for host in cluster if host not in results]


def unasked(hosts) -> str:
    """That nobody asked these; "" where there is none."""
    return f"{names(hosts)}: not asked (-l)" if hosts else ""


def names(hosts) -> str:
    """Hosts, not too many of them."""
    hosts = list(hosts)
    rest = len(hosts) - SHOWN_HOSTS
    return ", ".join(hosts[:SHOWN_HOSTS]) + (f" and {rest} more" if rest > 0 else "")


def forks_fault(forks: int, hosts, what: str) -> str:
    """Why Ansible, which attends to `forks` hosts at once, is too few for these; "" where it is not.

    what: they do all at once. Of more hosts, some would wait for the others to come to an end.
    """
    count = len(hosts)
    if forks >= count:
        return ""
    return (
        f"forks: {forks}, but there are {count} hosts, which {what} all at once: leave -f out, or set forks in "
        f"ansible.cfg (ANSIBLE_FORKS) to {count} or more"
    )


def limit_fault(variables) -> str:
    """Why -l leaves nobody to do anything; "" where it does not. variables: a task's, of the play with all hosts."""
    members = list(variables["groups"].get("cluster", ()))
    if not members or set(members) & set(variables["ansible_play_hosts_all"]):
        return ""
    return (
        f"-l: found no host of the group cluster in it; expected one or more of {names(members)}. Correct it, or "
        "leave it out."
    )


def brought(host: str, done: float, total: float) -> str:
    """How many of the bytes that go to a host are there. The callback live reads it, too (live_frame.counted)."""
    return f"{host}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB have come"


def with_rows(line: str, rows) -> str:
    """A line that is written over, and what each host does now: (host, words). The callback live reads it, too."""
    return "\n".join([line, *(f"{host}\t{words}" for host, words in rows)])


def row(host: str, words: str) -> str:
    """As `with_rows` of one host, and no line on all of them."""
    return with_rows("\r", [(host, words)])


def rows_of(text: str) -> tuple[str, list[tuple[str, str]]]:
    """(line, rows) of `with_rows`."""
    line, *rows = text.split("\n")
    return line, [(host, words) for host, mark, words in (row.partition("\t") for row in rows) if mark]


def without(limit: str, hosts: list[str]) -> str:
    """What -l takes, quoted for a shell, to leave these hosts out of those that `limit` means ("": all)."""
    separator = "," if "," in limit else ":"  # Ansible splits at one of them
    return shlex.quote(separator.join([*([limit] if limit else []), *(f"!{host}" for host in hosts)]))


def same_hosts(cli, default=(), subset: bool = True) -> list[str]:
    """The options by which another ansible-playbook, called from here, means the same hosts, and gets into them.

    cli: context.CLIARGS, in which Ansible has made all paths absolute. default: the inventories that need no -i.
    subset: -l as well.
    """
    words = []
    given = list(cli.get("inventory") or ())
    for inventory in given if given != list(default) else ():
        if inventory.endswith(","):
            words += ["-i", inventory.rstrip(",") + ","]
        else:
            words += ["-i", _near(inventory)]
    if subset and cli.get("subset"):
        words += ["-l", cli["subset"]]
    for flag, asked, usual in LOGIN:
        if (value := cli.get(asked)) and value != usual:
            value = _near(value) if asked.endswith("_file") else str(value)
            words += [f"{flag}={value}"] if value.startswith("-") else [flag, value]
    for name, value in _ways_in(cli.get("extra_vars") or ()).items():
        words += ["-e", said(name, value)]
    for one in cli.get("vault_ids") or ():
        label, mark, source = one.partition("@") if "@" in one else ("", "", one)
        words += ["--vault-id", label + mark + (source if source.startswith("prompt") else _near(source))]
    for file in cli.get("vault_password_files") or ():
        words += ["--vault-password-file", _near(file)]
    return words + [flag for flag, asked in ASKING if cli.get(asked)]


def said(name: str, value) -> str:
    """What says an extra variable again, after -e and before a shell's quotes."""
    plainly = isinstance(value, str) and re.fullmatch(r"[\w./:@%+,-]+", value)
    return f"{name}={value}" if plainly else json.dumps({name: value})


def _ways_in(options) -> dict:
    """Ansible's own variables, such as ansible_user, among what was typed after -e; no password, and no key itself."""
    found = {}
    for option in options:
        with contextlib.suppress(AnsibleError, yaml.YAMLError):
            mapping = yaml.safe_load(option) if option.startswith("{") else parse_kv(option)
            found |= mapping if not option.startswith("@") else {}
    return {
        str(name): value
        for name, value in found.items()
        if re.match("ansible_(?!.*pass|.*private_key$)", str(name))
    }


def _near(path: str) -> str:
    """A path as it is typed: from here, where it is below."""
    near = os.path.relpath(path)
    return path if near.startswith("..") else near
