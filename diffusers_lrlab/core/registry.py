"""Registries of everything that is chosen by name. A new entry is one decorated function.

Choices on the command line, error texts, tables in the docs and parametrised tests are derived from the entries.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .errors import LabError, did_you_mean, must_be, shown
from .plugins import call_registered, failures_located, load_installed_plugins, note_registered, where
from .values import Parameter, checked

__all__ = ["Entry", "Parameter", "Registry"]


@dataclass(frozen=True)
class Entry:
    """A registered name and its description."""

    name: str
    factory: Any  # the registered function or class, or its "module:name"
    description: str  # one line
    source: str  # the paper, equation or class it comes from
    parameters: tuple[Parameter, ...]  # its own
    common: tuple[Parameter, ...]  # shared by all entries of the registry
    traits: frozenset[str]  # out of those of the registry
    facts: Mapping[str, Any]  # figures, such as an optimizer's state in bytes
    is_foreign: bool  # registered by other code than this package's
    registry: "Registry" = field(repr=False, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        Calls the factory, and returns its value as the registry's `returns` gives it.

        Raises a `LabError` that names the function, its file and line, if it fails or returns an unusable value.
        """
        registry = self.registry
        return call_registered(registry.noun, self.name, self.function, registry.returns, registry.hint, args, kwargs)

    @cached_property
    def function(self) -> Any:
        """The factory, imported if it is registered as "module:name"."""
        if not isinstance(self.factory, str):
            return self.factory
        if not self.is_foreign:
            return pkgutil.resolve_name(self.factory)
        with failures_located(f"The import of {self.factory!r} for {self.title[0].lower()}{self.title[1:]}"):
            return pkgutil.resolve_name(self.factory)

    @property
    def title(self) -> str:
        """Its name in errors."""
        return f"The {self.registry.noun} {self.name!r}"

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
        given = {name: each.check(kwargs.get(name, each.default), repr(self.name)) for name, each in known.items()}
        for name, parameter in known.items():
            value, other = given.get(name), parameter.same_as or parameter.instead_of
            if value == parameter.default and parameter.same_as is None:
                if parameter.is_added or other is not None:
                    del given[name]
                continue
            if parameter.only_with and given[parameter.only_with[0]] != parameter.only_with[1]:
                beside, needed = parameter.only_with
                raise LabError(
                    f"{self.name!r} got {name}={value!r}, which has no effect with {beside}={given[beside]!r}; it needs "
                    f"{beside}={needed!r}. Drop one."
                )
            if other is not None and name in kwargs and value is not None and kwargs.get(other) is not None:
                why = "two names of the same parameter" if parameter.same_as else "of which one replaces the other"
                raise LabError(f"{self.name!r} got {name}={value!r} and {other}={kwargs[other]!r}, {why}. Drop one.")
            if parameter.same_as is not None:
                given[parameter.same_as] = given[parameter.same_as] if value is None else value
                del given[name]
            elif other is not None:
                given.pop(other, None)
        return given

    def replacing(self, name: str) -> list[str]:
        """The parameters that replace another one if they are given."""
        return [parameter.name for parameter in (*self.parameters, *self.common) if parameter.instead_of == name]


class Registry(dict[str, Entry]):
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
                if super(Registry, self).__contains__(taken) or taken in self._aliases:
                    raise LabError(f"The {self.noun} {taken!r} is already registered; choose another name.")
            is_foreign = note_registered(self.noun, name, factory)
            for parameter in parameters if is_foreign else ():
                parameter.check_fields()
            own = {parameter.name for parameter in parameters}
            common = tuple(p for p in self.common if p.name not in own and p.name not in without)
            about = (description, source, parameters, common, frozenset(traits), facts or {}, is_foreign)
            self[name] = Entry(name, factory, *about, self)
            self._aliases.update(dict.fromkeys(aliases, name))
            return factory

        return decorator

    @property
    def aliases(self) -> dict[str, str]:
        """Alternative names, with the names they stand for."""
        return dict(self._aliases)

    def aliases_of(self, entry: Entry) -> list[str]:
        return [alias for alias, name in self._aliases.items() if name == entry.name]

    def __getitem__(self, name: str) -> Entry:
        if name not in self:  # not a KeyError, whose text Python shows quoted and escaped
            known = sorted([*self, *self._aliases])
            hint = did_you_mean(str(name), known)
            own = "" if hint else " For a name of your own, import the code that registers it: --import FILE_OR_MODULE."
            raise LabError(f"Unknown {self.noun} {shown(str(name))}.{hint} Known: {', '.join(known)}.{own}")
        return super().__getitem__(self._aliases.get(name, name))

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name) and name not in self._aliases:
            load_installed_plugins()  # which may have it
        return super().__contains__(name) or name in self._aliases
