"""The rules of the house that no other tool checks: what a file may not name, and what must agree with what."""

import hashlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("controller", "trainer", "dev", "bench", "docs")


def committed():
    """The checkout's text files as git knows them: (name, text) pairs, new and not yet ignored ones included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if path.is_file():
            yield name, path.read_text(encoding="utf-8", errors="replace")


# What would tie the repository to one machine or one registry. The brackets keep this file from matching itself.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~-])/(?:hom[e]/(?!me/)\w|User[s]/\w|wor[k]/|opt/whe[e]ls|opt/pyp[i]"
    r"|roo[t]/\.(?:pyenv|cache|local|config))",
    "a package index": r"https?://(?!\S*\.example/)\S+/simpl[e]\b|\b(?:index-url|find-links)[ =]+\S*://",
    "a registry's host": r"\b(?:(?:pypi|pythonhosted|download\.pytorch|deb\.debian)\.or[g]|archive\.ubuntu\.co[m])",
    "a password or key": r"-----BEGIN [A-Z ]*PRIVATE KE[Y]|password: [\"']?\w{4,}$",
}  # fmt: skip


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what):
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in committed()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"{what} stands in:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a path of one machine", "cache: /hom" + "e/anna/.cache"),
        ("a path of one machine", "PIP_FIND_LINKS=/opt/whe" + "els"),
        ("a path of one machine", "PYTHON=/roo" + "t/.pyenv/shims/python"),
        ("a package index", "https://mirror.acme.org/simpl" + "e/"),
        ("a package index", "--extra-index-url https" + "://mirror.acme.org/cpu"),
        ("a registry's host", "see pypi.or" + "g"),
        ("a password or key", "-----BEGIN OPENSSH PRIVATE KE" + "Y-----"),
    ],
)
def test_the_patterns_find(what, line):
    assert re.search(FORBIDDEN[what], line)


# ---- locks ----


def name_of(requirement):
    """The normalised package name at the start of a requirement line."""
    return re.match(r"[A-Za-z0-9._-]+", requirement).group().lower().replace("_", "-").replace(".", "-")


def read_lock(name):
    """A lock's packages: name -> (pinned version with its marker, its hashes)."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ")
    packages = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            pinned = line.split("--hash")[0].strip()
            packages.setdefault(name_of(line), []).append((pinned, re.findall(r"--hash=(\S+)", line)))
    return packages


def read_in(name):
    """The packages that requirements/NAME.in asks for itself."""
    lines = (ROOT / "requirements" / f"{name}.in").read_text().splitlines()
    return {name_of(line) for line in lines if re.match(r"[A-Za-z0-9]", line)}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_is_pinned_and_hashed(lock):
    packages = read_lock(lock)
    assert read_in(lock) <= set(packages)
    for lines in packages.values():
        for pinned, hashes in lines:
            assert re.match(r"[A-Za-z0-9._-]+==[^ ;]+", pinned), f"{lock}.txt: not pinned: {pinned}"
            assert hashes, f"{lock}.txt: no hash: {pinned}"
            assert all(digest.startswith("sha256:") for digest in hashes)


def test_the_locks_agree():
    dev = read_lock("dev")
    for lock in ("controller", "trainer", "bench", "docs"):
        for name, lines in read_lock(lock).items():
            if lock in ("bench", "docs") and name not in dev:
                continue  # theirs alone: a peer, a generator, and what these need
            pins, expected = ({pinned.split(" ")[0] for pinned, _ in lines} for lines in (lines, dev[name]))
            assert pins == expected, f"{lock}.txt and dev.txt pin {name} differently"


def test_torch_has_one_version():
    (version,) = re.findall(r"^torch==(\S+)$", (ROOT / "requirements/torch.txt").read_text(), re.M)
    for name, text in committed():
        if name.startswith("tests/"):  # tests make up other versions
            continue
        for found in re.findall(r"\btorch(?:==|_version: *[\"']?)(\d[\w.+]*)", text):
            # A build for another CUDA is of the same version.
            assert found.partition("+")[0] == version, (
                f"{name} names torch {found}; requirements/torch.txt has {version}"
            )


