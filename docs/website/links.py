"""Inline code that spells a public name becomes a link; one that spells a name that does not exist is a warning.

`jattn.merge` and `jattn.merge(a, b)` link anywhere. A bare name links where it can mean nothing else: a class or a name
with an underscore of a public package (`AttentionSpec`, `write_kv`), or a neighbour of the docstring that it is in.
"""

import re
from collections.abc import Iterator

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
            if (
                found is None
                or found[1] == "jattn"
                or _inside(literal, (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature))
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
        if name[0].isupper() or "_" in name.partition(".")[0]:
            name = next((full for package in reference.PACKAGES if reference.exists(full := f"{package}.{name}")), "")
        elif not (name.startswith("jattn.") and reference.exists(name)):
            return None
        owner = name
        while owner and owner not in known:  # a field, or the member of an enum: its class is described
            owner = owner.rpartition(".")[0]
        return None if owner != name and owner in reference.packages() else known.get(owner)

    def _scopes(self, literal: nodes.literal) -> Iterator[str]:
        """The prefixes under which a name may be known here: of the class, package and page around it, then none."""
        node = literal.parent
        while node is not None:
            if isinstance(node, addnodes.desc) and node["domain"] == "py":
                signature = node[0]
                yield f"{signature['module']}.{signature['fullname']}."
                if "." not in signature["fullname"]:
                    yield f"{signature['module']}."
            node = node.parent
        yield self.env.docname.removeprefix("reference/") + "."
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
