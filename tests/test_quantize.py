"""Encoders against llama.cpp's and against hostile distributions; conversion: what survives a crash, how much memory it takes, what llama.cpp says about the result"""
import importlib.util, json, os, random, re, resource, shutil, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from sparkinfer.errors import FormatError, SparkinferError, UnsupportedError
from sparkinfer.formats.blocks import quant_type
from sparkinfer.formats.gguf import open_gguf, write_gguf
from sparkinfer.formats.quantize import K_LAYOUTS, RECIPES, SIMPLE_CODES, choose_type, encode, relative_error
from sparkinfer.formats.nvfp4_fp8 import decode_nvfp4, encode_nvfp4
from sparkinfer.formats.safetensors import Deferred, open_folder, write_folder
from sparkinfer.models.convert import convert
from sparkinfer.models.synthetic import SHAPES, synth

ROOT = Path(__file__).resolve().parent.parent
RECORD = json.loads((ROOT/'data'/'reference'/'llama-cpp-quantize.json').read_text())
ENCODED = [*K_LAYOUTS, *SIMPLE_CODES]
needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec('xllamacpp') is None, reason='xllamacpp comes with the parity extra')

def distributions(rows=400):
    "Weights that no model would have, and some that every model has"
    draw = np.random.default_rng(7)
    normal = draw.normal(0, .02, (rows, 256))
    outlier = normal.copy()
    outlier[:, 17] *= 60
    sizes = np.exp(draw.normal(0, 1.5, (rows, 8, 1)))
    return {name: np.float32(x) for name, x in dict(
        normal=normal, heavy_tails=draw.standard_t(3, (rows, 256)) * .02, outlier=outlier, positive=np.abs(normal) + .01, negative=-np.abs(normal) - .01, sparse=np.where(draw.random((rows, 256)) < .9, 0, normal),
        unequal_runs=(normal.reshape(rows, 8, 32) * sizes).reshape(rows, 256), three_values=draw.integers(-1, 2, (rows, 256)) * .03, large=normal * 1e5, small=normal * 1e-3).items()}

@pytest.fixture(scope='module')
def weights(): return distributions()

@pytest.mark.parametrize('name', ENCODED)
def test_blocks_decode_as_the_reference_decodes_them(name, weights):
    for x in weights.values():
        blocks = encode(x, name)
        assert np.array_equal(quant_type(name).decode(blocks).ravel(), gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).ravel())

@pytest.mark.parametrize('name', ENCODED)
def test_search_is_no_worse_than_rounding(name, weights):
    for label, x in weights.items(): assert relative_error(x, name) <= relative_error(x, name, 'nearest') * 1.0001, label

@pytest.mark.parametrize('name', ['Q2_K', 'Q4_K', 'Q5_K'])
def test_lloyd_is_better_than_rounding_and_keeps_scales_normal(name, weights):
    for label in ('normal', 'heavy_tails', 'unequal_runs', 'outlier'):
        assert relative_error(weights[label], name, 'lloyd') < relative_error(weights[label], name, 'nearest'), label
    at = {'Q2_K': 80}.get(name, 0)
    d = encode(weights['small'], name, 'lloyd')[:, at:at + 2].view('<f2')
    assert (d >= 2**-14).all()

@needs_llama_cpp
def test_no_worse_than_llama_cpp_on_anything(weights, tmp_path):
    "In a child process, since a fault in its library would end this one"
    np.savez(tmp_path/'weights.npz', **weights)
    code = f'''import sys; sys.path.insert(0, {str(ROOT/"tools")!r})
import numpy as np
from llama_cpp_quantize import llama_cpp_quantize
weights = np.load({str(tmp_path/"weights.npz")!r})
np.savez({str(tmp_path/"theirs.npz")!r}, **{{f"{{name}} {{label}}": llama_cpp_quantize(weights[label], name) for name in {list(K_LAYOUTS)} for label in weights}})'''
    subprocess.run([sys.executable, '-c', code], check=True)
    worse = {}
    for key, blocks in np.load(tmp_path/'theirs.npz').items():
        name, label = key.split(' ')
        x = np.float64(weights[label])
        theirs = np.sqrt(np.mean((quant_type(name).decode(blocks).reshape(x.shape) - x) ** 2) / np.mean(x ** 2))
        ours = relative_error(weights[label], name)
        if ours > theirs * 1.0005: worse[key] = (ours, theirs)
    assert not worse, worse

