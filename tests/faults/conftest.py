"""Provisioned hosts, and nothing left of a test's run on them."""

import pytest
from cupboard import HOSTS, deployed


@pytest.fixture(scope="session")
def plays(tmp_path_factory):
    """Three hosts, deployed by site.yml; down at the end."""
    with deployed("faults", len(HOSTS), tmp_path_factory.mktemp("faults")) as plays:
        yield plays


@pytest.fixture(autouse=True)
def nothing_left(request):
    """However a test ends: its run does not go on beside the next one's."""
    (lab,) = {"plays", "pair", "five"} & set(request.fixturenames)
    plays = request.getfixturevalue(lab)
    yield
    for host in plays.lab.hosts:
        plays.sh(host, "systemctl stop 'trainyard@*'")
