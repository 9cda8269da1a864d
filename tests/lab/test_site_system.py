"""site.yml on real hosts, as far as the machines themselves go: first contact, names, the mesh, kernel settings.

The tests follow one lab through its life, in this order. Its hosts begin untouched, with password-only SSH, a sudo that
asks for a password, and host keys that nobody has seen.
"""

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from plays import ROOT, Play, Plays
from test_firewall import SCAN

SYSTEM = ("--tags", "identity,ssh_mesh,tuning")
HOSTS = ("node1", "node2", "node3")
STATE = (
    "find /etc /var/lib/trainyard -xdev -type f 2>/dev/null | sort | xargs -d '\\n' sha256sum | sha256sum; "
    "hostname; getent passwd | sha256sum"
)


@pytest.fixture(scope="module")
def lab(make_lab):
    lab = make_lab("t-sys", hosts=3, unpinned=True)
    yield lab
    lab.down()


@pytest.fixture(scope="module")
def site(lab, tmp_path_factory):
    """`site(*arguments, answers=…)`: run site.yml on the lab; with answers, at a terminal where they are typed."""
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    environment = Plays(lab, tmp_path_factory.mktemp("plays")).environment()

    def run(*arguments, answers=None, inventory=lab.inventory):
        command = [program, "-i", str(inventory), "site.yml", *arguments]
        started = time.monotonic()
        if answers is None:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=800,
            )
            code, text = done.returncode, done.stdout + done.stderr
        else:
            code, text = at_a_terminal(command, environment, answers)
        return Play(code, text, time.monotonic() - started)

    return run


def at_a_terminal(command, environment, answers):
    """Run `command` at a terminal of its own and type each of `answers` (prompt: answer) when it asks for it, once.

    Returns its exit code and the screen.
    """
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], command, environment)
    screen, waiting = b"", dict(answers)
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:
            break
        screen += data
        for prompt in [prompt for prompt in waiting if prompt.encode() in screen]:
            time.sleep(0.5)  # until it reads
            os.write(terminal, f"{waiting.pop(prompt)}\r".encode())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), screen.decode(errors="replace")


def shown_key(lab, host):
    """The fingerprint that the machine itself shows."""
    return lab.exec(host, "ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub").split()[1]


def states(lab):
    return {host: lab.exec(host, "sh", "-c", STATE) for host in HOSTS}


@pytest.fixture(scope="module")
def untouched(lab):
    return states(lab)


def test_unknown_keys_are_refused_without_a_terminal_and_shown_as_the_machines_show_them(
    lab, site, untouched
):
    play = site()
    assert play.rc != 0
    for host in HOSTS:
        assert re.search(rf"{host} +10\.\S+ +ED25519 {re.escape(shown_key(lab, host))}", play.text)
    assert "-e accept_new_host_keys=true" in play.text
    assert not lab.known_hosts.exists() or lab.known_hosts.read_text() == ""
    assert states(lab) == untouched


def test_a_no_at_the_terminal_pins_nothing(lab, site):
    play = site(answers={"(yes/no)": "no"})
    assert play.rc != 0
    assert "not accepted" in play.text
    assert not lab.known_hosts.exists() or lab.known_hosts.read_text() == ""


def test_passwords_and_one_yes_are_typed_and_pin_all_keys(lab, site, tmp_path):
    """-k -K, on an inventory that holds no password."""
    (file,) = (file for file in lab.inventory.iterdir() if "ansible_password" in file.read_text())
    inventory = yaml.safe_load(file.read_text())
    for name in ("ansible_password", "ansible_become_password"):
        del inventory["all"]["vars"][name]
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    answers = {"SSH password:": lab.password, "BECOME password": lab.password, "(yes/no)": "yes"}
    play = site("-k", "-K", "--check", answers=answers, inventory=tmp_path / "hosts.yml")
    assert play.rc != 0
    assert "--tags first_contact" in play.text
    assert not lab.known_hosts.exists() or lab.known_hosts.read_text() == ""
    play = site("-k", "-K", "--tags", "first_contact", answers=answers, inventory=tmp_path / "hosts.yml")
    assert play.rc == 0, play.text
    assert lab.known_hosts.read_text().count("ssh-ed25519") == 3
    del answers["(yes/no)"]
    play = site("-k", "-K", "--check", "--tags", "tuning", answers=answers, inventory=tmp_path / "hosts.yml")
    assert play.rc == 0, play.text
    assert "(yes/no)" not in play.text
    assert lab.password not in play.text
    del answers["BECOME password"]
    play = site("-k", "--tags", "identity", answers=answers, inventory=tmp_path / "hosts.yml")
    assert play.rc != 0
    assert "node1: ops cannot become root there" in play.words and "-K asks for it" in play.words, play.text


def test_check_mode_tells_what_would_change_on_untouched_hosts(lab, site, untouched):
    play = site("--check", "--diff", *SYSTEM)
    assert play.rc == 0, play.text
    assert "hostname = node2" in play.text
    assert all(play.changed[host] > 5 for host in HOSTS)
    assert states(lab) == untouched


