"""PyPI's torchvision beside torch's CPU build: its compiled operators do not load, and its import asks for two of them.

Declares their schemas just before torchvision is imported. `torchvision_ops.pth` imports this at every start of Python.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

_declared: list[Any] = []
"""torch drops a library that nobody holds."""


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _declared.append(library)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
