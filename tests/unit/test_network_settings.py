"""What a file says of a card beside its addresses does not go unsaid (plugins/module_utils/network_settings.py).

Sends nothing.
"""

import copy

import pytest
import yaml
from networks import (
    BARE,
    BOND,
    CLUSTERS,
    DEFAULT,
    DESKTOP,
    ETH0,
    ETH1,
    LAN_NETWORK,
    NETPLAN,
    STATIC,
    WLAN,
    card,
    planned,
    read_from,
    survey,
    written,
)

from plugins.filter.network_plan import network_plan
from plugins.module_utils.network_files import OUR_FILE
from plugins.module_utils.network_settings import of_netplan

WIRED, STANZAS = "/etc/NetworkManager/system-connections/lan", "/etc/network/interfaces"
AUTH = {"key-management": "802.1x", "method": "ttls", "identity": "me", "password": "hunter22"}
ROUTE = {"to": "10.8.0.0/16", "via": "192.168.1.7"}
IN_WORDS = "under options in netplan's words"


def said_beside(path, lines):
    """A file of that kind which sets eth0 up, and says `lines` besides."""
    if path == NETPLAN:
        return yaml.safe_dump({"network": {"ethernets": {"eth0": {"dhcp4": True, **lines}}}}, sort_keys=False)
    if path == STANZAS:
        return f"auto eth0\niface eth0 inet dhcp\n    {lines}\n"
    match = (
        "[Match]\nName=eth0\n[Network]\nDHCP=yes"
        if path == LAN_NETWORK
        else "[connection]\ninterface-name=eth0"
    )
    return f"{match}\n{lines}\n"


