"""Stock servers with Ubuntu 22.04 and 24.04: the way there and back, and NVIDIA's driver out of Ubuntu's archive."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from plays import ROOT, Plays, wait_for
from test_nvidia import FAKE, plug_in, run

from plugins.filter.python_env import python_env_brought

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # an environment takes minutes

SUITES = {"jammy": "22.04", "noble": "24.04"}
OURS = "find / -xdev -name '*trainyard*' -not -path '/var/cache/*' -not -path '/var/log/*' -not -path '/proc/*' | sort"

# --- the way there and back ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SUITES)
def plays(request, make_lab, tmp_path_factory):
    lab = make_lab(f"t-{request.param}", hosts=2, suite=request.param)
    yield Plays(lab, tmp_path_factory.mktemp(request.param))
    lab.down()


ABOUT = """
import json, os, sys, sysconfig
about = sysconfig.get_path("stdlib"), sysconfig.get_config_var("WHEEL_PKG_DIR") or ""
print(json.dumps([os.path.realpath(sys.executable), *about]))
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A stand-in for python-build-standalone's archive: this machine's Python, packed so; and its line of the lock."""
    asked = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", ABOUT], capture_output=True, text=True, check=True
    )
    program, source, wheels = json.loads(asked.stdout)
    folder = tmp_path_factory.mktemp("python")
    binaries, library = folder / "python/bin", folder / "python/lib" / Path(source).name
    binaries.mkdir(parents=True)
    shutil.copy2(program, binaries / "python3")
    skipped = shutil.ignore_patterns("__pycache__", "test", "config-*", "sitecustomize.py")
    shutil.copytree(source, library, ignore=skipped)
    if wheels:  # Debian has pip's apart
        shutil.copytree(wheels, library / "ensurepip/_bundled", dirs_exist_ok=True)
        module, beside = (
            library / "ensurepip/__init__.py",
            "os.path.join(os.path.dirname(__file__), '_bundled')",
        )
        module.write_text(module.read_text().replace("sysconfig.get_config_var('WHEEL_PKG_DIR')", beside))
    file = folder / f"cpython-3.13.0+20261110-{os.uname().machine}-unknown-linux-gnu-install_only.tar.gz"
    subprocess.run(["tar", "-czf", str(file), "-C", str(folder), "python"], check=True)
    return file, f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"


@pytest.fixture(scope="module")
def variables(archive):
    """A file for -e that names the stand-in."""
    file, lock = archive
    variables = file.with_name("variables.json")
    variables.write_text(json.dumps({"_python_env_brought": python_env_brought(lock, file.parent.as_uri())}))
    return variables


def test_from_the_installer_to_a_run_and_back(plays, variables, tmp_path):
    """22.04's own Python is too old, its etcd speaks another dialect; 24.04's sshd is started by its socket.

    An etcd that was removed, and not purged, 22.04 masks until it is installed again.
    """
    lab, before = plays.lab, {host: plays.sh(host, OURS) for host in plays.lab.hosts}
    own = "systemctl is-enabled etcd || true; systemctl is-active etcd || true"
    come_and_go = "apt-get -qq update; apt-get -qq install -y etcd-server; apt-get -qq remove -y etcd-server"
    plays.sh("node1", f"{{ {come_and_go}; }} >/dev/null 2>&1")
    assert ("masked" in plays.sh("node1", own)) is (lab.options.suite == "jammy")
    more = ("-e", f"@{variables}")
    plays.site_twice(*more)
    for host in lab.hosts:
        assert f'VERSION_ID="{SUITES[lab.options.suite]}"' in plays.sh(host, "cat /etc/os-release")
    enabled, active = plays.sh("node1", own).split()
    assert enabled == "masked" and active != "active"
    results = {"trainer_results_dir": tmp_path}
    checked = plays.book("playbooks/preflight.yml", **results)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = json.loads((tmp_path / "preflight/last.json").read_text())
    assert {one["result"] for one in found["checks"]} == {"pass", "skip"}, found["checks"]
    # While a run goes on, the memory that it lives by stays, whatever the release's etcd calls its interface.
    begun = plays.book("train.yml", run="long", steps=100000, detach="true", **results)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    done = plays.book("site.yml", *more, etcd_peer_port=2391)
    assert done.returncode == 0 and "Active: long." in done.stdout, done.stdout + done.stderr
    lab.power("node2", on=False)
    told = plays.book("playbooks/stop.yml", run="long", **results)
    assert told.returncode == 4 and "run long: stopped on node1; not asked" in told.stdout, told.stdout
    lab.power("node2", on=True)
    wait_for(lambda: plays.answers("node2"), 60)
    gone = plays.book("playbooks/reset.yml", reset=",".join(lab.hosts), sure="true")
    assert gone.returncode == 0, gone.stdout + gone.stderr
    assert {host: plays.sh(host, OURS) for host in lab.hosts} == before
    enabled, active = plays.sh("node1", own).split()
    assert enabled == "disabled" and active != "active"


def test_a_server_of_it_is_a_controller(plays, archive):
    """As its user, with make alone installed: 22.04's own Python is too old, and 24.04's has no venv module."""
    host, (file, lock) = plays.lab.host("node1"), archive
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    names = b"\0".join(name for name in found if os.path.isfile(os.path.join(os.fsencode(ROOT), name)))
    packed = ["tar", "-c", "--null", "-T", "-", "--transform", "s,^,checkout/,"]
    tar = subprocess.run(packed, cwd=ROOT, input=names, capture_output=True, check=True).stdout
    plays.sh(
        "node1",
        # The venv module came with the test before, if that ran.
        "apt-get -qq update; apt-get -qq purge -y 'python3.*-venv' >/dev/null; apt-get -qq install -y make >/dev/null; "
        "useradd -m -d /srv/somebody -s /bin/bash somebody",
    )
    unpack = host.enter("tar", "-x", "--no-same-owner", "-C", "/srv/somebody")
    subprocess.run(unpack, input=tar, capture_output=True, check=True)
    subprocess.run(host.enter("dd", f"of=/srv/somebody/{file.name}"), input=file.read_bytes(), check=True)
    subprocess.run(
        host.enter("dd", "of=/srv/somebody/checkout/requirements/python.sha256"),
        input=lock.encode(),
        check=True,
    )
    plays.sh("node1", "chown -R somebody: /srv/somebody")

    def somebody(command):
        return plays.sh("node1", f"runuser -l somebody -c 'cd checkout; {command}'")

    small = "-e dataset=austen -e max_samples=100 -e vocab_size=300 -e sequence_length=32 -e batch_size=4 -e steps=3"
    somebody("make venv PYTHON_URL=file:///srv/somebody")
    somebody(".venv/bin/ansible-playbook -i inventory/local site.yml")
    somebody(f".venv/bin/ansible-playbook -i inventory/local train.yml -e model=tiny {small} -e run=first")
    assert '"step": 3' in somebody("cat runs/first/metrics.jsonl")
    ours = somebody("ls .trainyard/pythons | wc -l")
    assert int(ours) == 2  # the archive, and what was in it


# --- the driver ------------------------------------------------------------------------------------------------------

SECURE_BOOT = f"{FAKE}/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


@pytest.mark.parametrize("signed", [False, True])
def test_the_driver_comes_from_ubuntu_s_archive(plays, signed):
    """For a made-up card and the release's newest kernel, which does not run here; packages and modules are real.

    They are built here, or, where the firmware asks for a signature, Ubuntu's own.
    """
    plug_in(plays)
    if signed:
        plays.sh("node1", f"mkdir -p $(dirname {SECURE_BOOT}); printf '\\6\\0\\0\\0\\1' > {SECURE_BOOT}")
    depends = "apt-cache depends linux-image-generic | sed -n 's/.*Depends: linux-image-//p'"
    kernel = next(word for word in plays.sh("node1", depends).split() if word[0].isdigit())
    if signed:
        asked = (
            f"cd /var/tmp; apt-get -qq download linux-modules-nvidia-580-server-open-{kernel} 2>&1 || true"
        )
        if "404" in (said := plays.sh("node1", asked)):
            pytest.skip(f"the mirror lists Ubuntu's signed modules, but has them not: {said.strip()[-200:]}")
    for second in (False, True):
        play = run(plays, kernel, "2204")
        assert play.rc == 0, play.text
        assert bool(play.changed["node1"]) is not second, play.text
    found = "find /lib/modules/{} -name 'nvidia.ko*' -path '*/{}/*'"
    paths = [
        plays.sh("node1", found.format(kernel, place)).split()
        for place in ("updates/dkms", "nvidia-*-server*")
    ]
    assert [len(one) for one in paths] == [not signed, signed]
    (path,) = paths[signed]
    assert plays.sh("node1", f"/sbin/modinfo -F version {path}").startswith("580.")
    signer = plays.sh("node1", f"/sbin/modinfo -F signer {path}")
    assert ("Canonical" in signer) is signed
