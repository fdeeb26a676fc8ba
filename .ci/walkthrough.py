"""Export each committed notebook to one self-contained HTML page that opens offline: python .ci/walkthrough.py [names]

Pages go to out/walkthrough/. Code starts folded, so that a speaker shows prose and pictures; "Show code" unfolds it. Links between
notebooks become links between pages. Nothing is executed and nothing is loaded from the network; a page that would is an error.
"""

import argparse
import os
import re
import sys
from html import escape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter

from notebooks import ROOT, select, write_text

HEAD = """<style>
body.folded .jp-CodeCell .jp-Cell-inputWrapper { display: none }
#code { position: fixed; top: 8px; right: 8px; z-index: 9; font: 13px sans-serif; padding: 4px 10px }
@media print { #code { display: none } }
</style>"""
BUTTON = """<button id="code">Show code</button>
<script>
document.body.classList.add('folded')
document.getElementById('code').onclick = e => {
  e.target.textContent = document.body.classList.toggle('folded') ? 'Show code' : 'Hide code'
}
</script>"""
NO_ALT = 'alt="No description has been provided for this image"'  # nbconvert's
# what a browser would fetch by itself; a link that somebody clicks is none of it
FETCHED = re.compile(
    r"""<(?:script|img|iframe|link|source|video|audio)\b[^>]*?\b(?:src|href)\s*=\s*["'](?!data:)[^"'#][^"']*"""
    r"""|@import\b|url\(\s*["']?https?:[^)]*|(?:\bimport\b|\bfrom\b)[^;<]{0,20}["']https?:[^"']*""",
    re.IGNORECASE,
)


def page(path: Path) -> str:
    """A notebook, or a text as a notebook of one cell, as HTML, pictures inside."""
    if path.suffix == ".md":
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(path.read_text(encoding="utf-8"))])
    else:
        nb = nbformat.read(path, as_version=4)
    heading, pictured = path.stem, []
    for cell in nb.cells:
        pictured += [heading for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
        if cell.cell_type == "markdown":
            heading = (re.findall(r"^#+ (.*)$", cell.source, re.M) or [heading])[-1]
            cell.source = re.sub(r"(\]\(\d\d_\w+)\.ipynb", r"\1.html", cell.source)
            cell.source = re.sub(r"\]\((GLOSSARY|FINDINGS)\.md", r"](\1.html", cell.source)
    exporter = HTMLExporter(template_name="lab", embed_images=True, mathjax_url="", require_js_url="", jquery_url="", mermaid_js_url="")
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    html, _ = exporter.from_notebook_node(nb, {"metadata": {"name": path.stem}})
    html = re.sub(r"<script\b[^>]*\bsrc=[\"'][\"'][^>]*>\s*</script>", "", html)
    # what draws diagrams is loaded on demand, and there are none
    html = re.sub(r"<script\b[^>]*>(?:(?!</script>).)*mermaid(?:(?!</script>).)*</script>", "", html, flags=re.DOTALL)
    for heading in pictured:
        html = html.replace(NO_ALT, f'alt="figure of: {escape(heading)}"', 1)
    return html.replace("</head>", f"{HEAD}\n</head>", 1).replace("<main>", f"{BUTTON}\n<main>", 1)


def fetched(html: str) -> list[str]:
    """What the page would load from elsewhere."""
    return [m[0][:120] for m in FETCHED.finditer(html)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "walkthrough")
    args = parser.parse_args()
    failed = 0
    texts = [] if args.names else sorted(args.folder.glob("*.md"))
    for path in [*(source.with_suffix(".ipynb") for source in select(args.folder, args.names)), *texts]:
        html = page(path)
        loads = fetched(html)
        failed += bool(loads)
        write_text(html, args.out / f"{path.stem}.html")
        print(f"{os.path.relpath(args.out / path.stem)}.html: {len(html) / 1e6:.1f} MB" + "".join(f"\n  would load {x}" for x in loads))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
