"""`@on_ranks(4)`: the body of a test runs on so many workers of the pool."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable
from functools import wraps
from importlib.machinery import SourceFileLoader
from operator import attrgetter
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from tests.support.pool import TIMEOUT_S


def on_ranks(
    ranks: int | str, timeout_s: float = TIMEOUT_S, fixture: str = "pools"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on `ranks` workers with an initialised process group, each with the same arguments.

    `ranks`: their number, or the parameter of the test that holds it, such as "ranks" or "case.ranks". `fixture`: the
    pools that they come from, see `conftest`.

    Parameters and fixtures travel to the workers: they must be picklable. What fails on any rank fails the test.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @wraps(body)
        def test(**arguments: Any) -> None:
            pools = arguments.pop(fixture)
            number = ranks if isinstance(ranks, int) else attrgetter(ranks)(SimpleNamespace(**arguments))
            # Pickled here: a queue would only print that it could not.
            pools(number).run(_Body(body), pickle.dumps(arguments), timeout_s=timeout_s)

        own = inspect.signature(body)
        pools = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = own.replace(parameters=[pools, *own.parameters.values()])  # pyright: ignore[reportAttributeAccessIssue]
        return test

    return decorate


class _Body:
    """A test's body, by name: in its module stands the test that pytest runs."""

    def __init__(self, body: Callable[..., None]):
        self.module, self.__name__ = body.__module__, body.__name__

    def __call__(self, arguments: bytes) -> None:
        body = inspect.unwrap(getattr(_module(self.module), self.__name__))
        body(**pickle.loads(arguments))


def _module(name: str) -> ModuleType:
    """The module of a test, imported with assertions that say what they compared, as pytest does it."""
    if name not in sys.modules:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, name
        spec = importlib.util.spec_from_loader(name, _Explaining(name, found.origin), origin=found.origin)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


class _Explaining(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        from _pytest.assertion.rewrite import rewrite_asserts

        source = self.get_data(self.path)
        tree = ast.parse(source)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)
