"""What an object holds, as plain values: for comparing two gateways with each other."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

from pydantic import BaseModel

_PLAIN = (str, int, float, bytes, bool, type(None))
_MAPPINGS = (dict, OrderedDict)
_SEQUENCES = (list, tuple, deque)


class Holdings:
    """Flattens everything that can be reached from an object, by path. `ignored` are attributes that may differ."""

    def __init__(self, ignored: frozenset[str]) -> None:
        self._ignored = ignored
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no id is used twice
        self.found: dict[str, Any] = {}

    def add(self, value: Any, path: str) -> "Holdings":
        """What is reached by several paths is described where it is found first."""
        if isinstance(value, (*_PLAIN, type)):
            self.found[path] = value
        elif isinstance(value, BaseModel):
            self.found[path] = value.model_dump()
        elif id(value) in self._seen:
            self.found[path] = f"as {self._seen[id(value)]}"
        else:
            self._seen[id(value)] = path
            self._kept.append(value)
            self._add_parts(value, path)
        return self

    def _add_parts(self, value: Any, path: str) -> None:
        self.found[path] = type(value).__qualname__
        if isinstance(value, (set, frozenset)):
            self.found[path] = (
                sorted(map(repr, value)) if all(isinstance(each, _PLAIN) for each in value) else len(value)
            )
        elif isinstance(value, _MAPPINGS):
            for number, (key, part) in enumerate(value.items()):
                name = key if isinstance(key, (*_PLAIN, tuple)) else number
                self.add(part, f"{path}[{name!r}]")
        elif isinstance(value, _SEQUENCES):
            for number, part in enumerate(value):
                self.add(part, f"{path}[{number}]")
        elif isinstance(value, partial):
            self.add(value.func, f"{path}.func")
            self.add([*value.args, value.keywords], f"{path}.arguments")
        elif isinstance(value, MethodType):
            self.found[path] = value.__func__.__name__
            self.add(value.__self__, f"{path}.self")
        elif isinstance(value, Callable) and hasattr(value, "__name__"):  # type: ignore[arg-type]
            self.found[path] = value.__name__
        elif type(value).__module__.startswith("gateway."):
            for name in attributes_of(value):
                if name not in self._ignored and hasattr(value, name):
                    self.add(getattr(value, name), f"{path}.{name}")


def attributes_of(value: Any) -> Iterator[str]:
    """The names of an object's own attributes, compiled or not."""
    slots = [getattr(each, "__slots__", ()) for each in type(value).__mro__]
    compiled = [getattr(each, "__mypyc_attrs__", ()) for each in type(value).__mro__]
    named = chain(*([each] if isinstance(each, str) else each for each in (*slots, *compiled)))
    own = getattr(value, "__dict__", {})
    return (name for name in dict.fromkeys((*named, *own)) if not name.startswith("__"))
