"""The role time_sync on real hosts: a worker follows the head, nobody else is answered, and all of it goes again.

A lab's hosts are containers, which the role leaves alone. Here chronyd runs with -x all the same: it does all but set
the clock, which the hosts share with this machine.
"""

import pytest
from plays import RIVAL, include, playground, wait_for

from lab import machine

pytestmark = pytest.mark.full  # three minutes; tests/unit/test_time_sync.py has the decisions
CONF = "/etc/chrony/conf.d/trainyard.conf"
RUNS = """
d=/etc/systemd/system/chrony.service.d; mkdir -p $d
printf '[Unit]\\nConditionCapability=\\n[Service]\\nExecStart=\\nExecStart=!/usr/sbin/chronyd -x -F 1\\n' > $d/lab.conf
systemctl daemon-reload
"""
# A chronyc that says what /run/off says of the clock, until it is stepped.
SAYS_OFF = """
cat > /usr/local/bin/chronyc <<'END'
#!/bin/sh
[ "$1" = makestep ] && [ ! -e /run/stuck ] && rm -f /run/off
[ "$1" = waitsync ] && [ -e /run/off ] && { cat /run/off; exit 1; }
[ "$3" = sources ] && [ -e /run/apart ] && exec cat /run/apart
exec /usr/bin/chronyc "$@"
END
chmod +x /usr/local/bin/chronyc
echo 'try: 1, refid: 0A4D000B, correction: 0.400000000, skew: 0.100' > /run/off
"""
# One question to ADDRESS as an NTP client puts it; prints the stratum of the answer.
ASK = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(3)
    try:
        s.sendto(b"\\x23" + bytes(47), (sys.argv[1], 123))
        print(s.recv(100)[1])
    except OSError:
        print("nothing")
"""


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    with playground("t-time", 2, tmp_path_factory.mktemp("time")) as plays:
        yield plays


def role(plays, tags="time_sync", host="cluster", *arguments):
    """site.yml's part, on hosts that count as machines."""
    return plays.run(tags, host, {"_time_sync_container": False}, *arguments)


def sources(plays, host):
    """Address to (state, stratum) of whom chronyd on `host` asks; `*` is whom it follows."""
    lines = plays.sh(host, "chronyc -n -c sources").splitlines()
    return {line.split(",")[2]: (line.split(",")[1], int(line.split(",")[3])) for line in lines}


def test_a_container_is_left_alone_and_check_mode_runs_on_an_untouched_host(plays):
    play = plays.run("time_sync")
    assert play.rc == 0 and set(play.changed.values()) == {0}, play.text
    play = role(plays, "time_sync", "cluster", "--check", "--diff")
    assert play.rc == 0 and play.changed["node2"] > 0, play.text
    assert plays.sh("node2", "ls -d /etc/chrony /usr/sbin/chronyd 2>/dev/null || true") == ""


def test_another_daemon_is_named_and_stays(plays):
    plays.sh("node2", RIVAL)
    play = role(plays, "time_sync", "node2")
    plays.sh("node2", "dpkg --remove openntpd")
    assert play.rc != 0 and play.changed["node2"] == 0
    assert "openntpd keeps the time of this host" in play.words and "time_sync_manage: false" in play.words


def test_the_worker_follows_the_head_and_a_stranger_is_not_answered(plays):
    plays.sh("node2", "apt-get -qq update && apt-get -qq install systemd-timesyncd")
    for host in ("node1", "node2"):
        plays.sh(host, RUNS)
    play = role(plays, "firewall,time_sync")
    assert play.rc == 0, play.text
    head = plays.lab.host("node1").address
    wait_for(lambda: sources(plays, "node2")[head][0] == "*", 20)
    assert "pool " in plays.sh("node2", "chronyd -p")  # the distribution's sources stay
    # The lab lets no NTP out: the head says so, and the worker follows it nevertheless.
    assert "node1: no time source answers it, so that the others follow its own clock" in play.words
    assert "WARNING: node2" not in play.words
    assert sources(plays, "node2")[head][1] == 10
    assert plays.lab.exec("node2", "python3", "-c", ASK, head).strip() == "10"
    assert plays.lab.stranger("python3", "-c", ASK, head).stdout.strip() == "nothing"


