"""Stands in for SGLang's kernel package where there is no GPU: every name is there, and raises when it is called."""

from __future__ import annotations

from typing import Any

__version__ = "0.0.0+no.gpu"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError(f"the kernel {name} needs a GPU")

    kernel.__name__ = name
    return kernel
