"""The role nvidia on a real Debian host whose PCI bus is made up: packages really installed, modules really built."""

import pytest
from plays import Plays

pytestmark = (
    pytest.mark.full
)  # a build of kernel modules takes minutes; tests/unit/test_nvidia_*.py have the decisions

FAKE = "/opt/fake"
CARD = f"{FAKE}/sys/bus/pci/devices/0000:01:00.0"
STATE = (
    "dpkg-query --show --showformat='${Package} ${Version} ${db:Status-Abbrev}\\n';"
    " find /etc /lib/modules -newer /opt/before 2>/dev/null | sort"
)


@pytest.fixture(scope="module")
def plays(make_lab, tmp_path_factory):
    lab = make_lab("t-nvidia", hosts=1)
    plays = Plays(lab, tmp_path_factory.mktemp("nvidia"))
    plug_in(plays)
    yield plays
    lab.down()


def plug_in(plays):
    """A made-up card of NVIDIA's, and apt's index for what it takes."""
    plays.sh("node1", f"mkdir -p {CARD}; echo 0x10de > {CARD}/vendor; echo 0x030000 > {CARD}/class")
    plays.sh("node1", "apt-get -q update >/dev/null")


@pytest.fixture(scope="module")
def kernel(plays):
    """The release of Debian's newest kernel, which does not run here; its headers are the real ones."""
    found = plays.sh(
        "node1", "apt-cache depends linux-headers-amd64 | sed -n 's/.*Depends: linux-headers-//p'"
    )
    return found.split()[0]


def run(plays, kernel, device, *arguments, **variables):
    plays.sh("node1", f"echo 0x{device} > {CARD}/device")
    # A build of torch that Debian's driver runs.
    given = {"_nvidia_sys_root": FAKE, "_nvidia_kernel": kernel, "python_env_torch": "torch==2.13.0+cu128"}
    given |= variables
    # Not Plays.run: a build takes longer than its patience.
    command = plays.command("nvidia", "node1", given, *arguments)
    return plays.finish(command, seconds=850)


def modules(plays, kernel):
    """Licence and version of the module that was built for `kernel`."""
    find = f"find /lib/modules/{kernel} -name 'nvidia*.ko*' | grep -vE -- '-(uvm|drm|modeset|peermem)'"
    (path,) = plays.sh("node1", find).split()
    fields = [
        plays.sh("node1", f"/sbin/modinfo -F {field} {path}").strip() for field in ("license", "version")
    ]
    return tuple(fields)


def test_what_no_driver_serves_is_refused_and_nothing_is_changed(plays, kernel):
    plays.sh("node1", "touch /opt/before")
    before = plays.sh("node1", STATE)
    play = run(plays, kernel, "2c05", nvidia_source="distribution")
    assert play.rc != 0
    assert "the Blackwell card at 0000:01:00.0 (PCI id 10de:2c05) needs 570 or newer" in play.words
    play = run(plays, kernel, "3f01")
    assert "10de:3f01) is none that Trainyard knows" in play.words
    assert plays.sh("node1", STATE) == before


def test_check_mode_on_an_untouched_host_changes_nothing(plays, kernel):
    before = plays.sh("node1", STATE)
    play = run(plays, kernel, "2204", "--check", "--diff")
    assert play.rc == 0, play.text
    assert play.changed["node1"] > 0
    assert plays.sh("node1", STATE) == before


def test_headers_that_apt_has_not_are_told_with_the_cure(plays, kernel):
    play = run(plays, "6.1.0-1-amd64", "2204")
    assert play.rc != 0
    assert "the headers of the kernel 6.1.0-1-amd64 cannot be installed" in play.words
    assert "install the newest" in play.words


def test_the_driver_is_installed_built_pinned_and_held(plays, kernel):
    play = run(plays, kernel, "2204")
    assert play.rc == 0, play.text
    assert "1 Ampere: driver 535, proprietary kernel modules, from the distribution" in play.words
    terms, version = modules(plays, kernel)
    assert terms == "NVIDIA" and version.startswith("535.")
    held = plays.sh("node1", "apt-mark showhold").split()
    assert {"nvidia-kernel-dkms", "libcuda1", "nvidia-smi", "nvidia-persistenced"} <= set(held)
    assert " 1001\n" in plays.sh("node1", "apt-cache policy nvidia-smi")
    assert '"nvidia"' in plays.sh("node1", "apt-config dump | grep Package-Blacklist")
    assert plays.sh("node1", "systemctl is-enabled nvidia-persistenced").strip() == "enabled"
    assert plays.sh("node1", "systemctl --failed --no-legend --plain") == ""
    assert "none can be loaded or rebooted into" in play.words


def test_a_second_run_changes_nothing(plays, kernel):
    play = run(plays, kernel, "2204")
    assert play.rc == 0, play.text
    assert play.changed == {"node1": 0}
    assert run(plays, kernel, "2204", "--check").changed == {"node1": 0}


def test_another_module_that_runs_is_told_with_the_reboots_command(plays, kernel):
    """With the kernel's own answers made up, in a container that is told to be none."""
    plays.sh("node1", f"mkdir -p {FAKE}/sys/module/nvidia && echo 535.1.1 > {FAKE}/sys/module/nvidia/version")
    plays.sh("node1", "printf '#!/bin/sh\\nexit 1\\n' > /usr/local/bin/systemd-detect-virt")
    plays.sh("node1", "chmod +x /usr/local/bin/systemd-detect-virt")
    try:
        play = run(plays, kernel, "2204")
    finally:
        plays.sh("node1", f"rm -r /usr/local/bin/systemd-detect-virt {FAKE}/sys/module")
    assert play.rc == 0, play.text
    assert "the kernel runs the proprietary module 535.1.1, installed is the proprietary 535." in play.words
    assert "sudo systemctl reboot" in play.words
    assert play.changed == {"node1": 0}


def test_the_newest_of_the_branch_is_what_is_there_and_another_branch_is_not_offered(plays, kernel):
    play = run(plays, kernel, "2204", nvidia_upgrade=True)
    assert play.rc == 0, play.text
    assert play.changed == {"node1": 0}
    play = run(plays, kernel, "2204", nvidia_branch="550", nvidia_source="distribution")
    assert "the distribution, branch 550: it has 535 alone" in play.words
