"""The cluster's hosts, from the inventory's groups and variables, for roles that write about them all."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

import known_hosts
from inventory_groups import name_fault
from telling import forks_fault

LEAST_PERSON = 1000  # uids below are the system's, on Debian and Ubuntu
LEAST_RELEASE = {"Debian": 12, "Ubuntu": 22.04}  # what others make of these has numbers of its own
SERVICE_COMMENT = "Trainyard"  # in passwd, by which the role identity knows the user that it made
ADOPTED_COMMENT = "Trainyard (made by hand)"  # of one that was there before, which reset.yml leaves
SERVICE_SHELL = "/bin/bash"
SERVICE_HOME_MODE = "0750"
HOST_KEYS = ("ed25519", "ecdsa", "rsa")  # the facts ssh_host_key_KIND_public; ssh prefers them in this order


def cluster_hosts(names: Iterable[str], hostvars: Mapping[str, Mapping[str, Any]]) -> list[dict]:
    """`names` with what /etc/hosts needs: name, address on the cluster's network, names (canonical first)."""
    names = list(names)
    shorts = Counter(part.split(".")[0] for name in names for part in {name, _own_name(hostvars[name], name)})
    hosts = []
    for name in names:
        variables = hostvars[name]
        address = variables.get("cluster_address") or variables.get("ansible_host") or name
        full = list(dict.fromkeys([_own_name(variables, name), name]))
        short = [part.split(".")[0] for part in full if shorts[part.split(".")[0]] == 1]
        hosts.append({"name": name, "address": str(address), "names": list(dict.fromkeys([*full, *short]))})
    return hosts


def _own_name(variables: Mapping[str, Any], name: str) -> str:
    return str(variables.get("identity_hostname") or name)


def ssh_port(variables: Mapping[str, Any]) -> int:
    """The port of a host's SSH server, as the host itself saw the connection that read its facts."""
    words = (((variables.get("ansible_facts") or {}).get("env") or {}).get("SSH_CONNECTION") or "").split()
    # UNKNOWN: it came by no network, as from a machine to its guest.
    return int(words[3]) if len(words) == 4 and "UNKNOWN" not in words else 22


