"""Safetensors folders of every dialect, written here byte by byte, and read as the formulas say (in plain Python, sharing no code with the reader)."""
import json, struct, subprocess, sys, tracemalloc
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from sparkinfer.errors import FormatError, ModelNotFound, UnsupportedError
from sparkinfer.formats.gguf import open_gguf, write_gguf
from sparkinfer.formats.nvfp4_fp8 import encode_nvfp4
from sparkinfer.formats.safetensors import Deferred, FolderTensor, describe_folder, fuse_rows, open_checkpoint, open_folder, split_rows, to_blocks, write_folder
from sparkinfer.text.chat_template import ChatTemplate


# ---- files by hand

SIZES = {'U8': 1, 'F8_E4M3': 1, 'F8_E8M0': 1, 'BF16': 2, 'F16': 2, 'F32': 4, 'I64': 8}


def bf16(values):
    "Float32 values cut to their upper halves: BF16, exactly, for values that have no lower half"
    bits = np.asarray(values, '<f4').view('<u4')
    assert not (bits & 0xffff).any()
    return (bits >> 16).astype('<u2')


def write_file(path, tensors):
    "tensors: name → (dtype, array whose bytes are stored, or (shape, bytes))"
    header, data = {}, b''
    for name, (dtype, a) in tensors.items():
        raw = a.tobytes()
        header[name] = {'dtype': dtype, 'shape': list(a.shape), 'data_offsets': [len(data), len(data) + len(raw)]}
        assert len(raw) == a.size * SIZES[dtype]
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + data)


def make(folder, tensors, config=None, **texts):
    "A folder with one file (or shards, when `tensors` is a list of dicts) and its JSON files"
    folder.mkdir(exist_ok=True)
    (folder/'config.json').write_text(json.dumps(config or {'model_type': 'demo'}))
    for name, value in texts.items(): (folder/f'{name}.json').write_text(json.dumps(value))
    if isinstance(tensors, dict): write_file(folder/'model.safetensors', tensors)
    else:
        names = [f'model-{i:05d}-of-{len(tensors):05d}.safetensors' for i in range(1, len(tensors) + 1)]
        for name, part in zip(names, tensors): write_file(folder/name, part)
        (folder/'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': {t: name for name, part in zip(names, tensors) for t in part}}))
    return folder


# ---- the formulas

def e2m1(code): return (-1 if code & 8 else 1) * [0, .5, 1, 1.5, 2, 3, 4, 6][code & 7]
def e4m3(code):
    e, m = code >> 3 & 15, code & 7
    return (-1 if code & 128 else 1) * (m * 2.**-9 if e == 0 else (8 + m) * 2.**(e - 10))
