"""Preflight's checks of what the hosts are and have."""

from __future__ import annotations

import ipaddress
import re
import statistics
from collections.abc import Iterable

from host_runs import busy, of_version
from preflight_base import FAIL, GB, PASS, SKIP, WARN, Cluster, Said, check, equal, named, unique

# ---- who is there ----


@check("Every host answers Ansible, and its Python reads it", "all hosts", "the inventory")
def answer(cluster: Cluster) -> Iterable[Said]:
    for host, fact in cluster.facts.items():
        if host not in cluster.alive:
            said = fact.get("error") or "it was not asked"
            yield Said(FAIL, [host], f"no answer: {said}", f"{cluster.limits.ansible} {host} -b -m ping")
    if cluster.alive:
        yield Said(PASS, cluster.alive, f"{len(cluster.alive)} hosts answer")


@check(
    "Each host calls itself by its own name",
    "a name each, the inventory's",
    "RFC 1123; ranks on one name share memory",
    True,
)
def hostname(cluster: Cluster) -> Iterable[Said]:
    names = {host: survey["hostname"] for host, survey in cluster.survey().items()}
    wrong = [host for host, name in names.items() if name != cluster.facts[host]["expected"]["hostname"]]
    for host in wrong:
        same = [other for other, name in names.items() if name == names[host] and other != host]
        also = f", as {named(same)} does" if same else ""
        yield Said(FAIL, [host], f"it calls itself {names[host]}{also}", cluster.site("identity", [host]))
    if not wrong:
        yield from unique(cluster, names, "name", "identity")


@check(
    "No two hosts share a machine-id",
    "one each",
    "machine-id(5); clones share DHCP leases and journals by it",
    True,
)
def machine_id(cluster: Cluster) -> Iterable[Said]:
    yield from unique(
        cluster, {h: s["machine_id"] for h, s in cluster.survey().items()}, "machine-id", "identity"
    )


@check(
    "No two hosts share an SSH host key",
    "one each",
    "sshd(8); who has one host's key can pose as the other",
    True,
)
def host_key(cluster: Cluster) -> Iterable[Said]:
    owners: dict[str, list[str]] = {}
    for host, survey in cluster.survey().items():
        for key in survey["host_keys"]:
            owners.setdefault(key, []).append(host)
    shared = dict.fromkeys(tuple(hosts) for hosts in owners.values() if len(hosts) > 1)
    for hosts in shared:
        again = 'sh -c "rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh"'
        # Who knows a host by its old key, this controller and its peers, takes the new one for a stranger's.
        anew = f"   then ssh-keygen -R for each of them here, and {cluster.site('ssh_mesh')}"
        cure = cluster.on(hosts[1:], again) + anew
        yield Said(FAIL, list(hosts), f"the same key on {named(list(hosts))}", cure)
    if not shared:
        yield Said(PASS, cluster.alive, f"{len(owners)} keys")


@check(
    "Each host holds its cluster address, and nobody else does",
    "its own",
    "the inventory (cluster_address); strangers by a probe of RFC 5227",
    True,
)
def address(cluster: Cluster) -> Iterable[Said]:
    held = {
        host: {text.split("/")[0]: one["name"] for one in survey["interfaces"] for text in one["addresses"]}
        for host, survey in cluster.survey().items()
    }
    well, unasked = True, []
    for host, survey in cluster.survey().items():
        own = cluster.facts[host]["expected"]["address"]
        if survey["strangers"] is None:
            unasked.append(host)
        elif survey["strangers"] and not any(own in held[other] for other in cluster.alive if other != host):
            well = False
            who = named(survey["strangers"])
            yield Said(
                FAIL,
                [host],
                f"{own} is another machine's, too, whose hardware address is {who}",
                f"find {who} (the router's list of clients) and give it another address; or {host} another "
                f"cluster_address, and {cluster.site('network', [host])}",
            )
        if own not in held[host]:
            there = named(list(held[host])) or "none"
            well = False
            yield Said(
                FAIL, [host], f"{own} on no interface; there are {there}", cluster.site("network", [host])
            )
        links = {
            one["name"]: [text.split("/")[0] for text in one["addresses"]] for one in survey["interfaces"]
        }
        link = held[host].get(own, "")
        first = next((text for text in links.get(link, []) if ":" not in text), own)
        if first != own:
            well = False
            yield Said(
                WARN,
                [host],
                f"{own} is not the first address of {link}, by which gloo and NCCL go: that is {first}",
                f"have {own} stand first there, or on an interface of its own: network_interfaces, "
                f"{cluster.site('network', [host])}, and a reboot, which brings them into that order",
            )
        for other in cluster.alive:
            if other != host and own in held[other]:
                well = False
                yield Said(
                    FAIL,
                    [other],
                    f"{own}, which is {host}'s, on {held[other][own]}",
                    cluster.on([other], f"ip address del {own} dev {held[other][own]}"),
                )
    if well:
        # Nobody is asked over a link that is no Ethernet.
        besides = f"; whether a stranger has {named(unasked)}'s, too, was not to be asked" if unasked else ""
        yield Said(PASS, cluster.alive, f"each its own{besides}")


