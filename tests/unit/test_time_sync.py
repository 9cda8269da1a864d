"""One time for all hosts: what chrony is told, who keeps the time, and what is said where it is not kept."""

import time
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment, FileSystemLoader

from plugins.filter.time_sync import time_sync_apart, time_sync_fault, time_sync_off, time_sync_unserved

ROLE = Path(__file__).resolve().parents[2] / "roles/time_sync"


def told(host, servers=()):
    """The lines of chrony's file on `host`, without comments."""
    jinja = Environment(loader=FileSystemLoader(ROLE / "templates"), trim_blocks=True)
    text = jinja.get_template("trainyard.conf.j2").render(
        inventory_hostname=host,
        _time_sync_head="node1",
        _time_sync_head_address="10.0.0.1",
        cluster_network="10.0.0.0/24",
        time_sync_servers=servers,
    )
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_the_head_serves_and_the_others_prefer_it():
    assert told("node1") == ["allow 10.0.0.0/24", "local stratum 10 orphan"]
    assert told("node2") == ["server 10.0.0.1 iburst prefer"]


def test_servers_of_ones_own_come_after_the_head():
    assert told("node1", ["a", "b"])[:2] == ["server a iburst prefer", "server b iburst prefer"]
    assert told("node2", ["a"]) == ["server 10.0.0.1 iburst prefer", "server a iburst"]


@pytest.fixture(scope="module")
def survey(load_module):
    return load_module("time_sync_survey")


class Host:
    """Answers the survey's commands: `packages` as dpkg has them, the unit's state and start (s after boot)."""

    def __init__(self, packages=(), state="inactive", started=0.0):
        self.packages, self.state, self.started = packages, state, started

    def __call__(self, command):
        if command[0] == "dpkg-query":
            return 1, "".join(f"{name} {state}\n" for name, state in self.packages), "no packages found"
        return 0, f"ActiveState={self.state}\nActiveEnterTimestampMonotonic={self.started * 1e6:.0f}\n", ""


@pytest.mark.parametrize(
    ("packages", "rival", "chrony", "timesyncd"),
    [
        ([], "", False, False),
        ([("systemd-timesyncd", "installed")], "", False, True),
        ([("chrony", "installed"), ("systemd-timesyncd", "config-files")], "", True, False),
        ([("ntp", "installed"), ("ntpsec", "installed")], "ntpsec", False, False),  # Debian's ntp is ntpsec
        ([("openntpd", "installed")], "openntpd", False, False),
        # No package of Debian's conflicts with it: beside chrony, which of the two runs would be decided at each boot.
        ([("chrony", "installed"), ("ntpd-rs", "installed")], "ntpd-rs", True, False),
        ([("ntpsec", "config-files"), ("chrony", "installed")], "", True, False),
    ],
)
def test_who_keeps_the_time(survey, tmp_path, packages, rival, chrony, timesyncd):
    found = survey.survey(Host(packages), str(tmp_path / "none"))
    assert (found["rival"], found["chrony"], found["timesyncd"]) == (rival, chrony, timesyncd)


@pytest.mark.parametrize(
    ("state", "started", "written", "stale"),
    [
        ("active", 100, 90, False),
        ("active", 100, 110, True),  # killed before the restart
        ("inactive", 100, 110, False),
        ("active", 100, 10**9, False),  # written while the clock was wrong
    ],
)
def test_a_daemon_older_than_its_file_is_found(survey, tmp_path, monkeypatch, state, started, written, stale):
    booted = 1_700_000_000
    conf = tmp_path / "trainyard.conf"
    conf.write_text("")
    survey.os.utime(conf, (booted + written, booted + written))
    monkeypatch.setattr(time, "time", lambda: booted + 200.0)
    monkeypatch.setattr(time, "monotonic", lambda: 200.0)
    found = survey.survey(Host(state=state, started=started), str(conf))
    assert (found["running"], found["stale"]) == (state == "active", stale)


