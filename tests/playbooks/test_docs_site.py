"""`make docs-site`: whole, without internet, in a real browser."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import browser as browsers
import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/site"


@pytest.fixture(scope="module")
def site():
    made = subprocess.run(["make", "docs-site"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.fixture(scope="module")
def browser(site, tmp_path_factory):
    browsers.have()
    with browsers.Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.full
def test_a_link_that_leads_nowhere_fails(site, tmp_path):
    """By the same configuration, of other documents."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/conf.py", tmp_path / "docs")
    (tmp_path / "docs/one.md").write_text("# One\n\n## Two words\n")
    built = []
    for anchor in ("two-words", "two-word"):
        contents = "# All\n\n## Documentation\n\n**Here.** [One](docs/one.md)\n\n## More\n\n"
        (tmp_path / "README.md").write_text(f"{contents}[two](docs/one.md#{anchor})\n")
        command = [
            ROOT / ".venv-docs/bin/python",
            "-m",
            "sphinx",
            "-q",
            "--fail-on-warning",
            "-c",
            "docs",
            ".",
            "site",
        ]
        built.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True))
    good, bad = built
    assert good.returncode == 0 and "Two words" in (tmp_path / "site/docs/one.html").read_text(), good.stderr
    assert bad.returncode != 0 and "README.md:9: WARNING" in bad.stderr and "two-word" in bad.stderr


def test_every_document_is_a_page_and_takes_nothing_from_elsewhere(site):
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        page = (SITE / path.relative_to(ROOT)).with_suffix(".html").read_text()
        assert not re.findall(r'<(?:script|img|iframe|source)[^>]* src="(?:https?:)?//[^"]*', page)
        assert not re.findall(r'<link[^>]* href="(?:https?:)?//[^"]*', page)
    for path in SITE.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", path.read_text()), path


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_is_read_on_any_screen(browser, width, dark):
    for name in ("README", "docs/variables", "docs/guides/home-lan"):
        browser.open((SITE / f"{name}.html").as_uri(), width=width, height=800, dark=dark)
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), name
        ink = browser.value("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ink)[:3])) < 150) is dark
        assert browser.value("[...document.images].every(one => one.naturalWidth > 100)")
    assert browser.errors == []


@pytest.mark.full
def test_the_search_needs_no_server(browser):
    browser.open((SITE / "index.html").as_uri())
    browser.open((SITE / "search.html").as_uri() + "?q=micro_batch_size")
    listed = "[...document.querySelectorAll('#search-results li a')].map(one => one.href).join()"
    until = time.monotonic() + 30
    while "docs/variables.html" not in browser.value(listed):
        assert time.monotonic() < until, browser.value(listed)
    assert browser.errors == []
