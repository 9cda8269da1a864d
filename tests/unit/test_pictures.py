"""The pictures in docs are of what there is today, small, and used; what a terminal showed is drawn as it was."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("take_pictures", ROOT / "scripts/take_pictures.py")
take_pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(take_pictures)

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
    found = ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")
    assert " ".join(one.text for one in found) == "a <b> 1 2 3 ok x y"
    assert 'class="c32">ok' in text and f'x="{12 + 2 * 8.4:g}"' in text
    # Two seconds of it, and eight of rest: the second version from a tenth to a fifth of the whole.
    assert "@keyframes v1{0%{opacity:0}10%{opacity:1}20%{opacity:0}}" in text
    assert "20%{transform:translateY(-36px)}}" in text and "#all{transform:translateY(-36px)}" in text
    assert text.count('opacity="0"') == 2  # where nothing moves, the last version stands
    # A row of the first screen is not there before its time.
    (ok,) = re.findall(r'<g id="(v\d+)"><text [^>]*class="c32">ok', text)
    assert f"@keyframes {ok}{{0%{{opacity:0}}20%{{opacity:1}}100%{{opacity:1}}}}" in text
