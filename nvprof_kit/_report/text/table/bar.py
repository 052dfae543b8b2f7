"""A fraction as a bar."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

BAR_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"


class Bar:
    """A fraction of 1 as a bar, in eighths of a character, or as ``#`` if the terminal is ASCII only."""

    def __init__(self, share: float, style: str = "cyan", width: int = BAR_WIDTH) -> None:
        self._share = min(max(share, 0.0), 1.0)
        self._style = Style.parse(style)
        self._width = width

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """The preferred width; the minimum is 0."""
        return Measurement(0, min(self._width, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar; any positive fraction shows at least a sliver."""
        width = min(self._width, options.max_width)
        if options.ascii_only:
            text = "#" * round(self._share * width)
        else:
            eighths = max(round(self._share * width * 8), 1 if self._share > 0 else 0)
            text = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        yield Segment(text.ljust(width), self._style)
        yield Segment.line()
