"""Which layer of a transformer costs what, from Nsight's own data.

`open` opens a capture to ask it; `annotate_model`, `layer_range`, `step` and others put the layers into one. What there
is stands in ``__init__.pyi``. A name is loaded when it is first used: importing the package starts nothing and loads
neither torch nor pandas.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