def shown(state, command):
    """A unit as `systemctl show` has it; `command` is "" for one that has none, as a timer."""
    path = f"/usr/sbin/{command.split()[0]}" if command else ""
    told = f"ExecStart={{ path={path} ; argv[]=/usr/sbin/{command} ; ignore_errors=no ; start_time=[n/a] }}\n"
    return f"{told if command else ''}ActiveState={state}\n"


@pytest.mark.parametrize(
    ("units", "rival"),
    [
        ([("active", "phc2sys -w -s eth0")], "linuxptp"),
        ([("inactive", "phc2sys -w -s eth0"), ("active", "phc2sys -a -r")], "linuxptp"),
        ([("inactive", "phc2sys -w -s eth0")], ""),
        ([], ""),
        ([("active", "phc2sys -s CLOCK_REALTIME -c eth0 -O 37")], ""),  # a host that serves PTP itself
        ([("active", "phc2sys -ws CLOCK_REALTIME -c eth0")], ""),
        ([("active", "phc2sys -s eth0 -c CLOCK_REALTIME -O -37")], "linuxptp"),
        ([("active", "phc2sys -a -r -E ntpshm -M 2")], ""),  # chrony is told, and sets the clock
        ([("active", "phc2sys -a -r --clock_servo=refclock_sock")], ""),
        ([("active", "phc2sys -a -r -E linreg")], "linuxptp"),
        ([("active", "phc2sys -s CLOCK_REALTIME -c eth0"), ("active", "phc2sys -w -s eth1")], "linuxptp"),
        ([("active", "timemaster -f /etc/linuxptp/timemaster.conf")], "linuxptp"),  # by a chronyd of its own
        ([("active", "")], ""),  # a timer
    ],
)
def test_a_network_cards_clock_that_is_the_systems_leaves_no_room_for_chrony(survey, tmp_path, units, rival):
    """phc2sys of linuxptp sets it, several times a second; ntpd's package is told before."""

    def run_command(command, packages=()):
        if "phc2sys*" in command:
            assert command == [
                "systemctl",
                "show",
                "--property=ActiveState,ExecStart",
                "phc2sys*",
                "timemaster*",
            ]
            return 0, "\n".join(shown(*unit) for unit in units), ""
        return Host(packages)(command)

    assert survey.survey(run_command, str(tmp_path / "none"))["rival"] == rival
    packages = [("ntpsec", "installed")]
    found = survey.survey(lambda command: run_command(command, packages), str(tmp_path / "none"))
    assert found["rival"] == "ntpsec"


def test_whom_systemd_timesyncd_was_told_to_ask(survey, tmp_path):
    etc, lib = tmp_path / "etc", tmp_path / "lib"
    folders = (str(etc), str(lib))

    def asks(**files):
        for name, text in files.items():
            place = {"main": etc / "timesyncd.conf", "vendor": lib / "timesyncd.conf"}.get(name)
            place = place or (lib if name.startswith("lib_") else etc) / f"timesyncd.conf.d/{name[4:]}.conf"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return survey.timesyncd_asks(folders)

    assert survey.timesyncd_asks(folders) == []
    assert asks(main="[Time]\n#NTP=\n#FallbackNTP=ntp.ubuntu.com\nFallbackNTP=x\n") == []
    assert asks(vendor="[Time]\nNTP=vendor\n") == []  # the owner's file is read in its stead
    assert asks(main="[Time]\n NTP = a.example b.example\n") == ["a.example", "b.example"]
    assert asks(lib_20="[Time]\nNTP=c a.example\n") == ["a.example", "b.example", "c"]
    assert asks(etc_20="[Time]\nNTP=d \\\n  e\n") == ["a.example", "b.example", "d", "e"]
    assert asks(etc_30="[Time]\nNTP=\nNTP=f\n") == ["f"]