@check(
    "Every host's name leads to its cluster address, on every host",
    "the cluster address first",
    "hosts(5); gloo and etcd find peers by it",
    True,
)
def names(cluster: Cluster) -> Iterable[Said]:
    wrong: dict[str, list[str]] = {}
    lines: dict[str, list[tuple[int, str]]] = {}
    for host, survey in cluster.survey().items():
        for fact in cluster.facts.values():
            canonical, wanted = fact["expected"]["hostname"], fact["expected"]["address"]
            got = survey["names"].get(canonical, [])
            if got[:1] != [wanted]:
                leads = f"leads to {got[0]} first" if got else "is unknown"
                line = next((one for one in survey.get("lines") or [] if canonical in one["names"]), None)
                if line:  # the owner's, which identity leaves as it is
                    leads += f" (line {line['number']} of /etc/hosts there: {line['text']})"
                    lines.setdefault(host, []).append((line["number"], canonical))
                wrong.setdefault(host, []).append(f"{canonical} {leads}; expected {wanted}")
    for host, told in wrong.items():
        cure = cluster.site("identity", [host])
        if host in lines:
            space = "[[:space:]]"
            gone = [
                f'-e "{number}s/{space}{name}{space}/ /I" -e "{number}s/{space}{name}$//I"'
                for number, name in lines[host]
            ]
            taken = cluster.on([host], f"sed -i.before {' '.join(gone)} /etc/hosts")
            cure = f"{taken}; {cure}" if len(told) > len(lines[host]) else taken
        yield Said(FAIL, [host], "; ".join(told[:3]), cure)
    if not wrong:
        yield Said(PASS, cluster.alive, f"{len(cluster.facts)} names on each")


@check(
    "The route to each peer leaves by the interface of the cluster address",
    "that interface, that sender",
    "ip-route(8); NCCL and gloo are bound to it",
    True,
)
def route(cluster: Cluster) -> Iterable[Said]:
    well = True
    for host, survey in cluster.survey().items():
        own = cluster.facts[host]["expected"]["address"]
        interface = (survey["link"] or {}).get("name")
        bad = []
        for peer, fact in cluster.facts.items():
            way = survey["routes"].get(fact["expected"]["address"])
            if peer == host or not way or not interface:
                continue
            if way["dev"] != interface or (way["source"] and way["source"] != own):
                leaves = way["error"] or f"by {way['dev']} from {way['source'] or 'any address'}"
                bad.append((fact["expected"]["address"], f"{peer} {leaves}"))
        if bad:
            well = False
            text = f"the way to {', '.join(words for _, words in bad[:3])}; expected {interface} from {own}"
            held = [ipaddress.ip_interface(text) for one in survey["interfaces"] for text in one["addresses"]]
            peer, *_ = bad[0]
            cure = cluster.on([host], f"ip route replace {peer} dev {interface} src {own}")
            if not any(str(one.ip) == own and ipaddress.ip_address(peer) in one.network for one in held):
                cure = (
                    f"{cluster.on([host], f'ip route get {peer}')}   and, as {peer} is not in {interface}'s network, "
                    f"give it a route to it: routes in network_interfaces, and {cluster.site('network', [host])}"
                )
            yield Said(FAIL, [host], text, cure)
    if well:
        yield Said(PASS, cluster.alive, "each by its own interface")


