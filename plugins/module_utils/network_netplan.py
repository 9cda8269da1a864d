"""Which definitions in netplan's other files speak for our interfaces, and the changes by which these give way.

Given {path: {text, mode}} and the host's interfaces (links). `ours` maps a present name to the one that it shall have.
"""

import fnmatch
import os

import yaml
from network_claims import check_made, check_taken_in, others, own_cards
from network_entries import KINDS, Refused, below
from network_files import MADE, OUR_FILE, aside
from network_yaml import (
    WORDS,
    bare,
    beneath,
    form_fault,
    is_a_packages,
    netplan_after,
    network_of,
    read_by_netplan,
    read_netplan,
    yaml_fault,
)


def netplan_documents(files):
    """{path: what it holds} of the other files that netplan reads; refused where it could not read one."""
    documents = {}
    for path, file in read_by_netplan(files).items():
        if path == OUR_FILE:
            continue
        try:
            documents[path] = read_netplan(file["text"]) or {}
        except yaml.YAMLError as error:
            fault = yaml_fault(error)
            raise Refused(f"{path} is no valid YAML, so netplan cannot work on this host: {fault}") from None
        check_form(path, documents[path])
    return documents


def check_form(path, document):
    """Refuse what is YAML, and nothing for netplan."""
    network = (document.get("network") or {}) if isinstance(document, dict) else None
    if not isinstance(network, dict) or not all(isinstance(network.get(kind) or {}, dict) for kind in KINDS):
        raise Refused(
            f"{path}: network, or a kind in it, is no mapping, so netplan cannot work on this host: correct it"
        )
    for kind in KINDS:
        for identifier, definition in definitions_in(network, kind).items():
            if fault := form_fault(definition or {}):
                place = ".".join(filter(None, ("network", kind, str(identifier), fault[0])))
                raise Refused(
                    f"{path}: {place} is no {fault[1]}, so netplan cannot work on this host: correct it"
                )


def definitions_in(network, kind):
    """{identifier: definition} of a kind; a renderer may stand beside them, as a word."""
    found = network.get(kind) or {}
    return {key: one for key, one in found.items() if key != "renderer" or not isinstance(one, str)}


def netplan_claims(files, documents, ours, links, taken, made):
    """Changes to other netplan files so that none of them speaks for a name in `ours`; `made`: as `check_made`.

    documents: as `netplan_documents` has them; what gives way is taken out of them.
    """
    changes = []
    going = netplan_hits(documents, ours, links, made)
    referring = referring_to(documents, going)
    for path, document in documents.items():
        if take_out(path, document, going.get(path, []), referring, ours):
            check_not_in_run(path, going[path])
            changes += rewritten(path, document, files, taken)
    return changes


def netplan_hits(documents, ours, links, made):
    """{path: [(kind, identifier, names in `ours`)]} of the definitions that speak for those; refused where for others,
    too, or where they take one of ours in.
    """
    every = [
        (path, kind, identifier, definition, matches(kind, identifier, definition, links))
        for path, document in documents.items()
        for kind in KINDS
        for identifier, definition in definitions_in(document.get("network") or {}, kind).items()
    ]
    found = {}
    for path, kind, identifier, definition, meant in every:
        hit = [name for name in meant if name in ours] or [
            name for name in (identifier,) if name in ours or name in ours.values()
        ]
        if not hit:
            # By the interface's name, or by that of a definition which matches it.
            members = set(below(kind, definition or {})) if kind != "vlans" else set()
            members |= {name for _, _, other, _, names in every if other in members for name in names}
            check_taken_in(path, identifier, kind, [name for name in ours if name in members])
            continue
        check_for_ours_alone(path, identifier, meant, hit, ours, links)
        if kind in MADE:
            check_made(path, identifier, kind, made)
        found.setdefault(path, []).append((kind, identifier, hit))
    return found