def test_killed_half_way_it_is_simply_run_again(lab, site, tmp_path):
    """Killed as soon as the first host has its user, whatever the others have by then."""
    Plays(lab, tmp_path).kill_when(
        lambda: "trainyard" in lab.exec("node1", "getent", "passwd"), SYSTEM[1], "cluster"
    )
    play = site(*SYSTEM)
    assert play.rc == 0, play.text
    assert all(play.changed[host] > 2 for host in HOSTS)


def test_the_hosts_are_peers_that_know_each_other(lab):
    for host in HOSTS:
        assert lab.exec(host, "hostname").strip() == host
        assert lab.exec(host, "getent", "hosts", host).split()[0] == lab.host(host).address
        assert "127.0.1.1 " + host not in lab.exec(host, "cat", "/etc/hosts")
        groups = lab.exec(host, "id", "-nG", "ops").split()
        assert "trainyard" in groups
        assert (
            lab.exec(host, "stat", "-c", "%U:%G:%a", "/var/lib/trainyard").strip()
            == "trainyard:trainyard:750"
        )
        assert lab.exec(host, "getent", "shadow", "trainyard").split(":")[1] == "*"
        for peer in HOSTS:
            where = lab.exec(
                host, "runuser", "-u", "trainyard", "--", "ssh", "-o", "BatchMode=yes", peer, "hostname"
            )
            assert where.strip() == peer


def test_a_peers_key_opens_nothing_but_commands_and_only_from_its_own_address(lab):
    forward = ["ssh", "-o", "BatchMode=yes", "-o", "ControlPath=none", "-W", "127.0.0.1:22", "node2"]
    refused = lab.exec(
        "node1", "runuser", "-u", "trainyard", "--", "sh", "-c", f"{' '.join(forward)} 2>&1 || true"
    )
    assert "prohibited" in refused
    # node1's key, tried at node3, which is not where it belongs.
    key = lab.exec("node1", "cat", "/var/lib/trainyard/.ssh/id_ed25519")
    login = "ssh -i /tmp/stolen -o IdentitiesOnly=yes -o BatchMode=yes node2 true 2>&1"
    stolen = f"umask 077; cat > /tmp/stolen; {login}; rm /tmp/stolen"
    done = subprocess.run(
        lab.host("node3").enter("runuser", "-u", "trainyard", "--", "sh", "-c", stolen),
        input=key,
        capture_output=True,
        text=True,
    )
    assert "Permission denied" in done.stdout + done.stderr


def test_kernel_settings_are_in_the_kernel_and_in_the_file_and_the_host_is_well(lab):
    for host in HOSTS:
        assert lab.exec(host, "cat", "/proc/sys/net/ipv4/tcp_slow_start_after_idle").strip() == "0"
        assert "tcp_retries2 = 8" in lab.exec(host, "cat", "/etc/sysctl.d/90-trainyard.conf")
        assert lab.exec(host, "systemctl", "is-system-running").strip() == "running"


def test_a_second_run_changes_nothing(site):
    play = site(*SYSTEM)
    assert play.rc == 0, play.text
    assert play.changed == dict.fromkeys(HOSTS, 0)


def test_one_host_alone_loses_none_of_its_peers(lab, site):
    before = states(lab)
    play = site("-l", "node2", *SYSTEM)
    assert play.rc == 0, play.text
    assert play.changed == {"node2": 0}
    assert states(lab) == before


def test_a_persons_account_does_not_become_the_service_user(lab, site):
    before, password = states(lab), lab.exec("node2", "getent", "shadow", "ops")
    play = site("-l", "node2", "--tags", "identity", "-e", "trainer_user=ops")
    assert play.rc != 0
    assert "trainer_user: found ops, which is another's on this host already (uid 1" in play.words
    assert states(lab) == before
    assert lab.exec("node2", "getent", "shadow", "ops") == password


def test_a_link_in_the_service_users_home_leads_root_nowhere(lab, site):
    home = "/var/lib/trainyard/.ssh"
    plant = f"cd {home} && mv authorized_keys kept && ln -s /etc/shadow authorized_keys"
    lab.exec("node2", "runuser", "-u", "trainyard", "--", "sh", "-ec", plant)
    before = lab.exec("node2", "sha256sum", "/etc/shadow")
    play = site("-l", "node2", "--tags", "ssh_mesh")
    assert play.rc != 0
    assert f"{home}/authorized_keys: Permission denied for the user trainyard" in play.words
    assert lab.exec("node2", "sha256sum", "/etc/shadow") == before
    assert lab.exec("node2", "sh", "-c", f"grep -rlE '^root:' {home} || true") == ""
    lab.exec("node2", "mv", f"{home}/kept", f"{home}/authorized_keys")
    assert site("-l", "node2", "--tags", "ssh_mesh").changed == {"node2": 0}


