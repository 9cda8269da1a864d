"""What apt is told of a host's driver: components, NVIDIA's repository and its key, the pin."""

import re

import pytest
from nvidia_made_up import (
    DEBIAN_12,
    DEBIAN_13,
    KEYRING,
    UBUNTU_24,
    WHOLE_535,
    WHOLE_580,
    look,
    plan_for,
    refused,
)


def test_debians_mirror_gets_the_components_that_it_lacks():
    assert plan_for(DEBIAN_12, "2204")["sources"] == (
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n"
        f"Components: contrib non-free\nSigned-By: {KEYRING}\n"
    )
    assert plan_for(UBUNTU_24, "2204")["sources"] == ""


def test_a_mirror_is_known_by_the_end_of_its_path():
    uri = "https://mirror.hetzner.com/ubuntu/packages"
    mirror = {"uris": [uri], "suites": ["noble"], "components": ["main", "restricted"], "options": {}}
    assert f"URIs: {uri}" in plan_for(UBUNTU_24, "2204", survey={"sources": [mirror]})["sources"]
    other = {**mirror, "uris": ["https://packages.microsoft.com/ubuntu/24.04/prod"], "components": ["main"]}
    assert "is Ubuntu's own noble" in refused(UBUNTU_24, "2204", survey={"sources": [other]})


@pytest.mark.parametrize(
    "uri", ["mirror://mirrors.example/mirrors.txt", "https://nexus.example/repository/apt-proxy/"]
)
def test_a_mirror_of_any_address_is_known_by_its_components(uri):
    ubuntu = {"uris": [uri], "suites": ["noble"], "components": ["main", "universe"], "options": {}}
    assert (
        f"URIs: {uri}\nSuites: noble\nComponents: restricted multiverse"
        in (plan_for(UBUNTU_24, "2204", survey={"sources": [ubuntu]})["sources"])
    )
    debian = {**ubuntu, "suites": ["bookworm"], "components": ["main", "non-free-firmware"]}
    assert (
        "Components: contrib non-free\n"
        in (plan_for(DEBIAN_12, "2204", survey={"sources": [debian]})["sources"])
    )
    multimedia = {**debian, "components": ["main", "non-free"]}  # as somebody else's has them
    assert "is Debian's own bookworm" in refused(DEBIAN_12, "2204", survey={"sources": [multimedia]})


@pytest.mark.parametrize(
    "uri",
    [
        "https://ppa.example/graphics-drivers/ppa/ubuntu/",
        "https://private-ppa.launchpadcontent.net/example/builds/ubuntu",
    ],
)
def test_a_persons_archive_is_not_the_distributions(uri):
    own = {**look(UBUNTU_24)["sources"][0], "components": ["main", "universe"]}
    person = {"uris": [uri], "suites": ["noble"], "components": ["main"], "options": {}}
    added = plan_for(UBUNTU_24, "2204", survey={"sources": [own, person]})["sources"]
    assert "Components: restricted multiverse" in added and "ppa" not in added
    assert "is Ubuntu's own noble" in refused(UBUNTU_24, "2204", survey={"sources": [person]})


def test_other_peoples_sources_are_no_place_for_components():
    survey = look(DEBIAN_12, "2204")
    other = {
        "uris": ["https://apt.example/tools"],
        "suites": ["bookworm"],
        "components": ["main"],
        "options": {"Signed-By": "/etc/apt/keyrings/tools.asc"},
    }
    assert (
        "apt.example"
        not in plan_for(DEBIAN_12, "2204", survey={"sources": [*survey["sources"], other]})["sources"]
    )
    problem = refused(DEBIAN_12, "2204", survey={"sources": [other]})
    assert "none of this host's apt sources is Debian's own bookworm" in problem


def test_a_component_on_a_line_of_its_own_counts():
    line = {"uris": ["http://mirror.example/debian"], "suites": ["bookworm"], "options": {}}
    lines = [
        {**line, "components": ["main"]},
        {**line, "components": ["contrib", "non-free", "non-free-firmware"]},
    ]
    assert plan_for(DEBIAN_12, "2204", survey={"sources": lines})["sources"] == ""


CLOUD = {"uris": ["mirror+file:///etc/apt/mirrors/debian.list"], "components": ["main"], "options": {}}
BACKPORTS = {**CLOUD, "suites": ["bookworm-backports"]}
SECURITY = {**CLOUD, "uris": ["http://mirror.example/debian-security"], "suites": ["bookworm-security"]}


