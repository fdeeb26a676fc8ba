"""Notebooks as pages to show, and the links between notebooks, glossary and findings."""

import importlib.util
import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
RENDERED = sorted(NOTEBOOKS.glob("*.ipynb"))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def load(name):
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        spec = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / ".ci" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / ".ci"))


def prose(path):
    if path.suffix == ".md":
        return path.read_text()
    return "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown")


def anchors(path):
    """Heading anchors as JupyterLab and nbconvert make them: spaces become dashes, the rest stays."""
    return {m[1].strip().replace(" ", "-") for m in re.finditer(r"^#+ (.*)$", prose(path), re.M)}


@pytest.mark.parametrize(
    "path", [*RENDERED, NOTEBOOKS / "GLOSSARY.md", NOTEBOOKS / "FINDINGS.md", ROOT / "README.md"], ids=lambda p: p.name
)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(path):
    for file, anchor in LINK.findall(prose(path)):
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path.name}: {file}"
        if anchor and target.suffix in (".ipynb", ".md"):
            assert anchor in anchors(target), f"{path.name}: {file}#{anchor}"


def test_every_finding_has_why_how_and_a_link_to_the_cells_that_show_it():
    facts = re.split(r"^\*\*Fact\.\*\*", (NOTEBOOKS / "FINDINGS.md").read_text(), flags=re.M)[1:]
    assert len(facts) >= 16
    for fact in facts:
        assert fact.count("**Why.**") == fact.count("**How to apply.**") == 1, fact[:80]
        assert re.search(r"\]\(\d\d_\w+\.ipynb#", fact.split("**Why.**")[0]), fact[:80]


@pytest.mark.parametrize("path", RENDERED, ids=lambda p: p.stem)
def test_a_walkthrough_page_is_one_file_that_loads_nothing(path):
    """Pictures inside, links between pages, no script, font or picture from elsewhere."""
    tool = load("walkthrough")
    html = tool.page(path)
    assert tool.fetched(html) == []
    pictures = sum("image/png" in o.get("data", {}) for c in nbformat.read(path, as_version=4).cells for o in c.get("outputs", []))
    assert html.count('src="data:image/png;base64,') == html.count('alt="figure of: ') == pictures > 0
    assert not re.search(r'href="\d\d_\w+\.ipynb', html)
    assert "Show code" in html


def test_what_a_page_would_fetch_is_seen():
    """The check above can fail."""
    fetched = load("walkthrough").fetched
    for html in (
        '<script src="https://x/y.js"></script>',
        '<img alt="a" src="b.png">',
        "<style>@import 'x'</style>",
        "import('https://x/y.mjs')",
    ):
        assert fetched(html), html
    assert fetched('<a href="https://x">x</a><img src="data:image/png;base64,AA">') == []
