"""What MkDocs does beyond its plugins.

Generated texts are filled in; notebooks are run and become pages; links out of docs/ lead to the repository;
nothing is loaded from elsewhere.
"""

from __future__ import annotations

import base64
import functools
import os
import posixpath
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).parent))
import generate  # beside this file

WORKER = "https://unpkg.com/iframe-worker/shim"
"""What the theme's plugin `offline` would load."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and its pictures."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        path = Path(file.abs_src_path or "")
        page, pictures = page_of(path, path.stat().st_mtime_ns)
        folder, name = posixpath.split(file.src_uri.removesuffix(".ipynb"))
        files.append(File.generated(config, f"{folder}/{name}.md", content=page))
        for picture, content in pictures.items():
            files.append(File.generated(config, f"{folder}/{picture}", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, **_: Any) -> str:
    """Fill in the generated texts, and lead links to files outside docs/ to the repository."""
    source = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def led(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(source, found[2]))
        if target.startswith("docs/"):
            return found[0]
        return f"{found[1]}{config.extra['repository']}/blob/main/{target})"

    return re.sub(r"(\]\()((?:\.\./)+[^)#\s]*)\)", led, generate.filled(markdown))


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Take the script that an offline copy's search needs from the copy itself."""
    return output.replace(WORKER, get_relative_url("assets/iframe-worker.js", page.url))


def on_post_template(output: str, *, template_name: str, **_: Any) -> str:
    """The same for the page that says that there is no such page."""
    return output.replace(WORKER, "assets/iframe-worker.js")


@functools.lru_cache
def page_of(path: Path, _changed: int) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown with what its cells print, and the pictures in it by their file's name; run once until it
    changes.
    """
    import nbformat

    notebook = run(nbformat.read(path, as_version=4))
    pictures: dict[str, bytes] = {}
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_output(output, f"{path.stem}-{number}", pictures) for output in cell.outputs]
    parts.insert(
        1, f"*The notebook itself: [{path.name}]({path.name}). Its outputs are those of the run that made this page.*"
    )
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def run(notebook: Any) -> Any:
    """Run a notebook, in a folder that lies to the captures as its own does, and leave nothing behind."""
    import nbclient

    root = Path(__file__).parents[1]
    os.environ["KINETO_LOG_LEVEL"] = "6"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "docs" / "notebooks"
        place.mkdir(parents=True)
        (Path(folder) / "tests").symlink_to(root / "tests")
        resources = {"metadata": {"path": str(place)}}
        return nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()


def _output(output: Any, name: str, pictures: dict[str, bytes]) -> str:
    if output.output_type == "stream":
        return f"```{{ .text .output }}\n{output.text.rstrip()}\n```"
    data = output.get("data", {})
    if "image/png" in data:
        file = f"{name}-{len(pictures)}.png"
        pictures[file] = base64.b64decode(data["image/png"])
        return f"![Output of the cell above]({file})"
    if "text/html" in data:
        return f'<div class="output">\n{data["text/html"].strip()}\n</div>'
    return f"```{{ .text .output }}\n{data.get('text/plain', '').rstrip()}\n```"
