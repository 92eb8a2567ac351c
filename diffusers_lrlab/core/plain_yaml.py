"""YAML of downloaded files as plain data, without aliases, by which a few bytes can expand without end."""

from typing import Any

import yaml

from .words import counted

_LONGEST = 256 * 1024  # characters


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not allowed here", event.start_mark)
        return super().compose_node(parent, index)


def load_plain_yaml(text: str) -> Any:
    """The data of a YAML text; a `yaml.YAMLError` if it is not plain YAML."""
    if len(text) > _LONGEST:
        raise yaml.YAMLError(f"it has {counted(len(text), 'character', ',')}, more than {_LONGEST:,}")
    try:
        return yaml.load(text, _PlainLoader)  # a SafeLoader
    except (RecursionError, ValueError, AttributeError) as error:  # too deep, or an impossible date
        raise yaml.YAMLError(f"it cannot be read: {error}") from None


def load_front_matter(text: str) -> Any:
    """The metadata of a Markdown text, between lines of `---`, if any. Raises a `yaml.YAMLError` unless plain YAML."""
    first, *lines = text.lstrip().splitlines() or [""]
    if first.rstrip() != "---":
        return None
    # Not the next line: huggingface_hub takes at least one line for metadata.
    end = next((number for number, line in enumerate(lines) if number and line.rstrip() == "---"), None)
    if end is None:
        raise yaml.YAMLError("its metadata, which begin with a line ---, do not end with one")
    return load_plain_yaml("\n".join(lines[:end]))
