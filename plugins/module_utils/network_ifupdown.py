"""Which stanzas in ifupdown's files speak for our interfaces, and the changes by which these give way.

Given {path: {text, mode}} and `ours`, whose keys are the interfaces' present names: lines are commented out, and kept.
"""

import fnmatch
import re

from network_claims import check_made, check_taken_in
from network_entries import Refused
from network_files import IFUPDOWN_MARK, IFUPDOWN_RECORD

STANZA = re.compile(
    r"\s*(auto|allow-\S+|iface|mapping|rename|source|source-directory|no-auto-down|no-scripts)\b"
)
BRINGS_UP = re.compile(r"\s*(auto|allow-\S+)(\s|$)")
# ifupdown's words for what a device takes in. What a VLAN lies on (vlan-raw-device) keeps its addresses, and is not.
TAKEN_IN = {"bridge-ports": "bridges", "bond-slaves": "bonds", "slaves": "bonds"}
# By which ifupdown runs a command.
HOOKS = ("pre-up", "up", "post-up", "pre-down", "down", "post-down")
# What images bring: Vagrant's boxes wait for dhclient (chef/bento, debian/scripts/networking.sh), and cloud-init sets
# default routes (cloudinit/net/eni.py, _render_route), to which check_default_route sees.
HARMLESS = re.compile(r"sleep [\d.]+|route (add|del) (-A inet6 )?default gw [\da-fA-F.:]+( \|\| true)?")


def ifupdown_claims(files, ours, links, made):
    """Changes that comment the stanzas of `ours` out, and the names that ifupdown has configured.

    The stanzas taken out, by earlier runs too, are kept together in one file, from which ifdown can take the interfaces
    down. made: as `check_made` has it.
    """
    changes, texts, record, names = [], [], [], []
    for path, file in files.items():
        check_options(path, file["text"], ours, links, made)
        lines, taken_out, configured = commented_out(path, file["text"], ours, links)
        record += taken_out
        names += [name for name in dict.fromkeys(configured) if name not in names]
        text = "\n".join(lines) + "\n" * (not file["text"] or file["text"].endswith("\n"))
        texts.append(text)
        if lines != file["text"].splitlines():
            check_not_in_run(path, file["text"], ours)
            changes.append({"path": path, "content": text, "mode": file["mode"]})
    if names:
        record = [*inherited(record, texts), *record]
        changes.append({"path": IFUPDOWN_RECORD, "content": "\n".join(record) + "\n", "mode": "0600"})
    return changes, names


def check_options(path, text, ours, links, made):
    """Refuse stanzas that make one of `ours`, take it in, or run commands for it, which nothing would any more."""
    # What a name alone makes, as eth0.7.
    vlans = [link["name"] for link in links if link["kind"] == "vlan"]
    for device, option, words, number in ifupdown_options(text):
        kind = "vlans" if option == "iface" and device in vlans else TAKEN_IN.get(option)
        if kind and device in ours:
            check_made(path, device, kind, made)
        if option in TAKEN_IN and device not in ours:
            check_taken_in(path, device, TAKEN_IN[option], taken_in(words, ours))
        if option == "bond-master" and device in ours and words and words[0] not in (*made, "none"):
            check_taken_in(path, words[0], "bonds", [device])
        if option in HOOKS and card_of(device) in ours:
            check_hook(path, number, device, option, words)


def check_hook(path, number, device, hook, command):
    """Refuse a command that ifupdown runs for one of ours; only its program is named, for there may be a key in it."""
    if HARMLESS.fullmatch(" ".join(command)):
        return
    program = command[0] if command and re.fullmatch(r"[\w./-]+", command[0]) else "a command"
    raise Refused(
        f"{path}, line {number}: {hook} of {device} runs {program}, which nothing would any more, since "
        f"network_interfaces has {device}: put it into a systemd unit of its own, or a route under routes: of the "
        "entry, an open port into firewall_allow; then take the line out there"
    )


def commented_out(path, text, ours, links):
    """(lines, record, names): a file's lines without the stanzas of `ours`, these stanzas, and whose they are.

    record: what earlier runs took out of the file, too.
    """
    lines, record, names, drop = [], [], [], False
    for number, line in ifupdown_lines(text):
        words = ifupdown_words(line)
        earlier = line.removeprefix(IFUPDOWN_MARK)
        if earlier != line and not BRINGS_UP.match(earlier):
            record.append(earlier)
        if STANZA.match(line):
            keyword = words[0]
            brings_up = BRINGS_UP.match(line)
            if brings_up or keyword in ("mapping", "iface"):
                check_named_otherwise(path, number, words, ours, links)
            drop = keyword == "iface" and len(words) > 1 and card_of(words[1]) in ours
            if drop:
                names.append(words[1])
            elif brings_up and any(card_of(word) in ours for word in words[1:]):
                theirs = [word for word in words[1:] if card_of(word) not in ours]
                lines.append(IFUPDOWN_MARK + (line if "\n" not in line else " ".join(words)))
                lines += [" ".join([keyword, *theirs])] if theirs else []
                continue
        parts = line.split("\n")
        if drop and words and not words[0].startswith("#"):
            record += parts
            parts = [f"{IFUPDOWN_MARK}{part}" for part in parts]
        lines += parts
    return lines, record, names