def test_architecture_gives_a_reason_for_every_dependency():
    text = (ROOT / "docs/architecture.md").read_text().lower()
    table = text[text.index("## dependencies") :]
    asked = {package for lock in LOCKS for package in read_in(lock)} | {"torch"}
    missing = [package for package in sorted(asked) if not re.search(rf"\b{re.escape(package)}\b", table)]
    assert not missing, f"docs/architecture.md, Dependencies: no word about {', '.join(missing)}"


# ---- roles ----

ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())


def load(path):
    return yaml.safe_load(path.read_text()) or {}


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_options_equal_its_defaults(role):
    folder = ROOT / "roles" / role
    entries = load(folder / "meta/argument_specs.yml")["argument_specs"]
    defaults = load(folder / "defaults/main.yml") if (folder / "defaults/main.yml").exists() else {}
    assert "main" in entries
    options = {}
    for entry in entries.values():
        assert entry.get("short_description"), f"{role}: an entry point without short_description"
        options.update(entry.get("options", {}))
    own = {name for name in options if name.startswith(f"{role}_")}
    for name, option in options.items():
        assert option.get("description"), f"{role}: {name} has no description"
        assert name in defaults or option.get("required") or name not in own, f"{role}: {name} has no default"
        if name in defaults and "default" in option:
            assert option["default"] == defaults[name], f"{role}: {name}'s two defaults differ"
    assert set(defaults) <= own, f"{role}: defaults that argument_specs.yml does not name"


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_entry_points_exist(role):
    folder = ROOT / "roles" / role
    for entry in load(folder / "meta/argument_specs.yml")["argument_specs"]:
        assert (folder / "tasks" / f"{entry}.yml").is_file(), f"{role}: no tasks/{entry}.yml"


# ---- molecule ----


def tasks_of(items):
    """The tasks of plays, blocks within blocks included."""
    for item in items:
        parts = [item[key] for key in ("tasks", "block", "rescue", "always") if key in item]
        yield from [task for part in parts for task in tasks_of(part)] if parts else [item]


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_a_scenario_in_which_each_assertion_is_broken_once(role):
    """tests/lab/test_molecule.py plays the breaks, and sees at which task verify fails then."""
    folder = ROOT / "molecule" / role
    verify = list(tasks_of(load(folder / "verify.yml")))
    breaks = load(folder / "break.yml")
    names = [task["name"] for task in verify]
    stops = {play["vars"]["verify_stops_at"] for play in breaks if not play["tags"].endswith("-mended")}
    asserting = {
        task["name"]
        for task in verify
        if "ansible.builtin.assert" in task or "until" in task or task.get("failed_when", False) is not False
    }
    assert asserting <= stops, f"nothing breaks {', '.join(asserting - stops)}"
    assert stops <= set(names) and len(set(names)) == len(names)
    for task in verify:
        said = task.get("ansible.builtin.assert", {"that": ""})["that"]
        assert isinstance(said, str), f"{task['name']} asserts several things: only the first would be broken"
    tags = {play["tags"] for play in breaks}
    assert all(tag.removesuffix("-mended") in tags for tag in tags)


# ---- the shipped texts ----

TEXTS = sorted((ROOT / "trainer/data/texts").glob("*.txt"))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_shipped_text_is_the_one_that_its_readme_states(path):
    data = path.read_bytes()
    stated = (path.parent / "README.md").read_text()
    section = stated[stated.index(f"## {path.name}") :].split("\n## ")[0]
    assert hashlib.sha256(data).hexdigest() in section
    assert "Public domain" in section
    assert f"{len(data):,} bytes" in section
    paragraphs = data.decode("utf-8").split("\n\n")
    assert 300_000 < len(data) < 700_000
    assert len(paragraphs) > 500
    assert all(paragraph.strip() and "\n" not in paragraph.strip() for paragraph in paragraphs)


