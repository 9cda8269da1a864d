"""Run small playbooks against a lab of a test module's own."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from processes import kill_all

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lab.lab import Lab, LabError, Options  # noqa: E402 - the checkout's root is on the path only now

# For tests that come before the role firewall.
NFTABLES = (
    "command -v nft >/dev/null || { apt-get -qq update; apt-get -qq install -y nftables; } >/dev/null 2>&1"
)
# Another time daemon's package, without the daemon.
RIVAL = """
mkdir -p /tmp/openntpd/DEBIAN; cd /tmp
printf '%s\\n' 'Package: openntpd' 'Version: 9' 'Architecture: all' 'Maintainer: x <x@x>' 'Description: x' \\
  > openntpd/DEBIAN/control
dpkg-deb --build openntpd >/dev/null; dpkg --install openntpd.deb
"""
RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.M)


def changed_tasks(text):
    """How many tasks changed something, by host, as a playbook's last lines say."""
    return {found[1]: int(found[3]) for found in RECAP.finditer(text)}


@dataclass
class Play:
    """What a playbook run said and did. `changed` and `failed` are by host."""

    rc: int
    text: str
    seconds: float

    @property
    def changed(self):
        return changed_tasks(self.text)

    @property
    def words(self):
        """The text with all white space made one, to look for sentences in."""
        return " ".join(self.text.replace("\\n", " ").split())


class Plays:
    """A lab, and playbooks written to `directory` and run against it. root: the checkout whose own ones are meant."""

    def __init__(self, lab, directory, root=ROOT):
        self.lab, self.directory, self.root = lab, directory, root

    def command(self, tasks, host="cluster", variables=None, *arguments, fatal=False):
        """The command line that runs `tasks` on `host` with `variables` (of that play alone, below the inventory's).

        `fatal`: the first host's fault ends the play for all, as in site.yml. `tasks` may be a tag of site.yml instead:
        then that runs, with `variables` after -e.
        """
        program = Path(sys.executable).with_name("ansible-playbook")
        if isinstance(tasks, str):
            words = ["site.yml", "--tags", tasks, "-l", host, "-e", json.dumps(variables or {})]
            return [str(program), "-i", str(self.lab.inventory), *words, *arguments]
        play = {"hosts": host, "gather_facts": False, "vars": variables or {}, "tasks": tasks}
        play["any_errors_fatal"] = fatal
        book = self.directory / f"play-{len(list(self.directory.iterdir()))}.yml"
        book.write_text(yaml.safe_dump([play], sort_keys=False))
        return [str(program), "-i", str(self.lab.inventory), str(book), *arguments]

    def environment(self):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        # What a user sees is tested in tests/playbooks; here Ansible's own lines are read (RECAP).
        settings = {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_STDOUT_CALLBACK": "default"}
        return {**kept, "ANSIBLE_CONFIG": str(self.root / "ansible.cfg"), **settings}

    def book(self, playbook, *arguments, seconds=900, **extra):
        """Run one of the checkout's playbooks, with `extra` after -e; returns what subprocess.run does."""
        program = Path(sys.executable).with_name("ansible-playbook")
        words = [word for key, value in extra.items() for word in ("-e", f"{key}={value}")]
        return self._done(
            [str(program), "-i", str(self.lab.inventory), playbook, *words, *arguments], seconds
        )

    def site_twice(self, *arguments):
        """site.yml, by which every host of the lab changes, and again, by which none does; what the second changed."""
        for second in (False, True):
            done = self.book("site.yml", *arguments)
            assert done.returncode == 0, done.stdout + done.stderr
            changed = changed_tasks(done.stdout)
            assert {host: bool(changed[host]) for host in self.lab.hosts} == dict.fromkeys(
                self.lab.hosts, not second
            )
        return changed

    def _done(self, command, seconds):
        return subprocess.run(
            command,
            cwd=self.root,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def site(self, variables, *arguments):
        """The whole of site.yml, with `variables` after -e."""
        words = ["site.yml", "-e", json.dumps(variables), *arguments]
        program = Path(sys.executable).with_name("ansible-playbook")
        return self.finish([str(program), "-i", str(self.lab.inventory), *words])

    def run(self, tasks, host="cluster", variables=None, *arguments, fatal=False):
        return self.finish(self.command(tasks, host, variables, *arguments, fatal=fatal))

    def finish(self, command, seconds=None):
        """Runs a command line of `command` to its end, within `seconds`.

        Virtual machines may be emulated: what takes a minute on others takes ten there.
        """
        seconds = seconds or (2400 if self.lab.options.vms else 400)
        started = time.monotonic()
        done = self._done(command, seconds)
        return Play(done.returncode, done.stdout + done.stderr, time.monotonic() - started)

    def role(self, name, host="cluster", variables=None, *arguments):
        return self.run([include(name)], host, variables, *arguments)

    def kill_when(self, condition, tasks, host, variables=None):
        """Start a playbook and kill -9 all of it as soon as `condition()` is true."""
        process = subprocess.Popen(
            self.command(tasks, host, variables),
            cwd=self.root,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_for(condition, 120)
            assert process.poll() is None, "the playbook ended before it could be killed"
        finally:
            kill_all(process)

    def answers(self, host, address=None):
        """Whether `host`, at `address` (default: the inventory's), lets its user in anew and gives it root."""
        program = Path(sys.executable).with_name("ansible")
        target = ["-e", f"ansible_host={address}"] if address else []
        done = subprocess.run(
            [str(program), "-i", str(self.lab.inventory), host, "-b", "-T", "20", "-m", "ping", *target],
            cwd=self.root,
            env={**self.environment(), "ANSIBLE_SSH_ARGS": "-o ControlMaster=no -o ControlPath=none"},
            capture_output=True,
            text=True,
        )
        print(done.stdout, done.stderr)  # pytest shows it where the test fails
        return done.returncode == 0

    def sh(self, host, script):
        return self.lab.exec(host, "sh", "-ec", script)


def include(role):
    return {"name": f"Role {role}", "ansible.builtin.include_role": {"name": role}}


def wait_for(condition, seconds):
    """Until `condition()`; returns how long it took."""
    started = time.monotonic()
    while time.monotonic() < started + seconds:
        with contextlib.suppress(LabError, subprocess.SubprocessError):
            if condition():
                return time.monotonic() - started
        time.sleep(0.5)
    raise AssertionError(f"it did not happen within {seconds} s")


@contextlib.contextmanager
def playground(name, hosts, directory):
    """The Plays of a fresh lab; the lab goes with the block."""
    lab = Lab(name)
    try:
        lab.up(Options(name=name, hosts=hosts), replace=True)
        yield Plays(lab, directory)
    finally:
        lab.down()
