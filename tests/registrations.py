"""Names that a test registers, and what it removes, undone."""

import contextlib


@contextlib.contextmanager
def restored(*mappings):
    """Restores the items of registries and other dictionaries, with their order and aliases, when the block ends."""
    aliases = [mapping._aliases for mapping in mappings if hasattr(mapping, "_aliases")]
    held = [(mapping, dict(mapping)) for mapping in (*mappings, *aliases)]
    try:
        yield
    finally:
        for mapping, before in held:
            mapping.clear()
            mapping.update(before)