@pytest.mark.parametrize(
    ("path", "lines", "place", "cure", "entry"),
    [
        (NETPLAN, {"auth": AUTH}, "auth", f"auth {IN_WORDS}", {"options": {"auth": AUTH}}),
        (
            WIRED,
            "[802-1x]\neap=ttls;\npassword=hunter22",
            "[802-1x]",
            f"auth {IN_WORDS}",
            {"options": {"auth": AUTH}},
        ),
        (STANZAS, "wpa-conf /etc/lan.conf", "wpa-conf", f"auth {IN_WORDS}", {"options": {"auth": AUTH}}),
        (NETPLAN, {"mtu": 9000}, "mtu", "mtu: 9000", {"mtu": 9000}),
        (NETPLAN, {"mtu": 9000}, "mtu", "mtu: 9000", {"options": {"mtu": 9000}}),
        (LAN_NETWORK, "[Link]\nMTUBytes=9000", "MTUBytes=", "mtu: 9000", {"mtu": 9000}),
        (LAN_NETWORK, "[Link]\nMTUBytes=9K", "MTUBytes=", "mtu in netplan's words", {"mtu": 9000}),
        (WIRED, "[ethernet]\nmtu=9000", "mtu=", "mtu: 9000", {"mtu": 9000}),
        (STANZAS, "mtu 9000", "mtu", "mtu: 9000", {"mtu": 9000}),
        (
            NETPLAN,
            {"routes": [{"to": "default", "via": "192.168.1.1"}, {**ROUTE, "metric": 50}]},
            "routes",
            "routes: [{to: 10.8.0.0/16, via: 192.168.1.7, metric: 50}]",
            {"routes": [ROUTE]},
        ),
        (
            NETPLAN,
            {"routes": [{**ROUTE, "source": "x"}]},
            "routes",
            "routes in netplan's words",
            {"routes": []},
        ),
        (
            LAN_NETWORK,
            "Gateway=192.168.1.1\n[Route]\nGateway=192.168.1.1\n[Route]\nDestination=10.8.0.0/16\nGateway=192.168.1.7",
            "[Route]",
            "routes: [{to: 10.8.0.0/16, via: 192.168.1.7}]",
            {"routes": [ROUTE]},
        ),
        (
            LAN_NETWORK,
            "[Route]\nGateway=_dhcp4\nDestination=10.8.0.0/16",
            "[Route]",
            "routes in netplan's words",
            {"routes": [ROUTE]},
        ),
        (
            LAN_NETWORK,
            "[Route]\nMetric=7\nDestination=10.8.0.0/16",
            "[Route]",
            "routes: [{to: 10.8.0.0/16, metric: 7, scope: link}]",
            {"routes": []},
        ),
        (
            LAN_NETWORK,
            f"[Link]\nMACAddress={ETH1['mac']}",
            "[Link] MACAddress=",
            f"options: {{macaddress: '{ETH1['mac']}'}}",
            None,
        ),
        (
            WIRED,
            "[ipv4]\nroute1=0.0.0.0/0,192.168.1.1\nroute2=10.8.0.0/16,192.168.1.7,50",
            "the routes",
            "routes: [{to: 10.8.0.0/16, via: 192.168.1.7, metric: 50}]",
            {"routes": [ROUTE]},
        ),
        (
            WIRED,
            "[ipv4]\nroute1=10.8.0.0/16,192.168.1.7,0\nroute1_options=onlink=true,src=192.168.1.50,table=7",
            "the routes",
            "routes: [{to: 10.8.0.0/16, via: 192.168.1.7, metric: 0, on-link: true, table: 7, from: 192.168.1.50}]",
            {"routes": [ROUTE]},
        ),
        (
            WIRED,
            "[ipv4]\nroute1=10.8.0.0/16\nroute1_options=lock-mtu=true",
            "the routes",
            "routes in netplan's words",
            {"routes": []},
        ),
        (
            LAN_NETWORK,
            "[Route]\nDestination=10.8.0.0/16\nGateway=10.9.0.1\nGatewayOnLink=yes\nProtocol=static",
            "[Route]",
            "routes: [{to: 10.8.0.0/16, via: 10.9.0.1, on-link: true}]",
            {"routes": []},
        ),
        (
            WIRED,
            "[ipv6]\nroute1=fd00:8::/64",
            "the routes",
            "routes: [{to: 'fd00:8::/64', scope: link}]",
            {"routes": []},
        ),
        (WIRED, "[ethernet]\nwake-on-lan=64", "wake-on-lan=", "options: {wakeonlan: true}", None),
        (
            WIRED,
            "[infiniband]\ntransport-mode=connected",
            "transport-mode=",
            "options: {infiniband-mode: conn",
            None,
        ),
        (
            NETPLAN,
            {"routing-policy": [{"from": "10.0.0.0/8", "table": 7}]},
            "routing-policy",
            f"routing-policy {IN_WORDS}",
            {"options": {"routing-policy": []}},
        ),
        (
            LAN_NETWORK,
            "[RoutingPolicyRule]\nTable=7",
            "[RoutingPolicyRule]",
            f"routing-policy {IN_WORDS}",
            None,
        ),
        (WIRED, "[ipv4]\nrouting-rule1=priority 1 table 7", "[ipv4] routing-rule1=", "routing-policy", None),
        (
            NETPLAN,
            {"wakeonlan": True},
            "wakeonlan",
            "options: {wakeonlan: true}",
            {"options": {"wakeonlan": False}},
        ),
        (
            NETPLAN,
            {"macaddress": ETH1["mac"]},
            "macaddress",
            f"options: {{macaddress: '{ETH1['mac']}'}}",
            None,
        ),
        (STANZAS, "hwaddress ether 52:54:00:00:00:02", "hwaddress", f"macaddress {IN_WORDS}", None),
        (
            WIRED,
            "[ethernet]\ncloned-mac-address=52:54:00:00:00:02",
            "cloned-mac-address=",
            "options: {macaddress: '52:54",
            None,
        ),
    ],
)
def test_what_a_file_says_beside_addresses_does_not_go_with_it_unsaid(path, lines, place, cure, entry):
    files = {path: said_beside(path, lines)}
    told = read_from(path, told=files)
    wanted = {**STATIC, "nameservers": []}
    (refused,) = network_plan(survey(**copy.deepcopy(told)), [wanted])["errors"]
    assert refused.startswith(
        f"network_interfaces[0]: {path} has {place} for eth0, which would be lost, since its entry has none: "
        f"write {cure}"
    )
    assert refused.endswith(", or take it out there") and "hunter22" not in refused
    if entry is not None:
        planned([{**wanted, **entry}], **copy.deepcopy(told))
    planned([CLUSTERS], **copy.deepcopy(told))  # theirs stays
    ours = {"netplan": {OUR_FILE: written(planned([{**wanted, "mtu": 9000}]))["content"]}}
    planned([wanted], files=ours)  # who takes it out of the inventory means that


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("IPMasquerade=both", "[Network] IPMasquerade="),
        ("DHCPServer=yes\n[DHCPServer]\nPoolSize=9\nDNS=1.1.1.1", "[Network] DHCPServer=, [DHCPServer]"),
        ("[Route]\nMultiPathRoute=192.168.1.7@eth0 1\nDestination=10.8.0.0/16", "[Route] MultiPathRoute="),
        ("[NextHop]\nId=7\nGateway=192.168.1.7\n[Route]\nNextHop=7", "[NextHop], [Route] NextHop="),
        ("[SR-IOV]\nVirtualFunction=0", "[SR-IOV]"),
    ],
)
def test_what_systemd_networkd_alone_has_a_word_for_does_not_go_unsaid(lines, place):
    files = {LAN_NETWORK: said_beside(LAN_NETWORK, lines)}
    wanted = [{**STATIC, "routes": [ROUTE]}]
    (refused,) = network_plan(survey(files={"networkd": files}), wanted)["errors"]
    assert refused == (
        f"{LAN_NETWORK}: {place} for eth0 would be lost, since network_interfaces has eth0, and netplan no word for "
        "it: move it, below the names of its sections, into "
        "/etc/systemd/network/10-netplan-eth0.network.d/05-lan.conf, which is read besides"
    )
    files = {LAN_NETWORK: files[LAN_NETWORK].replace("eth0\n[Net", "eth*\n[Net")}
    (refused,) = network_plan(survey(files={"networkd": files}), wanted)["errors"]
    assert refused.endswith(", or have its [Match] fit eth0 no more")
    files = {
        "/etc/systemd/network/50-lan.network": files[LAN_NETWORK]
    }  # netplan's hides it at the latest run, too
    planned(wanted, files={"networkd": files})


