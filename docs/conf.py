"""The site of README, CONTRIBUTING and docs: `make docs-site`. What is read on a code host is what is built; nothing is
written twice for it.
"""

import re
from pathlib import Path

project = "Trainyard"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "roles/*/README.md",
    "trainer/data/texts/README.md",
]
myst_heading_anchors = 4  # as code hosts make them

html_theme = "furo"
html_title = "Trainyard"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_show_search_summary = False  # it is fetched, which a browser refuses where the site is files on a disk
# Of `make links` alone: an anchor is its page's own matter, and a single try may fail by chance.
linkcheck_anchors = False
linkcheck_retries = 2
linkcheck_timeout = 20
highlight_language = "none"  # of blocks that do not say theirs


def contents(_, page, source):
    """The side bar's contents are the links of README's section Documentation, by its headings."""
    if page == root_doc:
        section = re.search(r"^## Documentation$(.*?)^## ", source[0], re.S | re.M)[1]
        for caption, links in re.findall(r"^\*\*(.+?)\*\*(.*?)(?=^\*\*|\Z)", section, re.S | re.M):
            pages = "\n".join(re.findall(r"\]\(([\w./-]+\.md)\)", links))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption.rstrip('.:')}\n\n{pages}\n```\n"
    elif page.endswith("/README"):  # of one folder: reached by links alone
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def entrance(app, failed):
    """Whoever opens the folder comes to README."""
    if not failed:
        (Path(app.outdir) / "index.html").write_text(
            '<meta http-equiv="refresh" content="0; url=README.html">\n'
        )


def setup(app):
    app.connect("source-read", contents)
    app.connect("build-finished", entrance)