def test_recipe_chooses_what_llama_cpp_chose_for_smollm2(tmp_path):
    done = convert('smollm2', tmp_path/'x.gguf')
    types = [row[3] for row in done.rows]
    assert {t: types.count(t) for t in set(types)} == {'Q5_0': 166, 'Q8_0': 15, 'Q6_K': 14, 'Q4_K': 16, 'F32': 61}

@pytest.mark.parametrize('to', sorted(RECIPES))
def test_every_recipe_gives_every_tensor_a_type_that_fits(to):
    for columns in (31, 32, 64, 256, 576):
        for name in ('token_embd.weight', 'output.weight', 'blk.0.attn_v.weight', 'blk.5.ffn_down_exps.weight', 'blk.3.attn_qkv.weight', 'blk.1.ssm_alpha.weight', 'blk.2.attn_norm.weight', 'something.else.weight'):
            for tied in (True, False): assert columns % quant_type(choose_type(name, (8, columns), RECIPES[to], 8, tied)).block_size == 0

@needs_llama_cpp
def test_llama_cpp_finds_our_file_as_good_as_its_own(tmp_path):
    "Within 1 % of the perplexity that it gave to the file of its own quantiser"
    from sparkinfer.measure.accuracy import llama_cpp_logits, text_ids
    from sparkinfer.ops.sampling import log_softmax
    convert('smollm2', tmp_path/'x.gguf', 'Q4_K_M')
    with open_gguf(tmp_path/'x.gguf') as checkpoint: ids, _ = text_ids(checkpoint.metadata, tokens=RECORD['file']['positions'])
    logits = np.concatenate(list(llama_cpp_logits(tmp_path/'x.gguf', ids)))
    perplexity = float(np.exp(-log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]].mean()))
    assert abs(perplexity / RECORD['file']['perplexity'] - 1) < .01

@needs_llama_cpp
@pytest.mark.parametrize('to, refit', [('Q4_K_S', True), ('Q3_K_M', False), ('Q2_K', False), ('Q6_K', False), ('Q5_1', False), ('BF16', False), ('MXFP4', False), ('NVFP4', False)])
def test_llama_cpp_opens_it(tmp_path, to, refit):
    from sparkinfer.measure.accuracy import llama_cpp_logits
    synth('tiny-qwen3', tmp_path/'x.gguf', to='F32')
    convert(tmp_path/'x.gguf', tmp_path/'y.gguf', to, refit=refit)
    a, b = (next(llama_cpp_logits(tmp_path/f'{n}.gguf', [1, 2, 3, 4, 5, 6])) for n in 'xy')
    assert np.isfinite(b).all() and np.corrcoef(a.ravel(), b.ravel())[0, 1] > {'Q2_K': .3, 'Q3_K_M': .7, 'MXFP4': .7, 'NVFP4': .8}.get(to, .9)

