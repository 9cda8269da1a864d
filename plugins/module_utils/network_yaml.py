"""Netplan's files as netplan itself reads them: what is in each, which of them count, and what the role left of one.

Pure functions on {path: {text, …}}: nothing here reads a file or talks to a host.
"""

import os
import re

import yaml
from network_entries import KINDS
from network_files import MADE

# What YAML says of `!!int word`.
UNREADABLE = (AttributeError, KeyError, RecursionError, TypeError, ValueError)
WORDS = (str, int, float)  # which bool is, too
FORMS = {
    "match": (dict, "mapping"),
    "addresses": (list, "list"),
    "interfaces": (list, "list"),
    "link": (WORDS, "word"),
    "set-name": (WORDS, "word"),
}


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


def made_by(network):
    """The names of the devices that a netplan file makes."""
    return {name for kind in MADE for name in network.get(kind, {})}


def bare(kind, definition):
    """What netplan wants of a definition to which others refer, if it is to say nothing else."""
    return {key: definition[key] for key in ("id", "link") if kind == "vlans" and key in definition}


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


def read_netplan(text):
    loader = NetplanLoader(text)
    try:
        return loader.get_single_data()
    except UNREADABLE:
        raise yaml.MarkedYAMLError(problem="a value that cannot be read") from None
    finally:
        loader.dispose()


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


def yaml_fault(error):
    """What YAML takes exception to, and where: not the line, nor a word of it, which may be a wireless key."""
    said = getattr(error, "problem", None) or "a character that YAML has not"
    mark = getattr(error, "problem_mark", None)
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""

    def quoted(found):  # what was read; single characters may stay, and YAML's own '<block end>' and '\\t'
        return found[0] if len(found[2]) == 1 or found[2][0] in "<\\" else "…"

    return re.sub(r"(['\"])(.+?)\1", quoted, said) + place


# Which of its files netplan reads, and will read.


def read_by_netplan(files):
    """Those of its files that netplan reads: of several of one name, the one in /run, or else in /etc."""
    named = {os.path.basename(path): path for path in sorted(files, key=netplan_rank)}
    return {path: file for path, file in files.items() if named[os.path.basename(path)] == path}


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


def netplan_rank(path):
    """The later of two files of one name is that which netplan reads."""
    return path.startswith("/run/"), path.startswith("/etc/"), path.startswith("/lib/")


# What the role network has left of a file.


def is_a_packages(path, text, files):
    """Whether `text`, in /etc, is what the role network has left of a package's netplan file of that name."""
    return any(narrowed(text, files[other]["text"]) for other in beneath(path, files))


def beneath(path, files):
    """The packages' files that one in /etc hides from netplan."""
    same = [other for other in files if os.path.basename(other) == os.path.basename(path)]
    return [other for other in same if other.startswith(("/usr/", "/lib/"))]


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
