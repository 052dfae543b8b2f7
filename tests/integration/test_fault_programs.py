"""The programs with a planted fault, on which advise is judged, at toy sizes without a GPU."""

import sys

import pytest
from support.cli import execute
from support.gpu import PROGRAMS

pytest.importorskip("torch", minversion="2.6")


@pytest.mark.slow
def test_each_program_with_a_fault_computes_what_it_computes_without():
    done = execute(sys.executable, PROGRAMS / "faults.py", "--device", "cpu", "--toy", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("0 of ")
