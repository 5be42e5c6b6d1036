"""Do something once a package has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def after_import(package: str, action: Callable[[], None]) -> None:
    """Call `action()` when the package has been imported: now, if it already is."""
    if package in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(package, action))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the package as the other finders do, and adds the action to its loading."""

    def __init__(self, package: str, action: Callable[[], None]) -> None:
        self.package, self.action = package, action

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.package:
            return None
        sys.meta_path.remove(self)  # so that the others find it
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)  # not everybody who looks for a package goes on to import it
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            load(module)
            self.action()

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec
