"""One registry for everything that is chosen by name: a decorated function is the only place to touch.

Choices of the command line, error texts, tables of the README and parametrised tests are derived from the entries.
"""

import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .errors import LabError, did_you_mean, must_be, shortened
from .plugins import load_installed_plugins
from .ranges import Range
from .registered import call_registered, note_registered, where
from .signatures import checked


@checked
@dataclass(frozen=True)
class Parameter:
    """One keyword argument of a registered entry."""

    name: str
    kind: type  # int, float, bool, str or list; an int is accepted for a float, never the reverse
    default: Any  # None means "derived from the run", as `help` explains
    help: str  # with its unit
    range: str | None = None  # allowed values (of a list: of its items), such as "(0, 1]" or "[1, inf)"
    choices: tuple[Any, ...] | None = None
    items: type = float  # of a list
    same_as: str | None = None  # the common parameter that this is another name for
    only_with: tuple[str, Any] | None = None  # another parameter, and the value it must have for this one to have an effect

    def __post_init__(self) -> None:
        _ = self.interval  # which refuses what is none

    @cached_property
    def interval(self) -> Range | None:
        """`range` as one of numbers."""
        return None if self.range is None else Range(self.range)

    @property
    def allowed(self) -> str:
        """The allowed values in words, for error texts and tables."""
        if self.choices is not None:
            return "one of " + ", ".join(map(repr, self.choices))
        wanted = self.kind.__name__ if self.kind is not list else f"list of {self.items.__name__}"
        return f"{wanted} in {self.range}" if self.range else wanted

    def check(self, value: Any, owner: str) -> Any:
        """`value` as `kind`; a `LabError` that names the range if it is not allowed."""
        if value is None and self.default is None:
            return None
        if self.kind is list:
            fits = isinstance(value, (list, tuple)) and all(self._fits(item, self.items) for item in value)
        else:
            fits = self._fits(value, self.kind)
        if not fits:
            article = "" if self.choices is not None else f"a{'n' * (self.kind is int)} "
            raise must_be(self.name, value, article + self.allowed, self.help, of=owner)
        return [self.items(item) for item in value] if self.kind is list else self.kind(value)

    def _fits(self, value: Any, wanted: type) -> bool:
        if wanted in (str, bool):
            is_right = isinstance(value, wanted)
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        else:
            # A float of that size would be another number, and no count of updates comes near it.
            exact = abs(value) < 2**53 or (isinstance(value, float) and wanted is float)
            is_right = exact and (wanted is float or float(value).is_integer())
        return is_right and self._contains(value)

    def _contains(self, value: Any) -> bool:
        if self.choices is not None:
            return value in self.choices
        if self.interval is not None:
            return value in self.interval
        return not (isinstance(value, float) and math.isnan(value))


@dataclass(frozen=True)
class Entry:
    """What the lab knows about one registered name."""

    name: str
    factory: Any  # what is registered; its form depends on the registry
    description: str  # one line
    source: str  # the paper, equation or class it comes from
    parameters: tuple[Parameter, ...] = ()  # its own
    common: tuple[Parameter, ...] = ()  # those that it shares with the rest of the registry
    traits: frozenset[str] = frozenset()  # some of the registry's
    facts: Mapping[str, Any] = field(default_factory=dict)  # figures, such as an optimizer's state in bytes
    module: str | None = None  # that of the factory, where it has one
    registry: "Registry | None" = field(default=None, repr=False, compare=False)
    is_foreign: bool = False  # registered by other code than this package's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        The value of the factory, as the registry's `returns` gives it. All callers of a registered function use this.

        Raises a `LabError` that names the function, its file and line, if it fails or returns what cannot be used.
        """
        registry = self.registry
        assert registry is not None
        return call_registered(registry.noun, self.name, self.function, registry.returns, registry.hint, args, kwargs)

    @cached_property
    def function(self) -> Any:
        """The factory; if it is registered as "module:name", what that stands for."""
        if not isinstance(self.factory, str):
            return self.factory
        try:
            return pkgutil.resolve_name(self.factory)
        except (ImportError, AttributeError, ValueError) as error:
            if not self.is_foreign:
                raise
            raise LabError(f"{self.title} is registered as {self.factory!r}, which cannot be imported: {error}") from error

    @property
    def title(self) -> str:
        """How errors call it."""
        return f"The {self.registry.noun if self.registry else 'entry'} {self.name!r}"

    @property
    def where(self) -> str:
        """The sentence " It is at FILE:LINE." for a foreign function; an empty string for those of this package."""
        return where(self.function) if self.is_foreign else ""

    def resolve(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All keyword arguments with their values, checked: unknown ones and values out of range are errors."""
        known = {parameter.name: parameter for parameter in (*self.parameters, *self.common)}
        for key in kwargs:
            if key not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
                raise LabError(f"{self.name!r} does not take {key!r}: {takes}.{did_you_mean(key, known)}")
        given = {
            name: parameter.check(kwargs.get(name, parameter.default), repr(self.name)) for name, parameter in known.items()
        }
        for parameter in self.parameters:
            if parameter.only_with and given[parameter.name] != parameter.default:
                other, needed = parameter.only_with
                if given[other] != needed:
                    raise LabError(
                        f"{self.name!r} got {parameter.name}={given[parameter.name]!r}, which has no effect with "
                        f"{other}={given[other]!r}; it needs {other}={needed!r}. Drop one."
                    )
            if parameter.same_as is not None:
                value = given.pop(parameter.name)
                if value is not None and parameter.name in kwargs and kwargs.get(parameter.same_as) is not None:
                    raise LabError(
                        f"{self.name!r} got {parameter.name}={value!r} and {parameter.same_as}="
                        f"{kwargs[parameter.same_as]!r}, two names of one thing. Drop one."
                    )
                given[parameter.same_as] = given[parameter.same_as] if value is None else value
        return given


