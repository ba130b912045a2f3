"""Every CPU level gives right answers: what looks at the level runs again with a level forced, and with a CPU that has nothing to offer, and so does a step of the runner, which is made of all kernels.

A machine tests its own best level in tests/test_notebooks.py. Here the others run: a kernel that is right with VNNI and wrong with AVX2 would otherwise show on somebody else's computer.
Chapters that only put the words of `ops/00_simd` together have no code of their own for a level; theirs is compiled into the runner's step, which is held against what transformers says.
"""
import os, re, subprocess, sys
from functools import lru_cache
from pathlib import Path
import numpy as np
import pytest
from sparkinfer.jit import CPU_LEVELS, cpu_level, target_features

ROOT = Path(__file__).resolve().parent.parent
# how code looks that is not the same for all levels: it asks for one, names an instruction (every x86-64 has SSE2), or adds products of bytes, which overflow elsewhere with each level
DEPENDS = re.compile(r'\bHAS_(AVX|VNNI)\w*|llvm\.x86\.(?!sse2)|\b(UN)?SIGNED\b')
BY_TYPE, STEPS = ('ops/08_k_quants', 'ops/09_file_rows'), "the runner's steps"
TYPE_BY_TYPE = ' and '.join(BY_TYPE)
# One type for each way of adding that the two have: signed bytes, codes to 31 and to 63 (what an int16 just holds), minima, a table of values, floats. The chapters compile all of them, which takes minutes
TYPES = ('Q8_0', 'Q5_K', 'Q6_K', 'Q2_K', 'IQ4_NL', 'F16')

def depending():
    "The chapters of modules whose kernels depend on the level"
    modules = [module.read_text() for wing in ('formats', 'ops', 'models') for module in sorted((ROOT/'sparkinfer'/wing).glob('*.py'))]
    return [re.search(r'File to edit: \S*nbs/(\S+)\.ipynb', text)[1] for text in modules if DEPENDS.search(text)]

CHAPTERS = sorted({*depending()} - {*BY_TYPE})
# NUMBA_CPU_NAME=generic: LLVM may use no more than any x86-64 (or ARM) has, so an x86 built-in that slipped into the portable level ends the process
FORCED = {level: {'SPARKINFER_CPU': level} for level in CPU_LEVELS if level not in ('portable', cpu_level())} | {'generic CPU': {'NUMBA_CPU_NAME': 'generic'}}
levels = pytest.mark.parametrize('forced', FORCED)

# ---- what runs with a level forced, in one process for each level: they share what the first of them imports and compiles ----

