"""What the files say that configure a host's network: what the filters network_plan and network_back share.

Pure functions: nothing here reads a file or talks to a host.
"""

import fnmatch
import os
import re

import yaml
from network_entries import KINDS

GUARD = "/usr/local/lib/trainyard/guard"
OUR_FILE = "/etc/netplan/90-trainyard.yaml"
HEADER = "# Written by Trainyard from network_interfaces in the inventory; a change here is lost at the next run.\n"
CLOUD_INIT_OFF = "/etc/cloud/cloud.cfg.d/99-trainyard-network.cfg"
IFUPDOWN_RECORD = "/etc/network/interfaces.before-trainyard"
IFUPDOWN_MARK = "# trainyard: "  # before a line of ifupdown's that gave way
AFTER_NETPLAN = "20-trainyard-"  # before the name of a .network file that is to come after netplan's
ASIDE = ".before-trainyard"  # behind the name of a file that gave way
RESOLV_CONF = "/etc/resolv.conf"
MADE = ("bonds", "bridges", "vlans")  # devices that are not there before somebody configures them
PROFILES = "/etc/NetworkManager/system-connections"
READ_BY = {  # where a manager reads a file that gave way, by the directory in which it was laid aside
    "/etc/netplan": "/etc/netplan",
    "/etc/systemd/network": "/etc/systemd/network",
    "/etc/NetworkManager": PROFILES,
    "/run/NetworkManager": "/run/NetworkManager/system-connections",
}
PROFILE_KINDS = {  # NetworkManager's words for a profile's kind of card
    "ethernet": "ether",
    "802-3-ethernet": "ether",
    "infiniband": "infiniband",
    "wifi": "wlan",
    "802-11-wireless": "wlan",
}


def read_at(place):
    """Where a manager reads what was laid aside as `place`, with ASIDE and a number behind it or without."""
    place = place.rpartition(ASIDE)[0] or place
    return os.path.join(READ_BY[os.path.dirname(place)], os.path.basename(place))


UNREADABLE = (
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)  # what YAML says of `!!int word`


class NetplanLoader(yaml.SafeLoader):
    """Reads YAML as netplan does, to which all is words: 52:54:00:12:34:56 without quotes is no number of base 60,
    2024-13-45 no date, a wireless key 1234567.50 keeps its last digit, and `activation-mode: off` is not false. Only
    what is written as it was read is a number, or true or false. A key that stands twice counts twice: what it has is
    joined.
    """

    def flatten_mapping(self, node):
        joined = {}
        for key, value in node.value:
            before = joined.get(key.value) if isinstance(key, yaml.ScalarNode) else None
            if before and type(before[1]) is type(value) and not isinstance(value, yaml.ScalarNode):
                value = type(value)(
                    value.tag, before[1].value + value.value, value.start_mark, value.end_mark
                )
            joined[key.value if isinstance(key, yaml.ScalarNode) else id(key)] = (key, value)
        node.value = list(joined.values())
        super().flatten_mapping(node)


BOOL, INT, FLOAT, DATE = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp"))
NetplanLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (BOOL, INT, FLOAT, DATE)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
NetplanLoader.add_implicit_resolver(BOOL, re.compile("^(true|false)$"), list("tf"))
NetplanLoader.add_implicit_resolver(INT, re.compile(r"^(0|-?[1-9][0-9]*)$"), list("-0123456789"))


def read_netplan(text):
    loader = NetplanLoader(text)
    try:
        return loader.get_single_data()
    except UNREADABLE:
        raise yaml.MarkedYAMLError(problem="a value that cannot be read") from None
    finally:
        loader.dispose()


def yaml_fault(error):
    """What YAML takes exception to, and where: not the line, nor a word of it, which may be a wireless key."""
    said = getattr(error, "problem", None) or "a character that YAML has not"
    mark = getattr(error, "problem_mark", None)
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""

    def quoted(found):  # what was read; single characters may stay, and YAML's own '<block end>' and '\\t'
        return found[0] if len(found[2]) == 1 or found[2][0] in "<\\" else "…"

    return re.sub(r"(['\"])(.+?)\1", quoted, said) + place


WORDS = (str, int, float)  # which bool is, too
FORMS = {
    "match": (dict, "mapping"),
    "addresses": (list, "list"),
    "interfaces": (list, "list"),
    "link": (WORDS, "word"),
    "set-name": (WORDS, "word"),
}


def form_fault(definition):
    """(key, form): what netplan wants of a definition in vain, of the parts that are read here; None where nothing.

    key: "" for the definition itself. What is left empty counts as not there.
    """
    if not isinstance(definition, dict):
        return "", "mapping"
    for key, (kind, form) in FORMS.items():
        value = definition.get(key)
        if value is not None and not isinstance(value, kind):
            return key, form
    members = definition.get("interfaces") or []
    return None if all(isinstance(one, WORDS) for one in members) else ("interfaces", "list of words")


def bare(kind, definition):
    """What netplan wants of a definition to which others refer, if it is to say nothing else."""
    return {key: definition[key] for key in ("id", "link") if kind == "vlans" and key in definition}


def network_of(text):
    """{kind: {name: definition}} of a netplan file, of those that are some; {} where it is none."""
    try:
        network = read_netplan(text)["network"]
        return {
            kind: {name: one for name, one in network[kind].items() if not form_fault(one)}
            for kind in KINDS
            if network.get(kind)
        }
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        return {}


