"""`AfterImport`: a function is called once a module is imported, whatever the program asks of it before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvprof_kit._instrument.torch_compat import AfterImport


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "a_module_to_wait_for.py"
    path.write_text("value = 1\n")
    importlib.invalidate_caches()
    before = list(sys.meta_path)
    yield path
    sys.meta_path[:] = before
    sys.modules.pop(path.stem, None)


def waiting(name: str) -> list[str]:
    called: list[str] = []
    sys.meta_path.insert(0, AfterImport(name, lambda found: called.append(found.__name__)))
    return called


def test_a_question_whether_it_is_there_is_no_import(module: Path) -> None:
    """As `datasets` and `transformers` ask for torch before anything imports it."""
    finders = len(sys.meta_path)
    first, second = waiting(module.stem), waiting(module.stem)
    assert importlib.util.find_spec(module.stem) is not None
    assert first == second == []
    assert importlib.import_module(module.stem).value == 1
    importlib.reload(sys.modules[module.stem])
    assert first == second == [module.stem]
    assert len(sys.meta_path) == finders


def test_an_import_that_fails_is_waited_for_again(module: Path) -> None:
    called = waiting(module.stem)
    module.write_text("raise ImportError('not yet')\n")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(module.stem)
    assert called == []
    module.write_text("value = 'then it can be imported'\n")
    importlib.invalidate_caches()
    assert importlib.import_module(module.stem).value and called == [module.stem]
