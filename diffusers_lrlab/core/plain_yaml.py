"""Untrusted YAML as plain data, without the features by which a few bytes can expand without end."""

import re
from typing import Any

import yaml

from .words import counted

_LONGEST, _DEEPEST = 256 * 1024, 100  # characters; levels of nesting


class ShallowLoader(yaml.SafeLoader):
    """A SafeLoader with limited nesting, which takes PyYAML quadratic time."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.depth == _DEEPEST:
            raise _refused(f"more than {_DEEPEST} levels are not allowed", self.peek_event())
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _PlainLoader(ShallowLoader):
    """A loader without aliases and merge keys, too."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _refused("anchors and aliases are not allowed in untrusted files", event)
        node = super().compose_node(parent, index)
        if getattr(node, "tag", None) == "tag:yaml.org,2002:merge":
            raise _refused("merge keys are not allowed in untrusted files", event)
        return node


def _refused(what: str, event: Any) -> yaml.YAMLError:
    return yaml.composer.ComposerError(None, None, what, event.start_mark)


def load_plain_yaml(text: str) -> Any:
    """The data of an untrusted YAML text; a `yaml.YAMLError` if it is not plain YAML."""
    if len(text) > _LONGEST:
        raise yaml.YAMLError(f"it has {counted(len(text), 'character', ',')}, more than {_LONGEST:,}")
    return yaml.load(text, _PlainLoader)  # a SafeLoader


def load_front_matter(text: str) -> Any:
    """The metadata of a Markdown text, between lines of `---`, if any. Raises a `yaml.YAMLError` unless plain YAML."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if not text.lstrip().startswith("---"):
        return None
    end = re.compile(r"[\r\n]---[ \t]*(\r\n|\n|$)").search(text, text.index("---") + 3, _LONGEST)
    top = text[: end.end()] if end else ""
    # The pattern takes quadratic time for empty lines in a row.
    found = None if re.search(r"[\r\n]{20}", top) else REGEX_YAML_BLOCK.search(top)
    if found is None:
        raise yaml.YAMLError(f"its metadata do not end within {_LONGEST:,} characters, or have many empty lines in a row")
    return load_plain_yaml(found[2])
