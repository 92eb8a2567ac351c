"""YAML of strangers as plain data: what can make a few bytes grow without end is refused before anything is built of it."""

import re
from typing import Any

import yaml

from .words import counted

_LONGEST, _DEEPEST = 256 * 1024, 100  # characters; levels of nesting


class _PlainLoader(yaml.SafeLoader):
    """A SafeLoader without aliases and merge keys, and with a limit to the nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self._refused("anchors and aliases are", event)
        if self.depth == _DEEPEST:
            raise self._refused(f"more than {_DEEPEST} levels are", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if getattr(node, "tag", None) == "tag:yaml.org,2002:merge":
            raise self._refused("merge keys are", event)
        return node

    @staticmethod
    def _refused(what: str, event: Any) -> yaml.YAMLError:
        return yaml.composer.ComposerError(None, None, f"{what} not allowed in files of others", event.start_mark)


def load_plain_yaml(text: str) -> Any:
    """The data of a YAML text that may be somebody else's; a `yaml.YAMLError` for what is none, or more than data."""
    if len(text) > _LONGEST:
        raise yaml.YAMLError(f"it has {counted(len(text), 'character', ',')}, and no more than {_LONGEST:,} are read")
    return yaml.load(text, _PlainLoader)  # a SafeLoader


def check_front_matter(text: str) -> None:
    """Raises a `yaml.YAMLError` if the metadata at the top of a Markdown text, between lines of `---`, are not plain."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if not text.lstrip().startswith("---"):
        return
    end = re.compile(r"[\r\n]---[ \t]*(\r\n|\n|$)").search(text, text.index("---") + 3, _LONGEST)
    top = text[: end.end()] if end else ""
    # The pattern takes as long as the square of the empty lines in a row.
    found = None if re.search(r"[\r\n]{20}", top) else REGEX_YAML_BLOCK.search(top)
    if found is None:
        raise yaml.YAMLError(f"its metadata do not end within {_LONGEST:,} characters, or have many empty lines in a row")
    load_plain_yaml(found[2])