def check_named_otherwise(path, number, words, ours, links):
    """Refuse lines by which ifupdown sets up one of `ours` as another stanza says, or another card as one of these."""
    if words[0] == "iface":
        parent = words[words.index("inherits") + 1] if "inherits" in words[:-1] else ""
        if card_of(parent) in ours and card_of(words[1]) not in ours:
            raise Refused(
                f"{path}, line {number}: {words[1]} inherits from {parent}, whose lines give way to "
                "network_interfaces, so that ifupdown could read none of its files any more: write those lines out for "
                f"{words[1]}"
            )
        return
    macs = {link["mac"]: link["name"] for link in links if link["name"] in ours}
    for word in words[1:]:
        pattern, _, other = word.partition("=")
        kind, slash, value = pattern.partition("/")
        if words[0] == "mapping":
            hit = [name for name in ours if fnmatch.fnmatchcase(name, pattern)]
        elif not other or other in ours:
            hit = []
        elif slash:
            value = value.partition("/")[0]
            by_mac = macs.get(value.lower()) if kind == "mac" else None
            hit = [name for name in ours if name == by_mac or (not kind and fnmatch.fnmatchcase(name, value))]
        else:
            hit = [name for name in ours if name == pattern]
        if hit:
            raise Refused(
                f"{path}, line {number}: by '{words[0]} {word}' ifupdown sets {', '.join(hit)} up as a stanza of "
                f"another name says, and would go on to: call that stanza `iface {hit[0]}`, and write `auto {hit[0]}` "
                f"for this line; or leave {', '.join(hit)} out of network_interfaces"
            )


def check_not_in_run(path, text, ours):
    """Refuse to change a file in /run, of which the next boot would have it all again."""
    if path.startswith("/run/"):
        words = {card_of(word) for word in text.split()}
        cards = ", ".join(name for name in ours if name in words)
        raise Refused(
            f"{path} configures {cards}: what wrote it does so again at the next boot, mostly "
            "/etc/network/cloud-ifupdown-helper, and ifupdown reads it then: write its lines into "
            "/etc/network/interfaces, for the one there by which it is read (source, source-directory); or "
            f"leave {cards} out of network_interfaces"
        )


def inherited(record, texts):
    """The stanzas that those in `record` inherit from, those first that others of them need.

    texts: ifupdown's files as they will be. Without these it reads none of the record.
    """
    stanzas, wanted = {}, []
    for line in [line for text in texts for _, line in ifupdown_lines(text)]:
        words = ifupdown_words(line)
        if STANZA.match(line):
            stanza = stanzas.setdefault(words[1], []) if words[0] == "iface" and len(words) > 1 else []
        if words and stanzas and not words[0].startswith("#"):
            stanza.append(line)
    look = [record]
    while look:
        names = re.findall(r"(?m)^\s*iface .*\binherits\s+(\S+)", "\n".join(look.pop()))
        for name in names:
            if name in stanzas and name not in wanted:
                wanted.insert(0, name)
                look.append(stanzas[name])
    return [line for name in wanted for line in stanzas[name]]


# What its files say.


def ifupdown_options(text):
    """[(device, option, words, line)] of ifupdown's stanzas; the first of each is `iface`.

    line: its number; options may have _ for -.
    """
    found, device = [], None
    for number, line in ifupdown_lines(text):
        words = ifupdown_words(line)
        if STANZA.match(line):
            device = words[1] if words[0] == "iface" and len(words) > 1 else None
        if device and words and not words[0].startswith("#"):
            found.append((device, words[0].replace("_", "-"), words[1:], number))
    return found


def ifupdown_lines(text):
    """[(number, line)] of a file of ifupdown's: one that ends in a backslash goes on in the next, unless a comment."""
    found, open_ = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if open_:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line}")
        else:
            found.append((number, line))
        open_ = line.endswith("\\") and (open_ or not line.lstrip().startswith("#"))
    return found


def ifupdown_words(line):
    return line.replace("\\\n", " ").split()


def card_of(device):
    """The card that a stanza of ifupdown's is for: eth0:1 is but a label of some of eth0's addresses."""
    return device.partition(":")[0]


def taken_in(words, names):
    """Those of `names` that a bridge or a bond of ifupdown's takes in: by name, all, those that fit an expression
    (bridge-utils-interfaces(5)), or a range of them, as ifupdown2 has it.
    """
    found, way = set(), None
    for word in words:
        if word in ("regex", "noregex", "glob"):
            way = word
        elif word == "all":
            found |= set(names)
        elif way == "regex":
            found |= {name for name in names if fits_expression(word, name)}
        elif way == "glob" and (span := re.fullmatch(r"(.*?)(\d+)-(\d+)", word)):
            found |= {f"{span[1]}{number}" for number in range(int(span[2]), min(int(span[3]), 4095) + 1)}
        else:
            found.add(word)
    return [name for name in names if name in found]


def fits_expression(pattern, name):
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:  # of another kind than ours: perhaps
        return True
