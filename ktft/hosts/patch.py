"""What a patch of another library is: a row that says which name is replaced, by what and why, and a record of what is.

Rows name their owner and their wrapper by dotted path and are resolved when they are installed. So this room imports
nothing but versions, and every other room may import it.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ktft.versions import TESTED_SERVERS, TESTED_VERSIONS, is_at_least, pip_install, version_of

_ABSENT = object()
_installed: dict[Patch, tuple[Any, Any]] = {}  # in the order of installing: the owner, and what it had
_lock = threading.Lock()


@dataclass(frozen=True)
class Patch:
    """One name of another library that ktft replaces.

    Attributes:
        owner: dotted path of the module or class that has the name; `*` stands for what differs by model.
        name: the attribute.
        wrapper: `module:function` of ktft. For a function or method it is called as `wrapper(original, *arguments)`
            in its place. For a list it is called once, as `wrapper(elements)`, and returns the new elements.
        why: what the patch is for, and which extension point of the library cannot do it.
        on_instances: the code at `wrapper` gives the attribute to single objects by `put`. All other rows change their
            owner for the whole process.
        since: the first version of the library that has the name and needs the patch; None for every tested version.
    """

    owner: str
    name: str
    wrapper: str
    why: str
    on_instances: bool = False
    since: str | None = None

    @property
    def package(self) -> str:
        """The library."""
        return self.owner.partition(".")[0]

    @property
    def tested(self) -> dict[str, tuple[str, str]]:
        """Distribution -> the lowest version that the row was tested with, and the first that is too new."""
        every = TESTED_VERSIONS | TESTED_SERVERS
        mine = {name: tested for name, tested in every.items() if name.partition("-")[0] == self.package}
        return {name: (self.since or low, high) for name, (low, high) in mine.items()}

    @property
    def tested_versions(self) -> str:
        """`tested`, for a reader."""
        return ", ".join(f"{name} {low} to below {high}" for name, (low, high) in self.tested.items())

    @property
    def needed(self) -> bool:
        """Whether the installed version of the library is one that the row is for."""
        installed = version_of(self.package)
        return self.since is None or installed is None or is_at_least(installed, self.since)

    def find_owner(self) -> Any:
        """Import the module, or take the class from it.

        Raises:
            ValueError: the installed version has no such module or class, or the owner lacks the name; the message has
                the version and the command that installs one with it.
        """
        try:
            owner = _resolve(self.owner)
        except AttributeError as error:
            raise ValueError(self._lacks()) from error
        if not _has(owner, self.name):
            raise ValueError(self._lacks())
        return owner

    def find_wrapper(self) -> Any:
        """Import the function of ktft."""
        module, _, function = self.wrapper.partition(":")
        return getattr(importlib.import_module(module), function)

    def put(self, instance: Any, value: Any) -> None:
        """Give one object another value. A list keeps its identity and gets other elements, for others hold it too.

        Raises:
            ValueError: the object has no such attribute; the message has the version and the cure.
        """
        if not hasattr(instance, self.name):
            raise ValueError(self._lacks())
        if isinstance(value, list):
            getattr(instance, self.name)[:] = value
        else:
            setattr(instance, self.name, value)

    def take_off(self, instance: Any) -> None:
        """Let an object have its class's own method again."""
        delattr(instance, self.name)

    def _lacks(self) -> str:
        """The message for a person whose version of the library ktft does not know."""
        name = next(filter(version_of, self.tested), self.package)
        low, high = self.tested[name]
        return (
            f"{name} {version_of(name) or '(not installed)'} has no {self.owner}.{self.name}, which ktft replaces. "
            f"{self.why} ktft was tested with {name} {low} to below {high}; run: {pip_install(name)}"
        )


def install(patches: Iterable[Patch]) -> None:
    """Change the owners of these rows, all or none, but for rows that are in force or that this version has no need of.

    Raises:
        ValueError: an owner lacks its name; see `Patch.find_owner`.
    """
    if missing := [patch for patch in patches if patch not in _installed and patch.needed]:
        found = [(patch, patch.find_owner(), patch.find_wrapper()) for patch in missing]
        with _lock:
            for patch, owner, wrapper in found:
                if patch not in _installed:
                    _installed[patch] = owner, _replace(owner, patch.name, wrapper)


def undo() -> list[Patch]:
    """Give every owner back what it had. Returns the rows, so that `install` can put them in force again.

    Single objects keep what they got: they are models and Trainers, which a process can throw away.
    """
    with _lock:
        undone = list(_installed)
        for patch in reversed(undone):
            owner, held = _installed.pop(patch)
            _restore(owner, patch.name, held)
    return undone


def installed() -> list[Patch]:
    """The rows that are in force for the process, in the order in which they were installed."""
    return list(_installed)


def _replace(owner: Any, name: str, wrapper: Any) -> Any:
    """Returns what the owner itself had, for `_restore`."""
    held = vars(owner).get(name, _ABSENT)
    if isinstance(held, list):
        before = list(held)
        held[:] = wrapper(before)
        return before
    kind = type(held) if isinstance(held, staticmethod | classmethod) else None
    original = held.__func__ if isinstance(held, staticmethod | classmethod) else getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, replacement if kind is None else kind(replacement))
    return held


def _restore(owner: Any, name: str, held: Any) -> None:
    if held is _ABSENT:
        delattr(owner, name)
    elif isinstance(held, list):
        vars(owner)[name][:] = held
    else:
        setattr(owner, name, held)


def _resolve(path: str) -> Any:
    """The object at a dotted path, of which a beginning is a module. Raises AttributeError if there is none."""
    names = path.split(".")
    for count in range(len(names), 0, -1):
        module = ".".join(names[:count])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, and something that it imports is not
        else:
            return functools.reduce(getattr, names[count:], found)
    raise AttributeError(path)


def _has(owner: Any, name: str) -> bool:
    """Whether a module or class has the name, or its objects have it once they are made."""
    made_with = getattr(getattr(owner, "__init__", None), "__code__", None)
    return hasattr(owner, name) or (made_with is not None and name in made_with.co_names)
