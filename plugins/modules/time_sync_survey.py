#!/usr/bin/python
"""Who keeps a host's time: the input of the role time_sync."""

from __future__ import annotations

DOCUMENTATION = r"""
module: time_sync_survey
short_description: Read which time daemon a host has
description: Reads only.
options:
  conf:
    description: The file of chrony's that the role writes.
    type: path
    required: true
author: [Trainyard]
"""

EXAMPLES = r"""
- name: See who keeps the time
  time_sync_survey:
    conf: /etc/chrony/conf.d/trainyard.conf
  register: __time_sync
"""

RETURN = r"""
survey:
  description: What was found.
  returned: always
  type: dict
  contains:
    container: {description: "Whether the clock is another machine's.", type: bool}
    rival: {description: Another time daemon's package that somebody has chosen or runs; empty without one., type: str}
    chrony: {description: Whether chrony is installed., type: bool}
    timesyncd: {description: Whether systemd-timesyncd is installed., type: bool}
    running: {description: Whether chronyd runs., type: bool}
    reads: {description: "Whether chrony's own file, if there is one, reads that which the role writes.", type: bool}
    says: {description: "Chrony's settings as they are now, line by line, where it is installed.", type: list}
    timesyncd_asks: {description: "The servers that somebody has told systemd-timesyncd to ask.", type: list}
    stale: {description: Whether chronyd runs since before the file was written., type: bool}
"""

import fnmatch
import glob
import os
import re

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import in_container, service, stale

OURS, DEFAULT = "chrony", "systemd-timesyncd"
# Of Debian and Ubuntu. For chrony apt removes each but ntpd-rs: of that, systemd stops one where the other starts.
RIVALS = ("ntpsec", "ntp", "openntpd", "ntpd-rs")
# Of linuxptp those set the system's clock by that of a network card, timemaster by a chronyd or ntpd that it starts
# itself; its ptp4l alone does not.
PTP, SETS_CLOCK = "linuxptp", ("phc2sys*", "timemaster*")
# So told, phc2sys does not: the card's clock has the system's, as where the host itself serves PTP, or chrony is told
# what the card's says, and sets the clock.
LEAVES_CLOCK = re.compile(
    r"\s-\w*s ?CLOCK_REALTIME\b|\s(?:-\w*E|--clock_servo)[ =]?(?:ntpshm|refclock_sock)\b"
)
TIMESYNCD = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")


def installed(run_command) -> set[str]:
    """The time daemons' packages that dpkg has installed."""
    form = "--showformat=${Package} ${db:Status-Status}\n"
    _, out, _ = run_command(["dpkg-query", "--show", form, OURS, DEFAULT, *RIVALS])
    return {line.split()[0] for line in out.splitlines() if line.endswith(" installed")}


def reads(conf: str, main: str = "/etc/chrony/chrony.conf") -> bool:
    """Whether chronyd comes to `conf` by the file that it begins with, as it does by the package's own.

    True without such a file, which the package then brings.
    """
    return not os.path.exists(main) or comes_to(conf, main)


def comes_to(conf: str, name: str, depth: int = 10) -> bool:
    """Whether one of chrony's files brings in `conf`, or one that it includes does, in so many steps."""
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            lines = [words for line in file if (words := line.split()) and words[0][0] not in "#!;%"]
    except OSError:
        return False
    return any(
        (word.lower() == "confdir" and os.path.dirname(conf) == os.path.normpath(place))
        or (word.lower() == "include" and alike(conf, place))
        or (
            word.lower() == "include"
            and depth
            and any(comes_to(conf, one, depth - 1) for one in glob.glob(place))
        )
        for word, *places in lines
        for place in places
    )


def timesyncd_asks(folders: tuple[str, ...] = TIMESYNCD) -> list[str]:
    """The servers of NTP= in timesyncd.conf and the files beside it, as systemd reads them; empty, it begins anew."""
    first = [f"{folder}/timesyncd.conf" for folder in folders]
    beside = {}
    for folder in reversed(folders):  # of one name, the first folder's counts
        beside |= {os.path.basename(name): name for name in glob.glob(f"{folder}/timesyncd.conf.d/*.conf")}
    servers: list[str] = []
    for name in [
        *[name for name in first if os.path.exists(name)][:1],
        *(beside[one] for one in sorted(beside)),
    ]:
        with open(name, encoding="utf-8", errors="replace") as file:
            text = file.read().replace("\\\n", " ")
        for value in re.findall(r"(?m)^[ \t]*NTP[ \t]*=(.*)$", text):
            servers = [*servers, *value.split()] if value.strip() else []
    return list(dict.fromkeys(servers))


def alike(path: str, pattern: str) -> bool:
    """Whether a path is one that a pattern of chrony's names, in which a star stands for no slash."""
    return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)


def sets_clock(run_command) -> bool:
    """Whether one of linuxptp's units runs and sets the system's clock."""
    _, out, _ = run_command(["systemctl", "show", "--property=ActiveState,ExecStart", *SETS_CLOCK])
    return any(
        "ActiveState=active" in unit.splitlines() and "argv[]=" in unit and not LEAVES_CLOCK.search(unit)
        for unit in out.split("\n\n")
    )


def survey(run_command, conf: str) -> dict:
    there, started = installed(run_command), service(run_command, "chrony.service")["started"]
    says = run_command(["/usr/sbin/chronyd", "-p"])[1] if OURS in there else ""
    return {
        "container": in_container(),
        "rival": next((name for name in RIVALS if name in there), PTP if sets_clock(run_command) else ""),
        "chrony": OURS in there,
        "timesyncd": DEFAULT in there,
        "running": started is not None,
        "reads": reads(conf),
        "says": says.splitlines(),
        "timesyncd_asks": timesyncd_asks(),
        "stale": stale(started, conf),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={"conf": {"type": "path", "required": True}}, supports_check_mode=True
    )
    module.exit_json(changed=False, survey=survey(module.run_command, module.params["conf"]))


if __name__ == "__main__":
    main()
