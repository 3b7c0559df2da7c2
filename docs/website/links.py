"""Inline code that spells a public name becomes a link; one that spells a name that does not exist is a warning.

`jattn.merge` and `jattn.merge(a, b)` link anywhere. A bare name links where it is unambiguous: a class of a public
package (`AttentionSpec`), or, inside a docstring, a neighbour in the same class or package.
"""

import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from website import reference

log = logging.getLogger(__name__)
NAME = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)(\(.*\))?", re.DOTALL)


class LinkNames(SphinxTransform):
    """Wrap literals in references to the API pages."""

    default_priority = 400

    def apply(self, **kwargs) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            found = NAME.fullmatch(literal.astext())
            if found is None or _inside(
                literal, (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature)
            ):
                continue
            target = self._target(literal, found[1])
            if target is not None:
                link = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=True,
                    refdoc=self.env.docname,
                )  # fmt: skip
                literal.replace_self(link)
                link += literal
            elif found[1].startswith("jattn.") and not reference.exists(found[1]):
                log.warning("`%s` names nothing", found[1], location=literal)

    def _target(self, literal: nodes.literal, name: str) -> str | None:
        known = reference.targets()
        for prefix in self._scopes(literal):
            if f"{prefix}{name}" in known:
                return known[f"{prefix}{name}"]
        if name[0].isupper():
            return next((known[full] for package in reference.PACKAGES if (full := f"{package}.{name}") in known), None)
        return None

    @staticmethod
    def _scopes(literal: nodes.literal):
        """The prefixes under which a name may be known here: of the class and package around it, then none."""
        node = literal.parent
        while node is not None:
            if isinstance(node, addnodes.desc) and node["domain"] == "py":
                signature = node[0]
                yield f"{signature['module']}.{signature['fullname']}."
                if "." not in signature["fullname"]:
                    yield f"{signature['module']}."
            node = node.parent
        yield ""


def _inside(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    while node is not None:
        if isinstance(node, kinds):
            return True
        node = node.parent
    return False


def setup(app: Sphinx) -> dict:
    app.add_transform(LinkNames)
    return dict(parallel_read_safe=True, parallel_write_safe=True)