class Registry(Mapping[str, Entry]):
    """Names to entries, in the order of registration.

    Args:
        noun (`str`): What is registered, in the words of an error text: "learning-rate schedule".
        common (`tuple` of [`Parameter`], *optional*): Keyword arguments that every entry takes unless it opts out.
        traits (`dict`, *optional*): The properties of entries that the lab acts on, and their meanings; others are refused.
        shown_facts (`dict`, *optional*): Facts that the tables show, and the headings of their columns.
        returns (`Callable`, *optional*): `returns(value, *args)` gives what is used of the value of an entry, called with
            the positional arguments `args`, or raises [`Unusable`].
        hint (`str`): A remedy for entries that fail.
    """

    def __init__(
        self,
        noun: str,
        common: tuple[Parameter, ...] = (),
        traits: Mapping[str, str] | None = None,
        shown_facts: Mapping[str, str] | None = None,
        returns: Callable[..., Any] | None = None,
        hint: str = "",
    ):
        self.noun, self.common, self.traits, self.shown_facts = noun, common, dict(traits or {}), dict(shown_facts or {})
        self.returns, self.hint = returns, hint
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}

    @checked
    def register(
        self,
        name: str,
        *,
        description: str,
        source: str,
        parameters: tuple[Parameter, ...] = (),
        without: tuple[str, ...] = (),
        traits: tuple[str, ...] = (),
        facts: Mapping[str, Any] | None = None,
        aliases: tuple[str, ...] = (),
    ) -> Callable[[Any], Any]:
        """
        A decorator that registers a function under `name`; a name can be taken only once.

        A parameter that has the name of a common one takes its place; `without` names common ones that do not apply.
        `traits` are some of the registry's.
        """
        for trait in traits:
            if trait not in self.traits:
                wanted = f"one of {', '.join(map(repr, self.traits))}" if self.traits else "left out: there are none"
                hint = did_you_mean(trait, self.traits).strip() or "the table of traits in the docs has their meanings"
                raise must_be("trait", trait, wanted, hint, of=f"the {self.noun} {name!r}")

        def decorator(factory: Any) -> Any:
            for taken in (name, *aliases):
                if not taken.isidentifier():
                    raise LabError(f"The {self.noun} {taken!r} could not be typed; use letters, digits and _ in its name.")
                if self._has(taken):
                    raise LabError(f"The {self.noun} {taken!r} is already registered; choose another name.")
            own = {parameter.name for parameter in parameters}
            common = tuple(p for p in self.common if p.name not in own and p.name not in without)
            module, is_foreign = getattr(factory, "__module__", None), note_registered(self.noun, name, factory)
            about = (description, source, parameters, common, frozenset(traits), facts or {}, module)
            self._entries[name] = Entry(name, factory, *about, self, is_foreign)
            self._aliases.update(dict.fromkeys(aliases, name))
            return factory

        return decorator

    @contextmanager
    def temporarily(self) -> Iterator[None]:
        """Names that this block registers or takes away are as before when it ends."""
        with restored(self._entries, self._aliases):
            yield

    @property
    def aliases(self) -> dict[str, str]:
        """Other names, and the names they stand for."""
        return dict(self._aliases)

    def aliases_of(self, entry: Entry) -> list[str]:
        return [alias for alias, name in self._aliases.items() if name == entry.name]

    def __getitem__(self, name: str) -> Entry:
        # Not a KeyError: its text is shown quoted and escaped, and these texts are for people.
        if name not in self:
            known = sorted([*self, *self._aliases])
            hint = did_you_mean(str(name), known)
            own = "" if hint else " One of your own needs the code that registers it: --import FILE_OR_MODULE."
            raise LabError(f"Unknown {self.noun} {shortened(str(name))}.{hint} Known: {', '.join(known)}.{own}")
        return self._entries[self._aliases.get(name, name)]

    def __contains__(self, name: object) -> bool:
        if not self._has(name):
            load_installed_plugins()  # which may have it
        return self._has(name)

    def _has(self, name: object) -> bool:
        return name in self._entries or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def table(self) -> str:
        headings = ["name", "what it does", *self.shown_facts.values(), "arguments (default; allowed)", "source"]
        cells = []
        for entry in self.values():
            names = ", ".join(f"`{name}`" for name in (entry.name, *self.aliases_of(entry)))
            arguments = "<br>".join(f"`{p.name}` ({_default(p)}; {p.allowed}): {p.help}" for p in entry.parameters)
            facts = [str(entry.facts.get(fact, "–")) for fact in self.shown_facts]
            cells.append((names, entry.description, *facts, arguments or "–", entry.source))
        return markdown_table(headings, cells)

    def common_table(self) -> str:
        cells = [(f"`{p.name}`", _default(p), p.allowed, p.help) for p in self.common]
        return markdown_table(("argument", "default", "allowed", "what it does"), cells)


@contextmanager
def restored(*mappings: dict[Any, Any]) -> Iterator[None]:
    """Dictionaries hold what they held when this block ends, in the same order."""
    held = [dict(mapping) for mapping in mappings]
    try:
        yield
    finally:
        for mapping, before in zip(mappings, held, strict=True):
            mapping.clear()
            mapping.update(before)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], num_labels: int | None = None) -> str:
    """A table of escaped text; columns after the first `num_labels` are aligned to the right."""
    left = len(headings) if num_labels is None else num_labels
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    alignment = "|---" * left + "|---:" * (len(headings) - left) + "|"
    return "\n".join([f"| {' | '.join(headings)} |", alignment, *lines])


def _default(parameter: Parameter) -> str:
    if parameter.default is None:
        return "derived" if "derived" in parameter.help else "none"
    return repr(list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default)
