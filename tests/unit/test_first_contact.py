"""First contact without a network: how ssh's answers are judged, and what is pinned and shown."""

import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from plugins.action import first_contact as fc

REFUSED_LOGIN = "ops@192.0.2.1: Permission denied (publickey,password)."
UNKNOWN = """No ED25519 host key is known for node1 and you have requested strict checking.
Host key verification failed."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two public keys as lines of known_hosts, and their fingerprints, made by ssh-keygen."""
    made = []
    for number in range(2):
        file = tmp_path_factory.mktemp("key") / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
        line = "node1 " + " ".join(file.with_suffix(".pub").read_text().split()[:2])
        shown = subprocess.run(
            ["ssh-keygen", "-lf", str(file)], check=True, capture_output=True, text=True
        ).stdout
        made.append((line, shown.split()[1], number))
    return made


class Ssh:
    """Answers like ssh: `words` to the strict probe, `key` or `later` to the second. ssh-keygen is the real one."""

    def __init__(self, words, key="", later="", code=255):
        self.words, self.key, self.later, self.code, self.commands = words, key, later, code, []

    def __call__(self, command, **more):
        self.commands.append(command)
        if command[0] == "ssh-keygen":
            return subprocess.run(command, capture_output=True, text=True, check=False, **more)
        if "StrictHostKeyChecking=accept-new" in command:
            if self.key:
                option = next(word for word in command if word.startswith("UserKnownHostsFile="))
                Path(option.partition("=")[2]).write_text(f"{self.key}\n")
            return subprocess.CompletedProcess(command, 255, "", self.later or REFUSED_LOGIN)
        return subprocess.CompletedProcess(command, self.code, "", self.words)


def host(*arguments):
    return fc.Host("node1", "ssh", list(arguments), "192.0.2.1")


def test_a_host_that_refuses_only_the_login_is_known():
    ssh = Ssh(REFUSED_LOGIN)
    assert fc.look(host(), ssh).state == "known"
    assert len(ssh.commands) == 1


@pytest.mark.parametrize(
    "words",
    [  # as OpenSSH 9.2 says it
        "The ED25519 host key for node1 is marked as revoked.",
        "Host key ED25519 SHA256:I77rsV2Kjgg revoked by file /etc/ssh/revoked",
        "Error checking host key ED25519 SHA256:I77r in revoked keys file /none: No such file or directory",
    ],
)
def test_a_key_that_was_revoked_is_refused_and_not_shown_as_new(keys, words):
    """ssh says no more of it than of one that it does not know; its key was offered to be pinned."""
    ssh = Ssh(f"@@@@\n{words}\nThis could mean …\nHost key verification failed.", key=keys[0][0])
    found = fc.look(host(), ssh)
    assert (found.state, found.reason, found.lines) == ("revoked", words, [])
    said = "\n".join(fc.report_revoked([found]))
    assert "node1 (192.0.2.1) shows a host key that is not to be trusted" in said and words in said


def test_a_host_that_lets_everybody_in_is_known_too():
    assert fc.look(host(), Ssh("", code=0)).state == "known"


def test_an_unknown_key_is_fetched_and_shown_as_the_machine_itself_shows_it(keys):
    line, fingerprint, _ = keys[0]
    found = fc.look(host(), Ssh(UNKNOWN, key=line))
    assert (found.state, found.lines, found.fingerprint) == ("unknown", [line], f"ED25519 {fingerprint}")


def test_a_changed_key_is_told_with_both_fingerprints_and_the_line(keys, tmp_path):
    (old, old_print, _), (_, new_print, _) = keys
    file = tmp_path / "known hosts"
    file.write_text(f"# mine\n{old}\n")
    words = (
        "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n"
        f"The fingerprint for the ED25519 key sent by the remote host is\n{new_print}.\n"
        f"Offending ED25519 key in {file}:2\nHost key verification failed."
    )
    found = fc.look(host(), Ssh(words))
    assert (found.state, found.file, found.line) == ("changed", str(file), 2)
    text = "\n".join(fc.report_changed([found]))
    for part in (
        "node1",
        "192.0.2.1",
        f"ED25519 {old_print}",
        new_print,
        str(file),
        "line 2",
        f"sed -i 2d '{file}'",
    ):
        assert part in text


