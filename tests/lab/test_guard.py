"""The guard on a real host: the controller is killed, the host is restarted, and the old state comes back."""

import pytest
from plays import include, playground, wait_for

GUARD = "/usr/local/lib/trainyard/guard"
# What an undo starts must live on, as the DHCP client does that ifup starts.
DAEMON = ["sh", "-c", "sleep 3600 & echo $! > /run/daemon"]
SLOW_PROOF = ["sleep", "9"]  # as a change's last command it keeps the moment between apply and confirm open


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    with playground("t-guard", 1, tmp_path_factory.mktemp("guard")) as plays:
        play = plays.run([include("packages")], "node1", {"packages_names": ["nftables"]})
        assert play.rc == 0, play.text
        yield plays


def change(**more):
    """A task that writes /etc/guarded.conf under the guard."""
    options = {
        "name": "test",
        "why": "a test of the guard",
        "files": [{"path": "/etc/guarded.conf", "content": "new\n"}],
        "apply": [["cp", "/etc/guarded.conf", "/run/guarded.live"]],
        "timeout": 20,
        **more,
    }
    return [{"name": "Change", "guarded_change": options, "become": True}]


def cut_off(**more):
    """A task that makes the host unreachable: what it applies drops every new connection."""
    rules = "table inet t {\n chain c {\n type filter hook input priority -5; policy drop;\n iif lo accept\n }\n}\n"
    return change(
        files=[{"path": "/etc/cut.nft", "content": rules}],
        apply=[["nft", "-f", "/etc/cut.nft"]],
        undo=[["nft", "delete", "table", "inet", "t"], DAEMON],
        **more,
    )


def connects(plays):
    """Whether anything gets a TCP connection to the host's SSH: quicker to say than a whole Ansible."""
    knock = "import socket, sys; socket.create_connection((sys.argv[1], 22), 3)"
    return plays.lab.stranger("python3", "-c", knock, plays.lab.host("node1").address).returncode == 0


def daemon_lives(plays):
    """Whether the last undo's daemon is still there; forgets it."""
    return plays.sh("node1", "kill -0 $(cat /run/daemon) && echo lives; rm -f /run/daemon").strip() == "lives"


def armed(plays):
    return '"test"' in plays.sh("node1", f"{GUARD} status").split('"reports"')[0]


def applied(plays):
    return plays.sh("node1", "nft list tables") != ""


def test_confirmed_by_a_new_connection_and_the_second_run_changes_nothing(plays):
    play = plays.run(change(), "node1")
    assert play.rc == 0, play.text
    assert play.changed == {"node1": 1}
    assert plays.sh("node1", "cat /run/guarded.live; ls -A /var/lib/trainyard-guard").split() == [
        "new",
        ".lock",
    ]
    assert plays.run(change(), "node1").changed == {"node1": 0}


def test_a_login_that_takes_long_confirms_too(plays):
    """As where names are looked up in vain, accounts live in a directory, or the processors are busy."""
    plays.sh(
        "node1",
        "cp /etc/pam.d/sshd /root; echo 'session optional pam_exec.so /bin/sleep 8' >> /etc/pam.d/sshd",
    )
    try:
        play = plays.run(
            change(timeout=45, files=[{"path": "/etc/guarded.conf", "content": "slow\n"}]), "node1"
        )
    finally:
        plays.sh("node1", "cp /root/sshd /etc/pam.d/sshd")
    assert play.rc == 0, play.text
    assert plays.sh("node1", "cat /run/guarded.live").strip() == "slow"


@pytest.mark.parametrize(
    "loss",
    [
        "systemctl disable trainyard-guard-boot",  # as after a power cut between the files and `enable`
        "rm /etc/systemd/system/trainyard-guard-boot.service",
    ],
)
def test_a_guard_that_would_not_start_at_boot_is_installed_anew(plays, loss):
    plays.sh("node1", loss)
    play = plays.run(change(files=[{"path": "/etc/guarded.conf", "content": f"{loss}\n"}]), "node1")
    assert play.rc == 0, play.text
    enabled = plays.sh("node1", "systemctl is-enabled trainyard-guard-boot trainyard-guard-files").split()
    assert enabled == ["enabled", "enabled"]


def test_killed_before_it_confirmed_the_next_run_undoes_and_goes_on(plays):
    files = [{"path": "/etc/guarded.conf", "content": "newer\n"}]
    slow = change(files=files, verify=[SLOW_PROOF], undo=[DAEMON], timeout=300)
    plays.kill_when(lambda: armed(plays), slow, "node1")
    assert plays.sh("node1", "cat /etc/guarded.conf").strip() == "newer"
    # Its files stand, but are about to go: a change that was planned from them is not made.
    play = plays.run(change(files=files), "node1")
    assert play.rc != 0 and "A change of test waits to be confirmed on this host" in play.words
    assert armed(plays)

    play = plays.run([include("guard"), *change(files=files)], "node1")
    assert play.rc == 0, play.text
    assert daemon_lives(plays)
    assert "an earlier run ended before it had confirmed the change" in play.words
    assert "/etc/guarded.conf put back" in play.words
    assert plays.sh("node1", "cat /run/guarded.live").strip() == "newer"
    assert not armed(plays)


@pytest.mark.full
def test_killed_after_a_change_that_cuts_the_host_off_it_answers_again_within_60_s(plays):
    assert connects(plays)
    plays.kill_when(lambda: applied(plays), cut_off(timeout=40), "node1")
    assert not connects(plays)
    assert wait_for(lambda: plays.answers("node1"), 60) < 60
    assert "no new connection from the controller" in plays.sh(
        "node1", "cat /var/lib/trainyard-guard/test.report.json"
    )
    assert plays.sh("node1", "nft list tables; ls /etc/cut.nft 2>/dev/null || true") == ""
    assert daemon_lives(plays)
    for told in (True, False):  # nobody could say it then: the next run does, once
        play = plays.run([include("guard")], "node1")
        assert play.rc == 0 and play.changed["node1"] == 0, play.text
        assert ("of an earlier run, 20" in play.words and "no new connection" in play.words) == told, (
            play.text
        )


def test_a_restart_before_it_is_confirmed_brings_the_old_state_back(plays):
    plays.kill_when(lambda: armed(plays), cut_off(timeout=600), "node1")
    plays.lab.power("node1", on=False)
    plays.lab.power("node1", on=True)
    assert wait_for(lambda: plays.answers("node1") and not armed(plays), 60) < 60
    assert "restarted before" in plays.sh("node1", "cat /var/lib/trainyard-guard/test.report.json")
    assert plays.sh("node1", "ls /etc/cut.nft 2>/dev/null || true") == ""
    wait_for(lambda: plays.sh("node1", "cat /run/daemon").strip(), 20)
    assert daemon_lives(plays)


def test_cut_off_with_the_controller_alive_the_play_says_what_was_undone_and_why(plays):
    play = plays.run(cut_off(), "node1")
    assert play.rc != 0
    assert "The change was undone; the host answers at" in play.words
    assert "no new connection from the controller confirmed it within 20 s" in play.words
    assert "/etc/cut.nft removed" in play.words
    assert plays.answers("node1")