def read_by_netplan(files):
    """Those of its files that netplan reads: of several of one name, the one in /run, or else in /etc."""
    named = {os.path.basename(path): path for path in sorted(files, key=netplan_rank)}
    return {path: file for path, file in files.items() if named[os.path.basename(path)] == path}


def netplan_rank(path):
    """The later of two files of one name is that which netplan reads."""
    return path.startswith("/run/"), path.startswith("/etc/"), path.startswith("/lib/")


def narrowed(text, original):
    """Whether `text` is what the role network has left of a netplan file: definitions less, or just their names.

    An earlier version wrote `yes` and `off` anew as true and false.
    """
    return any(narrowed_by(load, text, original) for load in (read_netplan, yaml.safe_load))


def narrowed_by(load, text, original):
    try:
        now, before = load(text), load(original)
    except (yaml.YAMLError, *UNREADABLE):
        return False
    if (
        not isinstance(now, dict)
        or not isinstance(before, dict)
        or text != yaml.safe_dump(now, sort_keys=False)
    ):
        return False
    rest, whole = now.pop("network", None) or {}, before.pop("network", None) or {}
    if now != before or rest == whole or not isinstance(rest, dict) or not isinstance(whole, dict):
        return False
    for kind in KINDS:
        fewer, all_ = rest.pop(kind, None) or {}, whole.pop(kind, None) or {}
        if not isinstance(fewer, dict) or not isinstance(all_, dict):
            return False
        for name, one in fewer.items():
            if name not in all_ or one not in (all_[name], bare(kind, all_[name] or {})):
                return False
    return rest == whole


def is_a_packages(path, text, files):
    """Whether `text`, in /etc, is what the role network has left of a package's netplan file of that name."""
    return any(narrowed(text, files[other]["text"]) for other in beneath(path, files))


def beneath(path, files):
    """The packages' files that one in /etc hides from netplan."""
    same = [other for other in files if os.path.basename(other) == os.path.basename(path)]
    return [other for other in same if other.startswith(("/usr/", "/lib/"))]


def netplan_after(files, changes, kept=None):
    """{name: text} of all netplan files as they will be. kept: as `files`, those that may move there."""
    texts = {path: file["text"] for path, file in files.items()}
    for change in changes:
        text = texts.pop(change["path"], None)
        if "content" in change:
            texts[change["path"]] = change["content"]
        elif "move_to" in change:
            texts[change["move_to"]] = (
                (kept or {}).get(change["path"], {}).get("text", "") if text is None else text
            )
    return {
        os.path.basename(path): texts[path]
        for path in sorted(texts, key=netplan_rank)
        if os.path.basename(os.path.dirname(path)) == "netplan" and path.endswith(".yaml")
    }


def made_by(network):
    """The names of the devices that a netplan file makes."""
    return {name for kind in MADE for name in network.get(kind, {})}


def parts(text):
    """[(section, [(key, value)])] of a file as systemd-networkd and NetworkManager have them, in its order."""
    found = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            found.append((line[1:-1], []))
        elif "=" in line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found = found or [("", [])]
            found[-1][1].append((key.strip(), value.strip()))
    return found


def settings(text):
    """[(section, key, value)] of such a file."""
    return [(section, key, value) for section, pairs in parts(text) for key, value in pairs]


def keyed(text):
    """{(section, key): value} of such a file, of a key that stands twice the last."""
    return {(section, key): value for section, key, value in settings(text)}


def profile_for(said, links):
    """The names of the interfaces that a profile of NetworkManager is for; `said`: {(section, key): value}."""
    if name := said.get(("connection", "interface-name")):
        return [name]
    if mac := next((value.lower() for (_, key), value in said.items() if key == "mac-address"), None):
        return [link["name"] for link in links if link["mac"] == mac]
    kind = PROFILE_KINDS.get(said.get(("connection", "type")))
    by_hand = said.get(("connection", "autoconnect")) in ("false", "0", "no")
    gives_way = said.get(("connection", "autoconnect-priority"), "0").startswith("-")  # netplan's have 0
    if kind is None or by_hand or gives_way:
        return []
    denied = [
        mac.strip().lower()
        for (_, key), value in said.items()
        if key in ("mac-address-blacklist", "mac-address-denylist")
        for mac in value.split(";")
    ]
    return [
        link["name"]
        for link in links
        if ("wlan" if link["kind"] == "wlan" else link["link_type"]) == kind
        and link["mac"] not in denied
        and all(
            fits_elements(said.get(("match", key), ""), word)
            for key, word in (
                ("interface-name", link["name"]),
                ("driver", link["driver"] or ""),
                ("path", link["properties"].get("ID_PATH", "")),
            )
        )
    ]


def fits_elements(value, word):
    """Whether a word fits a list under a profile's [match] (nm-settings(5)): all that begin with & or !, and one of the
    others.
    """
    optional = []
    for element in value.split(";"):
        pattern = element.strip().lstrip("|&")
        fits = fnmatch.fnmatchcase(word, pattern.removeprefix("!")) is not pattern.startswith("!")
        if not pattern:
            continue
        if not element.strip().startswith(("&", "!")):
            optional.append(fits)
        elif not fits:
            return False
    return not optional or any(optional)
