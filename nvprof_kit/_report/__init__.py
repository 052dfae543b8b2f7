"""Output: terminal tables, plots, pages and traces."""

from nvprof_kit._result.result import RENDERERS

RENDERERS[:] = ["nvprof_kit._report.renderers"]