def test_of_what_is_said_beside_addresses_the_rest_is_replaced():
    """As images have it: leases, their words, what waits for whom."""
    overrides = {
        "dhcp4-overrides": {"route-metric": 100},
        "optional": True,
        "accept-ra": True,
        "critical": True,
    }
    cloud = said_beside(NETPLAN, {**overrides, "mtu": 1500, "wakeonlan": False, "link-local": []})
    planned([STATIC], files={"netplan": {NETPLAN: cloud}})
    planned([STATIC], files={"netplan": {NETPLAN: "network: {ethernets: {eth0: {mtu: , routes: }}}"}})
    lan = "IPForward=no\nIPv6Token=::7\nLLMNR=no\n[DHCP]\nUseMTU=yes\n[Link]\nMTUBytes=1500\nRequiredForOnline=no\n"
    planned([STATIC], files={"networkd": {LAN_NETWORK: said_beside(LAN_NETWORK, lan)}})
    wired = said_beside(
        WIRED, "[ethernet]\nmtu=0\nwake-on-lan=1\ncloned-mac-address=preserve\n[ipv4]\nmethod=auto\n[proxy]\n"
    )
    planned([STATIC], files={"networkmanager": {WIRED: wired}}, active=DESKTOP)
    # A wireless card's 802.1X stands with its networks.
    points = {"access-points": {"home": {"auth": AUTH}}}
    wlan = {"name": "wlan0", "kind": "wifis", "addresses": ["10.1.0.1/24"], "options": points}
    roaming = "[connection]\ntype=wifi\ninterface-name=wlan0\n[wifi]\nssid=home\n[802-1x]\neap=ttls;\n"
    planned([wlan], interfaces=[ETH0, WLAN], files={"networkmanager": {WIRED: roaming}}, active=DESKTOP)


