"""Every CPU level gives right answers: the kernels' chapters are run again with a level forced, and with a CPU that has nothing to offer.

A machine tests its own best level in tests/test_notebooks.py. Here the others run: a kernel that is right with VNNI and wrong with AVX2 would otherwise show on somebody else's computer."""
import os, subprocess, sys
from pathlib import Path
import pytest
from sparkinfer.jit import CPU_LEVELS, cpu_level, target_features

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ['ops/00_simd', 'ops/01_linear', 'ops/08_k_quants', 'ops/09_file_rows', 'ops/02_norm_rope', 'ops/03_attention', 'ops/04_gated_deltanet', 'ops/05_moe_routing', 'models/04_cpu_runner']
RUN = "import sys; from nbdev.test import nbdev_test as t; t.__wrapped__(path=sys.argv[1], n_workers=0)"
# NUMBA_CPU_NAME=generic: LLVM may use no more than any x86-64 (or ARM) has, so an x86 built-in that slipped into the portable level ends the process
FORCED = {level: {'SPARKINFER_CPU': level} for level in CPU_LEVELS if level not in ('portable', cpu_level())} | {'generic CPU': {'NUMBA_CPU_NAME': 'generic'}}

@pytest.mark.parametrize('chapter', CHAPTERS)
@pytest.mark.parametrize('forced', FORCED)
def test_level(forced, chapter):
    if forced in CPU_LEVELS and not CPU_LEVELS[forced] <= target_features(): pytest.skip(f'this CPU cannot run {forced}')
    done = subprocess.run([sys.executable, '-c', RUN, str(ROOT/'nbs'/f'{chapter}.ipynb')], cwd=ROOT, env=os.environ | FORCED[forced], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr

def test_portable_answers():
    "The whole road, from prompt to text, on the portable level"
    code = ("from sparkinfer import LLM; from sparkinfer.ops.simd import LEVEL; assert LEVEL == 'portable'; "
            "print(LLM.load('smollm2', context=64).generate('1, 2, 3, 4, 5,', temperature=0, max_tokens=12).text)")
    done = subprocess.run([sys.executable, '-c', code], env=os.environ | {'SPARKINFER_CPU': 'portable'}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.strip() == '6, 7, 8, 9,', done.stdout + done.stderr
