"""One driver for all hosts, and what is said of hosts whose drivers differ."""

import copy

from nvidia_made_up import (
    BY_DKMS,
    DEBIAN_12,
    SIGNED,
    TABLES,
    UBUNTU_22,
    UBUNTU_24,
    WHOLE_535,
    WHOLE_580,
    look,
    options,
    package,
    plan_for,
)

from plugins.filter.nvidia_common import nvidia_branches, nvidia_common, nvidia_versions
from plugins.filter.nvidia_plan import nvidia_plan

REPOSITORY, DEBIANS = ("nvidia", 580), ("distribution", 535)
OWN_570 = {
    "packages": [package("libcuda1", "570.133.20-1"), package("nvidia-kernel-open-dkms", "570.133.20-1")],
    "modules": [{"path": "nvidia.ko", "version": "570.133.20", "open": True}],
}


def together(**hosts):
    """(nvidia_common, {host: (source, branch) of its plan with that}) of hosts: (facts, device, survey, options)."""

    def plans(common):
        return {
            name: {
                "__nvidia_plan": plan_for(facts, device, survey=survey, **asked, common=common),
            }
            for name, (facts, device, survey, asked) in hosts.items()
        }

    common = nvidia_common(plans({}), list(hosts))
    found = {name: variables["__nvidia_plan"] for name, variables in plans(common).items()}
    return common, {name: (plan["source"], plan["branch"]) for name, plan in found.items()}


def test_one_driver_serves_every_card_of_all_hosts():
    """The home LAN on Debian 12: for itself, only the first would have NVIDIA's 580."""
    common, chosen = together(
        desktop=(DEBIAN_12, "2c05", {}, {}),
        laptop=(DEBIAN_12, "2820", {}, {}),
        oldie=(DEBIAN_12, "2482", {}, {}),
    )
    assert set(chosen.values()) == {REPOSITORY}
    assert (
        "one driver for all hosts, 580 of NVIDIA's repository: 535 of Debian does not serve" in common["says"]
    )
    assert "desktop (the Blackwell card at 0000:01:00.0 (PCI id 10de:2c05) needs 570" in common["says"]
    assert common["apart"] == []


def test_hosts_of_several_distributions_get_the_one_that_is_the_same_for_all():
    common, chosen = together(a=(DEBIAN_12, "2c05", {}, {}), b=(UBUNTU_24, "2204", {}, {}))
    assert set(chosen.values()) == {REPOSITORY}
    common, chosen = together(a=(UBUNTU_22, "2c05", {}, {}), b=(UBUNTU_24, "1b06", {}, {}))
    assert set(chosen.values()) == {("distribution", 580)} and common["says"] == ""


def test_hosts_that_their_distribution_serves_keep_to_it():
    common, chosen = together(a=(DEBIAN_12, "2204", {}, {}), b=(DEBIAN_12, "1b06", {}, {}))
    assert set(chosen.values()) == {DEBIANS} and common["says"] == ""


def test_a_host_without_a_card_and_one_alone_have_nothing_to_agree_on():
    plan = plan_for(DEBIAN_12, "2204")
    nothing = {"source": "", "branch": None, "says": "", "apart": []}
    assert nvidia_common({"a": {"__nvidia_plan": plan}}, ["a"]) == nothing
    without = nvidia_plan(look(DEBIAN_12), DEBIAN_12, options(), TABLES)
    assert (
        nvidia_common({"a": {"__nvidia_plan": plan}, "b": {"__nvidia_plan": without}}, ["a", "b"]) == nothing
    )


def test_where_none_serves_all_each_host_has_its_own_and_who_rules_it_out_is_named():
    arm = {**DEBIAN_12, "architecture": "aarch64"}  # for which NVIDIA's repository has nothing on Debian
    common, chosen = together(a=(DEBIAN_12, "2c05", {}, {}), b=(arm, "2204", {}, {}))
    assert chosen == {"a": REPOSITORY, "b": DEBIANS} and common["source"] == ""
    assert "580 of NVIDIA's repository not b (there is none for aarch64)" in common["says"]
    assert "535 of Debian not a (the Blackwell card at" in common["says"]
    common, chosen = together(
        a=(DEBIAN_12, "2c05", {}, {}), b=(UBUNTU_24, "2204", {}, {"source": "distribution"})
    )
    assert chosen == {"a": REPOSITORY, "b": ("distribution", 580)} and common["source"] == ""
    assert "580 of NVIDIA's repository not b (which has 580 of Ubuntu)" in common["says"]


