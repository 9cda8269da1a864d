"""The pictures in docs are of what there is today, small, and used; what a terminal showed is drawn as it was."""

import functools
import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("take_pictures", ROOT / "scripts/take_pictures.py")
take_pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(take_pictures)

SVG = "{http://www.w3.org/2000/svg}"
MADE_FROM = json.loads((take_pictures.PICTURES / "made-from.json").read_text())


@pytest.mark.parametrize("name", take_pictures.MADE_FROM)
def test_a_picture_shows_what_there_is_today(name):
    today = take_pictures.sources(name)
    changed = [source for source in today if MADE_FROM.get(name, {}).get(source) != today[source]]
    by_test = "as root, TRAINYARD_FULL=1 TRAINYARD_PICTURES=1 .venv/bin/pytest tests/lab/test_dashboard.py"
    cure = by_test if name == "dashboard.png" else "make pictures"
    assert not changed, f"docs/pictures/{name} is older than {', '.join(changed)}. Take it anew: {cure}"


def test_they_are_small_and_all_are_shown_with_words_for_who_cannot_see():
    files = {path.name: path.stat().st_size for path in take_pictures.PICTURES.iterdir()}
    files.pop("made-from.json")
    assert set(files) == set(take_pictures.MADE_FROM)
    assert max(files.values()) < 150_000 and sum(files.values()) < 600_000
    shown = {}
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for words, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / target).resolve().parent == take_pictures.PICTURES
            shown[Path(target).name] = words
    assert set(shown) == set(files)
    assert all(len(words.split()) > 4 for words in shown.values())


def test_a_function_of_a_file_stands_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(take_pictures, "ROOT", tmp_path)
    digests = []
    for text in (
        "def a():\n    return 1\n",
        "# new\ndef a():\n    return (1)\nb = 2\n",
        "def a():\n    return 2\n",
    ):
        (tmp_path / "one.py").write_text(text)
        digests.append(take_pictures.digest("one.py:a"))
    assert digests[0] == digests[1] != digests[2]


# ---- the demo's words ----


def rows_shown():
    """The rows of demo.svg, each once for each time that it was written."""
    return [one.text for one in ElementTree.parse(take_pictures.PICTURES / "demo.svg").iter(f"{SVG}text")]


@functools.cache
def names(pattern):
    """The names of plays and tasks in files of the checkout; what a template of one comes to may be anything."""
    found = re.findall(r"^ *- name: (.+)$", "\n".join(path.read_text() for path in ROOT.glob(pattern)), re.M)
    parts = [re.split(r"\{\{.*?\}\}", yaml.safe_load(name)) for name in found]
    return [re.compile(".+".join(map(re.escape, each))) for each in parts if any(each)]


def untrue(rows):
    """The rows that tell of a play or of a role's task which is not there by that name."""
    for row in rows:
        # A play's; a task's that changed something, or is at work: its end may be cut, and how far it is comes after.
        told = re.match(r"== (.+)|(?:changed +[\w ]+: |\w+ +)(\w+) : (.+?)(?:(…)|  |$)", row)
        if told:
            play, role, task, cut = told.groups()
            there = (
                names("playbooks/site.yml") + names("playbooks/train.yml")
                if play
                else names(f"roles/{role}/*/*.yml")
            )
            shown = play or task
            if cut:  # any name that begins so
                there = [one for one in there if one.pattern.startswith(re.escape(shown.rstrip()))]
            if not there or not (cut or any(one.fullmatch(shown) for one in there)):
                yield row


def test_the_demo_shows_plays_and_tasks_by_their_names_of_today():
    rows = rows_shown()
    assert sum(row.startswith("== ") for row in rows) >= 3
    assert sum(row.startswith("changed ") for row in rows) >= 5
    assert not list(untrue(rows)), "Take the pictures anew: make pictures"


def test_another_name_is_found():
    good = [
        "== The run",
        "changed  node1 node2: trainer : Start the processes",
        "node1  python_env : Have the locked environment (the fir…  [#---] 41 %, taking networkx  18 s",
        "node2  starting: loading the model",
    ]
    bad = [
        "== The runs",
        "changed  node1 node2: trainer : Start a process",
        "changed  node1: python_env : Start the processes",
        "node1  python_env : Have a locked environment (the fir…  trying it out  18 s",
    ]
    assert list(untrue(good + bad)) == bad


