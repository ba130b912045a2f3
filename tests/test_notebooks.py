"Every notebook is a test: it must run from top to bottom. How they are run stands in conftest.py"
import importlib.util
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if not p.name.startswith(('_', '.')) and '.ipynb_checkpoints' not in p.parts)
NO_CUDA = importlib.util.find_spec('numba_cuda') is None

def chapter(path):
    of_cuda = path.parent.name == 'cuda' or '_cuda_' in path.name
    return pytest.param(path, id=path.relative_to(ROOT/'nbs').as_posix(), marks=[pytest.mark.skip(reason='numba-cuda comes with the cuda and dev extras')] if NO_CUDA and of_cuda else [])

@pytest.mark.parametrize('notebook', [chapter(p) for p in NOTEBOOKS])
def test_notebook(notebook, chapters):
    status, said = chapters.outcome(notebook)
    assert status == 0, said
