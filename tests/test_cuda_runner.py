"The CUDA runner where there is no GPU: a step in Numba's simulator, its plain kernels for both targets, what it refuses. With a GPU, all of `sparkinfer.models.cuda_check`"
import importlib.util, os, subprocess, sys
from pathlib import Path
import pytest

needs_numba_cuda = pytest.mark.skipif(importlib.util.find_spec('numba_cuda') is None, reason='numba-cuda comes with the cuda and dev extras')
needs_gpu = pytest.mark.skipif(not Path('/dev/nvidia0').exists(), reason='needs an NVIDIA GPU')

slow = pytest.mark.skipif('SPARKINFER_SLOW' not in os.environ, reason='takes a minute and a half: SPARKINFER_SLOW=1 pytest tests/test_cuda_runner.py')

def python(code: str, **env):
    return subprocess.run([sys.executable, '-c', code], env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)

@needs_numba_cuda
@pytest.mark.parametrize('kv, limit', [('f32', 1e-5), pytest.param('int8', 3e-2, marks=slow)])
def test_a_step_in_the_simulator(kv, limit):
    "A delta layer with experts and a gated attention layer, prompt rows of two sequences and then a token of each, against the spec. Guards against wrong indices, strides, pages and states; int8 must be near, and cannot be exact"
    done = python(f'from sparkinfer.models.cuda_check import simulate\nprint(simulate({kv!r}, {limit}))', NUMBA_ENABLE_CUDASIM='1')
    assert done.returncode == 0 and 'relative error' in done.stdout, done.stdout + done.stderr

@needs_numba_cuda
@pytest.mark.parametrize('capability', [(9, 0), (12, 0)], ids=lambda c: f'sm_{c[0]}{c[1]}')
def test_both_targets_take_the_plain_kernels(capability):
    from sparkinfer.models.cuda_plain import plain_kernels
    for kernel in plain_kernels():
        used = kernel.resources(capability)
        assert (used.stack, used.spills) == (0, 0), (kernel.name, used)

@needs_numba_cuda
def test_refusals():
    "Each in one line that says what would do"
    from sparkinfer.errors import SparkinferError, UnsupportedError
    from sparkinfer.models.cuda_check import small_hybrid
    from sparkinfer.models.cuda_runner import CudaRunner
    from dataclasses import replace
    with pytest.raises(SparkinferError, match="'int8'"): CudaRunner(kv_type='bf16')
    runner = CudaRunner()
    runner.config = replace(small_hybrid().config, head_dim=18)
    with pytest.raises(UnsupportedError, match='heads of 18'): runner.choose_kernels()

@needs_numba_cuda
def test_who_draws():
    "On the card what it can, else the host: a mask or logprobs that the card ignored would be a wrong token, not an error"
    import numpy as np
    from sparkinfer.models.cuda_check import small_hybrid
    from sparkinfer.models.cuda_runner import CudaRunner
    from sparkinfer.ops.sampling import SampleSpec
    runner, two, warm = CudaRunner(), np.arange(2), SampleSpec(temperature=1.)
    runner.config = small_hybrid().config
    def drawing(*specs, places=two): return runner.draws_of(list(specs), np.unique(places), places)[0]
    assert drawing(SampleSpec(), SampleSpec()) == (False,) * 4 and drawing(warm, SampleSpec()) == (False, True, False, False)
    assert drawing(warm, SampleSpec(temperature=.5, top_p=.9)) == (False, True, True, False)
    assert drawing(warm, SampleSpec(presence_penalty=.1, history_ids=np.array([3], np.int32))) == (True, True, False, False)
    assert drawing(warm, SampleSpec(allowed=np.array([1], np.uint32))) == (True, True, False, False)
    assert drawing(SampleSpec(num_logprobs=0), SampleSpec()) == (False, False, False, True) and drawing(warm, SampleSpec(num_logprobs=101)) is None
    assert drawing(warm, warm, warm, places=np.array([0, 1, 1])) is None and drawing(*[SampleSpec()] * 3, places=np.array([0, 1, 1])) == (False,) * 4
    specs = SampleSpec(temperature=.5, seed=1), SampleSpec(temperature=.25, seed=2)
    swapped = runner.draws_of(list(specs), two, np.array([1, 0]))[1]
    assert swapped[:, 8:16].copy().view(np.float64).reshape(-1).tolist() == [4, 2]                # records stand in the order of the computed rows
    masked = [SampleSpec(allowed=np.uint32([word])) for word in (5, 9)]
    _, records, _, masks = runner.draws_of(masked, two, np.array([1, 0]))
    assert masks.tolist() == [[9], [5]] and records[:, 60:64].copy().view(np.uint32).reshape(-1).tolist() == [1, 2]      # and so do masks: another row's would be a wrong token