OURS = ["allow 10.0.0.0/24", "local stratum 10 orphan"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [  # as chronyd 4.3 answered, or did not, in a network of its own
        (OURS, ""),
        ([*OURS, "port 0"], "port 0"),
        (["port 1123", *OURS], "port 1123"),
        ([*OURS, "port 123"], ""),
        ([*OURS, "bindaddress 127.0.0.1"], "bindaddress 127.0.0.1"),
        ([*OURS, "bindaddress 10.0.0.1"], ""),
        ([*OURS, "bindaddress ::1"], ""),
        ([*OURS, "binddevice lo"], "binddevice lo"),
        ([*OURS, "deny all"], "deny all"),
        (["deny all", *OURS], ""),
        (["deny all"], ""),  # ours is not there yet
        ([*OURS, "deny"], ""),
        ([*OURS, "deny 10.0.0.0/8"], ""),
        ([*OURS, "deny 10.0.0.2"], "deny 10.0.0.2"),
        ([*OURS, "deny 10.0.0.9"], ""),
        ([*OURS, "deny 10.0.0.0/25", "allow all"], ""),
        # Of settings the last one counts, of networks the smallest, of equal ones again the last.
        (["port 0", *OURS, "port 123"], ""),
        (["port 123", *OURS, "port 0"], "port 0"),
        (["bindaddress 127.0.0.1", *OURS, "bindaddress 0.0.0.0"], ""),
        (["bindaddress 0.0.0.0", *OURS, "bindaddress 127.0.0.1"], "bindaddress 127.0.0.1"),
        (["bindaddress 127.0.0.1", *OURS, "bindaddress ::1"], "bindaddress 127.0.0.1"),  # one of each kind
        (["binddevice lo", *OURS, "binddevice eth0"], ""),
        (["binddevice eth0", *OURS, "binddevice lo"], "binddevice lo"),
        (["deny 10.0.0.2", "allow 10.0.0.2", *OURS], ""),
        ([*OURS, "allow 10.0.0.2", "deny 10.0.0.2"], "deny 10.0.0.2"),
        (["deny 10.0.0.0/25", "allow 10.0.0.2", *OURS], ""),
        ([*OURS, "allow 10.0.0.0/25", "deny 10.0.0.2/31"], "deny 10.0.0.2/31"),
        ([*OURS, "deny 10.0.0.0/24"], "deny 10.0.0.0/24"),
        (["deny 10.0.0.0/24", *OURS], ""),
        (["deny 10.0.0.0/24"], ""),  # ours is not there yet
        (["deny 10.0.0.2"], "deny 10.0.0.2"),
        ([*OURS, "deny all", "allow 10.0.0.0/24"], ""),
        ([*OURS, "deny all 10.0.0.0/8"], "deny all 10.0.0.0/8"),
        (["deny 10.0.0.2", *OURS, "allow all 10.0.0.0/24"], ""),
        # Equal are those whose prefixes are of the same four.
        ([*OURS, "deny 10.0.0.0/22"], "deny 10.0.0.0/22"),
        ([*OURS, "deny 10.0.0.0/20"], ""),
        ([*OURS, "allow 10.0.0.2", "deny 10.0.0.2/31"], "deny 10.0.0.2/31"),
        ([*OURS, "deny 10.0.0.2", "allow 10.0.0.0/29"], ""),
        ([*OURS, "deny 10.0.0.2", "allow 10.0.0.0/28"], "deny 10.0.0.2"),
        (["DENY 10.0.0.2", *OURS], "DENY 10.0.0.2"),
        (
            [*OURS, "deny 10.1", "denyall", "local stratum 8", "acquisitionport 123", "", "server 10.0.0.9"],
            "",
        ),
    ],
)
def test_a_head_that_would_not_answer_is_known_by_what_its_chrony_says(lines, found):
    assert time_sync_unserved(lines, "10.0.0.1", "10.0.0.0/24", ["10.0.0.2", "a-name"]) == found
    assert time_sync_unserved(lines, "10.0.0.1", "10.0.0.0/24", []) == ""  # nobody follows it


