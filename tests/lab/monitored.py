"""What Prometheus on node1 of a lab knows, and its alerts, which there may come at once."""

import json
import re
import urllib.parse
import urllib.request

from plays import ROOT

from lab.shell import LabError, inside_netns

RULES = ROOT / "roles/monitoring/files/rules.yml"
THERE = "/etc/trainyard-monitoring/rules.yml"
ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
# What a test cannot wait for: an average of five minutes or ten, a silence of fifteen, a third attempt.
SOONER = {
    r"for: \w+": "for: 5s",
    r"\[(5|10)m\]": "[1m]",
    r"> 900\b": "> 60",
    r"\[1h\]\)\) >= 3": "[1h])) >= 1",
}


def ask(lab, query):
    """Prometheus' answer: [({label: value}, value), …]."""
    return values(lab.exec("node1", "python3", "-c", ASK, address(query)))


def ask_beside(lab, query):
    """As `ask`, of a Prometheus that runs beside the hosts, in the lab's namespace."""
    try:
        with inside_netns(lab.network.netns), urllib.request.urlopen(address(query), timeout=10) as answer:
            return values(answer.read())
    except OSError as error:
        raise LabError(f"Prometheus does not answer: {error}") from None


def address(query):
    return "http://127.0.0.1:9090/api/v1/query?query=" + urllib.parse.quote(query)


def values(answer):
    return [(one["metric"], float(one["value"][1])) for one in json.loads(answer)["data"]["result"]]


def firing(lab, ask=ask):
    """{(alert, host)}; a run's has no host where it is all hosts' alike."""
    # One that fired when Prometheus was restarted is told for five minutes more, with its last time.
    query = 'ALERTS{alertstate="firing"} unless (time() - timestamp(ALERTS) > 45)'
    return {(one["alertname"], one.get("instance")) for one, _ in ask(lab, query)}


def sooner():
    """The rules as they are, but for how long it has to last: their text."""
    text = RULES.read_text()
    for long, short in SOONER.items():
        text, count = re.subn(long, short, text)
        assert count, long
    return text


def hasten(lab):
    """Have alerts fire within seconds of their cause."""
    put = f"cat > {THERE} <<'END'\n{sooner()}\nEND\npromtool check rules {THERE}\n"
    lab.exec("node1", "sh", "-ec", f"{put}systemctl kill --signal=HUP trainyard-prometheus")
