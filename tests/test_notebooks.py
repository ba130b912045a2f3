"Every notebook is a test: each runs as `nbdev-test` would run it (same flags), in a process of its own, several of them side by side"
import importlib.util, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if not p.name.startswith(('_', '.')) and '.ipynb_checkpoints' not in p.parts)
NO_CUDA = importlib.util.find_spec('numba_cuda') is None
# `__wrapped__`, because the plain function, called from `-c`, tests all notebooks whatever it is told
RUN = "import sys; from nbdev.test import nbdev_test as t; t.__wrapped__(path=sys.argv[1], n_workers=0)"

# A process each: one notebook must not see what another imported, and a fork after threads have started is a trap.
def run(notebook):
    return subprocess.run([sys.executable, '-c', RUN, str(notebook)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)

@pytest.fixture(scope='module')
def runs(request):
    "notebook → the future of its process, for those that this session asked for. A chapter mostly compiles, on one core, so as many run at a time as there are cores, up to four"
    wanted = [item.callspec.params['notebook'] for item in request.session.items if getattr(item, 'originalname', '') == 'test_notebook']
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        yield {notebook: pool.submit(run, notebook) for notebook in wanted if not (NO_CUDA and (notebook.parent.name == 'cuda' or '_cuda_' in notebook.name))}
        pool.shutdown(cancel_futures=True)

@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=[p.relative_to(ROOT/'nbs').as_posix() for p in NOTEBOOKS])
def test_notebook(notebook, runs):
    if notebook not in runs: pytest.skip('numba-cuda comes with the cuda and dev extras')
    done = runs[notebook].result()
    assert done.returncode == 0, done.stdout + done.stderr