@needs_numba_cuda
def test_every_draw_comes_back_to_its_row():
    "Steps at random on a card of NumPy, see tests/numpy_card.py: an answer, a report or a mask of another row would be a wrong token, not an error"
    done = python(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom numpy_card import search\nprint(search(200, 1), search(200, 2))", NUMBA_ENABLE_CUDASIM='1')
    assert done.returncode == 0 and 'repeated' in done.stdout, done.stdout + done.stderr

@needs_numba_cuda
def test_masks_follow_their_rows_into_pieces():
    "A step of more than 32 rows: a piece's masks are numbered anew, and one that took its neighbour's would be a wrong token"
    import numpy as np
    from types import SimpleNamespace
    from sparkinfer.cuda.sampling import DRAW_BYTES
    from sparkinfer.models.cuda_runner import CudaRunner
    runner, sent = CudaRunner(), {}
    runner.at, runner.undrawn = lambda name: name, True
    runner.send = lambda name, array: sent.__setitem__(name, np.array(array))
    records, masks = np.zeros((3, DRAW_BYTES), np.uint8), np.arange(8, dtype=np.uint32).reshape(4, 2)
    records.view(np.uint32)[:, 15] = 4, 0, 2                                                      # rows that have the step's fourth mask, none, its second
    runner.send_draws(records, np.zeros((0, 4), np.uint32), masks, np.array([5, 7, 3]))
    assert sent['masks'].tolist() == [[2, 3], [6, 7]]
    assert {row: int(n) for row, n in enumerate(sent['draws'].view(np.uint32)[:, 15]) if n} == {3: 1, 5: 2}

@needs_numba_cuda
def test_kernels_are_made_by_other_processes(tmp_path):
    "All of a model's at once; a kernel that cannot be made, or a process that ends, is an error with its name, not a slow start"
    code = '''
from sparkinfer.cuda.graphs import make_kernels
from sparkinfer.errors import SparkinferError
from sparkinfer.models.cuda_check import small_hybrid
from sparkinfer.models.cuda_runner import CudaRunner, kernels_of
weights, runner, heard = small_hybrid(), CudaRunner(), []
runner.config, runner.num_slots = weights.config, 1
runner.choose_kernels()
outline = runner.outline(runner.plan_weights(weights), weights)
kernels = kernels_of(*outline)
some = {name: kernels[name] for name in ("mask", "feed")}
recipe = "sparkinfer.models.cuda_runner", "kernels_of", outline
print(len(kernels) > 20, make_kernels(some, recipe, (9, 0), lambda *what: heard.append(what), 2), make_kernels(some, recipe, (9, 0)))
print(sorted(name for name, seconds in heard if seconds is None), all(kernels[name].path((9, 0)).exists() for name in some))
for module, names in (("sparkinfer.models.cuda_runner", {"mask_of_nobody": kernels["decide"]}), ("sparkinfer.no_such_module", {"decide": kernels["decide"]})):
    try: make_kernels(names, (module, *recipe[1:]), (9, 0))
    except SparkinferError as error: print(error)
'''
    done = python(code, SPARKINFER_CACHE=str(tmp_path), NUMBA_ENABLE_CUDASIM='0')
    assert done.returncode == 0, done.stderr
    first, second, unknown, ended = done.stdout.splitlines()
    assert first == 'True 2 0' and second == "['feed', 'mask'] True"
    assert 'mask_of_nobody cannot be made: KeyError' in unknown and 'decide cannot be made: its process has ended' in ended

@needs_numba_cuda
def test_kept_weights_are_the_packed_ones(tmp_path):
    "A second load reads what the first has written, byte for byte; a file that has changed since is packed anew, and what was kept of it is gone"
    code = '''
import os
from pathlib import Path
import numpy as np
from sparkinfer.formats.safetensors import open_checkpoint
from sparkinfer.model_store import cache_dir
from sparkinfer.models import cuda_runner
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.synthetic import synth
from sparkinfer.models.weights import Weights
path, calls, pack = Path(os.environ["SPARKINFER_CACHE"])/"m.gguf", [], cuda_runner.pack
cuda_runner.pack = lambda *a: calls.append(1) or pack(*a)
synth("tiny-qwen3moe", path)
def load(keep):
    calls.clear()
    checkpoint = open_checkpoint(path)
    runner = cuda_runner.CudaRunner()
    runner.keep_packed = keep
    runner.load(Weights.from_checkpoint(checkpoint, ModelConfig.from_checkpoint(checkpoint)), max_context=32)
    matrices = [m for layer in runner.layers for name, parts in layer.items() if name != "memory" and isinstance(parts, list) for m, _ in parts] + [runner.head, runner.embedding]
    return len(calls), [m.buffer.read(np.uint8, m.buffer.nbytes) for m in matrices]
plain, first, again = load(False), load(True), load(True)
assert plain[0] == first[0] > 0 == again[0], (plain[0], first[0], again[0])
assert all((a == b).all() and (a == c).all() for a, b, c in zip(plain[1], first[1], again[1]))
kept = list((cache_dir()/"packed").iterdir())
os.utime(path, (1, 1))
assert load(True)[0] == plain[0] and len(kept) == 1 and not kept[0].exists() and len(list((cache_dir()/"packed").iterdir())) == 1
'''
    done = python(code, SPARKINFER_CACHE=str(tmp_path), NUMBA_ENABLE_CUDASIM='1')
    assert done.returncode == 0, done.stderr

@needs_numba_cuda
def test_no_driver():
    if Path('/dev/nvidia0').exists(): pytest.skip('there is a GPU here')
    done = python('from sparkinfer.models.cuda_check import small_hybrid\nfrom sparkinfer.models.cuda_runner import CudaRunner\nCudaRunner().load(small_hybrid(), max_context=16)', NUMBA_ENABLE_CUDASIM='0')
    assert done.returncode and 'no CUDA driver' in done.stderr.splitlines()[-1], done.stderr

@needs_numba_cuda
def test_too_little_memory_is_said_with_numbers(monkeypatch):
    "What is needed, what is missing, what would fit"
    import sparkinfer.models.cuda_runner as module
    from sparkinfer.errors import SparkinferError
    from sparkinfer.models.cuda_check import small_hybrid
    from types import SimpleNamespace
    free = [300 << 20]
    monkeypatch.setattr(module, 'driver', lambda: SimpleNamespace(cuMemGetInfo=lambda: (0, free[0], 8 << 30)))
    monkeypatch.setattr(module, 'device_capability', lambda: (9, 0))
    with pytest.raises(SparkinferError, match=r'not enough memory on the GPU: .* are missing; [\d,]+ tokens of keys and values would fit'): module.CudaRunner().load(small_hybrid(), max_context=64, num_slots=2, num_pages=1 << 24)
    free[0] = 1 << 20
    with pytest.raises(SparkinferError, match='the weights alone do not fit'): module.CudaRunner().load(small_hybrid(), max_context=64)
    monkeypatch.setattr(module, 'device_capability', lambda: (8, 6))
    with pytest.raises(SparkinferError, match=r'8\.6.*9\.0'): module.CudaRunner().load(small_hybrid(), max_context=64)

@needs_gpu
@needs_numba_cuda
def test_on_the_gpu():
    done = subprocess.run([sys.executable, '-m', 'sparkinfer.models.cuda_check'], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
