"""What a caller opens: a capture, a job of many ranks, or a source that needs no capture."""

import nvprof_kit._report  # noqa: F401  # it registers how answers are shown