def test_backports_beside_the_release_in_one_stanza_are_passed_over():
    """As Debian's cloud images have them, and many an Ubuntu."""
    debian = {**CLOUD, "suites": ["bookworm", "bookworm-updates", *BACKPORTS["suites"]]}
    assert plan_for(DEBIAN_12, "2204", survey={"sources": [debian, SECURITY]})["sources"] == (
        "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\nSuites: bookworm bookworm-updates\n"
        "Components: contrib non-free non-free-firmware\n\n"
        "Types: deb\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\n"
        "Components: contrib non-free non-free-firmware\n"
    )
    suites = ["noble", "noble-updates", "noble-security", "noble-backports", "noble-proposed"]
    ubuntu = {**look(UBUNTU_24)["sources"][0], "suites": suites}
    assert plan_for(UBUNTU_24, "2204", survey={"sources": [ubuntu]})["sources"] == ""
    bare = {**ubuntu, "components": ["main", "universe"]}
    added = plan_for(UBUNTU_24, "2204", survey={"sources": [bare]})["sources"]
    assert "Suites: noble noble-updates noble-security\nComponents: restricted multiverse\n" in added


@pytest.mark.parametrize("sources", [[BACKPORTS], [SECURITY], [BACKPORTS, SECURITY]])
def test_what_comes_after_the_release_is_no_place_for_components_without_it(sources):
    problem = refused(DEBIAN_12, "2204", survey={"sources": sources})
    assert "none of this host's apt sources is Debian's own bookworm" in problem


def test_nvidias_repository_comes_with_its_key_unless_the_host_has_it():
    plan = plan_for(DEBIAN_13, "2c05")
    assert (
        "URIs: https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64/\nSuites: /\n"
        in plan["sources"]
    )
    assert "Components: contrib\n" in plan["sources"]  # of Debian's own
    assert plan["key"]["fingerprint"] == "02182E60104FCDC26EAE1B8597A5D4CB8793F200"
    mirror = plan_for(DEBIAN_13, "2c05", repository="https://mirror.example/cuda/")
    assert "URIs: https://mirror.example/cuda/debian13/x86_64/\n" in mirror["sources"]
    there = {
        "uris": ["https://mirror.example/x/debian13/x86_64/"],
        "suites": ["/"],
        "components": [],
        "options": {},
    }
    sources = [*look(DEBIAN_13)["sources"], there]
    own = plan_for(DEBIAN_13, "2c05", survey={"sources": sources})
    assert own["key"] is None and "Suites: /" not in own["sources"]


def test_headers_follow_a_kernel_to_backports():
    """Else the next kernel comes without them, and so without the driver."""
    kernels = {"kernel_packages": ["linux-image-amd64"], "kernel": "6.12.38+deb12-amd64"}
    written = plan_for(DEBIAN_12, "2204", survey={**kernels, "kernels_backported": ["linux-image-amd64"]})
    pin = "\nPackage: linux-headers-amd64\nPin: release n=*-backports\nPin-Priority: 500\n"
    assert written["preferences"].endswith(pin) and "linux-headers-amd64" in written["headers"]
    assert "backports" not in plan_for(DEBIAN_12, "2204", survey=kernels)["preferences"]


def test_the_pin_names_the_branch():
    written = plan_for(UBUNTU_24, "2204")["preferences"]
    assert "Pin: version 580.*\nPin-Priority: 1001\n" in written
    (names,) = re.findall("^Package: (.*)$", written, re.MULTILINE)
    assert all(name.endswith(":any") for name in names.split())  # 32-bit ones, too


def test_a_whole_driver_needs_no_sources():
    """Nor the key of NVIDIA's, which a host that had its packages from a local repository may not reach."""
    plan = plan_for(DEBIAN_12, "2482", survey=WHOLE_580)
    assert (plan["source"], plan["missing"], plan["sources"], plan["key"]) == ("nvidia", [], "", None)
    stable = {**look(DEBIAN_12)["sources"][0], "suites": ["stable"]}  # where contrib could not be added
    assert plan_for(DEBIAN_12, "2482", survey={**WHOLE_535, "sources": [stable]})["sources"] == ""
    own = plan_for(DEBIAN_12, "2482", survey={**WHOLE_580, "own_sources": True})  # as the role wrote them
    assert own["sources"] and own["key"]
    assert plan_for(DEBIAN_12, "2482", survey=WHOLE_580, upgrade=True)["key"]
    assert plan_for(DEBIAN_12, "2482", survey=WHOLE_580, cuda_toolkit=True)["key"]