class TestConvert:
    @pytest.mark.skipif(not Path('/proc/self/clear_refs').exists(), reason='the peak is read from Linux')
    @pytest.mark.parametrize('source, target, to', [('m', 'x.gguf', 'NVFP4'), ('m', 'x', 'NVFP4'), ('gguf', 'x', 'BF16'), ('gguf', 'x.gguf', 'Q4_K_M')])
    def test_memory_does_not_grow_with_the_model(self, tmp_path, source, target, to):
        """Peak resident memory of the process, anonymous and mapped pages together: of 235 MB that a model has more, in more and in larger tensors, at most a quarter may be seen.
        (The source's mapped pages used to stay, and a folder's tensors were float32 as a whole.)"""
        for name, layers, rows in (('small', 1, 2048), ('large', 2, 8192)):
            shapes = {'embed_tokens': (rows, 2048)} | {f'layers.{i}.self_attn.{p}_proj': (2048, 2048) for i in range(layers) for p in 'qkvo'}
            shapes |= {f'layers.{i}.mlp.{p}_proj': (2048, rows) if p == 'down' else (rows, 2048) for i in range(layers) for p in ('gate', 'up', 'down')}
            config = dict(model_type='llama', hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, intermediate_size=rows, vocab_size=rows, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True)
            write_folder(tmp_path/f'{name}.m', {f'model.{n}.weight': Deferred('BF16', shape, lambda shape=shape: (np.zeros((512, shape[1]), np.float32) for _ in range(shape[0] // 512))) for n, shape in shapes.items()}, config)
            if source == 'gguf': convert(tmp_path/f'{name}.m', tmp_path/f'{name}.gguf', 'BF16')
        code = f"""if True:            # a process of its own; the first round compiles, and after each the kernel's mark of the peak is set back to what is held now
            import re
            from sparkinfer.models.convert import convert
            for i, name in enumerate(('small', 'small', 'large')):
                open('/proc/self/clear_refs', 'w').write('5')
                convert(f'{tmp_path}/{{name}}.{source}', f'{tmp_path}/{{i}}-{target}', {to!r})
                print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"""
        peaks = [1024 * int(n) for n in subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True).stdout.split()]
        sizes = [(tmp_path/f'{name}.m'/'model.safetensors').stat().st_size for name in ('small', 'large')]
        assert sizes[1] > 4 * sizes[0] and peaks[2] - peaks[1] < (sizes[1] - sizes[0]) / 4, (sizes, peaks)

    @pytest.mark.parametrize('layout', ['modelopt', 'compressed-tensors'])
    @pytest.mark.parametrize('name', ['tiny-llama', 'tiny-qwen3moe', 'tiny-qwen35moe'])
    def test_what_engines_fuse_shares_one_factor(self, tmp_path, name, layout):
        "q, k, v; gate, up of a layer and of each expert; in_proj_qkv, z. The factor is that of the largest weight, no weight is cut off, and all decode by the formula"
        synth(name, tmp_path/'m', 'safetensors', to='F32')
        convert(tmp_path/'m', tmp_path/'x', 'NVFP4', layout=layout)
        groups, divide = {}, layout != 'modelopt'
        with open_folder(tmp_path/'m') as before, open_folder(tmp_path/'x') as after:
            for n, t in after.tensors.items():
                if t.type.name != 'NVFP4_ROWS': continue
                x = before.tensors[n].dequantize()
                group = re.sub(r'(q|k|v)_proj|in_proj_(qkv|z)|(gate|up)_proj', lambda m: m[1] and '<qkv>' or m[2] and '<delta>' or '<gate up>', n)
                groups.setdefault(group, []).append((np.abs(x).max(), t.scales['divisor' if divide else 'global'].item()))
                expected = decode_nvfp4(*encode_nvfp4(x, t.scales['divisor' if divide else 'global'].item(), divide, (6, 4)), divide)
                assert np.array_equal(t.dequantize(), expected) and np.sqrt(np.mean((expected - x) ** 2) / np.mean(x ** 2)) < .1
        for group, members in groups.items():
            largest = np.float32(max(size for size, _ in members))
            assert {factor for _, factor in members} == {(np.float32(2688) / largest if divide else largest / np.float32(2688)).item()}, group
        counts = {mark: {len(members) for group, members in groups.items() if mark in group} for mark in ('<qkv>', '<gate up>', '<delta>')}
        assert counts == {'<qkv>': {3}, '<gate up>': {2}, '<delta>': {2} if 'qwen35' in name else set()}

    @pytest.mark.parametrize('command', ['quantize smollm2 x.gguf --to F16', 'quantize smollm2 x --to BF16', 'synth qwen3-30b-a3b x.gguf --layers 1', 'synth tiny-qwen3 x --to F32'])
    def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(self, tmp_path, command):
        "The limit on the size of a file stands in for it: both are an OSError in the middle of a write"
        def limited(): resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
        done = subprocess.run([sys.executable, '-m', 'sparkinfer', *command.split()], cwd=tmp_path, preexec_fn=limited, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith('error: x') and 'cannot be written' in done.stderr and done.stderr.count('\n') == 1 and not list(tmp_path.iterdir()), done.stderr

    @pytest.mark.parametrize('target', ['x.gguf', 'x'])
    def test_an_interrupt_leaves_nothing(self, tmp_path, target):
        code = f"import time\nfrom sparkinfer.models.convert import convert\nconvert('smollm2', {target!r}, 'F16', progress=lambda *a: time.sleep(.02))"
        child = subprocess.Popen([sys.executable, '-c', code], cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
        deadline = time.time() + 60
        while not list(tmp_path.glob(f'.{target}.*.part')) and time.time() < deadline: time.sleep(.02)
        assert list(tmp_path.iterdir())
        child.send_signal(signal.SIGINT)
        assert child.wait(60) and 'KeyboardInterrupt' in child.stderr.read() and not list(tmp_path.iterdir())

    def test_a_killed_conversion_leaves_no_target_and_no_rest_for_long(self, tmp_path):
        target = tmp_path/'x.gguf'
        code = f"import time\nfrom sparkinfer.models.convert import convert\nconvert('smollm2', {str(target)!r}, 'F16', progress=lambda *a: time.sleep(.02))"
        child = subprocess.Popen([sys.executable, '-c', code])
        deadline = time.time() + 60
        while not list(tmp_path.glob('.x.gguf.*.part')) and time.time() < deadline: time.sleep(.02)
        child.send_signal(signal.SIGKILL); child.wait()
        assert not target.exists() and len(list(tmp_path.iterdir())) == 1
        convert('smollm2', target, 'Q8_0')
        assert [p.name for p in tmp_path.iterdir()] == ['x.gguf']

    def test_a_split_model_becomes_one_file(self, tmp_path):
        x = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
        for i in range(2):
            marks = {'split.no': np.uint16(i), 'split.count': np.uint16(2), 'split.tensors.count': np.int32(2)} | ({'general.architecture': 'llama', 'llama.block_count': 1} if i == 0 else {})
            write_gguf(tmp_path/f'm-{i + 1:05d}-of-00002.gguf', marks, {f'blk.0.attn_{"qk"[i]}.weight': x})
        convert(tmp_path/'m-00002-of-00002.gguf', tmp_path/'one.gguf', 'Q4_K_S')
        with open_gguf(tmp_path/'one.gguf') as one: assert len(one.tensors) == 2 and not [k for k in one.metadata if k.startswith('split.')] and one.tensors['blk.0.attn_k.weight'].type.name == 'Q4_K'

    def test_maps_go_first_and_must_match(self, tmp_path):
        done = convert('smollm2', tmp_path/'x.gguf', 'Q8_0', ['blk.0.*norm*=F32', '*.attn_v.weight=F16', '*.attn_?.weight=Q5_1'])
        types = {row[0]: row[3] for row in done.rows}
        assert types['blk.3.attn_v.weight'] == 'F16' and types['blk.3.attn_q.weight'] == 'Q5_1' and types['blk.3.ffn_up.weight'] == 'Q8_0'
        for maps in (['*.attn_z=F16'], ['nonsense'], ['*=Q99'], ['*.attn_q.weight=Q4_K']):
            with pytest.raises(SparkinferError): convert('smollm2', tmp_path/'y.gguf', 'Q8_0', maps)
        assert not (tmp_path/'y.gguf').exists()

    def test_other_architectures_pass_through(self, tmp_path):
        "From GGUF to GGUF no name has to be known"
        x = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
        write_gguf(tmp_path/'a.gguf', {'general.architecture': 'novelty', 'novelty.block_count': 2, 'strange': [1, 2]}, {'blk.0.wonder.weight': x, 'table': np.arange(5, dtype=np.int32), 'blk.1.b.bias': x[0]}, kinds={'novelty.block_count': 'uint64'})
        convert(tmp_path/'a.gguf', tmp_path/'b.gguf', 'Q5_K_M')
        with open_gguf(tmp_path/'b.gguf') as b:
            assert b.kinds['novelty.block_count'] == 'uint64' and {n: t.type.name for n, t in b.tensors.items()} == {'blk.0.wonder.weight': 'Q5_K', 'table': 'I32', 'blk.1.b.bias': 'F32'}
        with pytest.raises(UnsupportedError, match='novelty'): convert(tmp_path/'a.gguf', tmp_path/'folder', 'BF16')

    def test_values_that_no_block_can_hold(self, tmp_path):
        x = np.ones((4, 256), np.float32)
        x[2, 3] = np.inf
        write_gguf(tmp_path/'a.gguf', {'general.architecture': 'llama'}, {'blk.0.attn_q.weight': x})
        with pytest.raises(FormatError): convert(tmp_path/'a.gguf', tmp_path/'b.gguf', 'Q4_K_M')
        assert [p.name for p in tmp_path.iterdir()] == ['a.gguf']


# ---- sources from strangers

WEIRD = [None, -1, 0, 2**63, 1.5, 1e300, 'x', '', [], {}, [[]], True, {'a': 1}, '\x1b[2J\n', 10**30]

def spoiled(value, rng):
    "The JSON value with one thing in it another: a key gone or renamed, an element doubled, a number multiplied, a list where a string was"
    if isinstance(value, dict) and value and rng.random() < .9:
        key, what = rng.choice(list(value)), rng.random()
        if what < .15: value.pop(key)
        elif what < .25: value[key + rng.choice('x\n')] = value.pop(key)
        else: value[key] = spoiled(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < .85:
        i, what = rng.randrange(len(value)), rng.random()
        if what < .1: value.pop(i)
        elif what < .2: value.append(value[i])
        else: value[i] = spoiled(value[i], rng)
        return value
    if type(value) is int and rng.random() < .6: return rng.choice([value + 1, value - 1, value * 2, value // 2, -value, value * 1000])
    return rng.choice(WEIRD)

@pytest.fixture(scope='module')
def small_models(tmp_path_factory):
    "{name: (folder, GGUF file)} of families with everything in them, as small as they can be"
    where, made = tmp_path_factory.mktemp('small'), {}
    for name in ('tiny-llama', 'tiny-qwen35moe', 'tiny-qwen3next'):
        s = SHAPES[name]
        s = replace(s, hidden=64, heads=2, kv_heads=1, head_dim=32, vocab=400, intermediate=64 * bool(s.intermediate), experts=4 * bool(s.experts), expert_size=64 * bool(s.experts), shared_size=64 * bool(s.shared_size), **(dict(rope_dim=16, key_heads=1, value_heads=2, linear_size=32) if s.hybrid else dict(layers=1)))
        SHAPES['tiny-small'] = s
        try: synth('tiny-small', where/name, 'safetensors'), synth('tiny-small', where/f'{name}.gguf', to='F16')
        finally: del SHAPES['tiny-small']
        made[name] = where/name, where/f'{name}.gguf'
    return made

def converts_or_refuses(source, target, to):
    "True when it converted. Any exception but ours, and anything that is left, is a fault"
    try:
        with np.errstate(all='ignore'): convert(source, target, to)
    except SparkinferError as e:
        assert '\n' not in str(e) and '\x1b' not in str(e) and len(str(e)) < 3000
        assert not target.exists() and not list(target.parent.glob('.*'))
        return False
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    return True

@pytest.mark.parametrize('name', ['tiny-llama', 'tiny-qwen35moe', 'tiny-qwen3next'])
def test_spoiled_sources_convert_or_are_refused(small_models, name, tmp_path):
    folder, file = small_models[name]
    rng, done, count = random.Random(name), 0, 60
    for i in range(count):
        target, to = [(tmp_path/'x.gguf', 'Q8_0'), (tmp_path/'x', 'NVFP4'), (tmp_path/'x', 'BF16')][i % 3]
        if i % 2:
            shutil.copytree(folder, tmp_path/'m', dirs_exist_ok=True)
            text = rng.choice(['config.json', 'config.json', 'tokenizer.json', 'tokenizer_config.json'])
            (tmp_path/'m'/text).write_text(json.dumps(spoiled(json.loads((folder/text).read_text()), rng)))
            done += converts_or_refuses(tmp_path/'m', target, to)
        else:
            with open_gguf(file) as checkpoint:
                metadata = spoiled({key: value.tolist() if hasattr(value, 'tolist') else value for key, value in checkpoint.metadata.items()}, rng)
                if not isinstance(metadata, dict): continue
                try: write_gguf(tmp_path/'m.gguf', {key: value for key, value in metadata.items() if value is not None and value != {}}, checkpoint.tensors, overwrite=True)
                except FormatError: continue
            done += converts_or_refuses(tmp_path/'m.gguf', target, to)
    assert 0 < done < count, 'the damage must be neither harmless nor all fatal, or it tests nothing'

@pytest.mark.parametrize('entry', [[1], 'x', 5])
def test_rope_that_is_no_object_is_one_line(entry):
    from sparkinfer.errors import FormatError
    from sparkinfer.models.config import ModelConfig
    config = dict(model_type='llama', hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=10, max_position_embeddings=64, rms_norm_eps=1e-5, rope_parameters=entry)
    with pytest.raises(FormatError, match='rope_parameters'): ModelConfig.from_hf(config)