@pytest.mark.parametrize(
    ("path", "lines", "place"),
    [
        (
            NETPLAN,
            {"nameservers": {"addresses": ["10.0.0.53"], "search": ["lan", "home.lan"]}},
            "nameservers.search",
        ),
        (LAN_NETWORK, "DNS=10.0.0.53\nDomains=lan home.lan", "Domains="),
        (WIRED, "[ipv4]\ndns=10.0.0.53\ndns-search=lan;home.lan;", "dns-search="),
        (STANZAS, "dns-nameservers 10.0.0.53\n    dns-search lan home.lan", "dns-search"),
    ],
)
def test_the_domains_of_short_names_do_not_go_unsaid(path, lines, place):
    told = read_from(path, told={path: said_beside(path, lines)})
    wanted = {**STATIC, "nameservers": ["10.0.0.53"]}
    (refused,) = network_plan(survey(**copy.deepcopy(told)), [wanted])["errors"]
    assert refused == (
        f"network_interfaces[0]: {path} has {place} for eth0, which would be lost, since its entry has none: write "
        "nameservers: {addresses: […], search: [lan, home.lan]}, or take it out there"
    )
    for named in (
        {"addresses": ["10.0.0.53"], "search": ["lan"]},
        {"addresses": ["10.0.0.53"], "search": []},
        [],
    ):
        planned([{**wanted, "nameservers": named}], **copy.deepcopy(told))
        planned([BARE, {"name": "eth1"}, {**BOND, "nameservers": named}], **copy.deepcopy(told))
    planned([{**STATIC, "options": {"nameservers": {"search": []}}}], **copy.deepcopy(told))
    asked = {"networkd": {LAN_NETWORK: said_beside(LAN_NETWORK, "Domains=~corp")}}
    assert "search: [~corp]}" in network_plan(survey(files=asked), [wanted])["errors"][0]


@pytest.mark.parametrize(
    ("path", "lines", "place"),
    [
        (NETPLAN, {"accept-ra": False}, "accept-ra"),
        (NETPLAN, {"accept-ra": "n"}, "accept-ra"),
        (LAN_NETWORK, "IPv6AcceptRA=no", "[Network] IPv6AcceptRA="),
    ],
)
def test_that_no_router_is_listened_to_does_not_go_unsaid(path, lines, place):
    """Who else is on that network could have the host send by way of him."""
    told = read_from(path, told={path: said_beside(path, lines)})
    (refused,) = network_plan(survey(**copy.deepcopy(told)), [STATIC])["errors"]
    assert refused == (
        f"network_interfaces[0]: {path} has {place} for eth0, which would be lost, since its entry has none: write "
        "options: {accept-ra: false}, or take it out there"
    )
    for wanted in (False, True):
        planned([{**STATIC, "options": {"accept-ra": wanted}}], **copy.deepcopy(told))
    others = {NETPLAN: {"accept-ra": True}, LAN_NETWORK: "IPv6AcceptRA=yes"}
    planned([STATIC], **read_from(path, told={path: said_beside(path, others[path])}))


def test_what_netplan_has_no_word_for_is_left_to_networkmanager():
    for lines in ("[ipv4]\nmethod=shared", "[ethtool]\nring-rx=4096", "[tc]\nqdisc.root=fq_codel"):
        files = {"networkmanager": {WIRED: said_beside(WIRED, lines)}}
        (refused,) = network_plan(survey(files=files, active=DESKTOP), [STATIC])["errors"]
        assert refused.endswith("has none: leave eth0 out of network_interfaces, or take it out there")


def stored(more="", passthrough=""):
    """A profile as NetworkManager stores it by netplan (Ubuntu 23.10 and later)."""
    return f"""network:
  version: 2
  ethernets:
    NM-ae9132e0-fcf6-3d96-9f77-aa48efd55419:
      renderer: NetworkManager
      match:
        name: "eth0"
      dhcp4: true
      dhcp6: true
      ipv6-address-generation: "stable-privacy"
      wakeonlan: true{more}
      networkmanager:
        uuid: "ae9132e0-fcf6-3d96-9f77-aa48efd55419"
        name: "Wired connection 1"
        passthrough:
          connection.timestamp: "1700000000"
          802-1x._: ""
          ethernet._: ""
          ipv6.ip6-privacy: "-1"
          proxy._: ""{passthrough}
"""


def by_stored(more="", passthrough=""):
    files = {"netplan": {"/etc/netplan/90-NM-1.yaml": stored(more, passthrough)}}
    return network_plan(survey(files=files, active=DESKTOP), [{**STATIC, "nameservers": []}])["errors"]


def test_a_profile_that_networkmanager_stored_by_netplan_says_no_more_than_it_did():
    assert by_stored() == []
    assert by_stored(passthrough='\n          ethernet.wake-on-lan: "1"') == []


