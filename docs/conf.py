"""The site, which `make docs` builds with Sphinx from every Markdown page of the repository.

A broken link is an error (-W). The sources are relative to the root of the repository, so that links between
README, docs/ and bench/ are checked like any other, and work in an editor and on a code host as well.
"""

import threed

project = "threed"
author = "the threed authors"
version = release = threed.__version__
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
include_patterns = ["*.md", "docs/**", "bench/**"]
exclude_patterns = [".*", "build", "dist", "runs", "docs/_site", "**/__pycache__"]
myst_heading_anchors = 4  # anchors of headings, as code hosts make them

html_theme = "furo"
html_title = "threed"
html_extra_path = ["_site"]  # index.html at the root of the site, which leads to docs/index.html
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
for _name in getattr(threed, "__all__", ()):  # names that are resolved when they are asked for
    setattr(threed, _name, getattr(threed, _name))