def check_for_ours_alone(path, identifier, meant, hit, ours, links):
    """Refuse a definition that has but the name of ours and means other cards, and one that means others, too."""
    if meant and not any(name in ours for name in meant):
        raise Refused(
            f"{path}: '{identifier}' is {', '.join(meant)} by its match, and netplan would take it for "
            f"{identifier} of network_interfaces, too: call it {meant[0]} there, and what refers to it, too"
        )
    if rest := others(meant, ours, links):
        theirs = own_cards(rest, hit, links)
        wish = f"put {', '.join(theirs)} into network_interfaces too, or " if theirs else ""
        raise Refused(
            f"{path}: '{identifier}' configures {', '.join(hit)} together with {', '.join(rest)}: "
            f"{wish}narrow the match in that file{'' if theirs else f' to {hit[0]}'}"
        )


def referring_to(documents, going):
    """{identifier: (path, kind, name)} of what lies on a definition in the files that netplan reads before ours.

    It takes a name only from the same file or an earlier one, and ours is among the last: a definition that gives way
    has to leave its name there. going: as `netplan_hits` has them; these refer to nothing any more.
    """
    found = {}
    for path, document in documents.items():
        gone = {(kind, identifier) for kind, identifier, _ in going.get(path, [])}
        for kind, definitions in (document.get("network") or {}).items():
            for name, one in definitions.items() if isinstance(definitions, dict) else ():
                if not isinstance(one, dict) or (kind, name) in gone or is_after_ours(path):
                    continue
                inside = one.get("interfaces") if isinstance(one.get("interfaces"), list) else []
                for identifier in [one.get("link"), *inside]:
                    if isinstance(identifier, WORDS):
                        found.setdefault(identifier, (path, kind, name))
    return found


def take_out(path, document, going, referring, ours):
    """Whether something is left out of a file's document, in place: the definitions `going`, or all but their names."""
    network = document.get("network") or {}
    claimed = False
    for kind, identifier, hit in going:
        definition = network[kind][identifier]
        if identifier not in referring:
            del network[kind][identifier]
            claimed = True
            continue
        names = [ours.get(name, name) for name in hit]
        check_name_stays(path, kind, identifier, names, *referring[identifier])
        network[kind][identifier] = bare(kind, definition or {})
        claimed = claimed or definition != network[kind][identifier]
    for kind in KINDS:
        if kind in network and not definitions_in(network, kind):
            del network[kind]
    return claimed


def check_name_stays(path, kind, identifier, names, place, other_kind, other):
    """Refuse to leave nothing but a definition's name where our file has the interface by another one, or where netplan
    takes no name alone: of what is wireless.
    """
    wish = f"put {other} into network_interfaces too (kind: {other_kind}), or " if other_kind in KINDS else ""
    if identifier not in names:
        raise Refused(
            f"{place}: '{other}' lies on '{identifier}', which is {', '.join(names)} in network_interfaces, so that it "
            f"would lie on nothing: {wish}have {path} call '{identifier}' {names[0]}, and what refers to it, too"
        )
    if kind == "wifis":
        raise Refused(
            f"{place}: '{other}' lies on '{identifier}', of whose definition in {path} network_interfaces would leave "
            f"nothing but the name, which netplan does not take of what is wireless: {wish}take '{other}' out there"
        )


def check_not_in_run(path, going):
    """Refuse to change a file in /run, of which the next boot would have it all again."""
    if path.startswith("/run/"):
        cards = ", ".join(dict.fromkeys(name for _, _, hit in going for name in hit))
        raise Refused(
            f"{path} configures {cards}: netplan reads that before a file of the same name in /etc, and what wrote "
            "it does so again at the next boot, mostly for ip= in the kernel's command line (`cat /proc/cmdline`): "
            f"take that out there, then delete {path}; or leave {cards} out of network_interfaces"
        )


def rewritten(path, document, files, taken):
    """The changes that make `document` of a file; what was there is kept, and a package's is hidden from /etc."""
    file, left = files[path], yaml.safe_dump(document, sort_keys=False)
    if not path.startswith("/etc/"):
        return [{"path": f"/etc/netplan/{os.path.basename(path)}", "content": left, "mode": "0600"}]
    if set(document["network"]) <= {"version"} and not beneath(path, files):
        return [{"path": path, "move_to": aside(path, taken)}]
    original = []
    if not is_a_packages(path, file["text"], files):
        original = [{"path": aside(path, taken), "content": file["text"], "mode": "0600"}]
    return [*original, {"path": path, "content": left, "mode": file["mode"]}]


