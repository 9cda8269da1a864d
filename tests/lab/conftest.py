"""Labs for tests. Each lies in its own namespace under its own name, and goes when its scope ends."""

import os

import pytest
from plays import Plays

from lab.lab import Lab, Options, install_missing_tools, obstacles


@pytest.fixture(scope="session")
def able():
    """Skips, with the reason, where this machine cannot have a lab. `make test` as root may install what lacks."""
    if os.geteuid() == 0 and os.environ.get("TRAINYARD_INSTALL") == "1":
        install_missing_tools()
    reasons = obstacles()
    if reasons:
        pytest.skip(f"no lab on this machine: {'; '.join(reasons)}")


@pytest.fixture(scope="session")
def able_to_emulate(able):
    """As `able`, of virtual machines."""
    if os.environ.get("TRAINYARD_INSTALL") == "1":
        install_missing_tools(vms=True)
    reasons = obstacles(vms=True)
    if reasons:
        pytest.skip(f"no virtual machines here: {'; '.join(reasons)}")


@pytest.fixture(scope="session")
def make_lab(able):
    """`make_lab(name, **options)`: a running lab with lab.lab.Options; down at the end of the session at the latest."""
    labs = []

    def make(name, **options):
        lab = Lab(name)
        labs.append(lab)
        lab.up(Options(name=name, **options), replace=True)
        return lab

    yield make
    for lab in labs:
        lab.down()


@pytest.fixture(scope="session")
def lab3(make_lab):
    """Three hosts as `make lab` gives them. Whoever breaks one of them mends it again."""
    return make_lab("lab3", hosts=3)


@pytest.fixture(scope="session")
def cluster(make_lab):
    """Three bare hosts, which test_main_job provisions by site.yml; everybody else takes them `deployed`."""
    return make_lab("job", hosts=3)


@pytest.fixture(scope="session")
def deployed(cluster, tmp_path_factory):
    """`cluster` after site.yml, once for all who train on it. Whoever breaks something there mends it again."""
    if not getattr(cluster, "deployed", False):  # by test_main_job
        done = Plays(cluster, tmp_path_factory.mktemp("deployed")).book("site.yml", seconds=1500)
        assert done.returncode == 0, done.stdout + done.stderr
    return cluster


def pytest_collection_modifyitems(items):
    """test_main_job comes before those who have `cluster` deployed: it looks at the hosts while they are bare."""
    items.sort(key=lambda item: item.path.name != "test_main_job.py")
