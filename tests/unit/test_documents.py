"""What the documents name is there: links, anchors, files, commands with options and words."""

import ast
import contextlib
import functools
import io
import itertools
import json
import re
import runpy
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml
from ansible.cli.playbook import PlaybookCLI
from typed import ANSIBLE, ELSEWHERE, SAYS

from bench import simulate
from lab.__main__ import parser as lab_parser
from plugins.action.run_config import SWITCHES, role_variables
from trainer import config
from trainer.cli import _parser as trainer_parser

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "roles/*/README.md",
    "trainer/data/texts/README.md",
)
DOCUMENTS = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def prose(text):
    """A document without its fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


# ---- links ----


def anchors(text):
    """The anchors of a document's headings, as code hosts and the site make them."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def broken_links(path, text):
    """The targets of `text`, the document at `path`, that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        if not there.exists():
            yield f"{target}: there is no {file}"
        elif anchor and anchor not in anchors(text if there == path else there.read_text()):
            yield f"{target}: {there.name} has no heading of that anchor"


@every_document
def test_links_lead_somewhere(path):
    assert list(broken_links(path, path.read_text())) == []


def test_each_document_can_be_reached_from_readme():
    seen, ahead = set(), [DOCUMENTS[0]]
    while ahead:
        path = ahead.pop()
        if path not in seen:
            seen.add(path)
            links = re.findall(r"\]\(([^)#\s]+\.md)", prose(path.read_text()))
            ahead += [(path.parent / link).resolve() for link in links if "://" not in link]
    assert set(DOCUMENTS) <= seen


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "[a](docs/lab.md) [b](#two-words) [c](docs/lab.md#virtual-machines) [d](https://example.org/x)",
            None,
        ),
        ("[a](docs/labs.md)", "there is no docs/labs.md"),
        ("[a](#two-word)", "README.md has no heading of that anchor"),
        ("[a](docs/lab.md#virtual-machine)", "lab.md has no heading of that anchor"),
        ("```\n[a](nothing.md)\n```\nand `[b](nothing.md)`", None),
    ],
)
def test_a_broken_link_is_found(text, fault):
    found = list(broken_links(ROOT / "README.md", f"# One\n\n## Two `words`\n\n{text}\n"))
    assert [one.partition(": ")[2] for one in found] == ([fault] if fault else [])


# ---- commands ----

PLAYBOOKS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*(ROOT / "playbooks").glob("*.yml"), *(ROOT / "molecule").glob("*/break.yml"))
}
PLAYBOOKS |= {name: PLAYBOOKS[f"playbooks/{name}"] for name in ("site.yml", "train.yml")}
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {
    name for line in re.findall(r"^([a-z-]+(?: [a-z-]+)*):(?!=)", MAKEFILE, re.M) for name in line.split()
}
# What may stand before a command: a prompt, what was left out, who runs it, where, and with what in its environment.
BEFORE = re.compile(r"(?:\$ |… |sudo |time |nice -n \d+ |ssh \S+ |[A-Z_0-9]+=\S*(?: |$))*")
# Other people's programs, which documents may say to type; their words are not judged here.
OTHERS = {
    *(".", "cp", "git", "scp"),
    *("ansible-vault", "hf", "mokutil", "molecule", "pytest", "-m pytest", "-m bench", "pre-commit"),
}
# Lines of code blocks that nobody types: a comment, what is said of a run, a folder of a tree, what follows from what.
UNTYPED = re.compile(r"# |\w+: |\S+/(?: |$)|.*─►")


LAYERS = runpy.run_path(str(ROOT / "tests/run.py"))["LIMITS"]
# Those of the checkout, and those that a document says to copy or that a command writes.
INVENTORIES = {str(path.relative_to(ROOT)) for path in (ROOT / "inventory").glob("*")} | {
    "inventory/lab",
    "inventory/NAME",
    ".trainyard/labs/molecule/inventory",
}
INVENTORIES |= {
    copy for path in DOCUMENTS for copy in re.findall(r"cp -r \S+ (inventory/\w+)", path.read_text())
}


class Odd(Exception):
    """What is wrong with a command of a document."""


def bare(command):
    """(program, the rest): without what may stand before it and its folder; a module of Python's is `-m NAME`."""
    command = command[BEFORE.match(command).end() :]
    command = re.sub(r"^\S*/bin/(?=\w)", "", command)
    program, _, rest = re.sub(r"^python3? (?=-m )", "", command).partition(" ")
    if program == "-m":
        module, _, rest = rest.partition(" ")
        program = f"-m {module}"
    return program, rest


