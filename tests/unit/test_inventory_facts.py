"""What only facts tell of an inventory: interfaces and addresses that hosts have not, clones."""

from inventories import inventory

from plugins.action import inventory_check as ic


def facts(*interfaces, key="AAAA"):
    return {"interfaces": list(interfaces), "ssh_host_key_ed25519_public": key}


def test_interfaces_that_a_host_has_not_got_are_named_with_those_that_it_has():
    bad = inventory(
        node1={"cluster_interface": "eth0", "ansible_facts": facts("lo", "eth0", key="A")},
        node2={"cluster_interface": "enp5s0", "ansible_facts": facts("lo", "eth0", key="B")},
        node3={"cluster_interface": "enp5s0"},  # its facts are not known: -l
    )
    (problem,) = ic.check_facts(bad)
    assert (problem.where, problem.key) == ("node2", "cluster_interface")
    assert "enp5s0" in problem.found
    assert problem.expected == "one of eth0, lo"


def test_interfaces_of_the_network_role_must_exist_unless_it_makes_or_renames_them():
    wanted = [
        {"name": "eth0"},
        {"name": "eth7", "addresses": ["192.168.1.171/24"]},
        {"name": "bond0", "kind": "bonds"},
        {"name": "lan0", "macaddress": "02:00:00:00:00:01"},
        {"macaddress": "02:00:00:00:00:02"},
    ]
    bad = inventory(
        node2={
            "network_interfaces": wanted,
            "cluster_interface": "bond0",
            "ansible_facts": facts("lo", "eth0"),
        }
    )
    (problem,) = ic.check_facts(bad)
    assert problem.key == "network_interfaces"
    assert "eth7" in problem.found


def test_an_address_that_a_host_neither_has_nor_gets_is_told_before_any_change():
    def there(*addresses, key):
        return {**facts("eth0", key=key), "all_ipv4_addresses": list(addresses)}

    bad = inventory(
        node1={"ansible_facts": there("192.168.1.100", key="A")},
        node2={"cluster_address": "192.168.1.7", "ansible_facts": there("192.168.1.101", key="B")},
        node3={  # the role network is about to give it
            "cluster_address": "192.168.1.8",
            "network_interfaces": [{"name": "eth0", "addresses": ["192.168.1.8/24"]}],
            "ansible_facts": there("192.168.1.102", key="C"),
        },
    )
    (problem,) = ic.check_facts(bad)
    assert (problem.where, problem.key) == ("node2", "cluster_address")
    assert "192.168.1.7, which no interface" in problem.found
    assert problem.expected == "one of 192.168.1.101"
    # By the lease that it is reached at now its peers would know it, and it is about to give that up.
    eth0 = {"macaddress": "52:54:00:00:00:01", "ipv4": {"address": "192.168.1.57"}}
    for match in ({"name": "eth0"}, {"macaddress": "52:54:00:00:00:01"}, {"name": "eth1"}):
        host = {
            "ansible_host": "192.168.1.57",
            "network_interfaces": [{**match, "addresses": ["192.168.1.100/24"]}],
            "ansible_facts": {
                **there("192.168.1.57", key="D"),
                "interfaces": ["lo", "eth0", "eth1"],
                "eth0": eth0,
            },
        }
        told = list(ic.check_facts(inventory(node2=host)))
        assert len(told) == (match.get("name") != "eth1"), told  # another card's: it stays as it is
        assert not told or "192.168.1.57, which eth0 will not have any more" in told[0].found
        assert not told or "Set cluster_address: 192.168.1.100" in told[0].cure
        assert not list(ic.check_facts(inventory(node2={**host, "cluster_address": "192.168.1.100"})))
    # What the interface keeps, and what is another's with its hardware address.
    lease = {"name": "eth0", "addresses": ["192.168.1.100/24"], "options": {"dhcp4": True}}
    assert not list(ic.check_facts(inventory(node2={**host, "network_interfaces": [lease]})))
    card = [{"macaddress": eth0["macaddress"], "addresses": ["10.0.0.5/24"]}]
    vlan = {**there("192.168.1.57", key="D"), "interfaces": ["eth0", "eth0.10"], "eth0_10": eth0}
    assert not list(
        ic.check_facts(inventory(node2={**host, "network_interfaces": card, "ansible_facts": vlan}))
    )
    # Behind a forwarding gateway, what Ansible calls is not what the peers call.
    (behind,) = ic.check_facts(inventory(node2={"ansible_facts": there("10.0.0.5", key="B")}))
    assert behind.key == "ansible_host" and "Set cluster_address" in behind.cure


def test_an_interface_that_is_named_for_the_training_must_hold_its_address():
    def host(name, **more):
        links = {
            "eth0": {"ipv4": {"address": "192.168.1.101"}},
            "br_0": {"ipv4_secondaries": [{"address": "10.0.0.2"}]},
        }
        there = {
            **facts("lo", "eth0", "br-0", "eth9"),
            "all_ipv4_addresses": ["192.168.1.101", "10.0.0.2"],
            **links,
        }
        return inventory(node2={"cluster_interface": name, "ansible_facts": there, **more})

    assert not ic.check_facts(host("eth0")) and not ic.check_facts(host("br-0", cluster_address="10.0.0.2"))
    (problem,) = ic.check_facts(host("br-0"))
    assert (problem.where, problem.key) == ("node2", "cluster_interface")
    assert problem.found == "br-0, where eth0 has 192.168.1.101"
    assert "Set cluster_address to one of br-0's" in problem.cure
    # What the role network is about to do counts.
    to_be = {
        "cluster_address": "10.0.0.9",
        "network_interfaces": [{"name": "eth9", "addresses": ["10.0.0.9/24"]}],
    }
    assert not ic.check_facts(host("eth9", **to_be))
    (problem,) = ic.check_facts(host("eth0", **to_be))
    assert problem.found == "eth0, where eth9 gets 10.0.0.9"
    to_be["network_interfaces"] = [{"macaddress": "02:00:00:00:00:02", "addresses": ["10.0.0.9/24"]}]
    assert not ic.check_facts(host("eth0", **to_be))


def test_hosts_with_one_host_key_are_one_machine_or_clones():
    same = facts("eth0", key="AAAA")
    (problem,) = ic.check_facts(inventory(node1={"ansible_facts": same}, node3={"ansible_facts": same}))
    assert problem.where == "node3"
    assert "node1" in problem.found
    assert "dpkg-reconfigure openssh-server" in problem.cure
