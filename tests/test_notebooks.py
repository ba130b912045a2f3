"Every notebook is a test: each runs as `nbdev-test` would run it (same flags), in a process of its own"
import importlib.util, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if not p.name.startswith(('_', '.')) and '.ipynb_checkpoints' not in p.parts)
# `__wrapped__`, because the plain function, called from `-c`, tests all notebooks whatever it is told
RUN = "import sys; from nbdev.test import nbdev_test as t; t.__wrapped__(path=sys.argv[1], n_workers=0)"

# A process each: one notebook must not see what another imported, and a fork after threads have started is a trap.
@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=[p.relative_to(ROOT/'nbs').as_posix() for p in NOTEBOOKS])
def test_notebook(notebook):
    if notebook.parent.name == 'cuda' and importlib.util.find_spec('numba_cuda') is None: pytest.skip('numba-cuda comes with the cuda and dev extras')
    done = subprocess.run([sys.executable, '-c', RUN, str(notebook)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