@check(
    "No other interface has an address in the cluster's network",
    "one interface",
    "RFC 1122 3.3.4.2: which of two answers is a matter of luck",
    True,
)
def subnets(cluster: Cluster) -> Iterable[Said]:
    well = True
    for host, survey in cluster.survey().items():
        own = cluster.facts[host]["expected"]["address"]
        held = [
            (one["name"], ipaddress.ip_interface(text))
            for one in survey["interfaces"]
            if one["enabled"]
            for text in one["addresses"]
            if ":" not in text
        ]
        mine = next(((name, net.network) for name, net in held if str(net.ip) == own), None)
        if not mine:
            continue
        for name, net in held:
            if name != mine[0] and net.network.overlaps(mine[1]):
                well = False
                text = f"{name} has {net}, which overlaps {mine[0]}'s {mine[1]}"
                cure = cluster.on([host], f"ip address del {net} dev {name}")
                if str(net.ip) == survey["door"]:
                    text += "; SSH comes in by it"
                    play = cluster.site("network", [host])
                    cure = f"give {name} or {mine[0]} another subnet: network_interfaces, and {play}"
                yield Said(WARN, [host], text, cure)
    if well:
        yield Said(PASS, cluster.alive, "one each")


# ---- versions ----


@check(
    "All hosts have the same release of the trainer, that of this checkout",
    "one release",
    "ranks of two releases may not understand each other, nor one what another has checked",
)
def release(cluster: Cluster) -> Iterable[Said]:
    releases = {host: cluster.facts[host]["run"]["release"] or "" for host in cluster.alive}
    yield_to = lambda hosts: cluster.site("trainer")  # noqa: E731
    lacking = [host for host, name in releases.items() if not name]
    if lacking:
        yield Said(FAIL, lacking, "no trainer is deployed", cluster.limits.site)
    elif len(names := set(releases.values())) == 1 and not of_version(*names, cluster.limits.version):
        found = f"release {next(iter(names))}; expected {cluster.limits.version}, this checkout's"
        newer = "   or, where it was last run from a newer checkout, git pull here"
        yield Said(FAIL, list(releases), found, cluster.limits.site + newer)
    else:
        yield from equal(cluster, releases, "release", FAIL, yield_to)


def _one_python(cluster: Cluster) -> str:
    """The cure for environments that differ; where their Pythons (X.Y) do, site.yml alone would change nothing."""
    versions = {survey["versions"]["python"] for survey in cluster.survey().values()} - {""}
    mixed = len({tuple(one.split(".")[:2]) for one in versions}) > 1
    need = "   which names the hosts that need python_env_python: bring in the inventory; then the same again"
    return cluster.site("python_env") + (need if mixed else "")


@check("All environments have the same packages", "one digest", "requirements/trainer.txt")
def packages(cluster: Cluster) -> Iterable[Said]:
    digests = {
        host: ((cluster.facts[host]["run"]["environment"] or {}).get("digest") or "")[:12]
        for host in cluster.alive
        if cluster.facts[host]["run"]["release"]
    }
    if digests:
        yield from equal(cluster, digests, "digest", FAIL, lambda hosts: _one_python(cluster))
    else:
        yield Said(SKIP, cluster.alive, "no host has a release")


def _version(cluster: Cluster, key: str, what: str, result: str, cure) -> Iterable[Said]:
    values = {
        host: survey["versions"][key]
        for host, survey in cluster.survey().items()
        if cluster.facts[host]["run"]["release"]  # without one, that is said already
    }
    if values:
        yield from equal(cluster, values, what, result, cure)
    else:
        yield Said(SKIP, cluster.alive, "no host has a release")


@check(
    "All environments have the same Python",
    "one version; warn where only its last number differs",
    "compiled packages and pickled code objects differ by it",
)
def python(cluster: Cluster) -> Iterable[Said]:
    found = {survey["versions"]["python"] for survey in cluster.survey().values()} - {""}
    if len({tuple(one.split(".")[:2]) for one in found}) > 1:
        yield from _version(cluster, "python", "Python", FAIL, lambda hosts: _one_python(cluster))
        return
    # Packages are compiled for 3.12, not for 3.12.3. The interpreter below an environment is the distribution's, which
    # an upgrade of one host changes there alone, or the one that Ubuntu 22.04 is brought.
    upgrade = cluster.on(cluster.alive, 'sh -c "apt-get update && apt-get upgrade -y"')
    yield from _version(cluster, "python", "Python", WARN, lambda hosts: upgrade)


@check(
    "All environments have the same torch", "one build", "PyTorch: all ranks must run the same collectives"
)
def torch(cluster: Cluster) -> Iterable[Said]:
    yield from _version(cluster, "torch", "torch", FAIL, lambda hosts: cluster.site("python_env"))