@pytest.mark.parametrize("host", ["node1", "node2"])
def test_and_is_refused_before_anything_is_changed_and_before_chrony_is_restarted(host):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    precheck, chrony = (
        yaml.safe_load((ROLE / f"tasks/{name}.yml").read_text()) for name in ("precheck", "chrony")
    )
    (before,) = [task for task in precheck if "_time_sync_silent" in str(task)]
    (after,) = [task for task in chrony if "_time_sync_silent" in str(task)]
    assert before["vars"]["__time_sync_says"] == "{{ __time_sync.survey.says }}"
    restart = next(task for task in chrony if "enabled" in str(task))
    assert chrony.index(after) < chrony.index(restart)
    role = yaml.safe_load((ROLE / "vars/main.yml").read_text())
    names = ("_time_sync_unserved", "_time_sync_silent", "_time_sync_head", "_time_sync_head_address")
    hostvars = {f"node{n}": {"cluster_address": f"10.0.0.{n}"} for n in (1, 2)}
    values = {name: trust_as_template(role[name]) for name in names}
    values |= {"groups": {"cluster": ["node1", "node2"], "head": ["node1"]}, "hostvars": hostvars}
    values |= {
        "inventory_hostname": host,
        "cluster_network": "10.0.0.0/24",
        "__time_sync_says": [*OURS, "port 0"],
    }
    templar = Templar(loader=DataLoader(), variables=values)
    found = templar.template(trust_as_template(role["_time_sync_unserved"]))
    assert found == ("port 0" if host == "node1" else "")
    if found:
        assert 'found "port 0" in chrony' in templar.template(trust_as_template(role["_time_sync_silent"]))


@pytest.mark.parametrize(
    ("known", "refused"),
    [
        ({}, []),
        ({"_time_sync_unserved": "port 0"}, ["silent"]),
        ({"_time_sync_unserved": "port 0", "time_sync_manage": False}, []),
        ({"_time_sync_unserved": "port 0", "_time_sync_container": True}, []),
        ({"rival": "ntpsec"}, ["rival"]),
        ({"rival": "ntpsec", "time_sync_manage": False}, []),
        ({"rival": "ntpsec", "_time_sync_container": True}, []),
        ({"reads": False}, ["unread"]),
        ({"reads": False, "chrony": False}, []),  # the package brings its own
        ({"reads": False, "time_sync_manage": False}, []),
        ({"reads": False, "_time_sync_container": True}, []),
    ],
)
def test_what_the_precheck_refuses(known, refused):
    look, *tasks = yaml.safe_load((ROLE / "tasks/precheck.yml").read_text())
    told = {"rival": "", "chrony": True, "reads": True, **known}
    given = {"time_sync_manage": True, "_time_sync_container": False, "_time_sync_unserved": "", **known}
    given[look["register"]] = {"survey": told}
    environment = Environment()
    fails = {
        task["ansible.builtin.fail"]["msg"]: all(
            environment.compile_expression(str(when))(**given) for when in task["when"]
        )
        for task in tasks
    }
    words = {
        "silent": "{{ _time_sync_silent }}",
        "unread": "{{ _time_sync_unread }}",
        "rival": "survey.rival }} keeps",
    }
    assert len(fails) == 3
    assert [name for text, fail in fails.items() if fail for name in words if words[name] in text] == refused


WAITED = "try: 1, refid: 00000000, correction: 0.000000000, skew: 0.000\ntry: 2, refid: {}, correction: {}, skew: 0.1\n"


@pytest.mark.parametrize(
    ("rc", "words", "said"),
    [
        (0, WAITED.format("0A4D000B", "0.000007663"), ""),
        (1, WAITED.format("00000000", "0.000000000"), "no time source answers it yet"),
        (1, WAITED.format("7F7F0101", "0.000000000"), "follow its own clock"),
        (1, WAITED.format("0A4D000B", "41.250000000"), "is 41.2 s off"),
        (1, "506 Cannot talk to daemon\n", "506 Cannot talk to daemon"),
    ],
)
def test_what_is_said_of_a_clock(rc, words, said):
    fault = time_sync_fault(rc, words)
    assert said in fault and bool(fault) is bool(said)


@pytest.mark.parametrize("refid", ["00000000", "7F7F0101"])
def test_a_follower_that_nobody_answers_is_told_of_its_head(refid):
    fault = time_sync_fault(1, WAITED.format(refid, "0.000000000"), "10.0.0.1")
    assert "no time source answers it, the head (10.0.0.1) neither" in fault and "port 123" in fault
    assert time_sync_fault(0, WAITED.format("0A000001", "0.000000000"), "10.0.0.1") == ""