def test_a_second_run_changes_nothing_and_one_that_was_killed_is_made_good(plays):
    plays.sh("node2", f"touch {CONF}")  # written, and not yet read
    assert role(plays).changed == {"node1": 0, "node2": 1}
    assert role(plays).changed == {"node1": 0, "node2": 0}


def test_a_worker_that_nobody_answers_is_refused_and_one_whose_head_is_back_waits_for_it(plays):
    head = plays.lab.host("node1").address
    hook = "{ type filter hook output priority 0; udp dport 123 drop; }"
    plays.sh("node2", f"nft 'table inet deaf {{ chain out {hook}; }}'; systemctl restart chrony")
    play = role(plays)
    assert play.rc != 0, play.text
    assert f"node2: no time source answers it, the head ({head}) neither" in play.words
    assert "time_sync_manage: false" in play.words
    alone = role(plays, "time_sync", "node2")  # a newcomer, whom the head's firewall may not know yet
    assert alone.rc == 0 and "WARNING: node2: no time source answers it" in alone.words, alone.text
    plays.sh("node2", "nft delete table inet deaf")
    play = role(plays)
    assert play.rc == 0 and "WARNING: node2" not in play.words, play.text


def test_a_worker_that_is_off_by_less_than_a_second_is_set_or_refused(plays):
    plays.sh("node2", SAYS_OFF)
    play = role(plays)
    assert play.rc == 0 and play.changed == {"node1": 0, "node2": 1}, play.text
    assert "WARNING: node2" not in play.words
    plays.sh("node2", f"{SAYS_OFF} touch /run/stuck")
    play = role(plays)
    assert play.rc != 0 and "node2: its clock is 0.4 s off" in play.words, play.text
    plays.sh("node1", SAYS_OFF)  # then the others cannot be nearer
    play = role(plays)
    assert play.rc == 0 and "WARNING: node2: its clock is 0.4 s off" in play.words, play.text
    # It follows a source of its own, and the head, whose clock is at rest, does not.
    plays.sh("node1", "rm -f /usr/local/bin/chronyc /run/off")
    head = plays.lab.host("node1").address
    plays.sh(
        "node2", f"rm -f /run/off /run/stuck; echo '^,x,{head},10,6,377,1,-75.75,-75.75,0.25' > /run/apart"
    )
    play = role(plays)
    assert play.rc != 0 and f"node2: its clock is 75.5 s from that of the head ({head})" in play.words, (
        play.text
    )
    plays.sh("node2", "rm -f /usr/local/bin/chronyc /run/apart")


def test_a_chrony_conf_that_does_not_read_it_is_refused(plays):
    plays.sh("node2", "sed -i.kept '/^confdir/d' /etc/chrony/chrony.conf")
    play = role(plays, "time_sync", "node2")
    plays.sh("node2", "mv /etc/chrony/chrony.conf.kept /etc/chrony/chrony.conf")
    assert play.rc != 0 and "confdir /etc/chrony/conf.d" in play.words


def test_what_kept_the_time_before_keeps_it_again(plays):
    task = include("time_sync")
    task["ansible.builtin.include_role"]["tasks_from"] = "remove"
    play = plays.run([task])
    assert play.rc == 0, play.text
    state = (
        "dpkg-query --show --showformat='${Package} ${db:Status-Status}\\n' chrony systemd-timesyncd || true"
    )
    assert "systemd-timesyncd installed" in plays.sh("node2", state)
    assert "chrony installed" not in plays.sh("node2", state)
    # Debian's minimal system had nothing before.
    assert ("chrony installed" in plays.sh("node1", state)) is (plays.lab.options.suite not in machine.UBUNTU)
    assert "local stratum" not in plays.sh("node1", "chronyd -p")
    assert plays.lab.exec("node2", "python3", "-c", ASK, plays.lab.host("node1").address).strip() == "nothing"
    for host in ("node1", "node2"):
        assert plays.sh(host, "ls /etc/chrony/conf.d | grep trainyard || true") == ""
    assert set(plays.run([task]).changed.values()) == {0}