def test_of_a_file_of_roots_all_keys_of_the_host_are_forgotten(tmp_path, monkeypatch):
    """As /etc/ssh/ssh_known_hosts of a controller that is one of the cluster's hosts: ssh names one line of three."""
    file, hashed = tmp_path / "ssh_known_hosts", tmp_path / "hashed"
    file.write_text(
        "# ours\nnode1,192.0.2.1 ssh-ed25519 A\nnode1,192.0.2.1 ssh-rsa B\n[node2]:2222 ssh-rsa C\n"
    )
    hashed.write_text("|1|salt=|hash= ssh-rsa D\n")
    assert fc.forget(str(file), 2) == f"sed -i 2d {file}"
    monkeypatch.setattr(fc.os, "access", lambda *_: False)
    assert fc.forget(str(file), 4) == f"sudo ssh-keygen -R '[node2]:2222' -f {file}"
    assert fc.forget(str(hashed), 1) == f"sudo sed -i 1d {hashed}"
    words = fc.forget(str(file), 2).removeprefix("sudo ")
    assert words == f"ssh-keygen -R node1 -f {file}"
    subprocess.run(shlex.split(words), check=True, capture_output=True)
    assert file.read_text() == "# ours\n[node2]:2222 ssh-rsa C\n"


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("ssh: connect to host 192.0.2.1 port 22: Connection refused", "openssh-server"),
        ("ssh: connect to host 192.0.2.1 port 22: Connection timed out", "switched on"),
        ("ssh: connect to host 192.0.2.1 port 22: No route to host", "switched on"),
        ("ssh: Could not resolve hostname node1: Name or service not known", "ansible_host"),
        ("ssh: connect to host 192.0.2.1 port 22: Network is unreachable", "No route"),
        ("kex_exchange_identification: Connection closed by remote host", "by hand"),
        (f"no answer within {fc.GIVE_UP_SECONDS} s", "switched on"),
    ],
)
def test_a_host_that_does_not_answer_is_named_with_the_cure(words, cure):
    found = fc.look(host("-p", "22"), Ssh(words, later=words))
    assert found.state == "unreachable"
    text = "\n".join(fc.report_unreachable([found]))
    assert words in text
    assert cure in text
    assert "ssh -p 22 192.0.2.1" in text


def test_our_options_come_first_and_ansibles_arguments_are_kept():
    """ssh takes the first value of an option; a shared connection would hide a machine that was replaced."""
    ssh = Ssh(REFUSED_LOGIN)
    fc.look(host("-o", "ControlMaster=auto", "-o", "ProxyCommand=relay %h"), ssh)
    (command,) = ssh.commands
    assert command.index("ControlMaster=no") < command.index("ControlMaster=auto")
    assert "PreferredAuthentications=none" in command
    assert "BatchMode=yes" in command
    assert command[-3:] == ["ProxyCommand=relay %h", "192.0.2.1", "true"]


def test_a_hanging_ssh_and_a_missing_one_are_answers_not_tracebacks(monkeypatch):
    monkeypatch.setattr(fc, "GIVE_UP_SECONDS", 0.2)
    assert "no answer within" in fc.run_ssh(["sleep", "5"]).stderr
    assert "No such file" in fc.run_ssh(["/nowhere/ssh"]).stderr


@pytest.mark.parametrize(
    ("listed", "file"),
    [
        ("/home/me/.ssh/known_hosts /home/me/.ssh/known_hosts2", "/home/me/.ssh/known_hosts"),
        ("/srv/a b/known_hosts", "/srv/a b/known_hosts"),
        ("/dev/null", None),
        ("none", None),
    ],
)
def test_keys_are_pinned_where_ssh_itself_would_write(listed, file):
    def ssh(command, **_):
        assert "-G" in command
        return subprocess.CompletedProcess(command, 0, f"user me\nuserknownhostsfile {listed}\nport 22\n", "")

    assert fc.known_hosts_file(host(), ssh) == (Path(file) if file else None)


def test_ssh_itself_agrees_about_the_file(tmp_path):
    """Not the fake: `ssh -G` opens no connection."""
    file = tmp_path / "a b" / "known_hosts"
    found = fc.known_hosts_file(host("-F", "none", "-o", f'UserKnownHostsFile="{file}"'))
    assert found == file


def test_pinning_appends_whole_lines_for_the_owner_alone(tmp_path):
    file = tmp_path / "new" / "known_hosts"
    fc.pin(file, ["a", "b"])
    assert file.read_text() == "a\nb\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.write_text("mine, without an end")
    fc.pin(file, ["c"])
    assert file.read_text() == "mine, without an end\nc\n"


def test_options_with_a_quote_that_is_not_closed_are_told_with_host_and_variable(monkeypatch):
    action = fc.ActionModule.__new__(fc.ActionModule)
    options = {"ssh_common_args": '-o ProxyCommand="ssh -W %h:%p gate'}
    connection = SimpleNamespace(set_options=lambda **_: None, get_option=lambda key: options.get(key, ""))
    monkeypatch.setattr(fc.connection_loader, "get", lambda *_: connection)
    monkeypatch.setattr(fc.ActionBase, "run", lambda *_: None)
    monkeypatch.setattr(
        action,
        "validate_argument_spec",
        lambda _: (None, {"hosts": ["node1"], "accept": False}),
        raising=False,
    )
    action._play_context = None
    told = action.run(None, {"hostvars": {"node1": {"ansible_connection": "ssh"}}})
    assert told["failed"] and told["msg"].startswith("Nothing was changed.\n  - node1: how to reach it")
    assert "ansible_ssh_common_args: found" in told["msg"] and "No closing quotation" in told["msg"]


def test_the_table_has_a_line_a_host():
    hosts = [fc.Host("a", "ssh", [], "192.0.2.10", fingerprint="ED25519 SHA256:x"), host()]
    lines = fc.table(hosts)
    assert len(lines) == 3
    assert lines[1].split() == ["a", "192.0.2.10", "ED25519", "SHA256:x"]
