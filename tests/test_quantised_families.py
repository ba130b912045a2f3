"""Quantised families: a tiny model of noise in each kind of file, against itself decoded to float32, and what 8-bit activations cost beside what they cost llama.cpp on the same file."""
import importlib.util
from functools import lru_cache

import numpy as np
import pytest

from sparkinfer.measure.accuracy import compare_sources, llama_cpp_logits, logits_of, make_runner, open_model
from sparkinfer.models.convert import convert
from sparkinfer.models.synthetic import synth

MODELS = ('tiny-llama', 'tiny-qwen35', 'tiny-qwen35moe')
FILES = {      # name: (suffix, what it is converted to from the float32 file, other arguments); None: the mix of types that published files have
    'mix': ('.gguf', None, {}), 'Q4_K': ('.gguf', 'Q4_K_M', {}), 'Q6_K': ('.gguf', 'Q6_K', {}), 'Q8_0': ('.gguf', 'Q8_0', {}), 'NVFP4 in GGUF': ('.gguf', 'NVFP4', dict(maps=['*token_embd*=Q8_0'])),
    'NVFP4': ('', 'NVFP4', {}), 'NVFP4, compressed-tensors': ('', 'NVFP4', dict(layout='compressed-tensors')), 'FP8': ('', 'FP8', {}), 'FP8, a scale for each row': ('', 'FP8_CHANNEL', dict(layout='compressed-tensors')), 'FP8 in blocks': ('', 'FP8_BLOCK', dict(layout='fp8'))}
IDS = np.random.default_rng(0).integers(0, 1000, 2048).astype(np.int32)
SHORT = IDS[:96]                             # more than one chunk of the delta rule
PEER = {kind: kind if suffix else 'NVFP4 in GGUF' if kind.startswith('NVFP4') else 'Q8_0' for kind, (suffix, *_) in FILES.items()}       # llama.cpp reads no folders: it pays for the nearest kind that it reads
each = pytest.mark.parametrize('model, kind', [(model, kind) for model in MODELS for kind in FILES])

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "(model, kind) → the path of its file; 'exact' is the float32 file that all others come from, '… decoded' the same weights in float32"
    folder = tmp_path_factory.mktemp('quantised')
    @lru_cache(None)
    def path(model, kind):
        if kind == 'exact':
            synth(model, folder/f'{model}.gguf', to='F32')
            return folder/f'{model}.gguf'
        if kind.endswith(' decoded'):
            source = path(model, kind.removesuffix(' decoded'))
            target = source.with_name(f'{source.stem} decoded{source.suffix}')
            convert(source, target, 'F32')
            return target
        suffix, to, more = FILES[kind]
        target = folder/f'{model} {list(FILES).index(kind)}{suffix}'
        if to is None: synth(model, target)
        else: convert(path(model, 'exact'), target, to, **more)
        return target
    return path

def logits(path, runner='spec', ids=SHORT):
    loaded = make_runner(runner, open_model(path)[1], len(ids))
    try: return np.concatenate(list(logits_of(loaded, ids)))
    finally: loaded.close()

def worst(a, b):
    assert a.shape == b.shape and np.isfinite(a).all()
    return float((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max())

@each
def test_read_as_it_is_and_decoded_first(model, kind, place):
    "Scales beside the codes, one for a block, a row or a tensor, multiplied or divided by; heads reordered before or after decoding. Guards against a factor that one of the two readers forgets"
    ours = logits(place(model, kind))
    assert worst(ours, logits(place(model, f'{kind} decoded'))) <= 1e-4
    assert kind == 'mix' or 1e-3 < worst(ours, logits(place(model, 'exact'))) < 2, 'nothing was quantised, or something else than the model'

@each
def test_fast_with_float_activations(model, kind, place):
    "The kernels of a step with float32 weights, decoded from each kind of file"
    assert worst(logits(place(model, kind), 'cpu32'), logits(place(model, kind))) <= 1e-3

def in_blocks(rows): return np.split(rows, range(128, len(rows), 128))

@lru_cache(2)
def decoded(path, tokens): return logits(path, ids=IDS[:tokens])

@lru_cache(None)
def cost(path, engine, tokens):
    "KL at each position of the long text, to the same file decoded"
    ids = IDS[:tokens]
    other = llama_cpp_logits(path, ids) if engine == 'llama.cpp' else in_blocks(logits(path, engine, ids))
    return compare_sources(in_blocks(decoded(path, tokens)), other, ids).columns['kl']

@pytest.mark.skipif(importlib.util.find_spec('xllamacpp') is None, reason='xllamacpp comes with the parity extra')
@each
def test_activations_cost_no_more_than_llama_cpp_pays(model, kind, place):
    """Both against their file, decoded. Where noise picks another expert, a position costs a hundred times the median, here and there alike but not at the same positions:
    so the bar on the mean allows two standard errors, and the median has the same bar without any"""
    tokens = len(IDS) if model.endswith('moe') else 512
    ours, theirs = cost(place(model, kind), 'cpu', tokens), cost(place(model, PEER[kind]), 'llama.cpp', tokens)
    excess = ours - 1.15 * theirs
    assert np.median(ours) <= 1.15 * np.median(theirs) and excess.mean() <= 2 * excess.std() / np.sqrt(len(excess)), (np.median(ours), np.median(theirs), ours.mean(), theirs.mean())
