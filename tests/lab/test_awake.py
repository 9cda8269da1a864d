"""What the role tuning does for a run at night: no suspend, no lid, no unattended reboot, as logind and apt see it."""

import pytest
from plays import playground, wait_for

RUN = """
printf '[Service]\\nExecStart=/bin/sleep 900\\n' > /etc/systemd/system/trainyard@.service
systemctl daemon-reload
"""
REBOOTS = """echo 'Unattended-Upgrade::Automatic-Reboot "true";' > /etc/apt/apt.conf.d/99mine"""
UNIT = "/etc/systemd/system/trainyard-awake.service"
WANTS = "/etc/systemd/system/trainyard@.service.wants"
FILES = "/etc/apt/apt.conf.d/zz-trainyard-* /etc/needrestart/conf.d/zz-trainyard*"
OURS = f"ls -d {UNIT} {WANTS} {FILES} 2>/dev/null || true"


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    """A host whose owner has unattended-upgrades reboot it, with a run's unit that does nothing."""
    with playground("t-awake", 1, tmp_path_factory.mktemp("awake")) as plays:
        plays.sh("node1", RUN + REBOOTS)
        yield plays


def kept_from(plays):
    """What logind keeps from happening."""
    manager = "org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager"
    found = plays.sh("node1", f"busctl get-property {manager} BlockInhibited").split('"')[1]
    return set(filter(None, found.split(":")))


def reboots(plays):
    return plays.sh("node1", "apt-config dump Unattended-Upgrade::Automatic-Reboot").split('"')[1]


def test_an_untouched_host_sleeps_and_reboots_as_its_owner_has_it(plays):
    play = plays.run("tuning", "cluster", None, "--check", "--diff")
    assert play.rc == 0 and play.changed["node1"] > 0, play.text
    plays.sh("node1", "systemctl start trainyard@first; sleep 1; systemctl stop trainyard@first")
    assert (kept_from(plays), reboots(plays), plays.sh("node1", OURS)) == (set(), "true", "")


def tuned(plays, tasks):
    task = {"name": tasks}
    task["ansible.builtin.include_role"] = {"name": "tuning", "tasks_from": tasks, "apply": {"become": True}}
    play = plays.run([task], "node1")
    assert play.rc == 0 and play.changed == {"node1": 0}, play.text


def test_while_much_is_installed_the_host_stays_awake_and_no_longer(plays):
    for _ in range(2):  # as after a site.yml that was broken off
        tuned(plays, "hold")
        wait_for(lambda: kept_from(plays) == {"sleep", "idle", "handle-lid-switch"}, 10)
    asked = plays.sh("node1", "systemctl suspend --check-inhibitors=yes 2>&1 || true")
    assert "site.yml installs here" in asked
    for _ in range(2):
        tuned(plays, "release")
        wait_for(lambda: not kept_from(plays), 10)
    assert plays.sh("node1", OURS) == ""


@pytest.mark.full
@pytest.mark.parametrize("held", [True, False])
def test_the_drivers_reboot_leaves_it_as_awake_as_it_was(plays, held):
    """As in a site.yml that installs the driver before gigabytes of the trainer's packages."""
    tuned(plays, "hold" if held else "release")
    plan = {"branch": 580, "modules": "open", "prebuilt": False, "fabric": False}
    outcome = {"says": [], "load": False, "reboot": True, "pending": "", "running": False}
    task = {"name": "load", "vars": {"__nvidia_outcome": outcome, "__nvidia_plan": plan}}
    task["ansible.builtin.include_role"] = {"name": "nvidia", "tasks_from": "load", "apply": {"become": True}}
    play = plays.run([task], "node1")
    # There is no card, which is said after all of the reboot's.
    assert play.rc != 0 and "rebooted, and still" in play.text, play.text
    assert bool(kept_from(plays)) == held
    tuned(plays, "release")


def test_a_run_keeps_its_host_awake_until_a_while_after_its_end(plays):
    play = plays.run("tuning")
    assert play.rc == 0, play.text
    assert plays.run("tuning").changed == {"node1": 0}
    assert (kept_from(plays), reboots(plays)) == (set(), "false")
    plays.sh("node1", f"sed -i 's/sleep 30/sleep 0.3/' {UNIT}; systemctl daemon-reload")
    plays.sh("node1", "systemctl start trainyard@first")
    # Not shutdown: root may.
    wait_for(lambda: kept_from(plays) == {"sleep", "idle", "handle-lid-switch"}, 10)
    asked = plays.sh("node1", "systemctl suspend --check-inhibitors=yes 2>&1 || true")
    assert 'Operation inhibited by "Trainyard"' in asked and "A run trains here" in asked
    plays.sh("node1", "sleep 5")  # longer than it would stay without a run
    assert "sleep" in kept_from(plays)
    plays.sh("node1", "systemctl stop trainyard@first")
    assert "sleep" in kept_from(plays)
    wait_for(lambda: not kept_from(plays), 10)
    assert plays.sh("node1", "systemctl is-active trainyard-awake || true").strip() == "inactive"


# A service whose program was replaced under it, as an upgrade does, and needrestart as it runs after that.
UPGRADED = """
apt-get -qq update; apt-get -qq install -y --no-install-recommends needrestart >/dev/null 2>&1
cp /bin/sleep /usr/bin/rank
for name in trainyard@first other; do
  mkdir -p /etc/systemd/system/$name.service.d
  printf '[Service]\\nExecStart=\\nExecStart=/usr/bin/rank 900\\n' > /etc/systemd/system/$name.service.d/rank.conf
done
printf '[Service]\\n' > /etc/systemd/system/other.service
systemctl daemon-reload; systemctl restart trainyard@first other
rm /usr/bin/rank; cp /bin/sleep /usr/bin/rank
"""


@pytest.mark.full
def test_an_upgrade_restarts_no_run(plays):
    def processes():
        asked = "systemctl show --value -p MainPID"
        return [plays.sh("node1", f"{asked} {name}") for name in ("trainyard@first", "other")]

    def upgrade_ends():
        plays.sh("node1", "needrestart -q -l -r a >/dev/null 2>&1")
        return processes()

    plays.sh("node1", UPGRADED)
    before = processes()
    assert plays.run("tuning").rc == 0
    after = upgrade_ends()
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    plays.sh("node1", "rm /etc/needrestart/conf.d/zz-trainyard.conf")
    assert upgrade_ends()[0] != before[0]  # but for ours it would have been
    assert plays.run("tuning").changed["node1"] == 1


def test_an_owner_may_have_it_otherwise(plays):
    plays.sh("node1", "systemctl start trainyard@first")
    wait_for(lambda: kept_from(plays), 10)
    play = plays.run("tuning", "cluster", {"tuning_stay_awake": False})
    assert play.rc == 0 and play.changed["node1"] > 0, play.text
    assert (kept_from(plays), reboots(plays), plays.sh("node1", OURS)) == (set(), "true", "")
    assert plays.run("tuning", "cluster", {"tuning_stay_awake": False}).changed == {"node1": 0}
    assert plays.sh("node1", "systemctl is-active trainyard@first").strip() == "active"