@pytest.mark.parametrize(
    ("line", "apart"),
    [
        ("^*,10.0.0.1,10,6,377,12,-0.000021,-0.000019,0.0003", 0.0),  # fields as they are not
        ("^,*,10.0.0.1,10,6,377,12,-7.000000,-7.000000,0.0003", 0.0),  # it is followed, and has been set
        ("^,x,10.0.0.1,10,6,17,12,-321.750000,-321.400000,0.25", 321.5),
        ("^,-,10.0.0.1,10,6,17,12,0.250000,0.250000,0.5", 0.0),  # of a link that takes its time
        ("^,?,10.0.0.1,0,6,0,4294967295,7.000000,7.000000,0.0003", 0.0),  # has not answered of late
        ("506 Cannot talk to daemon", 0.0),
    ],
)
def test_a_follower_of_somebody_elses_time_is_found(line, apart):
    """The head has its own clock alone, minutes off; the others reach a pool."""
    sources = (
        f"^,*,192.0.2.1,2,6,377,12,0.000012,0.000011,0.0003\n{line}\n^,-,10.0.0.10,3,6,377,1,9.0,9.0,0.1\n"
    )
    assert time_sync_apart(sources, "10.0.0.1") == apart
    fault = time_sync_fault(0, WAITED.format("C0000201", "0.000000000"), "10.0.0.1", apart)
    assert bool(fault) is (apart > 0.1) and (not fault or "321.5 s from that of the head (10.0.0.1)" in fault)


def test_how_far_a_clock_is_off():
    assert time_sync_off(WAITED.format("0A4D000B", "41.250000000")) == 41.25
    assert time_sync_off("506 Cannot talk to daemon\n") == 0


def test_who_kept_the_time_is_noted_before_apt_removes_it():
    """Else a run that ends in between forgets it, and reset.yml does not bring it back."""
    tasks = yaml.safe_load((ROLE / "tasks/chrony.yml").read_text())
    place, note, install = (
        next(number for number, task in enumerate(tasks) if words in str(task))
        for words in ("_time_sync_before | dirname", "systemd-timesyncd\\n", "packages_names")
    )
    assert place < note < install
    for number in (place, note):
        assert "__time_sync.survey.timesyncd" in tasks[number]["when"]


def test_the_file_is_one_that_chrony_reads_and_the_note_is_not():
    values = yaml.safe_load((ROLE / "vars/main.yml").read_text())
    assert values["_time_sync_file"].endswith(".conf")
    assert not values["_time_sync_before"].endswith(".conf")


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("pool ntp.example.org iburst\nconfdir /etc/chrony/conf.d\n", True),
        ("ConfDir /run/chrony-dhcp /etc/chrony/conf.d/\n", True),
        ("include /etc/chrony/conf.d/*.conf\n", True),
        ("include /etc/ours.conf\n", False),
        ("include /etc/chrony/c*.conf\n", False),  # a star stands for no slash
        ("include conf.d/*.conf\n", False),
        ("include .\n", False),
        ("include FOLDER/yes*.conf\n", True),
        ("include FOLDER/no.conf FOLDER/over.conf\n", True),
        ("include FOLDER/no.conf\n", False),
        ("include FOLDER/itself.conf\n", False),
        ("# confdir /etc/chrony/conf.d\nserver 192.0.2.1\n", False),
        ("confdir /etc/chrony.d\n", False),
        (None, True),
    ],
)
def test_a_chrony_conf_of_somebodys_own_is_asked_whether_it_reads_ours(survey, tmp_path, text, reads):
    main = tmp_path / "chrony.conf"
    included = {
        "yes1.conf": "confdir /etc/chrony/conf.d\n",
        "no.conf": "server 192.0.2.1\n",
        "over.conf": f"include {tmp_path}/yes1.conf\n",
        "itself.conf": f"include {tmp_path}/itself.conf\n",
    }
    for name, content in included.items():
        (tmp_path / name).write_text(content)
    if text is not None:
        main.write_text(text.replace("FOLDER", str(tmp_path)))
    assert survey.reads("/etc/chrony/conf.d/trainyard.conf", str(main)) is reads
