"""Three provisioned hosts."""

import pytest
from cupboard import HOSTS
from plays import Plays
from test_train import book

from lab.lab import Lab, Options, install_missing_tools


@pytest.fixture(scope="session")
def plays(tmp_path_factory):
    """Three hosts, deployed by site.yml; down at the end."""
    install_missing_tools()
    lab = Lab("faults")
    try:
        lab.up(Options(name="faults", hosts=3), replace=True)
        plays = Plays(lab, tmp_path_factory.mktemp("faults"))
        done = book(plays, "site.yml", seconds=1800)
        assert done.returncode == 0, done.stdout + done.stderr
        yield plays
    finally:
        lab.down()


@pytest.fixture(autouse=True)
def nothing_left(plays):
    """However a test ends: its run does not go on beside the next one's."""
    yield
    for host in HOSTS:
        plays.sh(host, "systemctl stop 'trainyard@*'")
