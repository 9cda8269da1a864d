"""`python -m bench.site`: what site.yml takes, first and second run, on so many hosts, beside a bare shell script.

The script installs the very packages that site.yml brought, and the same Python environment, on hosts as fresh, on all
of them at once, by the lab's own way in, which is quicker than SSH. It checks nothing and configures nothing. As root.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from bench.measure import markdown
from lab.lab import Lab, Options, obstacles

ROOT = Path(__file__).resolve().parent.parent
RECAP = re.compile(r"^(node\d+)\s+: ok=(\d+)\s+changed=(\d+)", re.M)
SELECTED = ("dpkg-query", "--show", "--showformat=${Package}\n")
LOCKS = ("requirements/trainer.txt", "requirements/torch.txt")
SCRIPT = """
set -e
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --yes --no-install-recommends {packages}
python3 -m venv /opt/bare
/opt/bare/bin/pip install --quiet --no-deps --require-hashes -r /root/trainer.txt
/opt/bare/bin/pip install --quiet -r /root/torch.txt
"""


def site(lab: Lab) -> tuple[float, int, int]:
    """Run site.yml: (seconds, tasks that ran on a host, changes of all hosts)."""
    program = Path(sys.executable).with_name("ansible-playbook")
    begin = time.monotonic()
    done = subprocess.run(
        [str(program), "-i", str(lab.inventory), "site.yml"],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_STDOUT_CALLBACK": "default"},  # for its recap
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - begin
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr)
    found = RECAP.findall(done.stdout)
    return seconds, max(int(ok) for _, ok, _ in found), sum(int(changed) for _, _, changed in found)


def packages(lab: Lab) -> set[str]:
    return set(lab.exec("node1", *SELECTED).split())


def script(lab: Lab, names: set[str]) -> float:
    """Install packages and environment by a shell on all hosts at once; returns the seconds."""
    text = SCRIPT.format(packages=" ".join(sorted(names)))
    for host in lab.hosts:
        for lock in LOCKS:
            put = f"cat > /root/{Path(lock).name}"
            subprocess.run(
                lab.host(host).enter("sh", "-c", put), input=(ROOT / lock).read_bytes(), check=True
            )
    begin = time.monotonic()
    shells = [
        subprocess.Popen(
            lab.host(host).enter("bash", "-c", text), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for host in lab.hosts
    ]
    said = [shell.communicate()[0].decode(errors="replace") for shell in shells]
    for shell, one in zip(shells, said, strict=True):
        if shell.returncode:
            sys.exit(one[-3000:])
    return time.monotonic() - begin


def measure(count: int) -> list[tuple]:
    """The rows of so many hosts."""
    lab = Lab("bench-site")
    name = f"{count} host{'s' * (count > 1)}"

    def row(what, seconds, tasks="", changed=""):
        return name, what, str(tasks), str(changed), f"{seconds:.0f}", f"{seconds / count:.1f}"

    try:
        lab.up(Options(name=lab.name, hosts=count), replace=True)
        before = packages(lab)
        first = site(lab)
        brought = packages(lab) - before
        second = site(lab)
        if second[2]:
            sys.exit(f"the second run changed {second[2]} things; expected none")
        lab.up(Options(name=lab.name, hosts=count), replace=True)
        bare = script(lab, brought)
    finally:
        lab.down()
    return [
        row("site.yml, first run", *first),
        row("site.yml, second run", *second),
        row(f"the script, {len(brought)} packages", bare),
        (name, "first run / script", "", "", f"{first[0] / bare:.2f}", ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.site", description=__doc__.split(": ", 1)[1])
    parser.add_argument("hosts", metavar="HOSTS", nargs="*", type=int, help="1 to 32; default: 3 and 16")
    options = parser.parse_args()
    if reasons := obstacles():
        sys.exit(f"no lab on this machine: {'; '.join(reasons)}")
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before\n"
    )
    rows = [row for count in options.hosts or (3, 16) for row in measure(count)]
    print(markdown(("hosts", "what", "tasks a host", "changed", "seconds", "seconds a host"), rows))


if __name__ == "__main__":
    main()
