"""Takes the pictures of docs/pictures, all from one real run: `make demo`, recorded at a terminal of its own.

    scripts/take_pictures.py [--again]

demo.svg is that terminal, played back twelve times as fast; report-*.png show the run's report in a headless Chromium.
dashboard.png is taken by tests/lab/test_dashboard.py, of a lab in which a run goes on (TRAINYARD_PICTURES=1).
docs/pictures/made-from.json keeps what each was made from, by SHA-256: tests/unit/test_pictures.py fails where that has
changed since. With --again no run is made: the last recording (runs/demo.cast) and its run's report are drawn anew.
"""

import argparse
import ast
import fcntl
import hashlib
import json
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests/playbooks"), str(ROOT / "plugins/module_utils")]

import browser as browsers  # noqa: E402
import run_page  # noqa: E402

PICTURES = ROOT / "docs/pictures"
COLUMNS, ROWS = 112, 30

REPORT = ("plugins/module_utils/run_page.html", "plugins/module_utils/run_page.py")
# Picture -> what it shows: a file, or one function of it, without what stands around it.
MADE_FROM = {
    "demo.svg": (
        "scripts/show_run.py",
        "plugins/action/run_follow.py:progress_line",
        "plugins/action/run_follow.py:host_line",
        "plugins/action/run_report.py:report",
        "plugins/module_utils/live_plan.py",
        "plugins/callback/live.py",
        "plugins/module_utils/live_frame.py",
    ),
    "report-light.png": REPORT,
    "report-dark.png": REPORT,
    "report-phone.png": REPORT,
    "dashboard.png": ("roles/monitoring/files/page.html",),
}


def digest(source):
    """SHA-256 of FILE, or of what FILE:FUNCTION does (its comments and layout left out)."""
    path, _, name = source.partition(":")
    text = (ROOT / path).read_text(encoding="utf-8")
    if name:
        (found,) = (
            node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name
        )
        text = ast.unparse(found)
    return hashlib.sha256(text.encode()).hexdigest()


def sources(name):
    """What a picture is made from, as it is now: {source: SHA-256}."""
    return {source: digest(source) for source in MADE_FROM[name]}


# ---- the recording, in the format of asciinema: a header, then [seconds, "o", text] a line ----


def record(command, path):
    """Run `command` on a terminal of its own, and write down what it prints, and when; SystemExit if it fails."""
    began = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.environ |= {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
        os.execvp(command[0], command)
    with path.open("w", encoding="utf-8") as cast:
        header = {"version": 2, "width": COLUMNS, "height": ROWS, "made_from": sources("demo.svg")}
        print(json.dumps(header), file=cast)
        rest = b""
        while True:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # how a terminal says that nobody holds its other end
                break
            text, rest = whole(rest + data)
            print(
                json.dumps([round(time.monotonic() - began, 3), "o", text], ensure_ascii=False),
                file=cast,
                flush=True,
            )
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}; {path} has what it said")


