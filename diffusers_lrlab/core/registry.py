"""Registries of everything that is chosen by name. A new entry is one decorated function.

Choices on the command line, error texts, tables in the docs and parametrised tests are derived from the entries.
"""

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .errors import FAILURES, LabError, did_you_mean, located, must_be, shortened
from .plugins import load_installed_plugins
from .ranges import Parameter
from .registered import call_registered, note_registered, where
from .signatures import checked

__all__ = ["Entry", "Parameter", "Registry", "markdown_table", "restored"]


@dataclass(frozen=True)
class Entry:
    """A registered name and its description."""

    name: str
    factory: Any  # the registered function or class, or its "module:name"
    description: str  # one line
    source: str  # the paper, equation or class it comes from
    parameters: tuple[Parameter, ...] = ()  # its own
    common: tuple[Parameter, ...] = ()  # shared by all entries of the registry
    traits: frozenset[str] = frozenset()  # out of those of the registry
    facts: Mapping[str, Any] = field(default_factory=dict)  # figures, such as an optimizer's state in bytes
    module: str | None = None  # of the factory
    registry: "Registry | None" = field(default=None, repr=False, compare=False)
    is_foreign: bool = False  # registered by other code than this package's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        Calls the factory, and returns its value as the registry's `returns` gives it.

        Raises a `LabError` that names the function, its file and line, if it fails or returns an unusable value.
        """
        registry = self.registry
        assert registry is not None
        return call_registered(registry.noun, self.name, self.function, registry.returns, registry.hint, args, kwargs)

    @cached_property
    def function(self) -> Any:
        """The factory, imported if it is registered as "module:name"."""
        if not isinstance(self.factory, str):
            return self.factory
        try:
            return pkgutil.resolve_name(self.factory)
        except (ImportError, AttributeError, ValueError) as error:
            if not self.is_foreign:
                raise
            raise LabError(f"{self.title} is registered as {self.factory!r}, which cannot be imported: {error}") from error
        except FAILURES as error:
            if not self.is_foreign:
                raise
            raise located(error, f"The import of {self.factory!r} for {self.title[0].lower()}{self.title[1:]}") from error

    @property
    def title(self) -> str:
        """Its name in errors."""
        return f"The {self.registry.noun if self.registry else 'entry'} {self.name!r}"

    @property
    def where(self) -> str:
        """The sentence " It is at FILE:LINE." for a foreign function; an empty string for those of this package."""
        return where(self.function) if self.is_foreign else ""

    def resolve(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All keyword arguments with their values; unknown ones and values out of range are errors."""
        known = {parameter.name: parameter for parameter in (*self.parameters, *self.common)}
        for key in kwargs:
            if key not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
                raise LabError(f"{self.name!r} does not take {key!r}: {takes}.{did_you_mean(key, known)}")
        given = {
            name: parameter.check(kwargs.get(name, parameter.default), repr(self.name)) for name, parameter in known.items()
        }
        self._drop_replaced(given, kwargs)
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
                        f"{self.name!r} got {parameter.name}={value!r} and "
                        f"{parameter.same_as}={kwargs[parameter.same_as]!r}, two names of the same parameter. Drop one."
                    )
                given[parameter.same_as] = given[parameter.same_as] if value is None else value
        return given

    def replacing(self, name: str) -> list[str]:
        """The parameters that replace another one if they are given."""
        return [parameter.name for parameter in (*self.parameters, *self.common) if parameter.instead_of == name]

    def _drop_replaced(self, given: dict[str, Any], kwargs: Mapping[str, Any]) -> None:
        """Leaves out parameters that others replace, and those that are resolved only if they are given."""
        for parameter in (*self.parameters, *self.common):
            if not parameter.is_added and parameter.instead_of is None:
                continue
            if given[parameter.name] == parameter.default:
                del given[parameter.name]
            elif (other := parameter.instead_of) is not None:
                if kwargs.get(other) is not None:
                    raise LabError(
                        f"{self.name!r} got {parameter.name}={given[parameter.name]!r} and {other}={kwargs[other]!r}, of "
                        "which one replaces the other. Drop one."
                    )
                given.pop(other, None)


class Registry(Mapping[str, Entry]):
    """
    Names to entries, in the order of registration.

    `common` are keyword arguments that every entry takes unless it opts out; `traits` are properties of entries that the lab
    acts on, with their meanings; `shown_facts` are columns of the tables, with their headings. `returns(value, *args)`
    converts the value that an entry returned for `args`, or raises [`Unusable`]; `hint` is a remedy for entries that fail.
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
        A decorator that registers a function under a new `name`.

        A parameter with the name of a common one replaces it; `without` names common ones that do not apply. `traits` are
        out of those of the registry.
        """
        for trait in traits:
            if trait not in self.traits:
                wanted = f"one of {', '.join(map(repr, self.traits))}" if self.traits else "left out: there are none"
                hint = did_you_mean(trait, self.traits).strip() or "the table of traits in the docs has their meanings"
                raise must_be("trait", trait, wanted, hint, of=f"the {self.noun} {name!r}")

        def decorator(factory: Any) -> Any:
            for taken in (name, *aliases):
                if not taken.isidentifier():
                    raise must_be(f"the {self.noun}", taken, "a Python identifier", "use letters, digits and _")
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
        """Undoes registrations and removals when the block ends."""
        with restored(self._entries, self._aliases):
            yield

    @property
    def aliases(self) -> dict[str, str]:
        """Alternative names, with the names they stand for."""
        return dict(self._aliases)

    def aliases_of(self, entry: Entry) -> list[str]:
        return [alias for alias, name in self._aliases.items() if name == entry.name]

    def __getitem__(self, name: str) -> Entry:
        # Not a KeyError, whose text Python shows quoted and escaped.
        if name not in self:
            known = sorted([*self, *self._aliases])
            hint = did_you_mean(str(name), known)
            own = "" if hint else " For a name of your own, import the code that registers it: --import FILE_OR_MODULE."
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
            arguments = "<br>".join(f"`{p.name}` ({p.shown_default}; {p.allowed}): {p.help}" for p in entry.parameters)
            facts = [str(entry.facts.get(fact, "–")) for fact in self.shown_facts]
            cells.append((names, entry.description, *facts, arguments or "–", entry.source))
        return markdown_table(headings, cells)

    def common_table(self) -> str:
        cells = [(f"`{p.name}`", p.shown_default, p.allowed, p.help) for p in self.common]
        return markdown_table(("argument", "default", "allowed", "what it does"), cells)


@contextmanager
def restored(*mappings: dict[Any, Any]) -> Iterator[None]:
    """Restores the items of dictionaries, and their order, when the block ends."""
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
