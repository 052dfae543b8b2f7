"""Run by each Python process with this folder on ``PYTHONPATH``: annotates models if NVPROF_KIT_ANNOTATE is set,
counts a step if NVPROF_KIT_COUNT is, and records if NVPROF_KIT_RECORD is.

It does not raise, and runs the next ``sitecustomize`` on the path, if any.
"""

import importlib.machinery
import importlib.util
import os
import sys

if {"NVPROF_KIT_ANNOTATE", "NVPROF_KIT_COUNT", "NVPROF_KIT_RECORD"} & {*os.environ}:
    try:
        from nvprof_kit.integrations.annotate import install

        install()
    except ImportError as error:
        print(f"nvprof-kit: {sys.executable} has no nvprof_kit: {error}", file=sys.stderr)
    except Exception as error:  # the program must run without annotation
        print(f"nvprof-kit annotate: nothing is annotated: {error}", file=sys.stderr)

here = os.path.dirname(os.path.abspath(__file__))
folders = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
if spec is not None and spec.loader is not None:
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
