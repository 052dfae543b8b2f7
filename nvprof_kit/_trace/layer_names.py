"""The layers that an nsys export names, without opening it as a capture: for shell completion."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from nvprof_kit.names import DOMAIN, KNOWN_PHASES, LAYER_CATEGORIES, WINDOW, parse_range

_QUERY = """
WITH event AS (
  SELECT eventType, domainId, coalesce(event.text, string.value) AS text
  FROM NVTX_EVENTS AS event LEFT JOIN StringIds AS string ON string.id = event.textId
  WHERE eventType IN (59, 75)
)
SELECT DISTINCT text FROM event
WHERE eventType = 59 AND domainId IN (SELECT domainId FROM event WHERE eventType = 75 AND text = ?)
"""


def layer_names(path: Path) -> list[str]:
    """Module paths of the layers in an export, sorted; none where it is no export that can be read."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)) as db:
            return sorted(set(_layers(text for (text,) in db.execute(_QUERY, (DOMAIN,)))))
    except (sqlite3.Error, OSError):
        return []


def _layers(texts: Iterator[str | None]) -> Iterator[str]:
    for text in texts:
        if text and text not in KNOWN_PHASES and text != WINDOW:
            name = parse_range(text)
            if name.category in LAYER_CATEGORIES:
                yield name.text
