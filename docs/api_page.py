"""The sections of the page of the API: signatures, docstrings, and the types that results hold."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import nvprof_kit
from nvprof_kit._result.result import Result
from nvprof_kit._result.writer import Document

SECTIONS = {
    "opening": ("_api", "_analysis"),
    "answers": ("_result", "_findings"),
    "errors": ("errors",),
    "instrumentation": ("_instrument",),
    "recording": ("_capture", "_profiler"),
}
"""The sections of the page, and the packages that their names come from."""

INTERNAL = {
    "count_flops.entered",
    "count_flops.left",
    "generation.pause",
    "generation.resume",
    "Breakdown.choice",
    "Flops.blocks",
    "Metrics.blocks",
    "Metrics.joined",
    "Metrics.means",
    "NcuLayers.blocks",
    "NcuLayers.folded",
    "NcuLayers.work",
    "Layers.steps",
    "Ranks.make_page",
    "Result.select",
    "Result.bars",
    "Result.columns_of",
    "Result.warnings_beside",
    "Diff.warnings_beside",
    "StepOptions.selects",
    "ModelAnnotation.owner_gone",
    "Scope.run",
}
"""Members without an underscore that other modules of the library use; they are not public."""

OPENED = ("Capture", "Job", "MemorySnapshot", "NcuReports", "Tables", "TimerLog")
"""Classes whose objects come from functions; their constructors are not public."""

_HEADINGS = {"Args": "Arguments", "Attributes": "Fields", "Returns": "Returns", "Yields": "Yields", "Raises": "Raises"}


def section(packages: tuple[str, ...], tables: Mapping[int, str]) -> str:
    """All public names from some packages, each with its signature, docstring and members.

    Args:
        packages: The packages.
        tables: Link to the description of a table's columns, by ``id`` of the mapping of column to meaning.
    """
    lines: list[str] = []
    for name in nvprof_kit.__all__:
        thing = getattr(nvprof_kit, name)
        is_answer = inspect.isclass(thing) and issubclass(thing, (Result, Document))
        if ("_result" if is_answer else _home(thing).split(".")[1]) in packages:
            lines += _entry(name, thing, tables)
    return "\n".join(lines).rstrip()


def types(tables: Mapping[int, str]) -> str:
    """The classes that public fields, properties and methods give, but that are not exported."""
    lines: list[str] = []
    for found, where in sorted(_given().items(), key=lambda pair: (pair[0].__name__, pair[1])):
        lines += _entry(found.__name__, found, tables, f"of `{where}`", signed=False)
    return "\n".join(lines).rstrip()


def _entry(name: str, thing: Any, tables: Mapping[int, str], remark: str = "", *, signed: bool = True) -> list[str]:
    """A heading, the docstring, and the public members."""
    head = f"### `{name}{_signature(thing) if signed and name not in OPENED else ''}`" + (
        f" {remark}" if remark else ""
    )
    lines = [head, "", *_described(thing, name, tables)]
    if inspect.isclass(thing) and issubclass(thing, Result):
        for base in inspect.getmro(thing)[1:]:
            if base.__module__.startswith("nvprof_kit._analysis"):
                own = _fields(base, name, tables)
                lines += own[2:] if f"*{_HEADINGS['Attributes']}*" in lines else ["", *own]
    lines.append("")
    for member, method in _members(thing):
        if not _internal(thing, name, member):
            call = _called(method)
            shown = _returned(call) if isinstance(method, (property, cached_property)) else _signature(call)
            lines += [f"#### `{name}.{member}{shown}`", "", *_described(call, name, tables), ""]
    return lines


def _internal(thing: Any, name: str, member: str) -> bool:
    """Whether a member, perhaps of a base class, is not public."""
    bases = [base.__name__ for base in inspect.getmro(thing)] if inspect.isclass(thing) else []
    return any(f"{owner}.{member}" in INTERNAL for owner in (name, *bases))


def _home(thing: Any) -> str:
    return str(getattr(thing, "__module__", None) or thing.__name__)


def _members(thing: Any) -> Iterator[tuple[str, Any]]:
    """The documented public members of a class, of the class of an object, or of a module."""
    if inspect.isroutine(thing):
        return
    owner = thing if inspect.isclass(thing) or inspect.ismodule(thing) else type(thing)
    for member, method in sorted(vars(owner).items()):
        if member.startswith("_") or not inspect.getdoc(method) or not callable(_called(method)):
            continue
        if not inspect.ismodule(thing) or _home(method) == thing.__name__:
            yield member, method


def _called(member: Any) -> Any:
    """The function behind a method, a property, or a class method; None for anything else."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, cached_property):
        return member.func
    return getattr(member, "__func__", member) if inspect.isroutine(member) else None


def _signature(thing: Any) -> str:
    """The arguments without their types, which the docstring describes, and what is returned."""
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, (Exception, Result, Document))):
        return ""
    try:
        found = inspect.signature(thing)
    except ValueError:
        return ""
    plain = [
        one.replace(annotation=one.empty, default=_default(one.default))
        if one.default is not one.empty
        else one.replace(annotation=one.empty)
        for one in found.parameters.values()
        if one.name not in ("self", "cls")
    ]
    return str(inspect.Signature(plain)).replace("'…'", "…") + ("" if inspect.isclass(thing) else _returned(thing))


