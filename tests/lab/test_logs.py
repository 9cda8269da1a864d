"""logs.yml on two real hosts, for a login user in no group but sudo: launchers, and a host that comes back."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plays import ROOT, playground, wait_for
from processes import kill_all

# A run that only says that it is there.
UNIT = """
cat > /etc/systemd/system/trainyard@.service <<'END'
[Service]
User=trainyard
SyslogIdentifier=trainer
ExecStart=/bin/sh -c 'echo attempt 1 begins >&2; exec sleep infinity'
[Install]
WantedBy=multi-user.target
END
systemctl daemon-reload
umask 027
cd /var/lib/trainyard
mkdir -p runs/first/logs
echo "{\\"state\\": \\"running\\", \\"updated\\": $(date +%s)}" > runs/first/status.json
date '+%H:%M:%S step 1' > runs/first/logs/rank-0.log
chown -R trainyard: runs
systemctl enable --now trainyard@first
"""
HOSTS = ("node1", "node2")
KEPT = (
    15  # seconds, longer than a connection stays open that has the groups of before: playbooks/vars/quick.yml
)


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    with playground("t-logs", 2, tmp_path_factory.mktemp("logs")) as plays:
        play = plays.run("identity")
        assert play.rc == 0, play.text
        for host in HOSTS:
            plays.sh(host, UNIT)
        yield plays


def said(plays):
    done = plays.book("playbooks/logs.yml", run="first")
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.full
def test_an_ordinary_login_user_sees_what_launchers_say(plays):
    assert plays.run("identity").changed == {"node1": 0, "node2": 0}
    text = said(plays)
    for host in HOSTS:
        assert f"{host}/launch | attempt 1 begins" in text and f"{host}/r0 | step 1" in text, text
        plays.sh(host, "gpasswd -d ops systemd-journal")
    time.sleep(KEPT)
    text = said(plays)
    assert "launch |" not in text
    for host in HOSTS:
        assert (
            text.count(f"{host}: what its launcher said is missing: the user that Ansible logs in as") == 1
        ), text
    play = plays.run("identity")
    assert play.rc == 0 and play.changed == {"node1": 1, "node2": 1}, play.text
    time.sleep(KEPT)
    assert said(plays).count("launch | attempt 1 begins") == 2


@pytest.mark.full
def test_a_host_is_seen_again_whenever_it_answers(plays, tmp_path):
    """Off at the start, and its wire out later."""
    shown = tmp_path / "shown"
    words = ["-i", str(plays.lab.inventory), "playbooks/logs.yml", "-e", "run=first", "-e", "follow=true"]
    plays.lab.power("node2", on=False)
    with shown.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("ansible-playbook")), *words],
            cwd=ROOT,
            env=plays.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def count(words):
        assert process.poll() is None, shown.read_text()
        return shown.read_text().count(words)

    try:
        wait_for(lambda: count("node2: no answer: ") == 1, 120)
        plays.lab.power("node2", on=True)
        wait_for(lambda: count("node2 answers") == 1 and count("node2/launch | attempt 1 begins") == 1, 120)
        plays.lab.cut("node2")
        wait_for(lambda: count("node2: no answer: ") == 2, 120)
        plays.sh("node2", "date '+%H:%M:%S step 2' >> /var/lib/trainyard/runs/first/logs/rank-0.log")
        plays.lab.join("node2")
        wait_for(lambda: count("node2 answers") == 2 and count("node2/r0 | step 2") == 1, 120)
        assert count("node2/r0 | step 1") == 0 and count("node1: no answer") == 0
        for host in HOSTS:
            plays.sh(host, "systemctl stop trainyard@first")
        assert process.wait(120) == 0, shown.read_text()
    finally:
        plays.lab.join("node2")
        with contextlib.suppress(ProcessLookupError):
            kill_all(process)
