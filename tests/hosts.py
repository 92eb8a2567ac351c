"""Which versions are tested: the oldest lack some of what newer ones have."""

from importlib.metadata import PackageNotFoundError, version


def at_least(package, major=0, minor=0):
    try:
        return tuple(map(int, version(package).split(".")[:2])) >= (major, minor)
    except PackageNotFoundError:
        return False


# Schedules, samplers, audit and launcher are tested with older versions, too, and without what only training needs.
HAS_TRAINING = at_least("torch", 2, 11) and at_least("diffusers", 0, 35) and at_least("datasets")
HAS_GREEDY = at_least("transformers", 5, 4)
