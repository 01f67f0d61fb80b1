"""Stands in for triton where there is no GPU: kernels can be defined, and raise when they are launched.

Any submodule can be imported; names that begin with a capital are classes, all others modules that pass through what
they decorate.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

__version__ = "3.5.0"
__path__: list[str] = []


class _Kernel:
    def __init__(self, function: Any) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", __name__)

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError(f"the triton kernel {self.__name__} needs a GPU")


def jit(function: Any = None, **named: Any) -> Any:
    return _Kernel if function is None else _Kernel(function)


def autotune(*arguments: Any, **named: Any) -> Callable[[Any], Any]:
    return lambda decorated: decorated


heuristics = autotune


def cdiv(dividend: int, divisor: int) -> int:
    return -(dividend // -divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 1


class Config:
    def __init__(self, kwargs: Any = None, *arguments: Any, **named: Any) -> None:
        self.kwargs = kwargs or {}


class _Anything(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[0].isupper():
            value = type(name, (), {"__init__": lambda self, *arguments, **named: None})
        else:
            full = f"{self.__name__}.{name}"
            value = sys.modules.get(full) or _Anything(full)
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not named:
            return arguments[0]
        return lambda decorated: decorated


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("triton."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"triton.{name}")
