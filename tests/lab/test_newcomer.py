"""README's two sections of commands, typed in their order at a terminal of a fresh machine, for two fresh hosts.

The machine is a third host of the lab: a stock Debian with git, make and Python's venv, and a user who has never logged
in to the two others, which ask for a password. What each command took is printed.
"""

import re
import signal
import subprocess
import time

import pexpect
import pytest
from plays import ROOT
from typed import ANSIBLE, ELSEWHERE, SAYS

from lab.lab import Lab, Options

README = (ROOT / "README.md").read_text()
SECTIONS = ("Try it on one machine", "On your machines")
COMMAND = re.compile(r"(?:git|make|cp|\.|ansible-playbook) .+")
LONGEST = 1500  # seconds that a command may take


def commands():
    """What README says to type in SECTIONS, in its order."""
    found = []
    for section in SECTIONS:
        text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
        for line in text.splitlines():
            if line.startswith("    ") and COMMAND.match(line.strip()):
                typed, _, more = line.strip().partition("  ")
                found.append(typed)
                again = re.search(r"train\.yml .*$", more)
                found += [f"{ANSIBLE} {again[0]}"] if again else []
            elif not line.startswith("    "):
                spans = re.findall(r"`([^`]+)`", line)
                found += [one for one in spans if COMMAND.fullmatch(one) and one not in found]
    return [one for one in found if one not in ELSEWHERE]


def test_the_sections_commands_are_typed_in_their_order():
    """That all of README's are typed somewhere, tests/unit/test_documents.py says."""
    assert commands() == list(SAYS)


def with_addresses(text, lab):
    """The copied inventory with the addresses of the lab, and nothing else changed."""
    addresses = [lab.hosts[name].address for name in ("node1", "node2")]
    for theirs, ours in zip(
        ("192.168.1.0/24", "192.168.1.100", "192.168.1.101"),
        (str(lab.network.subnet), *addresses),
        strict=True,
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    return text


class Terminal:
    """A user's shell on a host. Passwords are typed where they are asked for, and new hosts' keys are trusted."""

    def __init__(self, lab, host, log):
        self.password, self.number = lab.password, 0
        program, *arguments = lab.host(host).enter("runuser", "-l", "ops")
        self.shell = pexpect.spawn(
            program,
            arguments,
            encoding="utf-8",
            dimensions=(40, 140),
            timeout=LONGEST,
            # A terminal's programs mind Ctrl-C, also where these tests run in the background of a shell.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.shell.logfile_read = log

    def type(self, line, says="", keys=""):
        """Seconds that `line` took; `says` has to come, and then `keys` are typed."""
        self.number += 1
        end, began, seen = rf"END{self.number}:(\d+):", time.monotonic(), not keys
        # What is typed comes back on the screen, too, and is not to be taken for its end.
        self.shell.sendline(f'{line}; echo EN"D{self.number}:$?:"')
        waiting = [
            end,
            "(?i)pass(word|phrase)[^\r\n]*: ?$",
            "Trust and pin them all[?]",
            *([says] if keys else []),
        ]
        text = ""
        while (which := self.shell.expect(waiting)) != 0:
            text += self.shell.before + self.shell.after
            if which < 3:
                self.shell.sendline((self.password, "yes")[which - 1])
            elif not seen:
                seen = True
                time.sleep(5)  # Ansible has its faults where a worker of its has just been made
                self.shell.send(keys)
                # A shell forgets the rest of a line whose program was interrupted.
                self.shell.sendline(f'echo EN"D{self.number}:$?:"')
        text += self.shell.before
        status = int(self.shell.match[1])
        assert seen and re.search(says, text), f"{line}: did not say {says}:\n{text[-4000:]}"
        # Interrupted: a program that says nothing of it, make, Ansible.
        assert status in ((0, 130, 2, 99) if keys else (0,)), f"{line}: status {status}:\n{text[-4000:]}"
        return time.monotonic() - began


@pytest.fixture
def lab(able):
    lab = Lab("newcomer")
    try:
        lab.up(Options(name="newcomer", hosts=3), replace=True)
        yield lab
    finally:
        lab.down()


def a_machine_of_ones_own(lab, host):
    """What README asks for, and a way to have the checkout from somewhere."""
    lab.exec(
        host, "sh", "-ec", "apt-get -qq update; apt-get -qq install -y git make python3-venv >/dev/null 2>&1"
    )
    bundle = subprocess.run(
        ["git", "bundle", "create", "-", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    subprocess.run(lab.host(host).enter("sh", "-ec", "cat > /srv/trainyard.bundle"), input=bundle, check=True)


def as_user(lab, host, script, text=""):
    """What the script prints, run in the user's home with `text` on its input."""
    command = lab.host(host).enter("runuser", "-l", "ops", "-c", script)
    return subprocess.run(command, input=text, text=True, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.full  # half an hour: two environments and two runs of the demo's model
@pytest.mark.timeout(5400)
def test_readme_alone(lab, tmp_path):
    mine = "node3"
    a_machine_of_ones_own(lab, mine)
    with (tmp_path / "terminal.txt").open("w") as log:
        terminal = Terminal(lab, mine, log)
        for line, says in SAYS.items():
            says, keys = says if isinstance(says, tuple) else (says, "")
            typed = line.replace("URL", "/srv/trainyard.bundle")
            if line.startswith(ANSIBLE):
                typed += " -k -K"  # as README says where passwords are asked for
            seconds = terminal.type(typed, says, keys)
            print(f"{seconds:6.0f} s  {line}", flush=True)
            if line.startswith("cp "):
                copied = "trainyard/inventory/home/hosts.yml"
                text = as_user(lab, mine, f"cat {copied}")
                as_user(lab, mine, f"cat > {copied}", with_addresses(text, lab))
            if line.endswith("preflight.yml"):
                for host in (
                    "node1",
                    "node2",
                ):  # slow machines: the run is still there when the next lines are typed
                    lab.set_cpus(host, 0.2)
            if line.endswith("stop.yml -e run=first"):
                for host in ("node1", "node2"):
                    lab.set_cpus(host, None)
    assert '"finished"' in as_user(lab, mine, "cat trainyard/runs/first/summary.json")