def test_the_owners_lines_stay_and_ours_come_back(lab, site):
    lab.exec(
        "node1", "sh", "-c", "sed -i '/node3/d' /etc/hosts; sed -i '1i 192.0.2.7 printer # mine' /etc/hosts"
    )
    play = site("-l", "node1", "--tags", "identity")
    assert play.rc == 0, play.text
    text = lab.exec("node1", "cat", "/etc/hosts")
    assert text.startswith("192.0.2.7 printer # mine\n")
    assert f"{lab.host('node3').address} node3" in text


def test_a_cloned_machine_id_is_replaced_and_the_first_host_keeps_it(lab, site):
    first = lab.exec("node1", "cat", "/etc/machine-id").strip()
    lab.exec("node3", "sh", "-c", f"echo {first} > /etc/machine-id")
    play = site("--tags", "identity")
    assert play.rc == 0, play.text
    assert "another host's" in play.words
    assert lab.exec("node1", "cat", "/etc/machine-id").strip() == first
    assert re.fullmatch("[0-9a-f]{32}", new := lab.exec("node3", "cat", "/etc/machine-id").strip())
    assert new != first


def test_a_host_that_does_not_answer_is_named_in_seconds(lab, site):
    before = states(lab)
    lab.cut("node3")
    try:
        play = site(*SYSTEM)
    finally:
        lab.join("node3")
    assert play.rc != 0
    assert "node3 (" in play.text
    assert "does not answer" in play.text
    assert "node1 (" not in play.text
    assert play.seconds < 60
    assert states(lab) == before


def test_a_changed_key_is_refused_until_it_is_forgotten(lab, site):
    old, before = shown_key(lab, "node2"), lab.known_hosts.read_text()
    renew = "rm /etc/ssh/ssh_host_*; ssh-keygen -A >/dev/null; systemctl restart ssh"
    lab.exec("node2", "sh", "-c", renew)
    state = states(lab)
    for arguments in ((), ("-e", "accept_new_host_keys=true")):
        play = site(*SYSTEM, *arguments)
        assert play.rc != 0
        assert old in play.text
        assert shown_key(lab, "node2") in play.text
        assert states(lab) == state
        assert lab.known_hosts.read_text() == before
    (cure,) = set(re.findall(r"^ +(sed -i \d+d .+)$", play.text, re.M))
    subprocess.run(cure, shell=True, check=True)
    play = site(*SYSTEM, "-e", "accept_new_host_keys=true")
    assert play.rc == 0, play.text
    assert (
        lab.exec(
            "node1", "runuser", "-u", "trainyard", "--", "ssh", "-o", "BatchMode=yes", "node2", "hostname"
        ).strip()
        == "node2"
    )
    assert play.changed["node3"] > 0  # it pins the new key, too


def test_two_hosts_with_one_host_key_are_refused_before_any_change(lab, site):
    keys = lab.exec("node1", "sh", "-c", "cd /etc/ssh && tar c ssh_host_* | base64 -w0")
    lab.exec(
        "node3",
        "sh",
        "-c",
        f"cd /etc/ssh && rm ssh_host_* && echo {keys} | base64 -d | tar x && systemctl restart ssh",
    )
    forget = ["ssh-keygen", "-R", lab.host("node3").address, "-f", str(lab.known_hosts)]
    subprocess.run(forget, check=True, capture_output=True)
    state = states(lab)
    play = site(*SYSTEM, "-e", "accept_new_host_keys=true")
    assert play.rc != 0
    assert "SSH host key" in play.text
    assert "the one that node1 has, too" in play.words
    assert states(lab) == state


def test_an_sshd_at_another_port_is_let_in_there_by_peers_and_strangers_and_nobody_elsewhere(
    lab, site, tmp_path
):
    """As docs/security.md has it: both ports at first, for site.yml lets in where sshd listens by then."""
    beside, address = tmp_path / "port.yml", lab.host("node2").address
    beside.write_text("all: {hosts: {node2: {ansible_port: 2222}}}\n")
    arguments = ("-l", "node1,node2", "-e", "accept_new_host_keys=true", "--tags", "ssh_mesh,firewall")
    login = ("runuser", "-u", "trainyard", "--", "ssh", "-o", "BatchMode=yes", "node2", "hostname")

    def listens_on(*ports):
        lines = "".join(f"Port {port}\\n" for port in ports)
        lab.exec(
            "node2",
            "sh",
            "-ec",
            f"printf '{lines}' > /etc/ssh/sshd_config.d/port.conf; systemctl restart ssh",
        )

    def reached():
        scan = ("python3", "-c", SCAN, address, "22", "2222", "8000")
        return json.loads(lab.stranger(*scan).stdout)["tcp"]

    play = site(*arguments)
    assert play.rc == 0 and reached() == [22], play.text
    listens_on(22, 2222)
    assert reached() == [22]
    assert site(*arguments).rc == 0 and reached() == [22, 2222]
    listens_on(2222)
    for changes in (True, False):
        play = site("-i", str(beside), *arguments)
        assert play.rc == 0 and (play.changed["node2"] > 0) == changes, play.text
        assert reached() == [2222]
        assert lab.exec("node1", *login).strip() == "node2"