def element(packed, i, j): return e2m1(int(packed[i, j // 2]) >> 4 * (j % 2) & 15)
def each(shape, f): return np.array([[f(i, j) for j in range(shape[1])] for i in range(shape[0])], np.float64).astype(np.float32)


rng = np.random.default_rng(7)
ROWS, COLUMNS = 6, 96
PACKED = rng.integers(0, 256, (ROWS, COLUMNS // 2), np.uint8)
E4M3_SCALES = rng.integers(1, 126, (ROWS, COLUMNS // 16), np.uint8)
POWERS = rng.integers(110, 135, (ROWS, COLUMNS // 32), np.uint8)
FACTOR = np.float32(3.7e-5)
FP8 = rng.integers(0, 126, (ROWS, COLUMNS), np.uint8) | (rng.integers(0, 2, (ROWS, COLUMNS), np.uint8) << 7)
CODES = np.array([[e4m3(int(c)) for c in row] for row in FP8])


def nvfp4(factor=FACTOR, divide=False):
    def one(i, j):
        exact = element(PACKED, i, j) * e4m3(int(E4M3_SCALES[i, j // 16]))
        return exact / float(factor) if divide else exact * float(factor)
    return each((ROWS, COLUMNS), one)
MXFP4 = each((ROWS, COLUMNS), lambda i, j: element(PACKED, i, j) * 2.**(int(POWERS[i, j // 32]) - 127))


def opened(folder): return open_folder(folder)


# ---- one dialect at a time

f32 = lambda *v: np.array(v, '<f4')
CHANNEL, GRID = rng.uniform(.001, .1, ROWS).astype('<f4'), np.float32([[.5, .25, 3], [.75, 2, .125]])        # GRID for blocks of 4 × 40: edge blocks of 2 rows and of 16 columns
DIALECTS = {     # name: (tensors, expected, type)
    'ModelOpt NVFP4': ({'w.weight': ('U8', PACKED), 'w.weight_scale': ('F8_E4M3', E4M3_SCALES), 'w.weight_scale_2': ('F32', np.array(FACTOR)), 'w.input_scale': ('F32', np.array(np.float32(.1)))}, nvfp4(), 'NVFP4_ROWS'),
    'compressed-tensors NVFP4': ({'w.weight_packed': ('U8', PACKED), 'w.weight_scale': ('F8_E4M3', E4M3_SCALES), 'w.weight_global_scale': ('F32', f32(1234.5)), 'w.input_global_scale': ('F32', f32(9))}, nvfp4(np.float32(1234.5), True), 'NVFP4_ROWS'),
    'compressed-tensors MXFP4': ({'w.weight_packed': ('U8', PACKED), 'w.weight_scale': ('U8', POWERS)}, MXFP4, 'MXFP4_ROWS'),
    'E8M0 by dtype': ({'w.weight_packed': ('U8', PACKED), 'w.weight_scale': ('F8_E8M0', POWERS)}, MXFP4, 'MXFP4_ROWS'),
    'FP8 by tensor': ({'w.weight': ('F8_E4M3', FP8), 'w.weight_scale': ('F32', np.array(np.float32(.03)))}, (CODES * float(np.float32(.03))).astype(np.float32), 'FP8'),
    'FP8 by tensor, (1,)': ({'w.weight': ('F8_E4M3', FP8), 'w.weight_scale': ('F32', f32(.03)), 'w.input_scale': ('F32', f32(2))}, (CODES * float(np.float32(.03))).astype(np.float32), 'FP8'),
    'FP8 by channel, (out,)': ({'w.weight': ('F8_E4M3', FP8), 'w.weight_scale': ('F32', CHANNEL)}, (CODES * CHANNEL[:, None].astype(float)).astype(np.float32), 'FP8'),
    'FP8 by channel, (out, 1)': ({'w.weight': ('F8_E4M3', FP8), 'w.weight_scale': ('F32', CHANNEL[:, None])}, (CODES * CHANNEL[:, None].astype(float)).astype(np.float32), 'FP8'),
    'FP8 by block, inv, F32': ({'w.weight': ('F8_E4M3', FP8), 'w.weight_scale_inv': ('F32', GRID)}, each((ROWS, COLUMNS), lambda i, j: CODES[i, j] * GRID[i // 4, j // 40]), 'FP8'),
    'FP8 by block, inv, BF16': ({'w.weight': ('F8_E4M3', FP8), 'w.weight_scale_inv': ('BF16', bf16(GRID))}, each((ROWS, COLUMNS), lambda i, j: CODES[i, j] * GRID[i // 4, j // 40]), 'FP8'),
    'FP8 by block, ModelOpt': ({'w.weight': ('F8_E4M3', FP8), 'w.weight_scale': ('F32', GRID[:, None, :, None])}, each((ROWS, COLUMNS), lambda i, j: CODES[i, j] * GRID[i // 4, j // 40]), 'FP8'),
    'MXFP8': ({'w.weight': ('F8_E4M3', FP8), 'w.weight_scale': ('U8', POWERS)}, each((ROWS, COLUMNS), lambda i, j: CODES[i, j] * 2.**(int(POWERS[i, j // 32]) - 127)), 'FP8'),
    'Mistral FP8': ({'w.weight': ('F8_E4M3', FP8), 'w.qscale_weight': ('BF16', bf16([.5])), 'w.qscale_act': ('BF16', bf16([2.]))}, (CODES * .5).astype(np.float32), 'FP8'),
    'BF16': ({'w.weight': ('BF16', bf16(GRID))}, GRID, 'BF16'), 'F16': ({'w.weight': ('F16', GRID.astype('<f2'))}, GRID, 'F16'), 'F32': ({'w.weight': ('F32', GRID)}, GRID, 'F32')}


@pytest.mark.parametrize('name', DIALECTS)
def test_dialect_decodes_as_its_formula(name, tmp_path):
    tensors, expected, kind = DIALECTS[name]
    config = {'quantization_config': {'quant_method': 'fp8', 'weight_block_size': [4, 40]}} if 'by block' in name else None
    with opened(make(tmp_path/'m', tensors, config)) as checkpoint:
        assert list(checkpoint.tensors) == ['w.weight'] and not checkpoint.orphans
        t = checkpoint.tensors['w.weight']
        assert (t.name, t.shape, t.type.name) == ('w.weight', expected.shape, kind)
        for rows in (None, 1, slice(0, 2), np.array([1, 0, 1])): assert np.array_equal(t.dequantize(rows), expected if rows is None else expected[rows])
        assert t.dequantize().dtype == np.float32
        if len(tensors) > 3 or 'input' in ''.join(tensors) or 'act' in ''.join(tensors): assert {'input', 'input_divisor'} & t.scales.keys()
        checkpoint.release(t); checkpoint.release('w.weight'); checkpoint.release()
        assert np.array_equal(t.dequantize(), expected)


@pytest.mark.parametrize('name', [n for n, (_, _, kind) in DIALECTS.items() if kind not in ('BF16', 'F16', 'F32')])
def test_each_needed_scale_is_missed_by_name(name, tmp_path):
    tensors = DIALECTS[name][0]
    weight = next(iter(tensors))
    for gone in [n for n in tensors if n != weight and 'input' not in n and 'act' not in n]:
        make(tmp_path/'m', {n: t for n, t in tensors.items() if n != gone}, {'quantization_config': {'quant_method': 'fp8', 'weight_block_size': [4, 40]}})
        with pytest.raises(FormatError, match='scale') as error: open_folder(tmp_path/'m')
        assert weight in str(error.value) and str(tmp_path/'m') in str(error.value)


def test_gpt_oss_blocks(tmp_path):
    "Experts in one stack: (experts, out, in / 32, 16) bytes and (experts, out, in / 32) scales"
    make(tmp_path/'m', {'mlp.experts.gate_up_proj_blocks': ('U8', PACKED.reshape(2, 3, 3, 16)), 'mlp.experts.gate_up_proj_scales': ('U8', POWERS.reshape(2, 3, 3)), 'mlp.experts.gate_up_proj_bias': ('BF16', bf16(np.ones((2, 3))))},
         {'quantization_config': {'quant_method': 'mxfp4', 'modules_to_not_convert': ['lm_head']}})
    with open_folder(tmp_path/'m') as checkpoint:
        assert np.array_equal(checkpoint.tensors['mlp.experts.gate_up_proj'].dequantize(), MXFP4.reshape(2, 3, 96)) and checkpoint.tensors['mlp.experts.gate_up_proj_bias'].shape == (2, 3)
    with pytest.raises(FormatError, match='down_proj_blocks .* has no mlp.experts.down_proj_scales'): open_folder(make(tmp_path/'n', {'mlp.experts.down_proj_blocks': ('U8', PACKED.reshape(2, 3, 3, 16))}))


def test_no_torch_is_needed(tmp_path):
    "bfloat16 and the small floats are read with NumPy alone"
    make(tmp_path/'m', DIALECTS['FP8 by block, inv, BF16'][0] | {'b': DIALECTS['BF16'][0]['w.weight']}, {'quantization_config': {'quant_method': 'fp8', 'weight_block_size': [4, 40]}})
    code = "import sys; from sparkinfer.formats.safetensors import open_folder; print([t.dequantize().shape for t in open_folder(sys.argv[1]).tensors.values()], {'torch', 'ml_dtypes', 'safetensors'} & sys.modules.keys())"
    out = subprocess.run([sys.executable, '-c', code, tmp_path/'m'], capture_output=True, text=True, check=True).stdout
    assert out == '[(6, 96), (2, 3)] set()\n', out


# ---- mixed checkpoints

def mixed_tensors():
    "NVFP4 feed-forward, FP8 attention, BF16 rest, as the names of a Llama"
    p, tensors, expected = 'model.layers.0.', {}, {}
    for k, part in enumerate(('gate', 'up')):          # a fused group whose members have different factors
        tensors |= {f'{p}mlp.{part}_proj.weight': ('U8', PACKED), f'{p}mlp.{part}_proj.weight_scale': ('F8_E4M3', E4M3_SCALES), f'{p}mlp.{part}_proj.weight_scale_2': ('F32', np.array(FACTOR * np.float32(1 + k)))}
        expected[f'{p}mlp.{part}_proj.weight'] = nvfp4(FACTOR * np.float32(1 + k))
    tensors |= {f'{p}self_attn.q_proj.weight': ('F8_E4M3', FP8), f'{p}self_attn.q_proj.weight_scale': ('F32', CHANNEL[:, None]), f'{p}self_attn.k_proj.weight': ('F8_E4M3', FP8), f'{p}self_attn.k_proj.weight_scale': ('F32', f32(.5)),
                f'{p}self_attn.k_proj.k_scale': ('F32', f32(1.5)), f'{p}self_attn.v_scale': ('F32', np.array(np.float32(2))), 'lm_head.weight': ('BF16', bf16(GRID)), 'lm_head.weight_scale': ('F32', f32(7))}
    expected |= {f'{p}self_attn.q_proj.weight': (CODES * CHANNEL[:, None].astype(float)).astype(np.float32), f'{p}self_attn.k_proj.weight': (CODES * .5).astype(np.float32), 'lm_head.weight': GRID}
    return tensors, expected


MODELOPT = {'producer': {'name': 'modelopt'}, 'quantization': {'quant_algo': 'MIXED_PRECISION', 'kv_cache_quant_algo': 'FP8', 'exclude_modules': ['lm_head', 'model.layers.0.mlp*'],       # wrong on purpose: the second is quantised
                                                               'quantized_layers': {'model.layers.0.mlp.gate_proj': {'quant_algo': 'NVFP4', 'group_size': 16}}}}


def test_mixed_checkpoint_is_decided_tensor_by_tensor(tmp_path):
    tensors, expected = mixed_tensors()
    with open_folder(make(tmp_path/'m', tensors, {'model_type': 'llama'}, hf_quant_config=MODELOPT)) as checkpoint:
        assert list(checkpoint.tensors) == [n for n in tensors if n in expected]                  # in the order of the file
        for name, values in expected.items(): assert np.array_equal(checkpoint.tensors[name].dequantize(), values), name
        assert checkpoint.orphans == ('lm_head.weight_scale',)
        assert {n: v.item() for n, v in checkpoint.kv_scales.items()} == {'model.layers.0.self_attn.k_proj.k_scale': 1.5, 'model.layers.0.self_attn.v_scale': 2}
        text = describe_folder(checkpoint)
        for word in ('NVFP4_ROWS', 'lm_head.weight_scale', 'k_proj.k_scale', 'modelopt, MIXED_PRECISION, NVFP4', 'model.layers.0.mlp*', 'llama'): assert word in text, word
        fused = fuse_rows([checkpoint.tensors[f'model.layers.0.mlp.{part}_proj.weight'] for part in ('gate', 'up')], 'gate_up')
        assert np.array_equal(fused.dequantize(), np.vstack([expected[f'model.layers.0.mlp.{part}_proj.weight'] for part in ('gate', 'up')]))


def test_scalar_scale_of_a_fused_matrix_reaches_every_part(tmp_path):
    "One engine gave it to the first part and the rest got what lay in memory: its score fell from .945 to .005"
    tensors = {'qkv.weight': DIALECTS['ModelOpt NVFP4'][0]['w.weight'], 'qkv.weight_scale': ('F8_E4M3', E4M3_SCALES), 'qkv.weight_scale_2': ('F32', np.array(FACTOR)), 'gate_up.weight': ('F8_E4M3', FP8), 'gate_up.weight_scale': ('F32', f32(.5))}
    with open_folder(make(tmp_path/'m', tensors)) as checkpoint:
        q, k, v = split_rows(checkpoint.tensors['qkv.weight'], [3, 1, 2], ['q', 'k', 'v'])
        gate, up = split_rows(checkpoint.tensors['gate_up.weight'], [3, 3])
        assert np.array_equal(np.vstack([q.dequantize(), k.dequantize(), v.dequantize()]), nvfp4()) and [t.scales['global'].item() for t in (q, k, v)] == [FACTOR] * 3
        assert np.array_equal(up.dequantize(), (CODES * .5).astype(np.float32)[3:]) and (q.name, q.shape) == ('q', (3, 96))
        with pytest.raises(FormatError, match='6 rows, not 3 \\+ 2'): split_rows(checkpoint.tensors['qkv.weight'], [3, 2])
        with pytest.raises(FormatError, match='cannot be fused'): fuse_rows([q, gate], 'x')


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6), st.sampled_from(['NVFP4', 'FP8', 'FP8_CHANNEL', 'FP8_BLOCK']), st.data())
def test_split_and_fuse_change_no_weight(tmp_path_factory, sixteens, stack, seed, kind, data):
    draw = np.random.default_rng(seed)
    rows = data.draw(st.integers(2, 300))
    cut = data.draw(st.integers(1, rows - 1))
    x = draw.normal(size=(rows, 16 * sixteens)).astype(np.float32)
    folder = tmp_path_factory.mktemp('split')/'m'
    write_folder(folder, {'w.weight': Deferred(kind, x.shape, lambda: x)}, {})
    with open_folder(folder) as checkpoint:
        t = checkpoint.tensors['w.weight']
        parts = split_rows(t, [cut, rows - cut])
        assert np.array_equal(np.vstack([p.dequantize() for p in parts]), t.dequantize()) and np.array_equal(fuse_rows(parts, 'w').dequantize(), t.dequantize())


def test_lossless_blocks_of_gguf(tmp_path):
    "A folder's NVFP4 and MXFP4 written as GGUF, and back, with the same values"
    x = np.random.default_rng(3).normal(size=(8, 128)).astype(np.float32)
    write_folder(tmp_path/'m', {'a.weight': Deferred('NVFP4', x.shape, lambda: x), 'b.weight': Deferred('MXFP4', x.shape, lambda: x)}, {})
    with open_folder(tmp_path/'m') as checkpoint:
        made = {n: to_blocks(t) for n, t in checkpoint.tensors.items()}
        write_gguf(tmp_path/'m.gguf', {'general.architecture': 'demo'}, {n: t for n, (t, _) in made.items()})
        with open_gguf(tmp_path/'m.gguf') as blocks:
            for n, (_, factor) in made.items(): assert np.array_equal(blocks.tensors[n].dequantize() * factor, checkpoint.tensors[n].dequantize())
            write_folder(tmp_path/'back', blocks.tensors, {})
        with open_folder(tmp_path/'back') as back:
            for n, (_, factor) in made.items(): assert np.array_equal(back.tensors[n].data, checkpoint.tensors[n].data) and np.array_equal(back.tensors[n].dequantize() * factor, checkpoint.tensors[n].dequantize())
        with pytest.raises(UnsupportedError, match='FP8'): to_blocks(FolderTensor('w', (1, 1), checkpoint.tensors['a.weight'].type.__class__('FP8', None, 1, 1, None, None), np.zeros(1, np.uint8)))


# ---- foreign and unfinished quantisations

@pytest.mark.parametrize('config, word', [
    ({'quant_method': 'gptq', 'bits': 4}, 'gptq'), ({'quant_method': 'awq'}, 'awq'), ({'quant_method': 'bitsandbytes', 'load_in_4bit': True}, 'bitsandbytes'), ({'quant_method': 'compressed-tensors', 'format': 'pack-quantized'}, 'pack-quantized'),
    ({'quant_method': 'compressed-tensors', 'format': 'mixed-precision', 'config_groups': {'g': {'format': 'int-quantized'}}}, 'int-quantized'), ({'quant_method': 'modelopt', 'quant_algo': 'W4A8_AWQ'}, 'W4A8_AWQ'), ({'quant_algo': 'NVFP4'}, 'quant_method'),
    ({'quant_method': 'compressed-tensors', 'format': 'dense', 'sparsity_config': {'format': 'sparse-24-bitmask'}}, 'sparse'), ({'quant_method': ['x']}, 'x'), ({'quant_method': 'compressed-tensors', 'format': ['x']}, 'x')])
def test_unknown_methods_are_refused_by_name(config, word, tmp_path):
    for place in ({'quantization_config': config}, {'text_config': {'quantization_config': config}}):
        with pytest.raises(UnsupportedError, match=word): open_folder(make(tmp_path/'m', DIALECTS['BF16'][0], place))


@pytest.mark.parametrize('name, dtype, array', [('w.qweight', 'U8', PACKED), ('w.weight.absmax', 'F32', f32(1)), ('w.weight.quant_state.bitsandbytes__nf4', 'U8', PACKED), ('w.pre_quant_scale', 'F32', f32(1))])
def test_arrays_of_other_schemes_are_refused_without_a_config_too(name, dtype, array, tmp_path):
    with pytest.raises(UnsupportedError, match='quantisation that is not supported') as error: open_folder(make(tmp_path/'m', DIALECTS['BF16'][0] | {name: (dtype, array)}))
    assert name in str(error.value)


def test_wrong_scales_are_refused(tmp_path):
    def refused(tensors, *words):
        with pytest.raises(FormatError) as error: open_folder(make(tmp_path/'m', tensors))
        for word in words: assert word in str(error.value), (word, str(error.value))
    nv = DIALECTS['ModelOpt NVFP4'][0]
    refused(nv | {'w.weight_scale': ('F8_E4M3', E4M3_SCALES[:, :3])}, 'w.weight', '6 × 3')
    refused(nv | {'w.weight_scale': ('F32', np.ones((6, 6), '<f4'))}, 'w.weight_scale', 'F32')
    refused(nv | {'w.weight_scale_2': ('F32', f32(1, 2, 3))}, 'w.weight_scale_2', '3')
    refused(nv | {'w.weight_global_scale': ('F32', f32(1))}, 'both dialects')
    refused({'w.weight': ('U8', np.zeros((), np.uint8)), 'w.weight_scale': ('U8', np.zeros((), np.uint8))}, 'w.weight')
    refused(DIALECTS['FP8 by tensor'][0] | {'w.weight_scale': ('F32', np.ones((3, 1), '<f4'))}, 'w.weight', '(3, 1)')
    refused(DIALECTS['FP8 by tensor'][0] | {'w.weight_scale': ('I64', np.ones(1, '<i8'))}, 'w.weight_scale', 'I64')
    refused({f'layers.{i}.weight': ('F8_E4M3', FP8) for i in range(40)}, '40 quantised tensors', 'layers.0.weight', 'and 34 more')
    make(tmp_path/'m', nv | {'w.weight_scale_2': ('F32', f32(np.nan))})
    with open_folder(tmp_path/'m') as checkpoint, pytest.raises(FormatError, match="'w.weight' has the factor"): checkpoint.tensors['w.weight'].dequantize()


# ---- folders

def test_shards_with_scales_in_another_file(tmp_path):
    nv = DIALECTS['compressed-tensors NVFP4'][0]
    parts = [{'w.weight_packed': nv['w.weight_packed']}, {n: t for n, t in nv.items() if n != 'w.weight_packed'} | {'norm.weight': ('BF16', bf16(GRID))}]
    folder = make(tmp_path/'m', parts)
    for path in (folder, folder/'model-00002-of-00002.safetensors', folder/'model.safetensors.index.json', folder/'config.json'):
        with open_checkpoint(path) as checkpoint:
            assert np.array_equal(checkpoint.tensors['w.weight'].dequantize(), nvfp4(np.float32(1234.5), True)) and len(checkpoint.paths) == 2 and not checkpoint.unlisted
            checkpoint.release('w.weight')
    (folder/'model.safetensors.index.json').unlink()                                             # complete shards need no index
    with open_folder(folder) as checkpoint: assert list(checkpoint.tensors) == ['w.weight', 'norm.weight']
    (folder/'model-00001-of-00002.safetensors').unlink()
    (folder/'model-00001-of-00003.safetensors').write_bytes(b'')
    with pytest.raises(FormatError, match='no model.safetensors.index.json'): open_folder(folder)


def test_tensors_the_index_does_not_list(tmp_path):
    folder = make(tmp_path/'m', [{'a': ('F32', f32(1)), 'b': ('F32', f32(2))}, {'c': ('F32', f32(3))}])
    index = json.loads((folder/'model.safetensors.index.json').read_text())
    del index['weight_map']['b']
    (folder/'model.safetensors.index.json').write_text(json.dumps(index))
    with open_folder(folder) as checkpoint: assert checkpoint.unlisted == ('b',) and len(checkpoint.tensors) == 3 and 'does not list: b' in describe_folder(checkpoint)


def test_which_files(tmp_path):
    def refused(kind, match):
        with pytest.raises(kind, match=match): open_checkpoint(tmp_path/'m')
    refused(ModelNotFound, 'no such file')
    (tmp_path/'m').mkdir()
    refused(ModelNotFound, 'no safetensors file')
    (tmp_path/'m/pytorch_model.bin').write_bytes(b'x')
    refused(ModelNotFound, 'only pytorch_model.bin: convert it')
    write_file(tmp_path/'m/anything.safetensors', {'a': ('F32', f32(1))})
    with open_checkpoint(tmp_path/'m') as checkpoint: assert list(checkpoint.tensors) == ['a'] and checkpoint.metadata['config'] == {}
    write_file(tmp_path/'m/other.safetensors', {'a': ('F32', f32(1))})
    refused(FormatError, 'has 2 safetensors files and no')
    with open_checkpoint(tmp_path/'m/other.safetensors') as checkpoint: assert len(checkpoint.paths) == 1
    write_file(tmp_path/'m/model.safetensors', {'a': ('F32', f32(2))})
    with open_checkpoint(tmp_path/'m') as checkpoint: assert checkpoint.tensors['a'].dequantize() == 2
    (tmp_path/'m/model.safetensors.index.json').write_text(json.dumps({'weight_map': {'a': 'other.safetensors'}}))
    refused(FormatError, 'both model.safetensors and an index')


def test_gguf_through_the_same_door(tmp_path):
    write_gguf(tmp_path/'a.gguf', {'general.architecture': 'demo'}, {'w': np.ones((1, 2), np.float32)})
    for path in (tmp_path, tmp_path/'a.gguf'):
        with open_checkpoint(path) as checkpoint: assert checkpoint.metadata['general.architecture'] == 'demo'
    write_gguf(tmp_path/'b.gguf', {}, {})
    with pytest.raises(FormatError, match='2 GGUF models'): open_checkpoint(tmp_path)


def test_text_files(tmp_path):
    folder = make(tmp_path/'m', {'a': ('F32', f32(1))}, {'model_type': 'demo'}, generation_config={'eos_token_id': [1, 2]}, tokenizer_config={'chat_template': [{'name': 'tool_use', 'template': 'x'}, {'name': 'default', 'template': 'from the list'}]})
    (folder/'tokenizer.json').write_text('{}')
    with open_folder(folder) as checkpoint:
        assert checkpoint.metadata['generation_config'] == {'eos_token_id': [1, 2]} and checkpoint.metadata['tokenizer.json'] == str(folder/'tokenizer.json') and checkpoint.metadata['tokenizer.chat_template'] == 'from the list'
        assert checkpoint.metadata['quantization'] == {'method': 'none', 'algorithms': [], 'ignore': [], 'block': (128, 128)}
    (folder/'chat_template.jinja').write_text('{{ messages[0].content }}!')
    with open_folder(folder) as checkpoint:
        class Plain: bos_token = eos_token = ''; control_tokens = {}
        assert ChatTemplate.from_gguf(checkpoint.metadata, Plain()).render([{'role': 'user', 'content': 'hello'}]) == 'hello!'
    (folder/'tokenizer_config.json').write_text('{"chat_template": "plain"}')
    (folder/'chat_template.jinja').unlink()
    with open_folder(folder) as checkpoint: assert checkpoint.metadata['tokenizer.chat_template'] == 'plain'
    for name, content, word in (('config.json', '[]', 'not a JSON object'), ('generation_config.json', '{', 'not JSON'), ('tokenizer_config.json', '{"chat_template": 7}', 'chat template is int'), ('config.json', '{"a": "\udc80"}', 'UTF-8')):
        old = (folder/name).read_bytes()
        (folder/name).write_bytes(content.encode('utf-8', 'surrogateescape'))
        with pytest.raises(FormatError, match=word): open_folder(folder)
        (folder/name).write_bytes(old)


def test_views_outlive_the_checkpoint(tmp_path):
    checkpoint = open_folder(make(tmp_path/'m', DIALECTS['ModelOpt NVFP4'][0]))
    kept = checkpoint.tensors['w.weight']
    checkpoint.close(); checkpoint.close(); checkpoint.release()
    assert checkpoint.closed and not checkpoint.tensors and np.array_equal(kept.dequantize(), nvfp4()) and 'closed' in repr(checkpoint)


# ---- writing

def test_config_entries_of_each_layout(tmp_path):
    x = np.ones((64, 64), np.float32)
    def written(dialect, kinds, **options):
        name = f'{dialect}-{"-".join(kinds)}-{len(options)}'
        write_folder(tmp_path/name, {f'layers.{i}.proj.weight': Deferred(kind, x.shape, lambda: x, **(options if kind == 'NVFP4' else {})) for i, kind in enumerate(kinds)} | {'embed.weight': Deferred('BF16', x.shape, lambda: x), 'norm.weight': np.ones(3, np.float32)}, {'a': 1, 'quantization_config': 'old'}, dialect=dialect)
        theirs = tmp_path/name/'hf_quant_config.json'
        return json.loads((tmp_path/name/'config.json').read_text()), json.loads(theirs.read_text()) if theirs.exists() else None
    config, theirs = written('modelopt', ['NVFP4'])
    assert config['a'] == 1 and config['quantization_config']['quant_method'] == 'modelopt' and config['quantization_config']['quant_algo'] == 'W4A16_NVFP4' and config['quantization_config']['ignore'] == ['embed']
    assert theirs['quantization'] == {'quant_algo': 'W4A16_NVFP4', 'group_size': 16, 'kv_cache_quant_algo': None, 'exclude_modules': ['embed']}
    assert written('modelopt', ['NVFP4'], input_scale=.01)[1]['quantization']['quant_algo'] == 'NVFP4'
    config, theirs = written('modelopt', ['NVFP4', 'FP8'])
    assert theirs['quantization']['quant_algo'] == 'MIXED_PRECISION' and theirs['quantization']['quantized_layers'] == {'layers.0.proj': {'quant_algo': 'W4A16_NVFP4', 'group_size': 16}, 'layers.1.proj': {'quant_algo': 'FP8'}}
    config, theirs = written('compressed-tensors', ['NVFP4'])
    q = config['quantization_config']
    assert theirs is None and q['format'] == 'nvfp4-pack-quantized' and q['config_groups']['group_0']['targets'] == ['Linear'] and q['config_groups']['group_0']['weights']['group_size'] == 16 and q['config_groups']['group_0']['input_activations'] is None and q['ignore'] == ['embed']
    q = written('compressed-tensors', ['NVFP4', 'FP8_CHANNEL'])[0]['quantization_config']
    assert q['format'] == 'mixed-precision' and [g['format'] for g in q['config_groups'].values()] == ['nvfp4-pack-quantized', 'float-quantized'] and q['config_groups']['group_1']['targets'] == ['layers.1.proj']
    assert written('fp8', ['FP8_BLOCK'])[0]['quantization_config'] == {'quant_method': 'fp8', 'activation_scheme': 'dynamic', 'fmt': 'e4m3', 'weight_block_size': [128, 128], 'modules_to_not_convert': ['embed']}
    config, theirs = written('modelopt', [])
    assert theirs is None and 'quantization_config' not in config
    with pytest.raises(FormatError, match='fp8 layout does not hold NVFP4'): written('fp8', ['NVFP4'])
    with pytest.raises(FormatError, match='gguf'): write_folder(tmp_path/'x', {}, {}, dialect='gguf')


@pytest.mark.parametrize('dialect', ['modelopt', 'compressed-tensors'])
def test_a_better_encoder_and_activation_scales(dialect, tmp_path):
    x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    write_folder(tmp_path/'m', {'w.weight': Deferred('NVFP4', x.shape, lambda: x, encode=lambda values, factor, divide: encode_nvfp4(values, factor, divide, (6, 4)), input_scale=.25)}, {}, dialect=dialect)
    with open_folder(tmp_path/'m') as checkpoint:
        t = checkpoint.tensors['w.weight']
        packed, scales, factor = encode_nvfp4(x, divide=dialect != 'modelopt', peaks=(6, 4))
        assert np.array_equal(t.data, packed.ravel()) and np.array_equal(t.scales['block'], scales) and t.scales['global' if dialect == 'modelopt' else 'divisor'].item() == factor
        assert t.scales['input' if dialect == 'modelopt' else 'input_divisor'].item() == (.25 if dialect == 'modelopt' else 4)
        other = 'modelopt' if dialect != 'modelopt' else 'compressed-tensors'
        write_folder(tmp_path/'o', checkpoint.tensors, {}, dialect=other)
    with open_folder(tmp_path/'o') as back: assert back.tensors['w.weight'].scales['input' if other == 'modelopt' else 'input_divisor'].item() == (.25 if other == 'modelopt' else 4)


def test_writer_holds_one_tensor_at_a_time(tmp_path):
    shape, alive = (256, 1024), []
    def make_one():
        alive.append(1)
        return np.full(shape, len(alive), np.float32)
    tracemalloc.start()
    try:
        write_folder(tmp_path/'m', {f'layers.{i}.weight': Deferred('NVFP4' if i % 2 else 'BF16', shape, make_one) for i in range(24)}, {}, shard_bytes=1_000_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally: tracemalloc.stop()
    assert len(alive) == 24 and peak < 8 * 4 * 256 * 1024, peak                                    # encoding BF16 takes some temporaries of one tensor
    with open_folder(tmp_path/'m') as checkpoint:
        assert len(checkpoint.paths) > 5 and all(p.stat().st_size < 1_100_000 for p in checkpoint.paths)
        for i in range(24): assert np.allclose(checkpoint.tensors[f'layers.{i}.weight'].dequantize(), i + 1, rtol=.01)


def test_nothing_is_left_of_a_failure(tmp_path):
    count = 0
    def failing():
        nonlocal count
        count += 1
        if count == 3: raise KeyboardInterrupt
        return np.ones((4, 4), np.float32)
    with pytest.raises(KeyboardInterrupt): write_folder(tmp_path/'m', {f'{i}': Deferred('F32', (4, 4), failing) for i in range(5)}, {}, shard_bytes=64)
    assert list(tmp_path.iterdir()) == []
    (tmp_path/'m').mkdir()
    with pytest.raises(FileExistsError): write_folder(tmp_path/'m', {}, {})


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=12).filter(lambda n: n != '__metadata__'), st.tuples(st.sampled_from(['f4', 'f2', 'f8', 'i1', 'u1', 'i8', '?', 'u2']), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=6), st.integers(1, 64))
def test_plain_arrays_round_trip(tmp_path_factory, shapes, shard_bytes):
    draw, folder = np.random.default_rng(0), tmp_path_factory.mktemp('plain')/'m'
    arrays = {'x' + name: draw.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in shapes.items()}
    write_folder(folder, arrays, {}, shard_bytes=shard_bytes)
    with open_folder(folder) as checkpoint:
        assert checkpoint.tensors.keys() == arrays.keys()
        for name, a in arrays.items(): assert checkpoint.tensors[name].shape == a.shape and np.array_equal(checkpoint.tensors[name].dequantize(), a.astype(np.float32))

def test_half_a_model_without_an_index(tmp_path):
    "One file called …-00001-of-00002 was taken for a whole model"
    from safetensors.numpy import save_file
    save_file({'x.weight': np.ones((2, 4), np.float32)}, tmp_path/'model-00001-of-00002.safetensors')
    (tmp_path/'config.json').write_text('{"model_type": "llama"}')
    with pytest.raises(FormatError, match='1 of 2 files are missing'): open_folder(tmp_path)

@pytest.mark.parametrize('key, setting', [('truncation', dict(direction='Right', max_length=5, strategy='LongestFirst', stride=0)), ('padding', dict(strategy=dict(Fixed=64), direction='Right', pad_to_multiple_of=None, pad_id=0, pad_type_id=0, pad_token='<|endoftext|>'))])
def test_settings_of_training_in_a_tokenizer_are_ignored_with_a_warning(tmp_path, key, setting):
    "tokenizer.json keeps what its last user cut or filled texts to; a prompt of six tokens would have lost one, without a word"
    import json
    from sparkinfer.models.synthetic import synth
    from sparkinfer.text.tokenizer import Tokenizer
    synth('tiny-llama', tmp_path/'m', 'safetensors')
    text, path = 'what is the time now, and where were they then?', tmp_path/'m'/'tokenizer.json'
    plain = Tokenizer.from_folder(tmp_path/'m').encode(text)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: setting}))
    import tokenizers
    assert len(tokenizers.Tokenizer.from_file(str(path)).encode(text).ids) == {'truncation': 5, 'padding': 64}[key]           # so the library would do it
    with pytest.warns(UserWarning, match=f'tokenizer.json: its {key} is a setting of training and is ignored'): told = Tokenizer.from_folder(tmp_path/'m')
    assert told.encode(text) == plain and 5 < len(plain) < 64

@pytest.mark.parametrize('config', [{'quantization_config': 'fp8'}, {'quantization_config': [1]}, {'quantization_config': 0}, {'quantization_config': False}, {'text_config': {'quantization_config': 'x'}}, {'compression_config': 3},
                                    {'quantization_config': {'quant_method': 'modelopt', 'config_groups': []}}, {'quantization_config': {'quant_method': 'modelopt', 'ignore': 'lm_head'}}, {'quantization_config': {'quant_method': 'fp8', 'weight_block_size': 128}}])
def test_quantisation_of_the_wrong_kind_is_named(tmp_path, config):
    "(A `quantization_config` that is no object was taken for none.)"
    write_folder(tmp_path/'m', {'a.weight': np.ones((4, 4), np.float32)}, {'model_type': 'llama'})
    import json
    (tmp_path/'m'/'config.json').write_text(json.dumps({'model_type': 'llama'} | config))
    with pytest.raises(FormatError, match='/m/config.json: `(quantization|compression)_config'): open_folder(tmp_path/'m')

@pytest.mark.parametrize('name', ['', 'model.safetensors', 'config.json'])
def test_a_folder_is_opened_by_any_of_its_files(tmp_path, name):
    from sparkinfer.formats.safetensors import open_checkpoint
    write_folder(tmp_path/'m', {'a.weight': np.ones((4, 4), np.float32)}, {'model_type': 'llama'})
    with open_checkpoint(tmp_path/'m'/name) as opened: assert list(opened.tensors) == ['a.weight'] and opened.metadata['config'] == {'model_type': 'llama'}