def whole(data):
    """(text, rest): what of `data` is whole in UTF-8, and the bytes of a character that is cut."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if error.end < len(data) or len(data) - error.start > 3:
            raise
        return data[: error.start].decode(), data[error.start :]


# ---- what the terminal showed ----

WRITTEN = re.compile(r"(\x1b\[([\d;]*)([A-Za-z])|\r\n|\r|[^\r\x1b]+)")


def rows_of(cast):
    """What a terminal showed in the end, and when: its rows, each a list of (seconds, runs), its width and height.

    cast: the lines of a recording. A row that was written over has a version for each time; runs are (colour, text)
    pairs, colour being the terminal's number for it, 1 for bold and 0 for none. Knows what Ansible and this checkout
    use: colours, the start of the row, erasing it and all below, rows further up. Raises ValueError at any other
    control sequence.
    """
    header, *events = map(json.loads, cast.splitlines())
    width, rows, at, colour, runs = header["width"], [[]], 0, 0, []

    def note(seconds):
        if (runs or rows[at]) and (not rows[at] or rows[at][-1][1] != runs):
            rows[at].append((seconds, [*runs]))

    for seconds, _, text in events:
        for piece, numbers, letter in WRITTEN.findall(text):
            if letter == "m":
                colour = max(map(int, (numbers or "0").split(";")))
            elif letter == "A" and not runs and int(numbers) <= at:
                at -= int(numbers)
            elif letter == "J" and not numbers:
                for row in rows[at + 1 :]:
                    row.append((seconds, []))
                note(seconds)
            elif letter:
                if letter != "K" or numbers:
                    raise ValueError(f"at {seconds} s: a control sequence that is not known, {piece!r}")
            elif piece == "\r":
                runs = []
            elif piece == "\r\n":
                rows[at].append((seconds, runs))
                at, runs = at + 1, []
                if at == len(rows):
                    rows.append([])
            else:
                while piece:
                    room = width - sum(len(words) for _, words in runs)
                    if not room:  # the terminal goes on in the next row
                        rows[at].append((seconds, runs))
                        at, runs, room = at + 1, [], width
                        if at == len(rows):
                            rows.append([])
                    runs.append((colour, piece[:room]))
                    piece = piece[room:]
        if runs:
            note(seconds)
    while rows and not (rows[-1] and rows[-1][-1][1]):
        rows.pop()
    return rows, width, header["height"]


# ---- the terminal as a moving picture ----

SPEED = 12  # the recording is played so many times as fast, or more where that would take longer than LONGEST
LONGEST = 25.0  # seconds; a busy machine's recording is to be neither longer nor larger
FRAME = 0.2  # seconds; what changed within is shown at once
REST = 8.0  # seconds for which the end stands still
ROW, COLUMN, EDGE = 18, 8.4, 12  # pixels; the last between text and border
COLOURS = {
    1: "#fff",
    31: "#ff7b72",
    32: "#7ee787",
    33: "#e3b341",
    34: "#79c0ff",
    35: "#d2a8ff",
    36: "#56d4dd",
}


def text_of(runs, y):
    """A row as SVG; each run of one colour at its own column, whatever font is at hand."""
    column, pieces = 0, []
    for colour, words in runs:
        blank = len(words) - len(words.lstrip())
        if words.strip():
            kind = f' class="c{colour}"' if colour in COLOURS else ""
            x, length = EDGE + (column + blank) * COLUMN, len(words.strip()) * COLUMN
            pieces.append(
                f'<text x="{x:g}" y="{y}" textLength="{length:g}"{kind}>{escape(words.strip())}</text>'
            )
        column += len(words)
    return "".join(pieces)


def moving(cast):
    """A recording as SVG that plays by itself, again and again; to who wants no motion it shows the end alone.

    All rows stand below each other, and are lifted past the window as they came; of one that was written over, each
    version has its time.
    """
    rows, columns, height = rows_of(cast)
    speed = max(SPEED, max(at for row in rows for at, _ in row) / LONGEST)
    versions = [sorted({round(at / speed / FRAME): runs for at, runs in row}.items()) for row in rows]
    whole = versions[-1][-1][0] + round(REST / FRAME)

    def percent(frame):
        return f"{100 * frame / whole:.4g}%"

    def lifted(count):
        return f"{{transform:translateY({min(0, height - count) * ROW}px)}}"

    pieces, moves = [], []
    for number, row in enumerate(versions):
        for place, (frame, runs) in enumerate(row):
            text = text_of(runs, number * ROW + 13)
            # What is further down comes into sight with its time; on the first screen a row has to wait for it.
            if text and (len(row) > 1 or (frame and number < height)):
                name, until = f"v{len(moves) // 2}", row[place + 1][0] if place + 1 < len(row) else whole
                shown = f"0%{{opacity:0}}{percent(frame)}{{opacity:1}}" if frame else "0%{opacity:1}"
                moves.append(f"@keyframes {name}{{{shown}{percent(until)}{{opacity:{int(until == whole)}}}}}")
                moves.append(f"#{name}{{animation:{name} {whole * FRAME:g}s step-end infinite}}")
                hidden = "" if until == whole else ' opacity="0"'  # where nothing moves
                text = f'<g id="{name}"{hidden}>{text}</g>'
            pieces.append(text)
    counts = {row[0][0]: number for number, row in enumerate(versions, 1)}
    lifts = "".join(f"{percent(frame)}{lifted(count)}" for frame, count in sorted(counts.items()))
    fills = "".join(f".c{number}{{fill:{fill}}}" for number, fill in COLOURS.items())
    wide, high = columns * COLUMN + 2 * EDGE, height * ROW + 2 * EDGE
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}">
<style>
text{{font:14px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;fill:#c9d1d9}}
.c1{{font-weight:bold}}{fills}
#all{lifted(len(rows))}
@media(prefers-reduced-motion:no-preference){{
#all{{animation:lift {whole * FRAME:g}s step-end infinite}}
@keyframes lift{{{lifts}}}
{chr(10).join(moves)}
}}
</style>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<svg y="{EDGE}" width="100%" height="{height * ROW}"><g id="all">
{chr(10).join(filter(None, pieces))}
</g></svg>
</svg>
"""


# ---- the report in a browser ----


def report(run):
    """The pictures of a run's report: on a desktop, light and dark, and on a phone."""
    page = run_page.write(run)
    with tempfile.TemporaryDirectory() as profile, browsers.Browser(profile) as browser:
        browser.ask("Emulation.setScrollbarsHidden", hidden=True)
        for name, width, height, dark in (
            ("light", 1200, 800, False),
            ("dark", 1200, 800, True),
            ("phone", 390, 780, False),
        ):
            browser.open(page.resolve().as_uri(), width=width, height=height, dark=dark)
            browser.picture(PICTURES / f"report-{name}.png", whole=False)


def write_down(made_from):
    """Add {picture: {source: SHA-256}} to what the pictures were made from."""
    path = PICTURES / "made-from.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **made_from}, indent=1) + "\n")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="draw the last recording anew, without a run")
    if not browsers.program():
        raise SystemExit("no chromium here: apt install chromium")
    cast = ROOT / "runs/demo.cast"
    if not parser.parse_args(arguments).again:
        cast.parent.mkdir(exist_ok=True)
        record(["make", "--no-print-directory", "demo"], cast)
    elif not cast.is_file():
        raise SystemExit(f"there is no {cast.relative_to(ROOT)}: without --again one is recorded")
    recording = cast.read_text(encoding="utf-8").replace(str(ROOT), "~/trainyard")
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "demo.svg").write_text(moving(recording), encoding="utf-8")
    report(ROOT / "runs" / re.search(r"(demo-[\d-]+)\S*: loss by step", recording)[1])
    # A recording that is drawn anew is as old as before.
    made_from = {name: sources(name) for name in MADE_FROM if name.startswith("report-")}
    made_from["demo.svg"] = json.loads(recording.splitlines()[0])["made_from"]
    write_down(made_from)
    for name in made_from:
        print(f"{(PICTURES / name).stat().st_size:>9,} bytes  docs/pictures/{name}")


if __name__ == "__main__":
    main()