# What our own file takes over from the others.


def names_given(files, links):
    """{interface: {match, set-name}} of the cards that have their present name from netplan's files, ours included.

    Whoever takes such a definition away takes these two over: at the next boot the card would have the kernel's name,
    and nothing would configure it.
    """
    merged = {}  # as netplan does: by the files' names, what comes later goes over what came before
    for _, text in sorted(netplan_after(files, []).items()):
        for kind, definitions in network_of(text).items():
            for identifier, one in definitions.items():
                before = merged.setdefault((kind, identifier), {})
                if isinstance(before.get("match"), dict) and isinstance(one.get("match"), dict):
                    one["match"] = before["match"] | one["match"]
                before.update(one)
    given = {}
    for (kind, identifier), one in merged.items():
        name, match = one.get("set-name"), one.get("match")
        if kind not in MADE and isinstance(match, dict) and name in matches(kind, identifier, one, links):
            given[name] = {"match": match, "set-name": name}
    return given


def keeping_name(item, given):
    """The definition of an entry, with what gives the card its present name; but the inventory's own word counts."""
    definition = item["definition"]
    # From options; perhaps of several cards.
    by_other_marks = set(definition.get("match", {})) - {"macaddress"}
    if item["kind"] in MADE or "set-name" in definition or by_other_marks:
        return definition
    return {**given.get(item["name"], {}), **definition}


def join_link(item, network, documents, ours, links):
    """Have netplan know what a VLAN of ours lies on: in our file, by its name; in another, by that of the definition.

    network: what our file will have. A definition that comes after it has to have its name here, too.
    """
    link = item["definition"]["link"]
    if link in ours or link in ours.values():
        network[item["kind"]][item["name"]]["link"] = ours.get(link, link)
        return
    found = [
        (identifier != link, is_after_ours(path), identifier, kind, definition)
        for path, document in documents.items()
        for kind, definitions in (document.get("network") or {}).items()
        for identifier, definition in (definitions.items() if isinstance(definitions, dict) else ())
        if identifier == link or (kind in KINDS and link in matches(kind, identifier, definition, links))
    ]
    if not found:
        raise Refused(
            f"{item['where']}.options.link: no netplan file has {link}, so netplan takes no VLAN on it: put {link} "
            "into network_interfaces too, with the addresses that it has"
        )
    _, after, identifier, kind, definition = min(found, key=lambda one: one[:2])
    network[item["kind"]][item["name"]]["link"] = identifier
    if after and kind == "wifis":
        raise Refused(
            f"{item['where']}.options.link: {link} is wireless, and stands in a netplan file that comes after "
            f"{OUR_FILE}, in which netplan does not take its name alone: put {link} into network_interfaces too (kind: "
            f"wifis), or give that file a name that comes before {os.path.basename(OUR_FILE)}"
        )
    if after and kind in KINDS:
        network.setdefault(kind, {}).setdefault(identifier, bare(kind, definition or {}))


def is_after_ours(path):
    return os.path.basename(path) > os.path.basename(OUR_FILE)


def matches(kind, identifier, definition, links):
    """The names of `links` that a netplan definition speaks for; an empty match is for all of its kind."""
    match = definition.get("match") if isinstance(definition, dict) else None
    if match is None:
        return [link["name"] for link in links if identifier in (link["name"], *link["altnames"])]
    pattern = str(match.get("name", "*"))
    # A card that has got its set-name has lost the name by which it was known.
    named = [
        link["name"]
        for link in links
        if any(fnmatch.fnmatchcase(name, pattern) for name in (link["name"], *link["altnames"]))
    ] or [definition.get("set-name")]
    drivers = match.get("driver", "*")
    drivers = drivers if isinstance(drivers, list) else [drivers]
    return [
        link["name"]
        for link in links
        if (link["kind"] == "wlan") == (kind == "wifis")
        and link["name"] in named
        and ("macaddress" not in match or str(match["macaddress"]).lower() == link["mac"])
        and any(fnmatch.fnmatchcase(link["driver"] or "", str(driver)) for driver in drivers)
    ]
