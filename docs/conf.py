"""How Sphinx builds this documentation: ``make docs``. Nothing is fetched while it builds."""

from __future__ import annotations

import re
from importlib.metadata import version as installed_version

from pygments.lexer import RegexLexer
from pygments.token import Generic, Text
from sphinx.application import Sphinx

project = "lightning-resilience"
author = "the contributors of lightning-resilience"
copyright = "2026, the contributors of lightning-resilience"
release = version = installed_version(project)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# Files that are also read in the repository are linked to by their path there. Here they are pages.
_PAGES_ELSEWHERE = {
    "../benchmarks/README.md": "benchmarks.md",
    "../examples/README.md": "examples.md",
    "../recipes/README.md": "recipe-files.md",
}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80
autodoc_preserve_defaults = True
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_use_rtype = False
python_use_unqualified_type_names = True

# Every name of this package must exist. Names of others cannot be looked up without the network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!lightning_resilience)(?!:).*")]

html_theme = "furo"
html_title = "lightning-resilience"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
highlight_language = "none"
pygments_style = "friendly"
pygments_dark_style = "monokai"


class _Log(RegexLexer):
    """Lines that the package prints; the tests compare them with its messages."""

    tokens = {"root": [(r"^\[lightning-resilience\]", Generic.Prompt), (r".+?\n|\n", Text)]}


def _link_to_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    pattern = r"\]\((" + "|".join(map(re.escape, _PAGES_ELSEWHERE)) + ")"
    text = re.sub(pattern, lambda match: f"]({_PAGES_ELSEWHERE[match[1]]}", source[0])
    source[0] = re.sub(r"\[[\w-]+\.md\]\(", "[](", text)  # links named after a file get the title of its page


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _link_to_pages)
    app.add_lexer("log", _Log)