@pytest.mark.parametrize(
    ("line", "place", "cure"),
    [
        ('ethernet.wake-on-lan: "64"', "wake-on-lan= in networkmanager.pass", "write options: {wakeonlan: true}"),
        ('802-1x.eap: "tls;"', "[802-1x] in networkmanager.pass", f"write auth {IN_WORDS}"),
        ("ethtool.ring-rx: 4096", "[ethtool] in networkmanager.pass", "leave eth0 out of network_interfaces"),
        ('tc.qdisc.root: "fq"', "[tc] in networkmanager.pass", "leave eth0 out of network_interfaces"),
        ('ipv4.method: "shared"', "[ipv4] method=shared in networkmanager.pass", "leave eth0 out of"),
        ('ipv4.route2: "10.9.0.0/16,192.168.1.9"', "routes", "write routes: [{to: 10.9.0.0/16, via: 192.168.1.9}]"),
    ],
)  # fmt: skip
def test_what_netplan_passes_through_to_networkmanager_does_not_go_unsaid(line, place, cure):
    (refused,) = by_stored(passthrough=f"\n          {line}")
    assert (
        refused.startswith(f"network_interfaces[0]: /etc/netplan/90-NM-1.yaml has {place}")
        and cure in refused
    )


def test_what_netplan_says_and_passes_through_is_told_once():
    (refused,) = by_stored("\n      mtu: 9000", '\n          ethernet.mtu: "9000"')
    assert "has mtu for eth0" in refused
    one = "routes: [{to: 10.8.0.0/16, via: 192.168.1.7}]"
    (refused,) = by_stored(f"\n      {one}", '\n          ipv4.route1: "10.8.0.0/16,192.168.1.7"')
    assert f"has routes for eth0, which would be lost, since its entry has none: write {one}," in refused
    (refused,) = by_stored(f"\n      {one}", '\n          ipv4.route2: "10.9.0.0/16,192.168.1.9"')
    assert f"write {one[:-1]}, {{to: 10.9.0.0/16, via: 192.168.1.9}}]" in refused
    auth = {"auth": AUTH, "networkmanager": {"passthrough": {"802-1x.eap": "tls;"}}}
    files = {"netplan": {NETPLAN: said_beside(NETPLAN, auth)}}
    planned([{**STATIC, "options": {"auth": AUTH}}], files=files)
    assert [place for _, place, _ in of_netplan(auth)] == ["auth"]
    for odd in ("networkmanager", {"passthrough": ["x"]}, {"passthrough": {7: None, "ipv4": ["y"]}}):
        assert of_netplan({"networkmanager": odd}) == []


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("ethernet-ring-rx 4096", "leave eth0 out of network_interfaces"),
        ("ethernet_autoneg off", "leave eth0 out of network_interfaces"),
        ("link-speed 1000", "leave eth0 out of network_interfaces"),
        ("hardware-irq-coalesce-rx-usecs 9", "leave eth0 out of network_interfaces"),
        ("offload-ufo off", "leave eth0 out of network_interfaces"),
        ("ethtool-coalesce-rx-usecs 9", "leave eth0 out of network_interfaces"),
        ("offload-tso off", "write options: {tcp-segmentation-offload: false}"),
        ("gro-offload on", "write options: {generic-receive-offload: true}"),
    ],
)
def test_what_ethtool_sets_by_a_stanza_does_not_go_unsaid(line, cure):
    files = {"ifupdown": {STANZAS: said_beside(STANZAS, line)}}
    wanted = {**STATIC, "nameservers": []}
    (refused,) = network_plan(survey(files=copy.deepcopy(files)), [wanted])["errors"]
    assert f"has {line.split()[0].replace('_', '-')} for eth0" in refused
    assert refused.endswith(f"its entry has none: {cure}, or take it out there")
    if "options" in cure:
        planned([{**wanted, **yaml.safe_load(cure.removeprefix("write "))}], files=files)
    planned([wanted], files={"ifupdown": {STANZAS: said_beside(STANZAS, "link-type dummy")}})


def test_what_netplan_turns_off_does_not_go_unsaid():
    """Most cards have it on by themselves."""
    files = {"netplan": {NETPLAN: said_beside(NETPLAN, {"tcp-segmentation-offload": False})}}
    (refused,) = network_plan(survey(files=files), [STATIC])["errors"]
    assert "write options: {tcp-segmentation-offload: false}, or" in refused
    files = {
        "netplan": {
            NETPLAN: said_beside(NETPLAN, {"virtual-function-count": 0, "emit-lldp": False, 7: False})
        }
    }
    planned([STATIC], files=files)


