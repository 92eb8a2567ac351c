"""Numbers with their nouns, and durations, as text."""


def counted(number: float, noun: str, form: str = "") -> str:
    """A number with a regular noun, such as "1 update" or "2 updates"; the format `","` gives 1,500."""
    return f"{number:{form}} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of a regular noun."""
    if noun.endswith("y"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "nch", "tch", "sh")) else f"{noun}s"


def singular(noun: str) -> str:
    """The singular of a regular plural in -s."""
    return noun.removesuffix("s")


def agreeing(number: int, singular: str, plural: str) -> str:
    """The verb that agrees with a number."""
    return singular if number == 1 else plural


def times(number: int) -> str:
    """A number of repetitions: "once", "2 times"."""
    return "once" if number == 1 else f"{number} times"


def duration(seconds: float) -> str:
    """A duration to three digits in a suitable unit: "43.2 s", "29.3 min", "2.5 h"."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    hours = seconds / 3600
    return f"{hours:.3g} h" if hours < 999.5 else f"{hours:,.0f} h"