def is_command(piece):
    """Whether what stands among other words is one: a program alone is spoken of, unless it is this repository's."""
    program, rest = bare(piece)
    return (
        program in CHECKS
        or program.startswith("-m ")
        or bool(re.fullmatch(r"(?:playbooks/)?\w+\.yml", program))
        or (program in OTHERS and bool(rest))
    )


def parts(text):
    """(fenced, plain): the fenced blocks, each its language and its text, and the document without them."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
    return fence.findall(text), fence.sub("", text)


def blocks(text):
    """The code blocks whose lines are typed, each a list of lines; those of YAML and of other languages are not."""
    fenced, plain = parts(text)
    typed = [block for language, block in fenced if language in ("", "shell", "sh", "bash", "console")]
    for block in typed + re.findall(r"(?:^    .*\n)+", plain, re.M):
        try:
            data = yaml.safe_load(textwrap.dedent(block))
        except yaml.YAMLError:
            data = None
        if not isinstance(data, list) and not (isinstance(data, dict) and all(map(str.isidentifier, data))):
            yield [line.strip() for line in block.splitlines() if line.strip()]


def commands(text):
    """Every command in code blocks and code spans, one a string, without what is said about it beside.

    Each line of a code block begins with one; whether that is known, `check` says.
    """
    # The end of `… -e depth=full` is that of the last whole one.
    whole = ""
    for line in itertools.chain.from_iterable(blocks(text)):
        first, *more = re.split(r"\s{2,}|\s# |[:;] (?=-e |\S+\.yml -)", line)
        if UNTYPED.match(line) or not bare(first)[0]:
            continue
        if first.startswith("… ") and whole:
            first = f"{whole} {first[2:]}"
        else:
            whole = first
        yield first.strip()
        yield from (piece.strip() for piece in more if is_command(piece.strip()))
    fenced, plain = parts(text)
    shown = [line for language, block in fenced if language == "text" for line in block.splitlines()]
    for piece in shown + re.findall(r"`([^`\n]+)`", plain):
        if is_command(piece.strip()):
            yield piece.strip()


@functools.cache
def words_of(playbook):
    """What may follow -e: the words that the playbook's own head names, and the roles' variables."""
    head = "\n".join(line for line in PLAYBOOKS[playbook].splitlines() if line.startswith("#"))
    words = set(re.findall(r"-e (\w+)=", head)) | role_variables(str(ROOT / "roles"))
    return words | set(SWITCHES) | set(config.FIELDS) if playbook.endswith("train.yml") else words


def tags_of(playbook):
    imported = f"playbooks/{playbook}"  # by the two at the root
    found = re.findall(
        r"tags: (?:\[([\w, ]+)\]|(\w+))", PLAYBOOKS[imported if imported in PLAYBOOKS else playbook]
    )
    return {tag for several, one in found for tag in (several or one).split(", ")}


def known(words, expected, what):
    for word in words:
        if word not in expected:
            raise Odd(f"{word} is no {what}")


def parsed(parser, words):
    """What an argparse parser makes of them."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return parser.parse_args(words)
        except SystemExit:
            raise Odd(f"{parser.prog} does not take: {shlex.join(words)}") from None


def keys_of(extra):
    """The keys of what follows -e: key=value, or a mapping; without placeholders and the tests' own."""
    keys = json.loads(extra) if extra.startswith("{") else [extra.split("=")[0]]
    return [key for key in keys if key.lower() != "key" and not key.startswith("_")]