def peer_known_hosts(
    hosts: Iterable[dict], hostvars: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Host to its lines for ssh_known_hosts, from its facts; hosts without facts are left out.

    `hosts` as `cluster_hosts` gives them. The facts came over a connection whose host key was pinned before.
    """
    lines = {}
    for host in hosts:
        facts = hostvars[host["name"]].get("ansible_facts") or {}
        port = ssh_port(hostvars[host["name"]])
        places = [*host["names"], host["address"]]
        pattern = ",".join(places if port == 22 else [f"[{place}]:{port}" for place in places])
        keys = [
            public_key(
                host["name"],
                f"{facts[f'ssh_host_key_{kind}_public_keytype']} {facts[f'ssh_host_key_{kind}_public']}",
            )
            for kind in HOST_KEYS
            if facts.get(f"ssh_host_key_{kind}_public")
        ]
        if keys:
            lines[host["name"]] = [f"{pattern} {key} trainyard@{host['name']}" for key in keys]
    return lines


def peer_ssh_ports(hosts: Iterable[dict], hostvars: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Host to its lines for ssh's configuration: none for one on port 22; hosts without facts are left out."""
    lines = {}
    for host in hosts:
        if not hostvars[host["name"]].get("ansible_facts"):
            continue
        port, mark = ssh_port(hostvars[host["name"]]), f"# trainyard@{host['name']}"
        places = ",".join([*host["names"], host["address"]])
        other = [f"Match originalhost {places} {mark}", f"  Port {port} {mark}"]
        lines[host["name"]] = other if port != 22 else []
    return lines


def peer_authorized_keys(hosts: Iterable[dict], keys: Mapping[str, str]) -> dict[str, list[str]]:
    """Host to its line for authorized_keys: its key, good from its own address alone, and for commands alone.

    `keys`: host to its public key as ssh-keygen writes it; hosts without one are left out.
    """
    lines = {}
    for host in hosts:
        if keys.get(host["name"]):
            options = f'from="{host["address"]}",restrict'
            key = public_key(host["name"], keys[host["name"]])
            lines[host["name"]] = [f"{options} {key} trainyard@{host['name']}"]
    return lines


def public_key(host: str, text: str) -> str:
    """Kind and key of what a host says its public key is, without a comment.

    Raises AnsibleFilterError where it is anything else: a second line would let in whom no option keeps out.
    """
    key = known_hosts.public_key(text)
    if key is None:
        raise AnsibleFilterError(
            f"{host}: found a public key that is none ({text[:60]!r}…); expected one line of kind, key and comment. "
            "Somebody may have changed it on that host"
        )
    return key


def next_peers(peers: list[str], host: str, most: int = 16) -> list[str]:
    """Up to `most` of `peers`, from `host` on and around, so that each host is asked equally often."""
    start = peers.index(host)
    return [*peers[start:], *peers[:start]][:most]


def mesh_login_fault(survey: Mapping[str, Any], user: str, home: str) -> str:
    """Why sshd would not let the service user of another host in by its key; "" where it would.

    `survey`: as `service_user_fault` has it. From which address sshd lets it in is left to sshd, when all is there.
    """
    found = survey["sshd"]

    def others(key: str, own: Iterable[str]) -> bool:
        patterns = found.get(key, [])
        if key == "allowusers":  # a group's name may have an @ of its own, as SSSD writes it
            patterns = [one.partition("@")[0] for one in patterns]
        # Of these sshd itself knows no "!"; who has written one means it all the same.
        wanted = any(_is_named(one, patterns) for one in own) and not any(
            _is_named(one, [pattern[1:] for pattern in patterns if pattern.startswith("!")]) for one in own
        )
        return bool(patterns) and not wanted

    def denied(
        key: str, own: Iterable[str]
    ) -> bool:  # no name of theirs has an @, as what is for some addresses has
        return any(_is_named(one, found.get(key, [])) for one in own)

    groups = survey["groups"] or [user]  # as it is made
    keys = {_place(one, user, home) for one in found.get("authorizedkeysfile", [])}
    methods = found.get("authenticationmethods", [])
    algorithms = ",".join(found.get("pubkeyacceptedalgorithms", [])).split(",")
    forced = found.get("forcecommand", [""])[0].rpartition("/")[2]
    faults = (
        (others("allowusers", [user]), "AllowUsers", "allowusers", user),
        (others("allowgroups", groups), "AllowGroups", "allowgroups", f"one of its groups, such as {user}"),
        (denied("denyusers", [user]), "DenyUsers", "denyusers", f"none that is {user}"),
        (denied("denygroups", groups), "DenyGroups", "denygroups", "none of its groups"),
        (found.get("pubkeyauthentication") == ["no"], "PubkeyAuthentication", "pubkeyauthentication", "yes"),
        (algorithms != [""] and "ssh-ed25519" not in algorithms, "PubkeyAcceptedAlgorithms",
         "pubkeyacceptedalgorithms", "ssh-ed25519 among them"),
        (bool(methods) and not {"any", "publickey"} & {*methods}, "AuthenticationMethods", "authenticationmethods",
         "publickey among them"),
        (bool(keys) and f"{home}/.ssh/authorized_keys" not in keys, "AuthorizedKeysFile",
         "authorizedkeysfile", ".ssh/authorized_keys among them"),
        # Others may be what notes a command and then runs it.
        (forced in ("internal-sftp", "sftp-server", "false", "nologin"), "ForceCommand", "forcecommand", "none"),
        (found.get("chrootdirectory", ["none"]) != ["none"], "ChrootDirectory", "chrootdirectory", "none"),
    )  # fmt: skip
    for wrong, name, key, expected in faults:
        if wrong:
            return (
                f"sshd's {name}: found {' '.join(found[key])}, by which {user} of the other hosts does not get in here "
                f"(sshd -T -C user={user}); expected {expected}. Let it in there (Match User {user}), and "
                "systemctl reload ssh; or, to see to it yourself, set ssh_mesh_verify: false."
            )
    return ""


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of sshd's patterns is `name`: but for * and ? each sign stands for itself."""
    signs = {"*": ".*", "?": "."}
    return any(
        re.fullmatch("".join(signs.get(sign, re.escape(sign)) for sign in one), name) for one in patterns
    )


def _place(pattern: str, user: str, home: str) -> str:
    """The file that sshd's AuthorizedKeysFile is for a user."""
    path = re.sub("%([%hu])", lambda sign: {"%": "%", "h": home, "u": user}[sign[1]], pattern)
    return os.path.normpath(os.path.join(home, path))


def release_fault(facts: Mapping[str, Any]) -> str:
    """Why a host's release cannot be set up, by Ansible's facts of it; "" where it can, or has no number."""
    system, version = facts.get("distribution"), str(facts.get("distribution_version"))
    least = LEAST_RELEASE.get(system)
    if not least or not re.fullmatch(r"\d+(\.\d+)?", version) or float(version) >= least:
        return ""
    return (
        f"found {system} {version}; expected Debian 12 or later, or Ubuntu 22.04 or later. Upgrade it (Ubuntu: "
        "do-release-upgrade), or take the host out of the inventory."
    )


def init_fault(survey: Mapping[str, Any]) -> str:
    """Why a host keeps no run; "" where it does. `survey`: what the module identity_survey found."""
    if not survey["init"]:
        return ""
    return (
        f"found {survey['init']} as the first process; expected systemd, which keeps runs going there. In WSL put "
        "[boot] and below it systemd=true into /etc/wsl.conf, and type wsl --shutdown in Windows. A container that "
        "has none (Docker's, RunPod's) trains by itself alone: with a checkout in it, and inventory/local."
    )


def host_name_fault(survey: Mapping[str, Any], wanted: str) -> str:
    """Why a host cannot be named as it is to be; "" where it can. `survey`: what the module identity_survey found.

    kubelet and slurmd find themselves no more under another name, Proxmox VE loses its guests, Ceph moves its data.
    """
    name = survey["host_names"][0]
    if name == wanted or not survey["named_by"]:
        return ""
    cure = f"Set identity_hostname: {name} for this host, or name the host so in the inventory."
    if odd := name_fault(name):  # the check of the inventory would not take it
        cure = (
            f"{name} can be no host's name here ({odd}): name the machine {wanted} by that one's own means, and then "
            f"sudo hostnamectl set-hostname {wanted}."
        )
    return (
        f"identity_hostname: found {wanted} for a machine that {' and '.join(survey['named_by'])} knows as {name}, and "
        f"would lose under that; expected {name}. {cure}"
    )


def service_user_fault(survey: Mapping[str, Any], user: str, home: str) -> str:
    """Why `user` with the home `home` cannot be the service user; "" where it can.

    `survey`: what the module identity_survey found. The user must be nobody's, or the one that an earlier run made, or
    one that was made for this; and the home hold nothing of anybody's, which would be the trainer's and go with it.
    """
    account, place = survey["account"], survey["place"]
    ours = account and account["comment"] in (SERVICE_COMMENT, ADOPTED_COMMENT)
    if account and (not 0 < account["uid"] < LEAST_PERSON or (account["home"] != home and not ours)):
        return (
            f"trainer_user: found {user}, which is another's on this host already "
            f"(uid {account['uid']}, home {account['home']}); "
            "expected a name that nobody has, for a system user of the trainer's own. "
            "Leave trainer_user out, or choose another name."
        )
    cure, held = "Choose another, such as a new one in it.", (place or {}).get("holds")
    if place and not place["directory"]:
        found, expected = "no directory", "one, or nothing there"
    elif place and place["owner"] not in ("root", user):
        found, expected = f"{place['owner']}'s", "a directory of the trainer's own"
        if place["owner"] == str(place["uid"]) and place["uid"] < LEAST_PERSON and not account:
            found += ", a user's that is no more,"
            cure = (
                f"Where that was {user}, make it anew, as root: groupadd --force --system --gid {place['gid']} {user}; "
                f"useradd --system --uid {place['uid']} --gid {user} --home-dir {home} "
                f"--comment {SERVICE_COMMENT} {user}. Else choose another."
            )
    elif held and not (ours and place["owner"] == user):
        found, expected = f"a directory with {held} in it already", "an empty one, or nothing there"
    else:
        return ""
    return f"trainer_state_dir: found {home}, which is {found} on this host; expected {expected}. {cure}"


def shared_home_fault(hostvars: Mapping[str, Mapping[str, Any]], names: list[str], home: str) -> str:
    """Why `home` cannot be the service user's: several of these hosts have it on one disk; "" where none do."""
    on: dict[str, list[str]] = {}
    for name in names:
        if disk := hostvars[name].get("__identity_survey", {}).get("survey", {}).get("disk"):
            on.setdefault(disk, []).append(name)
    for disk, hosts in on.items():
        if len(hosts) > 1:
            return (
                f"trainer_state_dir: found {home}, which is {disk} on {', '.join(hosts)}; expected a directory of each "
                "host's own, for its runs, locks and caches. Set it to one on the hosts' own disks; data and models "
                "may lie on a shared disk (storage_path)."
            )
    return ""


def service_user_stands(survey: Mapping[str, Any], home: str) -> bool:
    """Whether the service user, its group, its home and the login user's groups are as the role makes them."""
    account, place = survey["account"], survey["place"]
    if not account or not place or not place["directory"] or survey["login_lacks"]:
        return False
    made = {"gid": survey["group"], "home": home, "shell": SERVICE_SHELL}
    return (
        all(account[key] == value for key, value in made.items())
        and account["comment"] in (SERVICE_COMMENT, ADOPTED_COMMENT)
        and (place["uid"], place["gid"]) == (account["uid"], account["gid"])
        and place["mode"] == SERVICE_HOME_MODE
    )


def service_comment(account: Mapping[str, Any] | None) -> str:
    """By what in passwd the service user is known; `account`: as it was found, None where it is yet to be made."""
    return SERVICE_COMMENT if account is None or account["comment"] == SERVICE_COMMENT else ADOPTED_COMMENT


def without_root(message: str, host: str, user: str) -> str:
    """What is said where the first task that needs root failed with `message`."""
    reason = message.removeprefix("Task failed: ").strip()
    if not re.search(r"sudo|password|privilege|become", reason, re.IGNORECASE):
        return reason
    cure = ""
    if re.search(r"sudo: (command )?not found|not in the sudoers", reason):  # as Debian's installer leaves it
        cure = f" Type there as root: apt-get install sudo && /usr/sbin/adduser {user} sudo."
    elif "must have a tty" in reason:
        cure = (
            f" Take `requiretty` out of /etc/sudoers there, or write `Defaults:{user} !requiretty` (visudo)."
        )
    return (
        f"{host}: {user} cannot become root there ({reason}); expected sudo, with a password (-K asks for it) or "
        f"without.{cure} Nothing was changed."
    )


def machine_ids(names: Iterable[str], hostvars: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Each host's machine-id, as the role identity has found it or made it anew."""
    return {name: _made(hostvars[name], "__identity_machine", "machine_id") for name in names}


def mesh_keys(
    names: Iterable[str], hostvars: Mapping[str, Mapping[str, Any]], otherwise: str = ""
) -> dict[str, str]:
    """Each host's public SSH key, as it was found or made anew; `otherwise` where there is none yet."""
    return {name: _made(hostvars[name], "__ssh_mesh_key", "public_key") or otherwise for name in names}


def _made(host: Mapping[str, Any], made: str, key: str) -> str:
    """What the task that is registered as `made` has made, or the role identity's look found."""
    found = host.get("__identity_survey", {}).get("survey", {})
    return host.get(made, {}).get(key) or found.get(key) or ""


def etcd_token(
    members: list[dict], hostvars: Mapping[str, Mapping[str, Any]], port: int, anew: str = ""
) -> str:
    """What a set of members shares; with another one all begin anew.

    It changes with the members and their machines. Of the same ones, it is what their units say, or ends with `anew`
    (a time, as digits): one of them has lost its part.
    """
    names = [member["name"] for member in members]
    ids = machine_ids(names, hostvars).values()
    words = ";".join([",".join(member["address"] for member in members), ",".join(ids), str(port)])
    token = hashlib.sha256(words.encode()).hexdigest()[:12]
    kept = [_etcd_kept_token(hostvars[name]) for name in names]
    return f"{token}-{anew}" if anew else max([token, *(one for one in kept if one.startswith(token))])


def _etcd_unit(host: Mapping[str, Any]) -> str | None:
    """A host's unit as it is, "" where it has none; None of a host that is not in the play."""
    return host.get("__identity_survey", {}).get("survey", {}).get("etcd_unit")


def _etcd_kept_token(host: Mapping[str, Any]) -> str:
    found = re.search(r"--initial-cluster-token=(\S+)", _etcd_unit(host) or "")
    return found[1] if found else ""


def etcd_lost(members: list[dict], hostvars: Mapping[str, Mapping[str, Any]], port: int) -> dict[str, str]:
    """The members that have lost their part of the memory of runs, and how that shows; of the hosts in the play alone.

    One that forgot what it had promised the others must not come back as who it was; etcd refuses it, too.
    """
    names = [member["name"] for member in members]
    seen = {name: hostvars[name] for name in names if _etcd_unit(hostvars[name]) is not None}
    lost = {name: etcd_fault(host.get("__etcd_well", {})) for name, host in seen.items()}
    token = etcd_token(members, hostvars, port)
    having = [name for name, host in seen.items() if _etcd_kept_token(host) == token]
    if having and len(seen) == len(names):  # else the token is not known, or all begin anew in any case
        lost.update({name: "it is not set up there" for name in names if name not in having})
    return {name: why for name, why in lost.items() if why}


def etcd_fault(answer: Mapping[str, Any]) -> str:
    """What a member's answer to "/health", or the want of one, says against it; "" where all is well, or none asked."""
    if answer.get("skipped") or not answer or "true" in (answer.get("content") or ""):
        return ""
    return (answer.get("content") or answer["msg"].rpartition("Request failed: ")[2]).strip()


def etcd_lost_text(lost: Mapping[str, str], members: list[str], whole: bool, waits: bool) -> str:
    """What is said of members that have lost their part. whole: all hosts are in the play; waits: a run is active."""
    hosts = ", ".join(f"{name} ({why})" for name, why in lost.items())
    found = f"etcd, the memory by which runs go on, is not well on {hosts}"
    until = "no run goes on" if 2 * len(lost) >= len(members) else "fewer hosts may be lost"
    if not whole:
        return (
            f"WARNING: {found}. Run site.yml without -l, or for all its members at once: {', '.join(members)}. It has "
            f"them begin anew where that is needed and no run is active. Until then {until}."
        )
    if waits:
        return (
            f"WARNING: {found}. Run site.yml again once no run is active: it has all members begin anew. Until then "
            f"{until}."
        )
    return f"{found}. All its members begin anew: no run lives by them."


def etcd_members(names: list[str], hostvars: Mapping[str, Mapping[str, Any]]) -> list[dict]:
    """The hosts that keep the memory of runs, of `names` (the head first), with their name and address.

    Three outlive the loss of any one, five that of any two; more would only make each word slower. Two would need both,
    so that of two hosts the head alone keeps it; one host needs none.
    """
    count = {0: 0, 1: 0, 2: 1, 3: 3, 4: 3}.get(len(names), 5)
    return [
        {"name": host["name"], "address": host["address"]} for host in cluster_hosts(names[:count], hostvars)
    ]


def etcd_runs(answer: Mapping[str, Any]) -> list[str]:
    """The runs that live by a member's memory, of its answer to "kv/range": hosts' own records are there.

    Those go with a host's last sign of life; a run's plan and its end stay (trainer/cluster/store.py).
    """
    keys = [base64.b64decode(one["key"]).decode() for one in (answer.get("json") or {}).get("kvs", [])]
    parts = [key.split("/") for key in keys if key.startswith("/trainyard/")]
    starts = {start for _, _, start, *rest in parts if rest and rest[0] not in ("plan", "end")}
    return sorted({re.sub(r"\.\d{8}T\d+$", "", start) for start in starts})  # RUN.LAUNCH


def etcd_runs_of(names: list[str], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The runs that live by the memory of one of these hosts, where it is about to change (roles/etcd)."""
    return sorted({run for name in names for run in etcd_runs(hostvars[name].get("__etcd_kept", {}))})


class FilterModule:
    def filters(self):
        return {
            "cluster_hosts": cluster_hosts,
            "etcd_fault": etcd_fault,
            "etcd_lost": etcd_lost,
            "etcd_lost_text": etcd_lost_text,
            "etcd_members": etcd_members,
            "etcd_runs": etcd_runs,
            "etcd_runs_of": etcd_runs_of,
            "etcd_token": etcd_token,
            "forks_fault": forks_fault,
            "host_name_fault": host_name_fault,
            "init_fault": init_fault,
            "mesh_keys": mesh_keys,
            "next_peers": next_peers,
            "peer_authorized_keys": peer_authorized_keys,
            "peer_known_hosts": peer_known_hosts,
            "peer_ssh_ports": peer_ssh_ports,
            "release_fault": release_fault,
            "service_comment": service_comment,
            "mesh_login_fault": mesh_login_fault,
            "service_user_fault": service_user_fault,
            "service_user_stands": service_user_stands,
            "shared_home_fault": shared_home_fault,
            "without_root": without_root,
        }
