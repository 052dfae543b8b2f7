"""The house: which room may import which, and what an import may pull in."""

import ast
import re
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from string import Formatter

import pytest
from support.cli import execute
from support.data import DATA

from nvprof_kit._findings import RULES
from nvprof_kit._toml import read_toml

PACKAGE = Path(__file__).parents[2] / "nvprof_kit"
FILES = sorted(PACKAGE.rglob("*.py"))

FOUNDATION = {"names", "errors", "issues", "_findings", "_operators", "_toml"}
READING = FOUNDATION | {"_trace", "_result", "_analysis", "_ranks"}
MAY_IMPORT = {
    "names": set(),
    "errors": {"_toml"},
    "issues": {"_toml"},
    "_findings": {"_toml"},
    "_operators": {"_toml"},
    "_toml": set(),
    "_instrument": FOUNDATION,
    "_capture": FOUNDATION | {"_instrument"},
    "_trace": FOUNDATION,
    "_result": FOUNDATION | {"_trace"},
    "_analysis": FOUNDATION | {"_trace", "_result"},
    "_ranks": FOUNDATION | {"_trace", "_result", "_analysis"},
    "_report": READING,
    "_api": READING | {"_capture", "_report"},
    "_cli": READING | {"_capture", "_report", "_api", "integrations"},
    "_profiler": FOUNDATION | {"_instrument", "_capture", "_trace", "_result", "_analysis", "_report"},
    "integrations": FOUNDATION | {"_instrument", "_capture"},
    "__main__": {"_cli"},
}
"""Data moves one way: a room imports rooms to its left. ``_profiler`` alone is of both halves: it records, and reads
the file that it recorded. ``integrations`` may import whatever instruments and captures; nothing imports it."""

EXCEPTIONS = {
    # the memory profiler leaves its own pages when it ends, as the documents it follows describe
    ("_instrument.memory.files", "_report.plots.memory"),
    ("_instrument.memory.files", "_report.page.sunburst"),
    # the version
    ("_cli.__init__", "__init__"),
}
"""The imports against the direction, by name."""


ORDER = {
    "_instrument": "patches|ranges+session+ranks|compile|modules|loop|memory flops meters",
    "_ranks": "columns communication|mapping|maps|groups stages|messages|clocks|causes|waits|verdict replay|answer",
}
"""Files and rooms inside a room, in order: each imports those before it, and none beside it but those joined by +."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def imports(path: Path) -> list[str]:
    """Modules of the package that a file imports, at whatever place in it."""
    here = module_name(path).split(".")[:-1]
    imported = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["nvprof_kit", *here[: len(here) + 1 - node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [name if is_module(name := f"{module}.{alias.name}") else module for alias in node.names]
        else:
            continue
        ours = [name for name in names if name.split(".")[0] == "nvprof_kit"]
        imported += [name.partition(".")[2] or "__init__" for name in ours]
    return imported


def is_module(dotted: str) -> bool:
    parts = dotted.split(".")
    if parts[0] != "nvprof_kit":
        return False
    place = PACKAGE.joinpath(*parts[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


def crossings() -> set[tuple[str, str]]:
    """Every import that leaves its room against the direction."""
    found = set()
    for path in FILES:
        room = module_name(path).split(".")[0]
        for imported in imports(path):
            target = imported.split(".")[0]
            if target != room and target not in MAY_IMPORT.get(room, set()):
                found.add((module_name(path), imported))
    return found


def test_imports_go_one_way():
    assert crossings() - EXCEPTIONS == set()


@pytest.mark.parametrize("room", ORDER)
def test_imports_inside_a_room_go_one_way(room):
    rank = {unit: index for index, units in enumerate(ORDER[room].split("|")) for unit in units.split()}
    unit_of = {name: unit for unit in rank for name in unit.split("+")}
    files = {path: module_name(path).split(".")[1] for path in (PACKAGE / room).rglob("*.py")}
    assert set(files.values()) - {"__init__"} == unit_of.keys()
    against = {
        (module_name(path), imported)
        for path, name in files.items()
        for imported in imports(path)
        if imported.startswith(f"{room}.")
        and name != "__init__"
        and (target := unit_of[imported.split(".")[1]]) != unit_of[name]
        and rank[target] >= rank[unit_of[name]]
    }
    assert against == set()


def test_every_exception_is_still_needed():
    assert EXCEPTIONS - crossings() == set()


def test_no_import_cycle():
    """In the whole package, imports inside functions counted."""
    graph = {module_name(path).removesuffix(".__init__"): set(imports(path)) for path in FILES}
    order = TopologicalSorter({name: {one for one in found if one in graph} - {name} for name, found in graph.items()})
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


SEAMS = ("_trace.open", "_trace.schema", "_instrument.session", "_cli")
"""Private modules that tests may import: where captures are read, what is in them, who listens, the command line."""
MOST_PRIVATE = 40
"""Files of tests that import others; the public API and `tests/support` are for all else."""


def test_tests_go_by_the_public_api():
    private = re.compile(rf"^(?:from|import) nvprof_kit\._(?!{'|'.join(seam[1:] for seam in SEAMS)})", re.MULTILINE)
    files = (PACKAGE.parent / "tests").rglob("test_*.py")
    found = [path.name for path in files if private.search(path.read_text(encoding="utf-8"))]
    assert 0 < len(found) <= MOST_PRIVATE, found


MOST_FILES = 16
"""Of Python in one folder: who has the word for a thing then finds its file at a glance."""


def test_the_tests_of_a_file_run_in_one_worker(request):
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("needs pytest --dist loadgroup, as make test has it")
    assert request.node.nodeid.endswith("@tests/unit/test_architecture.py"), "pytest-xdist does not see the groups"


def test_no_folder_is_crowded():
    files = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in FILES)
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}


def loaded(code: str) -> set[str]:
    """What is in sys.modules after some code ran in a fresh interpreter."""
    done = execute(sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)", cwd=PACKAGE.parent, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "nvtx", "numpy", "pandas", "pyarrow", "matplotlib", "rich"}


def test_importing_the_package_pulls_in_nothing_heavy():
    assert loaded("import nvprof_kit") & HEAVY == set()


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_the_command_line_answers_without_anything_heavy(argument):
    run = f"import nvprof_kit._cli\ntry: nvprof_kit._cli.main([{argument!r}])\nexcept SystemExit: pass"
    assert loaded(run) & HEAVY == set()


def test_annotating_names_pulls_in_neither_torch_nor_pandas():
    assert loaded("from nvprof_kit import layer_range, step, phase, mark, record") & {"torch", "pandas"} == set()


def test_layers_with_counts_imports_nothing_that_it_does_not_use():
    call = f"main(['layers', '--format', 'csv', {str(DATA / 'limits' / 'llama.sqlite.xz')!r}])"
    run = f"from nvprof_kit._cli import main\ntry: {call}\nexcept SystemExit as end: assert not end.code"
    modules = loaded(run)
    assert "nvprof_kit._analysis.flops.work" in modules
    assert modules & {"torch", "nvtx", "matplotlib", "rich", "scipy", "networkx", "duckdb"} == set()


def test_a_capture_is_opened_before_pandas_is_loaded():
    """pandas is imported while threads read the file: what a verb imports before it opens a capture must not."""
    verbs = "layers,breakdown,summary,advise,metrics,diff,ncu plan,report,plot,export"
    captures = [str(DATA / f"eager-{release}.sqlite.xz") for release in ("2023.4", "2024.2")]
    calls = [[*verb.split(), *captures[: 1 + (verb == "diff")]] for verb in verbs.split(",")]
    run = f"""
