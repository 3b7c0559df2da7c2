"""Sphinx: Markdown and notebooks by myst-nb, the theme furo. A warning fails the build (see `website.build`)."""

import jattn

project = "jattn"
release = version = jattn.__version__
copyright = "the jattn authors"

extensions = ["myst_nb", "website.links"]
nb_execution_mode = "off"  # notebooks show the outputs that are stored in them; `make notebooks` executes them
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
highlight_language = "none"  # of indented blocks, which hold formulas; fences name their language

nitpicky = True
# Types in a signature link where they are public; most are JAX's, or internal.
nitpick_ignore_regex = [("py:class", ".*")]
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"jattn {release}"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_show_sourcelink = False
html_copy_source = False
templates_path = []