def test_the_shipped_texts_are_package_data():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["trainer.data"] == ["texts/*"]
    assert TEXTS


def roles_tasks():
    """Every task file of a role's: (its path in the checkout, its tasks as they are nested)."""
    for path in sorted(ROOT.glob("roles/*/tasks/*.yml")):
        yield path.relative_to(ROOT).as_posix(), yaml.safe_load(path.read_text()) or []


def nested(tasks):
    for task in tasks:
        yield task
        for key in ("block", "rescue", "always"):
            yield from nested(task.get(key, ()))


def test_a_rescue_that_ends_in_a_fault_blames_no_host_that_is_well():
    """By any_errors_fatal one host's fault brings all of them there: its own words end the play for all.

    One that does not answer any more brings the others there, too, and has no words: they may not go on without it.
    """
    found = [
        (name, "when" in one, [(task["name"], str(task.get("when", ""))) for task in faults])
        for name, tasks in roles_tasks()
        for one in nested(tasks)
        if one.get("any_errors_fatal") is not False
        and (faults := [task for task in nested(one.get("rescue", ())) if "ansible.builtin.fail" in task])
    ]
    assert len(found) >= 4
    for name, held, (*own, last) in found:
        assert own and all("ansible_failed_result is defined" in when for _, when in own), (name, own)
        assert last == ("Stop, as another host does not answer", ""), name
        assert not held, name  # the rescue would have the block's condition, too


def texts(value):
    """All that is said in what a YAML file holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.items() if isinstance(value, dict) else value:
            yield from texts(list(one) if isinstance(one, tuple) else one)


def test_a_new_line_within_an_expression_is_one():
    """Ansible leaves the two characters of one as they are: only between double quotes does YAML make it what it is."""
    files = [path for place in ("roles", "playbooks", "molecule") for path in ROOT.glob(f"{place}/**/*.yml")]
    said = [
        (path.relative_to(ROOT).as_posix(), expression)
        for path in files
        for text in texts(list(yaml.safe_load_all(path.read_text())))
        for expression in re.findall(r"\{[{%].*?[}%]\}", text, re.DOTALL)
    ]
    assert len(said) > 1000
    assert [(path, one) for path, one in said if r"\n" in one] == []


def test_what_hosts_ask_of_themselves_and_of_each_other_goes_by_no_proxy():
    """One in /etc/environment would answer for an etcd that it does not reach; its no_proxy takes no networks."""
    found = {
        (name, task["name"]): task["ansible.builtin.uri"].get("use_proxy")
        for name, tasks in roles_tasks()
        for task in nested(tasks)
        if "ansible.builtin.uri" in task
    }
    by_proxy = {place for place, use in found.items() if use is not False}
    assert len(found) > len(by_proxy) and {name for name, _ in by_proxy} == {"roles/trainer/tasks/fetch.yml"}


class Plays(yaml.SafeLoader):
    """Of what Ansible reads, but for vaults and the like."""


Plays.add_multi_constructor("!", lambda loader, suffix, node: None)


def test_a_play_says_whether_it_gathers_facts():
    """By ansible.cfg one that does not say gathers none, and a role that is told of the login user by them fails."""
    paths = [ROOT / "site.yml", *(ROOT / "playbooks").glob("*.yml"), *(ROOT / "molecule").glob("**/*.yml")]
    plays = [
        (path.relative_to(ROOT).as_posix(), play)
        for path in paths
        if isinstance(read := yaml.load(path.read_text(), Plays), list)  # noqa: S506 - a SafeLoader
        for play in read
        if "hosts" in play
    ]
    assert len(plays) > 40
    assert [(name, play["name"]) for name, play in plays if "gather_facts" not in play] == []