import nvprof_kit._trace.open
from nvprof_kit._cli import main

class Opened(BaseException):
    pass

def open_capture(*args, **options):
    raise Opened

nvprof_kit._trace.open.open_capture = open_capture
for call in {calls}:
    try:
        main(call)
    except Opened:
        pass"""
    assert "pandas" not in loaded(run)


def test_sql_stays_with_the_tables_it_fills():
    spoken = {module_name(path) for path in FILES if "SELECT " in path.read_text(encoding="utf-8")}
    assert {name.split(".")[0] for name in spoken} <= {"_trace"}


MAKERS = [(r"Issue\.of|db\.warn", "issues.toml"), (r"\w+Error\.of", "errors.toml")]


@pytest.mark.parametrize(("maker", "document"), MAKERS)
def test_every_sentence_is_used_and_gets_its_facts(maker, document):
    sources = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    sentences = read_toml("nvprof_kit", document)
    assert [code for code in sentences if f'"{code}"' not in sources] == []
    for call in [node for node in ast.walk(ast.parse(sources)) if isinstance(node, ast.Call)]:
        facts = {keyword.arg for keyword in call.keywords} | {"share"}
        if re.fullmatch(maker, ast.unparse(call.func)) and isinstance(call.args[0], ast.Constant):
            sentence = sentences[call.args[0].value]
            fields = Formatter().parse(sentence if isinstance(sentence, str) else sentence[1])
            named = {re.match(r"\w*", field)[0] for _, field, _, _ in fields if field is not None}
            assert named <= facts or None in facts, call.args[0].value


def test_every_case_of_advise_has_its_texts_and_is_used():
    files = [path for path in FILES if module_name(path).startswith("_analysis.advise.")]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    texts = read_toml("nvprof_kit._analysis.advise", "findings.toml")
    assert {*re.findall(r'"([a-z-]+:[^ "{][^"{]*)"', sources)} <= {*texts}
    for name in texts:
        rule, _, case = name.partition(":")
        assert {*texts.get(rule, {}), *texts[name]} == {"title", "fix", "refuted_by"}, name
        assert rule in RULES and (f'"{name}"' in sources or (f'"{case}"' in sources and f'"{rule}:{{' in sources)), name


WRITES = re.compile(r"write_text\(|write_bytes\(|savefig\(|open\([^)]*[\"'][wax]b?[\"']")


def test_every_file_is_written_by_the_writer():
    """It refuses inputs, and writes whole or not at all; what only fills a buffer is none of it."""
    rooms = ("_cli", "_report", "_result", "_analysis", "_ranks", "_profiler", "_api")
    found = {
        f"{module_name(path)}: {line.strip()}"
        for path in FILES
        if module_name(path).split(".")[0] in rooms
        for line in path.read_text(encoding="utf-8").splitlines()
        if WRITES.search(line) and "savefig(buffer" not in line
    }
    allowed = ("_result.writer: ", "_cli.__init__: setattr(sys, name")
    assert {one for one in found if not one.startswith(allowed)} == set()