@check(
    "All environments have the same NCCL",
    "one version",
    "NCCL: versions that differ refuse each other, or hang",
)
def nccl(cluster: Cluster) -> Iterable[Said]:
    if not any(survey["versions"]["nccl"] for survey in cluster.survey().values()):
        yield Said(SKIP, cluster.alive, "a build of torch without NCCL")
        return
    yield from _version(cluster, "nccl", "NCCL", FAIL, lambda hosts: cluster.site("python_env"))


@check(
    "All hosts of one distribution's release run the same kernel",
    "one release",
    "ours: one more thing that cannot be the reason",
)
def kernel(cluster: Cluster) -> Iterable[Said]:
    systems: dict[str, dict[str, str]] = {}
    for host, survey in cluster.survey().items():
        systems.setdefault(survey["system"], {})[host] = survey["versions"]["kernel"]
    for found in systems.values():
        # Who differs from most may be the one that has been upgraded.
        newest = max(found.values(), key=lambda release: [int(part) for part in re.findall(r"\d+", release)])
        old = [host for host, release in found.items() if release != newest]
        systems_name = cluster.survey()[next(iter(found))]["system"]
        cure = _newer_kernel(cluster, old, found, newest, systems_name)
        yield from equal(cluster, found, "kernel", WARN, lambda hosts, cure=cure: cure)


def _newer_kernel(cluster: Cluster, old: list[str], found: dict[str, str], newest: str, system: str) -> str:
    """What brings the `newest` kernel to the `old` hosts: an upgrade keeps to a series, such as 6.8's generic ones."""

    def series(release: str) -> tuple[str, str]:
        return ".".join(re.findall(r"\d+", release)[:2]), release.rpartition("-")[2]

    upgrade = "apt-get update && apt-get {} -y && reboot"
    if {series(found[host]) for host in old} <= {series(newest)}:
        return cluster.on(old, f'sh -c "{upgrade.format("dist-upgrade")}"')
    release = system.partition("ubuntu-")[2]
    if release and {series(one)[1] for one in found.values()} == {"generic"}:
        # A desktop has the one of later releases from the start, a server that of its own.
        return cluster.on(old, f'sh -c "{upgrade.format(f"install linux-generic-hwe-{release}")}"')
    having = next(host for host, one in found.items() if one == newest)
    names = cluster.on([having], f"dpkg -S /boot/vmlinuz-{newest}")
    return f"{names}   names its package; install that on {named(old)}, and boot it"


@check(
    "All hosts with a card have the same driver",
    "one version",
    "NVIDIA's CUDA compatibility guide: a build of torch needs a least driver",
)
def driver(cluster: Cluster) -> Iterable[Said]:
    drivers = {h: s["versions"]["driver"] for h, s in cluster.survey().items() if s["gpu"]["cards"]}
    if not drivers:
        yield Said(SKIP, cluster.alive, "no host has a card of NVIDIA's")
        return
    yield from equal(cluster, drivers, "driver", WARN, lambda hosts: cluster.site("nvidia"))


# ---- the machine ----


@check(
    "The hosts' clocks agree",
    "warn over {clock_warn_seconds:g} s apart, fail over {clock_fail_seconds:g} s",
    "ours: logs in one order; a lease of etcd is 10 s; TLS",
    True,
)
def clock(cluster: Cluster) -> Iterable[Said]:
    offsets, error = clock_offsets(cluster)
    if len(offsets) < 2:
        yield Said(SKIP, cluster.alive, "the clocks were not compared")
        return
    spread = max(offsets.values()) - min(offsets.values())
    result = PASS
    for limit, name in ((cluster.limits.clock_warn_seconds, WARN), (cluster.limits.clock_fail_seconds, FAIL)):
        if spread - error > limit:
            result = name
    text = f"{spread * 1000:.1f} ms apart (give or take {error * 1000:.1f})"
    if result == PASS:
        yield Said(PASS, list(offsets), text)
        return
    middle = clock_middle(cluster, offsets)
    far = [host for host, offset in offsets.items() if abs(offset - middle) > spread / 2] or list(offsets)
    told = ", ".join(f"{host} {offsets[host] - middle:+.3f} s" for host in far)
    yield Said(result, far, f"{text}: {told}", cluster.site("time_sync"))