def types():
    "Rows of a file against decoded weights, plain and at the ends of their range; many rows of activations, and tiles, to the last bit"
    from sparkinfer.formats.blocks import QUANT_TYPES, random_blocks
    from sparkinfer.ops.file_rows import ROW_KINDS
    from sparkinfer.ops.linear import activation_bytes, matmul, matvec, pack, packed_bytes, quantize_activation, tile_kind
    columns, rows, many = 512, 16, 8
    stride, random = activation_bytes(columns), np.random.default_rng(0)
    memory = np.zeros(many * stride + 64, np.uint8)
    records = memory[-memory.ctypes.data % 64:][:many * stride].reshape(many, stride)
    for name in TYPES:
        quant = QUANT_TYPES[name]
        for byte, x in ((None, random.standard_normal((many, columns))), (0xff, np.ones((many, columns))), (0xff, -np.ones((many, columns))), (0x80, np.ones((many, columns)))):
            if name == 'F16':
                if byte: continue
                blocks = random.standard_normal(rows * columns).astype(np.float16).view(np.uint8).reshape(-1, 2)
            else: blocks = random_blocks(name, rows * columns // quant.block_size)
            if byte:
                blocks[:, 16:] = byte
                for at in {'Q6_K': (208,), 'Q2_K': (80, 82)}.get(name, ()): blocks[:, at:at + 2] = np.array([.5], np.float16).view(np.uint8)
            for record, row in zip(records, x):
                record[:4 * columns] = row.astype(np.float32).view(np.uint8)
                quantize_activation(record.ctypes.data, columns, 0, columns // 32)
            codes, scales = records[:, 4 * columns:5 * columns].view(np.int8), np.ascontiguousarray(records[:, 5 * columns:][:, :columns // 8]).view(np.float32)
            seen = x.astype(np.float32) if name == 'F16' else (codes.reshape(many, -1, 32) * scales.astype(np.float64)[..., None]).reshape(many, columns)
            decoded = quant.decode(blocks.reshape(-1, quant.block_bytes)).reshape(rows, columns).astype(np.float64)
            one, all_rows, tiled, scratch = (np.zeros(shape, kind) for shape, kind in (((many, rows), np.float32),) * 3 + ((32 * columns, np.uint8),))
            for record, out in zip(records, one): matvec(ROW_KINDS[name], blocks.ctypes.data, record.ctypes.data, columns, out.ctypes.data, 0, rows // 8)
            error = np.abs(one - seen @ decoded.T).max() / np.abs(decoded).sum(1).max()
            assert error < 2e-6, (name, byte, error)
            matmul(ROW_KINDS[name], blocks.ctypes.data, records.ctypes.data, stride, many, columns, all_rows.ctypes.data, 4 * rows, 0, rows // 8, scratch.ctypes.data)
            assert (all_rows == one).all(), (name, byte)
            if tile_kind(name) == tile_kind('F32'): continue
            tiles = np.zeros(packed_bytes(name, rows, columns), np.uint8)
            pack(name, blocks.reshape(-1), rows, columns, tiles)
            for record, out in zip(records, tiled): matvec(tile_kind(name), tiles.ctypes.data, record.ctypes.data, columns, out.ctypes.data, 0, rows // 8)
            assert (tiled == one).all(), (name, byte)
            all_rows[:] = np.nan
            matmul(tile_kind(name), tiles.ctypes.data, records.ctypes.data, stride, many, columns, all_rows.ctypes.data, 4 * rows, 0, rows // 8, scratch.ctypes.data)
            assert (all_rows == one).all(), (name, byte)

def steps():
    "A dense model with attention only and a mixture of experts with recurrent layers: a prompt in one piece, cut in odd places and token by token, then single steps"
    from test_families import LIMITS, fresh, record, runner_of, worst
    for name in ('llama', 'qwen3_5_moe'):
        rec = record(name)
        prompt, ids = rec['prompt_75'], rec['ids'][:83]
        for cuts in ((), (7, 14, 64, 70), range(1, 75)):
            logits = fresh(runner_of('cpu32', name), ids, (*cuts, *range(75, 83)))
            assert worst(logits[75:], rec['steps']) <= LIMITS['cpu32'] and worst(logits[75 - len(prompt):75], prompt) <= LIMITS['cpu32'], (name, cuts)

def run_all():
    "In the process of a level: says `passed …` for everything that does"
    from nbdev.test import nbdev_test
    for chapter in CHAPTERS:
        try: nbdev_test.__wrapped__(path=str(ROOT/'nbs'/f'{chapter}.ipynb'), n_workers=0)
        except SystemExit as ended:
            if ended.code: continue
        print('passed', chapter, flush=True)
    for name, check in {TYPE_BY_TYPE: types, STEPS: steps}.items():
        check()
        print('passed', name, flush=True)

def start(env, code):
    return subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

@pytest.fixture(scope='module')
def said():
    "forced level → what its process has printed; the levels run side by side"
    possible = [forced for forced in FORCED if forced not in CPU_LEVELS or CPU_LEVELS[forced] <= target_features()]
    running = {forced: start(FORCED[forced], f'import sys; sys.path.insert(0, {str(ROOT/"tests")!r}); import test_levels; test_levels.run_all()') for forced in possible}
    yield lru_cache(None)(lambda forced: running[forced].communicate(timeout=1200)[0] if forced in running else None)
    for process in running.values(): process.kill()

@levels
@pytest.mark.parametrize('chapter', [*CHAPTERS, TYPE_BY_TYPE, STEPS])
def test_level(forced, chapter, said):
    if said(forced) is None: pytest.skip(f'this CPU cannot run {forced}')
    assert f'passed {chapter}\n' in said(forced), said(forced)

def test_which_chapters_depend_on_the_level():
    "Guards against a pattern that finds nothing, after which no level would be tested"
    assert {'ops/00_simd', 'ops/01_linear', *BY_TYPE} <= set(depending())

def test_portable_answers():
    "The whole road, from prompt to text, on the portable level"
    code = ("from sparkinfer import LLM; from sparkinfer.ops.simd import LEVEL; assert LEVEL == 'portable'; "
            "print(LLM.load('smollm2', context=64).generate('1, 2, 3, 4, 5,', temperature=0, max_tokens=12).text)")
    done = start({'SPARKINFER_CPU': 'portable'} | FORCED['generic CPU'], code)
    said = done.communicate(timeout=600)[0]
    assert done.returncode == 0 and said.strip().endswith('6, 7, 8, 9,'), said