IFUPDOWN = {"systemd-networkd": False, "NetworkManager": False, "systemd-resolved": True, "networking": True}


def of_bridge(*lines, active=IFUPDOWN, path=STANZAS, options=None, **parameters):
    """What is said where a bridge that ifupdown, or netplan, made comes into network_interfaces."""
    content = "\n  ".join(["iface br0 inet dhcp", "bridge_ports eth0", *lines]) + "\niface eth0 inet manual\n"
    if path == WIRED:
        content = lines[0]
    elif path == NETPLAN:
        content = (
            f"network: {{ethernets: {{eth0: {{}}}}, bridges: {{br0: {{interfaces: [eth0], {lines[0]}}}}}}}"
        )
    options = {
        "interfaces": ["eth0"],
        **({"parameters": parameters} if parameters else {}),
        **(options or {}),
    }
    bridge = {**STATIC, "name": "br0", "kind": "bridges", "nameservers": [], "options": options}
    cards = [
        {**ETH0, "addresses": [], "master": "br0"},
        card("br0", kind="bridge", addresses=ETH0["addresses"]),
    ]
    told = read_from(path, told={path: content})["files"]
    out = [{**DEFAULT, "interface": "br0"}]
    seen = survey(files=told, active=active, interfaces=cards, routes=out)
    return network_plan(seen, [BARE, bridge])["errors"]


USUAL_BRIDGE = (
    "bridge_stp off",
    "bridge_fd 0",
    "bridge_maxwait 0",
    "bridge_waitport 0",
)  # Debian's wiki, Proxmox


def test_a_bridge_without_a_spanning_tree_is_what_systemd_networkd_makes_by_itself():
    assert of_bridge(*USUAL_BRIDGE) == []
    assert of_bridge(*(line.replace("_", "-") for line in USUAL_BRIDGE)) == []
    for parameters in ("{}", "{stp: false}", "{stp: no, forward-delay: 0}"):
        assert of_bridge(f"parameters: {parameters}", path=NETPLAN) == [], parameters
    for parameters in ("{stp: true}", "{forward-delay: 0}", "{stp: false, ageing-time: 7}"):
        (refused,) = of_bridge(f"parameters: {parameters}", path=NETPLAN)
        assert "has parameters for br0" in refused, parameters
    for line in ("bridge_stp on", "bridge_fd 9", "bridge_ageing 7"):
        (refused,) = of_bridge(*USUAL_BRIDGE[2:], line)
        assert f"has {line.split()[0].replace('_', '-')} for br0" in refused
        assert of_bridge(line, stp=True) == []
    assert "write options: {parameters: {stp: true, …}}, or" in of_bridge("bridge_stp on")[0]


def test_networkmanager_has_to_be_told_that_a_bridge_has_no_spanning_tree():
    """By itself it has one."""
    for said in ({"active": DESKTOP}, {"options": {"renderer": "NetworkManager"}}):
        (refused,) = of_bridge(*USUAL_BRIDGE, **said)
        assert (
            "has bridge-stp for br0" in refused
            and "write options: {parameters: {stp: false, …}}, or" in refused
        )
        (refused,) = of_bridge("renderer: NetworkManager, parameters: {stp: false}", path=NETPLAN, **said)
        assert "has parameters for br0" in refused
        assert of_bridge(*USUAL_BRIDGE, **said, stp=False) == []
    networkds = {"options": {"renderer": "networkd"}}
    assert of_bridge(*USUAL_BRIDGE, active=DESKTOP, **networkds) == []