def clock_offsets(cluster: Cluster) -> tuple[dict[str, float], float]:
    """Each host's clock less the first one's, s, and the greatest uncertainty: by peers, else by the controller."""
    edges = {
        pair: (found["offset"], found["offset_error"])
        for pair, found in cluster.pairs().items()
        if "offset" in found
    }
    if not edges:
        known = {host: cluster.facts[host].get("clock") for host in cluster.alive}
        known = {host: value for host, value in known.items() if value}
        return {host: value[0] for host, value in known.items()}, 2 * max(
            (v[1] for v in known.values()), default=0
        )
    ways = {}
    for (a, b), (offset, error) in edges.items():
        ways.setdefault(a, {})[b] = (offset, error)
        ways.setdefault(b, {}).setdefault(a, (-offset, error))
    first = next(iter(ways))
    found, errors, todo = {first: 0.0}, {first: 0.0}, [first]
    while todo:
        host = todo.pop(0)
        for peer, (offset, error) in ways[host].items():
            if peer not in found:
                found[peer], errors[peer] = found[host] + offset, errors[host] + error
                todo.append(peer)
    return found, max(errors.values())


def clock_middle(cluster: Cluster, offsets: dict[str, float]) -> float:
    """The offset that is right: the middle one; of two hosts the one whose clock the controller's confirms."""
    if len(offsets) > 2:
        return statistics.median(offsets.values())
    known = {host: cluster.facts[host].get("clock") for host in offsets}
    if all(known.values()):
        return offsets[min(known, key=lambda host: abs(known[host][0]))]
    return statistics.mean(offsets.values())


@check(
    "There is room for the run: data, model and checkpoints",
    "{min_free_gb:g} GB and what the run needs",
    "trainer_min_free_gb; the run's model, dataset and adapter (-e model=… -e dataset=… -e adapter=…)",
)
def disk(cluster: Cluster) -> Iterable[Said]:
    least, run = cluster.limits.min_free_gb, cluster.limits.run_gb
    more = ""
    if unknown := cluster.limits.run_unknown:
        more = f" besides what {unknown} takes: not on the controller, so of unknown size "
        more += "(in a full fine-tune, with three checkpoints, a model takes 19 times its files)"
    well, most = True, least
    for host, survey in cluster.survey().items():
        room, held = survey["disk"], survey.get("held") or {}
        there = min(run, (held.get("brought", 0) + held.get("checkpoints", 0)) / GB)
        need = least + run - there
        most = max(most, need)
        needed = (
            f"{need:.1f} GB needed{f' besides {there:.1f} that are there' if there >= 0.05 else ''}{more}"
        )
        fault, where = "", cluster.facts[host]["run"]["run_dir"].rsplit("/", 1)[0]
        cure = cluster.on([host], f"du -sh {where}") + "   and remove old runs there"
        if room["read_only"]:
            fault = "it is mounted for reading alone"
            cure = cluster.on([host], "dmesg --level=err,crit")
            cure += "   the kernel does so with a disk whose file system has faults: boot, which checks it"
        elif room["free"] < need * GB:
            fault = f"{room['free'] / GB:.1f} of {room['total'] / GB:.1f} GB free, {needed}"
        elif room["inodes"] is not None and room["inodes"] < 10_000:
            fault = f"{room['inodes']} files may still be made"
        if fault:
            well = False
            yield Said(FAIL, [host], fault, cure)
    if well:
        free = min(survey["disk"]["free"] for survey in cluster.survey().values())
        yield Said(PASS, cluster.alive, f"{free / GB:.0f} GB free or more, {most:.1f} GB needed{more}")


@check(
    "There is memory for the ranks",
    "{memory_gb:g} GB a process available",
    "preflight_memory_gb; torch alone takes about half of it",
)
def memory(cluster: Cluster) -> Iterable[Said]:
    well = True
    for host, survey in cluster.survey().items():
        processes = cluster.facts[host]["run"]["processes"]
        free = survey["memory"]["available"] / GB / processes
        promised = survey["memory"].get("promised")
        if promised is not None and promised / GB / processes < min(cluster.limits.memory_gb, free):
            well = False
            text = f"{promised / GB:.2f} GB for {processes} processes: vm.overcommit_memory is 2, by which the kernel "
            text += "gives programs no more than half of the memory, used or not"
            cure = cluster.on([host], "sysctl vm.overcommit_memory=0")
            cure += "   and where that is set at boot: grep -rs overcommit /etc/sysctl.conf /etc/sysctl.d"
            yield Said(FAIL, [host], text, cure)
        elif free < cluster.limits.memory_gb:
            well = False
            text = f"{survey['memory']['available'] / GB:.2f} GB available for {processes} processes"
            yield Said(
                FAIL,
                [host],
                text,
                cluster.on([host], "ps -eo pid,rss,comm --sort=-rss") + "   and end what need not run",
            )
        elif processes > 1 and survey["gpu"]["gpus"] and survey["memory"]["shared"] < GB:
            well = False
            text = f"/dev/shm of {survey['memory']['shared'] / GB:.2f} GB, by which NCCL links the GPUs of a host"
            yield Said(WARN, [host], text, cluster.on([host], "mount -o remount,size=50% /dev/shm"))
    if well:
        least = min(survey["memory"]["available"] for survey in cluster.survey().values())
        yield Said(PASS, cluster.alive, f"{least / GB:.1f} GB available or more")


