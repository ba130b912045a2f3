"The GPU wing where there is no GPU: nothing else imports it, its kernels step through Numba's simulator, and both targets take them"
import importlib.util, os, subprocess, sys
from pathlib import Path
import pytest
import sparkinfer

needs_numba_cuda = pytest.mark.skipif(importlib.util.find_spec('numba_cuda') is None, reason='numba-cuda comes with the cuda and dev extras')

def python(code: str, **env) -> str:
    done = subprocess.run([sys.executable, '-c', code], env=dict(os.environ, **env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

# A machine without the extra: `numba.cuda` must not be touched by anything outside of the wing, not even by way of a helper.
WITHOUT = '''
import importlib, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("numba_cuda", "cuda") or name.startswith(("numba_cuda.", "cuda.")): raise ModuleNotFoundError(f"no {name} here", name=name)
sys.meta_path.insert(0, Absent())
import sparkinfer
names = [m.name for m in pkgutil.walk_packages(sparkinfer.__path__, "sparkinfer.") if not m.name.startswith(("sparkinfer.cuda", "sparkinfer.models.cuda_")) and not m.name.endswith("__main__")]
for name in names: importlib.import_module(name)
wing = sorted(m for m in sys.modules if m.startswith(("sparkinfer.cuda.", "numba_cuda")))
print(len(names), wing)
assert not wing, wing
'''

def test_nothing_else_imports_the_wing():
    assert int(python(WITHOUT).split()[0]) > 25

@needs_numba_cuda
def test_the_test_above_can_fail():
    with pytest.raises(AssertionError, match='no numba_cuda here'): python(WITHOUT.replace('print(len', 'import sparkinfer.cuda.graphs\nprint(len'))

QUICK = ['check_instructions', 'check_warp', 'check_matrix_products', 'check_quantize', 'check_linear', 'check_stages', 'check_beside', 'check_swiglu', 'check_delta', 'check_ends']

def simulate(*options):
    out = subprocess.run([sys.executable, '-m', 'sparkinfer.cuda.check', '--seed', '7', *options], env=dict(os.environ, NUMBA_ENABLE_CUDASIM='1'), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200)
    assert out.returncode == 0 and 'FAILED' not in out.stdout, out.stdout + out.stderr
    return out.stdout

@needs_numba_cuda
def test_kernels_in_the_simulator():
    "Tiny sizes, every type, wrong indices and all; takes no GPU and no compiler"
    said = simulate('--only', *QUICK)
    assert all(name in said for name in QUICK)

@needs_numba_cuda
@pytest.mark.skipif('SPARKINFER_SLOW' not in os.environ, reason='takes six minutes: SPARKINFER_SLOW=1 pytest tests/test_cuda.py -k simulator')
def test_the_large_kernels_in_the_simulator():
    "Experts, attention and many rows, whose blocks of hundreds of threads the simulator steps one by one"
    said = simulate()
    assert 'check_experts' in said and 'check_attention' in said

@needs_numba_cuda
@pytest.mark.parametrize('capability', [(9, 0), (12, 0)], ids=lambda c: f'sm_{c[0]}{c[1]}')
@pytest.mark.parametrize('kind', ['Q8_0', 'Q4_K', 'Q5_K', 'Q6_K', 'Q4_1', 'NVFP4', 'FP8', 'BF16', 'F16', 'F32'])
def test_both_targets_take_every_type_without_spills(kind, capability):
    from sparkinfer.cuda.linear import KINDS, gemv_arguments, gemv_kernel
    for columns, tokens in ((2048, 1), (1280, 4)):
        used = gemv_kernel(*gemv_arguments(KINDS[kind], 16384, columns, tokens)[0]).resources(capability)
        assert (used.stack, used.spills) == (0, 0) and used.registers <= 128, used

@needs_numba_cuda
def test_weights_are_requested_before_the_wait():
    "What dependent launch is for. `ptxas` once moved read-only loads behind the wait; in the PTX at least, and with loads that may not move, they stand before it"
    from sparkinfer.cuda.linear import gemv_kernel
    code = gemv_kernel('Q4_K', 2048, 1).ptx()
    before, after = code.split('griddepcontrol.wait')
    assert before.count('ld.global.L1::no_allocate.v4') == 2 and 'no_allocate' not in after and 'ld.global.nc' not in code

HOT = '[fat_kernel("Q8_0", 2048, 1, 2, 2, buffers=2), fat_kernel("Q8_0", 4096, 1, 1, 4, "heads", True), fat_kernel("Q4_K", 5120, 1, 1, 3, block=1024), fat_kernel("Q6_K", 17408, 1, 1, 6, "rest512", True, block=640), fat_kernel("Q4_K", 5120, 1, 1, 3, block=1024, beside="Q8_0"), fat_kernel("Q4_K", 5120, 1, 1, 3, block=1024, beside="Q6_K"), fat_swiglu_kernel("Q4_K", 5120, 17408), fat_kernel("Q8_0", 4096, 1, 1, 4, "heads", True, registers=88), attend_kernel(16, 2, 256, 64, 64), attend_kernel(24, 4, 256, 64, 32, kv="int8"), combine_kernel(16, 2, 256, 64), delta_step_kernel(16, 32, 128, 128, 4, True, noted=True), delta_rows_kernel(16, 48, 128, 128, True), router_kernel(2048, 256), experts_up_kernel("Q4_K", "Q8_0", 2048, 512, 256, 8, 512), experts_down_kernel("Q5_K", "Q8_0", 2048, 512, 256, 8, 512), jobs_kernel(256, 8, 32), jobs_down_kernel("Q5_K", 2048, 512), rows_kernel("Q8_0", 2048, 4, 2, resident=2), pairs_up_kernel("Q4_K", 2048, 512, 8)[0], pairs_down_kernel("Q5_K", 2048, 512, 2)[0], weigh_kernel, gather_kernel, decide_kernel, penalise_kernel]'

@needs_numba_cuda
@pytest.mark.parametrize('capability', [(9, 0), (12, 0)], ids=lambda c: f'sm_{c[0]}{c[1]}')
def test_the_kernels_of_a_step_do_not_spill(capability):
    "A register array that went to local memory would cost a step a third of its speed, and no check would see it"
    for module in ('attention', 'fused', 'gated_deltanet', 'moe_routing', 'rows', 'sampling'): exec(f'from sparkinfer.cuda.{module} import *', globals())
    for kernel in eval(HOT):
        used = kernel.resources(capability)
        assert used.spills <= (0 if capability == (9, 0) else 64) and used.shared <= 49152, (kernel.name, used)     # tuned where it was measured; the other target may lay aside a few words

@needs_numba_cuda
def test_fat_kernels_ask_for_weights_and_pages_before_the_wait():
    from sparkinfer.cuda.attention import attend_kernel
    from sparkinfer.cuda.fused import fat_kernel
    before, after = fat_kernel('Q8_0', 2048, 1, 2, 2, buffers=2).ptx().split('griddepcontrol.wait')
    assert before.count('ld.global.L1::no_allocate.v4') == 16                        # two groups of two rows of two units, two planes
    before, after = attend_kernel(16, 2, 256, 64, 64).ptx().split('griddepcontrol.wait')
    assert before.count('ld.global.L1::no_allocate.v4') == 32 and 'st.global' not in before

@needs_numba_cuda
def test_what_is_read_ahead_of_a_wait_is_complete():
    "`down` reads scores ahead of its wait for `up`: it must not begin before the router has ended, so `up` lets it begin only behind its own wait, in all its blocks"
    from sparkinfer.cuda.moe_routing import experts_down_kernel, experts_up_kernel, router_kernel
    up, down = experts_up_kernel('Q4_K', 'Q8_0', 2048, 512, 256, 8, 512).ptx(), experts_down_kernel('Q5_K', 'Q8_0', 2048, 512, 256, 8, 512).ptx()
    order = [word for word in up.replace(';', '').split() if word.startswith('griddepcontrol.')]
    assert order == ['griddepcontrol.wait', 'griddepcontrol.launch_dependents'] * (len(order) // 2) and len(order) >= 2
    assert down.index('griddepcontrol.launch_dependents') < down.index('griddepcontrol.wait') and router_kernel(2048, 256).ptx().index('griddepcontrol.launch_dependents') < router_kernel(2048, 256).ptx().index('griddepcontrol.wait')

@needs_numba_cuda
def test_shared_arrays_are_aligned_for_vector_loads():
    "Numba aligns them to their elements; asynchronous copies and `ldmatrix` want 16 bytes"
    import re
    from sparkinfer.cuda.rows import jobs_kernel
    assert set(re.findall(r'\.shared \.align (\d+)', jobs_kernel(256, 8, 16).ptx())) == {'16'}

@needs_numba_cuda
def test_jobs_cover_every_pair_once():
    import numpy as np
    from sparkinfer.cuda.rows import jobs_spec
    ids = np.array([[3, 1], [1, 0], [1, 2]] + [[1, 5]] * 8)
    jobs = jobs_spec(ids, 8)
    jobs = jobs[jobs[:, 0] >= 0]
    assert jobs[:, 0].tolist() == [0, 1, 1, 2, 3, 5] and jobs[:, 1].tolist() == [1, 8, 3, 1, 1, 8]
    assert sorted(p for job in jobs for p in job[8:8 + job[1]]) == list(range(ids.size))
    assert all(ids.reshape(-1)[p] == job[0] for job in jobs for p in job[8:8 + job[1]])
    pairs = jobs_spec(ids, 8, 2)
    pairs = pairs[pairs[:, 0] >= 0]
    assert pairs[:, 0].tolist() == [0] + [1] * 6 + [2, 3] + [5] * 4 and pairs[:, 1].sum() == ids.size and pairs[:, 1].max() == 2

@needs_numba_cuda
def test_a_machine_without_a_driver_is_told_so():
    from sparkinfer.cuda.ptx import ptxas_path
    if Path('/dev/nvidia0').exists(): pytest.skip('there is a GPU here')
    out = subprocess.run([sys.executable, '-m', 'sparkinfer.cuda.check'], env={k: v for k, v in os.environ.items() if k != 'NUMBA_ENABLE_CUDASIM'}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert out.returncode == 2 and 'no CUDA driver' in out.stderr and 'Traceback' not in out.stderr, out.stdout + out.stderr