def check_playbook(words):
    cli = PlaybookCLI(["ansible-playbook", *words])
    cli.init_parser()
    given = parsed(cli.parser, words)
    known(given.args, PLAYBOOKS, "playbook")
    known([one for one in given.inventory or [] if one], INVENTORIES, "inventory")
    for playbook in given.args:
        keys = [key for extra in given.extra_vars for key in keys_of(extra)]
        known(keys, words_of(playbook), f"word of {playbook}")
        known(
            [tag for tags in given.tags for tag in tags.split(",")], tags_of(playbook), f"tag of {playbook}"
        )


def check_word(words):
    """-e and what follows it, of whatever playbook."""
    keys = [key for word in words if "=" in word or "{" in word for key in keys_of(word)]
    known(keys, set().union(*map(words_of, PLAYBOOKS)), "word of any playbook")


def check_make(words):
    known([word for word in words if "=" not in word], TARGETS, "target of the Makefile")
    for name, value in (word.split("=", 1) for word in words if "=" in word):
        if f"$({name})" not in MAKEFILE:
            raise Odd(f"{name} is no variable of the Makefile")
        if name == "LAYERS":
            known(value.split(), LAYERS, "layer of tests")
        if name == "LAB":
            parsed(lab_parser(), ["down" if "lab-down" in words else "up", *shlex.split(value)])
        if name == "INVENTORY":
            known([value], INVENTORIES, "inventory")


def check_trainer(words):
    if len(words) == 1:  # it is spoken of
        alone = {"bench": [], "burn": []}
        words += {"generate": ["D"], "export": ["D", "O"], "fetch": ["model", "N", "D"], **alone}.get(
            *words, ["C"]
        )
    given = parsed(trainer_parser(), words)
    keys = [key for word in getattr(given, "overrides", []) for key in keys_of(word)]
    known(keys, config.FIELDS, "key of the trainer")


def check_lab(words):
    parsed(lab_parser(), words)


def check_simulate(words):
    parsed(simulate.parser(), words)


def check_torchrun(words):
    """Its own options are not judged."""
    if "trainer" in words:
        check_trainer(words[words.index("trainer") + 1 :])


CHECKS = {
    "ansible-playbook": check_playbook,
    "torchrun": check_torchrun,
    "make": check_make,
    "trainer": check_trainer,
    "-m trainer": check_trainer,
    "-m lab": check_lab,
    "-m bench.simulate": check_simulate,
    "-e": check_word,
}


def check(command):
    """Raise Odd if a command of a document is none."""
    command = re.sub(r"(--[\w-]+) …", r"\1 X", command)
    # [what may be left out], and so on
    first, rest = bare(" ".join(re.sub(r"[\[\]…]", " ", command).split()))
    if first in OTHERS:
        return
    words = shlex.split(rest)
    if first.endswith(".yml"):  # a playbook, for short
        name = first if first in PLAYBOOKS else f"playbooks/{first}"
        if name not in PLAYBOOKS and "/" not in first:
            return  # a file of another kind
        first, words = "ansible-playbook", [name, *words]
    if first not in CHECKS:
        raise Odd(f"{first} is no program that documents know; see CHECKS and OTHERS")
    if words:
        # off|on is two commands.
        for choice in itertools.product(*([word] if "=" in word else word.split("|") for word in words)):
            CHECKS[first](list(choice))