@check(
    "A run's unit may lock memory",
    "unlimited, or all of the memory",
    "NCCL's guide: RDMA and pinned buffers need it; limits.conf does not reach units",
    True,
)
def memlock(cluster: Cluster) -> Iterable[Said]:
    well, most = True, []
    for host, survey in cluster.survey().items():
        limit, total = survey["memlock"], survey["memory"]["total"]
        if not limit or not limit["loaded"]:
            well = False
            yield Said(FAIL, [host], "the unit trainyard@ is not there", cluster.site("trainer", [host]))
            continue
        # In a container the kernel's own limit is the machine's, and no unit can raise it.
        found = limit["set"] if survey["container"] else limit["found"]
        if found is not None and found < total:
            well = False
            text = f"{found} bytes" + (f", by {', '.join(limit['drop_ins'])}" if limit["drop_ins"] else "")
            cure = cluster.site("trainer", [host])
            if limit["drop_ins"]:
                files = " ".join(limit["drop_ins"])
                cure = cluster.on([host], f'sh -c "rm {files} && systemctl daemon-reload"')
            yield Said(FAIL, [host], text, cure)
        else:
            most.append(host)
    if well:
        yield Said(PASS, most, "unlimited inside the unit")


@check("Nobody holds the port where the ranks meet", "{port} is free", "trainer_port")
def port(cluster: Cluster) -> Iterable[Said]:
    well = True
    for host in cluster.alive:
        run = cluster.facts[host]["run"]
        if run["port_holder"] and not busy([run]):
            well = False
            other = f"-e trainer_port={cluster.limits.port + 1}"
            cure = f"{cluster.limits.train} {other}   or end that process"
            if pid := process_of(run["port_holder"]):
                cure = f"{cluster.on([host], f'kill {pid}')}   or {other}"
            yield Said(FAIL, [host], f"port {cluster.limits.port} is held by {run['port_holder']}", cure)
    if well:
        yield Said(PASS, cluster.alive, f"port {cluster.limits.port} is free")


def process_of(holder: str) -> str:
    words = holder.split()
    return words[1] if words[:1] == ["process"] and len(words) > 1 else ""


@check(
    "The memory by which the hosts agree on a run answers each of them",
    "every member; fail without a majority",
    "docs/design/recovery.md: a run goes on while a majority of etcd's members lives",
    True,
)
def store(cluster: Cluster) -> Iterable[Said]:
    members = list(dict.fromkeys(url for survey in cluster.survey().values() for url in survey["stores"]))
    if not members:
        yield Said(SKIP, cluster.alive, "a host alone needs none")
        return
    lost, why = {}, ""
    for url in members:
        faults = {h: s["stores"][url] for h, s in cluster.survey().items() if s["stores"].get(url)}
        if faults:
            lost[url], why = list(faults), next(iter(faults.values()))
    if not lost:
        yield Said(PASS, cluster.alive, f"{len(members)} of {len(members)} members answer")
        return
    dead = [url for url, hosts in lost.items() if len(hosts) == len(cluster.alive)]
    majority = len(members) // 2 + 1
    result = FAIL if len(members) - len(dead) < majority else WARN
    for url, askers in lost.items():
        host = cluster.members[url.split("://")[-1].rsplit(":", 1)[0]]
        if url in dead:
            restart = cluster.on([host], "systemctl restart trainyard-etcd")
            cure = f"{restart}   or, where that does not help, once no run is active: {cluster.limits.site}"
            text = f"etcd on {host} does not answer: {why} (it was stopped, has lost its data, or came beside a run)"
            yield Said(result, [host], text, cure)
        else:
            text = f"etcd on {host} does not answer {named(askers)}: {why}"
            yield Said(FAIL, askers, text, cluster.opening(host))