def test_a_bridge_that_knows_vlans_is_left_to_whoever_made_it():
    """Whatever parameters its entry has: none says that."""
    for line in ("bridge-vlan-aware yes", "bridge_vids 2-4094", "bridge-pvid 7"):
        (refused,) = of_bridge(*USUAL_BRIDGE, line, stp=False)
        assert f"has {line.split()[0].replace('_', '-')} for br0" in refused
        assert refused.endswith("none: leave br0 out of network_interfaces, or take it out there")
    for line in ("bridge-vlan-aware no", "bridge-pvid 1", "bridge_allow_untagged yes", "ethernet-autoneg on"):
        assert of_bridge(*USUAL_BRIDGE, line) == []
    # netplan takes a card's offloads of cards alone.
    (refused,) = of_bridge(*USUAL_BRIDGE, "offload-gro off")
    assert refused.endswith("none: leave br0 out of network_interfaces, or take it out there")
    stored = "networkmanager: {passthrough: {bridge.multicast-snooping: 'false'}}"
    (refused,) = of_bridge(f"parameters: {{stp: false}}, {stored}", path=NETPLAN)
    assert "in networkmanager.passthrough for br0, which would be lost" in refused
    lines = "[connection]\ntype=bridge\ninterface-name=br0\n[bridge]\nstp=false\n"
    for more, refused in (("", False), ("vlan-filtering=false", False), ("vlan-filtering=true", True)):
        errors = of_bridge(f"{lines}{more}", path=WIRED, active=DESKTOP, stp=False)
        assert ["[bridge] vlan-filtering= for br0" in one for one in errors] == [True] * refused


def test_what_the_stanzas_of_a_bonds_ports_say_of_it_is_the_bonds():
    """ifenslave takes a bond's options from its ports, too."""
    ports = [f"iface {name} inet manual\n  bond-master bond0\n  bond-mode 1" for name in ("eth0", "eth1")]
    text = "\n".join([*ports, "iface bond0 inet dhcp\n  bond-slaves none\n"])
    told = {"files": {"ifupdown": {STANZAS: text}}, "active": IFUPDOWN}
    bond = {**BOND, "nameservers": []}
    planned([BARE, {"name": "eth1"}, bond], **copy.deepcopy(told))
    bond["options"] = {"interfaces": ["eth0", "eth1"]}
    (refused,) = network_plan(survey(**copy.deepcopy(told)), [BARE, {"name": "eth1"}, bond])["errors"]
    assert refused == (
        f"network_interfaces[2]: {STANZAS} has bond-mode for eth0, which would be lost, since the entry of bond0 has "
        f"none: write parameters {IN_WORDS}, or take it out there"
    )
    # Of another bond than that which takes the port in, they are not its own.
    parameters = {"parameters": BOND["options"]["parameters"]}
    other = {"name": "bond1", "kind": "bonds", "options": {"interfaces": ["eth1"], **parameters}}
    bond["options"] = {"interfaces": ["eth0"]}
    (refused,) = network_plan(survey(**told), [BARE, {"name": "eth1"}, bond, other])["errors"]
    assert refused.startswith(f"network_interfaces[2]: {STANZAS} has bond-mode for eth0")


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/usr/lib/netplan/50.yaml", said_beside(NETPLAN, {"mtu": 9000})),
        ("/lib/netplan/50.yaml", said_beside(NETPLAN, {"mtu": 9000})),
        (
            "/usr/lib/NetworkManager/system-connections/lan",
            said_beside(WIRED, "uuid=7b2d\n[ethernet]\nmtu=9000"),
        ),
    ],
)
def test_nobody_is_told_to_change_a_packages_file(path, content):
    """The next upgrade would bring it back."""
    kind = "netplan" if "netplan" in path else "networkmanager"
    (refused,) = network_plan(survey(files={kind: {path: content}}, active=DESKTOP), [STATIC])["errors"]
    assert refused.endswith(
        f"{path} has mtu{'=' * (kind != 'netplan')} for eth0, which would be lost, since its "
        "entry has none: write mtu: 9000"
    )


def test_the_size_of_a_bonds_ports_is_the_bonds():
    files = {"netplan": {NETPLAN: said_beside(NETPLAN, {"mtu": 9000})}}
    wanted = [BARE, {"name": "eth1"}, {**BOND, "mtu": 9000}]
    planned(wanted, files=files)
    assert network_plan(survey(files=files), [*wanted[:2], BOND])["errors"]
    both = {"netplan": {NETPLAN: "network: {ethernets: {all: {match: {name: 'eth*'}, mtu: 9000}}}"}}
    (refused,) = network_plan(survey(files=both), [{**STATIC, "mtu": 9000}, CLUSTERS])["errors"]
    assert refused.startswith(
        "network_interfaces[1]: /etc/netplan/50.yaml has mtu for eth1, which would be lost"
    )