def test_the_demo_was_typed_as_the_makefile_has_it():
    """A row that is full goes on in the next, so blanks are left out."""
    (demo,) = re.findall(r"^DEMO := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    shown = "".join(rows_shown()).replace(" ", "")
    assert re.findall(r"inventory/localtrain\.yml(.+?)-erun=demo-", shown) == [demo.replace(" ", "")]


# ---- the terminal ----


def cast(*events, width=10, height=3):
    return "\n".join(map(json.dumps, [{"version": 2, "width": width, "height": height}, *events]))


def test_a_terminal_is_recorded(tmp_path):
    path = tmp_path / "x.cast"
    said = "stty size; printf '\\033[32m%s\\033[0m\\n' 'größer ⠑'; sleep 2; tput cols"
    take_pictures.record(["bash", "-c", said], path)
    rows, width, height = take_pictures.rows_of(path.read_text())
    texts = ["".join(words for _, words in row[-1][1]) for row in rows]
    assert texts == [f"{height} {width}", "größer ⠑", str(width)]
    assert rows[1][-1][1] == [(32, "größer ⠑")]
    assert rows[2][0][0] - rows[1][0][0] > 0.25  # of the two seconds, on a busy machine, too
    with pytest.raises(SystemExit, match="false ended with status 1"):
        take_pictures.record(["false"], path)


def test_rows_are_written_over_and_go_on_where_the_width_ends():
    rows, *_ = take_pictures.rows_of(
        cast(
            [0, "o", "one\r\nstep 1"],
            [1, "o", "\r\x1b[Kstep 2"],
            [2, "o", "\r\x1b[Kdone\r\nabcdefghijkl\r\n"],
        )
    )
    assert rows == [
        [(0, [(0, "one")])],
        [(0, [(0, "step 1")]), (1, [(0, "step 2")]), (2, [(0, "done")])],
        [(2, [(0, "abcdefghij")])],
        [(2, [(0, "kl")])],
    ]
    with pytest.raises(ValueError, match="a control sequence that is not known"):
        take_pictures.rows_of(cast([0, "o", "\x1b[2J"]))


def test_rows_further_up_are_written_over_and_those_below_erased():
    rows, *_ = take_pictures.rows_of(
        cast(
            [0, "o", "a\x1b[K\r\nb\x1b[K\r\nc\x1b[K\x1b[J"],
            [1, "o", "\r\x1b[2A\x1b[Jdone\r\n"],
            [2, "o", "d"],
        )
    )
    assert rows == [
        [(0, [(0, "a")]), (1, []), (1, [(0, "done")])],
        [(0, [(0, "b")]), (1, []), (2, [(0, "d")])],
    ]
    with pytest.raises(ValueError, match="a control sequence that is not known"):
        take_pictures.rows_of(cast([0, "o", "one\r\n\x1b[2A"]))  # above the screen


def test_the_moving_picture_has_each_row_and_each_version_at_its_time():
    events = [0, "o", "a <b>\r\n1"], [12, "o", "\r2"], [24, "o", "\r3\r\n\x1b[32m  ok\r\nx\r\ny\r\n"]
    text = take_pictures.moving(cast(*events))
    found = ElementTree.fromstring(text).iter(f"{SVG}text")
    assert " ".join(one.text for one in found) == "a <b> 1 2 3 ok x y"
    assert 'class="c32">ok' in text and f'x="{12 + 2 * 8.4:g}"' in text
    # Two seconds of it, and eight of rest: the second version from a tenth to a fifth of the whole.
    assert "@keyframes v1{0%{opacity:0}10%{opacity:1}20%{opacity:0}}" in text
    assert "20%{transform:translateY(-36px)}}" in text and "#all{transform:translateY(-36px)}" in text
    assert text.count('opacity="0"') == 2  # where nothing moves, the last version stands
    # A row of the first screen is not there before its time.
    (ok,) = re.findall(r'<g id="(v\d+)"><text [^>]*class="c32">ok', text)
    assert f"@keyframes {ok}{{0%{{opacity:0}}20%{{opacity:1}}100%{{opacity:1}}}}" in text