@every_document
def test_commands_are_what_there_is(path):
    faults = []
    for command in commands(path.read_text()):
        try:
            check(command)
        except Odd as fault:
            faults.append(f"{command}: {fault}")
    assert faults == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("ansible-playbook -i inventory/home trian.yml", "trian.yml is no playbook"),
        ("ansible-playbook playbooks/staus.yml", "playbooks/staus.yml is no playbook"),
        ("playbooks/staus.yml", "playbooks/staus.yml is no playbook"),
        ("ansible-playbook -i inventory/hom site.yml", "inventory/hom is no inventory"),
        ("ansible-playbook train.yml -e run=a -e stpes=3", "stpes is no word of train.yml"),
        ("ansible-playbook playbooks/logs.yml -e steps=3", "steps is no word of playbooks/logs.yml"),
        ("train.yml -e '{\"firewal_manage\": true}'", "firewal_manage is no word of train.yml"),
        ("site.yml --tags tiem_sync", "tiem_sync is no tag of site.yml"),
        ("ansible-playbook --chekc site.yml", "does not take: --chekc site.yml"),
        ("-e resmue=true", "resmue is no word of any playbook"),
        ("make dmo", "dmo is no target of the Makefile"),
        ("sudo make lab HOST=3", "HOST is no variable of the Makefile"),
        ('make lab LAB="--ofline"', "does not take: up --ofline"),
        ('make test LAYERS="units"', "units is no layer of tests"),
        ("trainer exprot DIR OUT", "trainer does not take: exprot"),
        ("torchrun --nproc-per-node 2 -m trainer trian run.yaml", "trainer does not take: trian run.yaml"),
        ("WORLD_SIZE=2 trainer plan run.yaml stratgy=fsdp", "stratgy is no key of the trainer"),
        ("trainer plan run.yaml --links 1gbit", "trainer does not take: plan run.yaml --links 1gbit"),
        ("python3 -m lab powr node2 off|on", "does not take: powr node2 off"),
        ('make lab-down LAB="--offline"', "does not take: down --offline"),
        (
            "ssh HOST NNODES=3 /opt/trainyard/current/bin/trainer paln run.yaml",
            "does not take: paln run.yaml",
        ),
        ("… -e dpeth=full", "dpeth is no word of any playbook"),
        ('.venv/bin/python -m bench.simulate --speed "3070 T=2100"', "does not take: --speed '3070 T=2100'"),
        ("python -m bench.simulat --link 1gbit", "-m bench.simulat is no program that documents know"),
    ],
)
def test_a_typo_in_a_command_is_found(command, fault):
    (found,) = commands(f"    {command}     what it does\n")
    assert (found,) == tuple(commands(f"By `{command}` it is done."))
    with pytest.raises(Odd, match=re.escape(fault)):
        check(found)


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ("scpp llama.yaml 192.168.1.101:", "scpp is no program that documents know"),
        ("git pull\n    ansible-valut encrypt_string", "ansible-valut is no program that documents know"),
        ("sudo aptt install git     first of all: git", "aptt is no program that documents know"),
        ("make venv\n\n    maek demo", "maek is no program that documents know"),
        (
            "ansible-playbook playbooks/preflight.yml    before\n    … -e detph=full    minutes",
            "detph is no word of playbooks/preflight.yml",
        ),
    ],
)
def test_an_unknown_word_in_a_block_of_commands_is_found(block, fault):
    faults = []
    for command in commands(f"Type:\n\n    {block}\n\nand see.\n"):
        with contextlib.suppress(Odd):
            check(command)
            continue
        faults.append(command)
    (found,) = faults
    with pytest.raises(Odd, match=re.escape(fault)):
        check(found)


def test_what_nobody_types_is_no_command():
    text = (
        "    all:\n      vars: {a: b}\n\nand\n\n    - name: A task\n\nand\n\n    a ─► b\n      ─► c\n\n"
        "and\n\n    WORLD_SIZE=3  MASTER_ADDR=10.77.0.11\n    first: loss 7.66: 3.95\n    roles/   one a concern\n"
        "\n```yaml\nsteps: 3\n```\n\nand `git`, `scp`, `a b`\n"
    )
    assert list(commands(text)) == []


# ---- README's, each typed by a test ----


def readmes():
    """README's commands and options; which inventory they are for is none, nor is a program that is spoken of."""
    text = (ROOT / "README.md").read_text()
    options = re.findall(r"`(-[^`\n]+|[A-Z_]+=[^`\n]+)`", parts(text)[1])
    found = [one for one in [*commands(text), *options] if len(one.split()) > 1 or "=" in one]
    return {one for one in found if not one.startswith("-i ")}