def _default(value: Any) -> Any:
    """A default value; an object of its own is described where its class is."""
    return "…" if repr(value).startswith("<") or is_dataclass(value) else value


def _returned(function: Any) -> str:
    """The type of what a function returns; '' for nothing."""
    found = str(getattr(function, "__annotations__", {}).get("return", "None"))
    return "" if found in ("None", "_Own", "_Function", "Any") else f" -> {found}"


def _described(thing: Any, name: str, tables: Mapping[int, str]) -> list[str]:
    """A docstring in Google's style as Markdown."""
    owner = thing if inspect.isroutine(thing) or inspect.isclass(thing) or inspect.ismodule(thing) else type(thing)
    return _markdown((inspect.getdoc(thing) or "").splitlines(), name, _home(owner), tables)


def _fields(base: Any, name: str, tables: Mapping[int, str]) -> list[str]:
    """The fields that a docstring describes."""
    lines = (inspect.getdoc(base) or "").splitlines()
    found = lines[lines.index("Attributes:") :] if "Attributes:" in lines else []
    return _markdown(found, name, base.__module__, tables)


def _markdown(lines: list[str], name: str, module: str, tables: Mapping[int, str]) -> list[str]:
    made: list[str] = []
    heading = ""
    code = skipped = False
    for line in _linked("\n".join(lines), module, tables).splitlines():
        head = line.rstrip(":")
        if line.startswith("```"):
            code = not code
            made.append(line)
        elif code:
            made.append(line)
        elif line.endswith(":") and head in _HEADINGS:
            heading = head
            made += [f"*{_HEADINGS[head]}*", ""]
        elif heading and re.match(r"    \S", line) and heading not in ("Returns", "Yields"):
            named, _, meaning = line.strip().partition(": ")
            skipped = f"{name}.{named}" in INTERNAL
            made += [] if skipped else [f"- `{named}`: {meaning}".replace("``", "`")]
        elif not (skipped and line.startswith("     ")):
            made.append((f"  {line.strip()}" if heading and line.strip() else line.strip()).replace("``", "`"))
    return made


_TABLE = re.compile(r"([Cc]olumns(?: of)?)\s+`([\w.]*\b[A-Z][A-Z_]+)`")


def _linked(text: str, module: str, tables: Mapping[int, str]) -> str:
    """A docstring in which the name of a table's columns is a link to their description."""

    def link(found: re.Match[str]) -> str:
        path, _, last = found[2].rpartition(".")
        owner = importlib.import_module(path) if path else sys.modules[module]
        shown = tables.get(id(getattr(owner, last, None)))
        return f"{found[1].split()[0]}: {shown}" if shown else found[0]

    return _TABLE.sub(link, text)


@cache
def _given() -> Mapping[type, str]:
    """Each class that is not exported, and the member or function that gives it."""
    exported = {id(getattr(nvprof_kit, name)): name for name in nvprof_kit.__all__}
    found: dict[type, str] = {}
    ahead = [(name, getattr(nvprof_kit, name)) for name in nvprof_kit.__all__]
    while ahead:
        name, thing = ahead.pop(0)
        for module, member, annotation in _annotations(thing):
            where = f"{name}.{member}" if member else f"{name}()"
            for word in () if _internal(thing, name, member) else re.findall(r"[A-Za-z]\w*", annotation):
                given = _resolved(module, word)
                if not inspect.isclass(given) or not given.__module__.startswith("nvprof_kit"):
                    continue
                if id(given) not in exported and given not in found and not issubclass(given, Enum):
                    found[given] = where
                    ahead.append((given.__name__, given))
    return found


def _annotations(thing: Any) -> Iterator[tuple[str, str, str]]:
    """Module, name and type of each public field, property and method; of a function, of what it returns."""
    if inspect.isfunction(thing):
        yield thing.__module__, "", _returned(thing)
    if inspect.isroutine(thing) or inspect.ismodule(thing):
        return
    for base in inspect.getmro(thing if inspect.isclass(thing) else type(thing)):
        fields = vars(base).get("__annotations__", {}) if base.__module__.startswith("nvprof_kit") else {}
        yield from ((base.__module__, name, str(kind)) for name, kind in fields.items() if not name.startswith("_"))
        if base.__module__.startswith("nvprof_kit"):
            yield from ((base.__module__, name, _returned(_called(call))) for name, call in _members(base))


def _resolved(module: str, word: str) -> Any:
    """What a name in a module's annotation stands for; imports for type checking are read from the source."""
    home = sys.modules[module]
    return getattr(home, word) if hasattr(home, word) else _for_types(home).get(word)


@cache
def _for_types(home: ModuleType) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(inspect.getsource(home))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nvprof_kit"):
            source = importlib.import_module(str(node.module))
            found |= {one.asname or one.name: getattr(source, one.name, None) for one in node.names}
    return found
