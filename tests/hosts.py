"""Which versions are tested: those of constraints-oldest.txt lack some of what newer ones have."""

from importlib.metadata import version


def at_least(package, major, minor):
    return tuple(map(int, version(package).split(".")[:2])) >= (major, minor)


HAS_GREEDY = at_least("transformers", 5, 4)