def words_typed(node):
    """The words of a test's source that it may type: strings in their order, and NAME=VALUE of what is named.

    What it says of itself or looks for in an answer is not typed.
    """
    if isinstance(node, ast.Assert):
        node = ast.Module([one for one in ast.walk(node.test) if isinstance(one, ast.Call)], [])
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from node.value.split()
    named = [(node.arg, node.value)] if isinstance(node, ast.keyword) else []
    if isinstance(node, ast.Dict):
        named = [
            (getattr(key, "value", ""), value) for key, value in zip(node.keys, node.values, strict=True)
        ]
    for name, value in named:
        yield f"{name}={getattr(value, 'value', '')}"
    for child in ast.iter_child_nodes(node):
        yield from words_typed(child)


def types(source, test, command):
    """Whether the function `test` of a test file's source types a command of README."""
    (function,) = (one for one in ast.parse(source).body if getattr(one, "name", "") == test)
    typed = list(words_typed(function))
    words = shlex.split(re.sub(r"^ansible-playbook (?:-i \S+ )?", "", command))
    settings = [word for word in words if re.match(r"[a-z_]+=", word)]
    for setting in settings:
        name, _, value = setting.partition("=")
        whatever = not value or re.fullmatch(r"[A-Z]+(?:\.yaml)?", value)
        if not any(word.startswith(f"{name}=") if whatever else word == setting for word in typed):
            return False
    rest = [word for word in words if word not in settings and word != "-e"]
    return any(typed[at : at + len(rest)] == rest for at in range(len(typed)))


def test_every_command_of_readme_is_typed_by_a_test():
    newcomer = {one.removeprefix(f"{ANSIBLE} ") for one in SAYS}
    untyped = {one for one in readmes() if one.removeprefix(f"{ANSIBLE} ") not in newcomer}
    assert untyped == set(ELSEWHERE)


@pytest.mark.parametrize("command", ELSEWHERE)
def test_who_is_said_to_type_a_command_does(command):
    path, _, test = ELSEWHERE[command].partition("::")
    assert types((ROOT / path).read_text(), test, command)


@pytest.mark.parametrize(
    ("body", "command", "is_typed"),
    [
        ('run("make", "clean")', "make clean", True),
        ('assert run("make", "clean") == 0', "make clean", True),
        ("run('make clean'.split())", "make clean", True),
        ('run("make", "-n", "clean")', "make clean", False),
        ('"""It is for make clean."""', "make clean", False),
        ('assert "make clean" in said', "make clean", False),
        (
            'play("train.yml", model=path, run="first")',
            f"{ANSIBLE} train.yml -e model=DIR -e run=first",
            True,
        ),
        (
            'play("train.yml", model=path, run="other")',
            f"{ANSIBLE} train.yml -e model=DIR -e run=first",
            False,
        ),
        (
            'play("site.yml", model=path, run="first")',
            f"{ANSIBLE} train.yml -e model=DIR -e run=first",
            False,
        ),
        ('play({"queue": "true"})', "-e queue=true", True),
    ],
)
def test_what_a_test_types_is_told_from_what_it_speaks_of(body, command, is_typed):
    assert types(f"def test_it():\n    {body}\n", "test_it", command) is is_typed


# ---- files ----

NAMED = re.compile(
    r"(?:^|(?<=[ =]))(?:bench|docs|inventory/local|inventory/examples|lab|molecule|playbooks|plugins|requirements|roles"
    r"|scripts|tests|trainer)/[\w./*-]+[\w/](?= |$)"
)


def missing_files(text):
    """The files of the checkout that code spans and commands name, and that are not there."""
    for span in {*re.findall(r"`([^`\n]+)`", text), *commands(text)}:
        for name in NAMED.findall(span):
            if not list(ROOT.glob(name.rstrip("/"))):
                yield name


@every_document
def test_files_that_are_named_are_there(path):
    assert list(missing_files(path.read_text())) == []


def test_a_file_that_is_gone_is_found():
    text = "`tests/unit/test_gone.py`, `trainer/loop.py`, `.venv/bin/pytest tests/unit/test_gon.py`"
    assert set(missing_files(text)) == {"tests/unit/test_gone.py", "tests/unit/test_gon.py"}