def test_a_branch_that_ends_before_another_begins_serves_not_all():
    """What will be once NVIDIA's repository has, for new cards, a branch that old ones are not served by."""
    tables = {**TABLES, "branch": 585}
    hosts = {"volta": "1db6", "blackwell": "2c05"}
    plans = {
        name: {"__nvidia_plan": nvidia_plan(look(DEBIAN_12, device), DEBIAN_12, options(), tables)}
        for name, device in hosts.items()
    }
    says = nvidia_common(plans, list(plans))["says"]
    assert "585 of NVIDIA's repository not volta (the Volta card" in says and "is served up to 580" in says


def test_a_driver_that_is_there_gives_way_only_when_somebody_asks():
    hosts = {"a": (DEBIAN_12, "2c05", {}, {}), "b": (DEBIAN_12, "2482", OWN_570, {})}
    common, chosen = together(**hosts)
    assert chosen == {"a": REPOSITORY, "b": ("installed", 570)}
    assert (common["branch"], common["apart"]) == (580, ["b has 570"])
    common, chosen = together(
        a=(DEBIAN_12, "2c05", {}, {}), b=(DEBIAN_12, "2482", WHOLE_535, {})
    )  # Debian's own, such as of a host that was there before the first
    assert chosen == {"a": REPOSITORY, "b": DEBIANS} and common["apart"] == ["b has 535"]
    asked = {name: (*host[:3], {"branch": "580"}) for name, host in hosts.items()}
    common, chosen = together(**asked)
    assert set(chosen.values()) == {REPOSITORY} and common["apart"] == []


def test_what_most_hosts_have_already_is_what_a_fresh_one_gets():
    common, chosen = together(
        a=(DEBIAN_12, "2482", WHOLE_580, {}), b=(DEBIAN_12, "2204", {}, {}), c=(DEBIAN_12, "2204", {}, {})
    )
    assert set(chosen.values()) == {REPOSITORY} and common["apart"] == []
    common, chosen = together(a=(DEBIAN_12, "2c05", OWN_570, {}), b=(DEBIAN_12, "2482", OWN_570, {}))
    assert set(chosen.values()) == {("installed", 570)} and common["apart"] == []


def test_a_host_that_is_played_alone_keeps_what_all_had_chosen():
    """As with -l: nvidia_common has nobody to agree with, and the distribution's own would serve it, too."""
    plan = plan_for(DEBIAN_12, "2482", survey=WHOLE_580)
    assert (plan["source"], plan["branch"], plan["missing"], plan["move"]) == ("nvidia", 580, [], False)
    ubuntus = [
        package(name, "580.95.05-0ubuntu1")
        for name in (
            *("libnvidia-compute-580", "nvidia-utils-580", "nvidia-compute-utils-580"),
            "nvidia-dkms-580-open",
        )
    ]
    plan = plan_for(UBUNTU_24, "2482", survey={"packages": ubuntus})
    assert (plan["source"], plan["missing"], plan["move"]) == ("nvidia", [], False)


def test_a_fresh_ubuntu_beside_one_with_ubuntus_own_driver_has_the_distributions():
    for there in (SIGNED, BY_DKMS):
        common, chosen = together(a=(UBUNTU_24, "2482", there, {}), b=(UBUNTU_24, "2684", {}, {}))
        assert chosen == {"a": ("installed", 580), "b": ("distribution", 580)}
        assert (common["says"], common["apart"]) == ("", [])


# ---- what differs in the end ----


def test_the_host_that_differs_is_named():
    hostvars = {
        name: {"__nvidia_outcome": {"version": version}}
        for name, version in (("node1", "580.95.05"), ("node2", "580.82.07"), ("node3", "580.95.05"))
    }
    hostvars["node4"] = {}
    hosts = list(hostvars)
    assert nvidia_versions(hostvars, hosts) == ["node2 has 580.82.07 (most have 580.95.05, such as node1)"]
    assert nvidia_branches(hostvars, hosts) == [580]
    other = {"node5": {"__nvidia_outcome": {"version": "570.172.08"}}}
    assert nvidia_branches({**hostvars, **other}, [*hosts, "node5"]) == [570, 580]
    hostvars["node2"] = copy.deepcopy(hostvars["node1"])
    assert nvidia_versions(hostvars, hosts) == []
    assert nvidia_versions({"node4": {}}, ["node4"]) == nvidia_branches({"node4": {}}, ["node4"]) == []
