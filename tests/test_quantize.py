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
        synth('tiny-llama', tmp_path/'words', 'safetensors')
        for name, layers, rows in (('small', 1, 2048), ('large', 2, 8192)):
            extra = {'norm': (2048,)} | {f'layers.{i}.{n}_layernorm': (2048,) for i in range(layers) for n in ('input', 'post_attention')}
            shapes = {'embed_tokens': (rows, 2048)} | {f'layers.{i}.self_attn.{p}_proj': (2048, 2048) for i in range(layers) for p in 'qkvo'}
            shapes |= {f'layers.{i}.mlp.{p}_proj': (2048, rows) if p == 'down' else (rows, 2048) for i in range(layers) for p in ('gate', 'up', 'down')}
            config = dict(model_type='llama', hidden_size=2048, num_hidden_layers=layers, num_key_value_heads=32, num_attention_heads=32, intermediate_size=rows, vocab_size=rows, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True)
            zeros = {f'model.{n}.weight': Deferred('BF16', shape, lambda shape=shape: (np.zeros((512, shape[1]), np.float32) for _ in range(shape[0] // 512))) for n, shape in shapes.items()}
            write_folder(tmp_path/f'{name}.m', zeros | {f'model.{n}.weight': np.zeros(shape, np.float32) for n, shape in extra.items()}, config, files=[tmp_path/'words'/'tokenizer.json'])
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
        synth('tiny-llama', tmp_path/'whole.gguf', to='BF16')
        with open_gguf(tmp_path/'whole.gguf') as whole:
            names, count = list(whole.tensors), len(whole.tensors)
            for i in range(2):
                marks = {'split.no': np.uint16(i), 'split.count': np.uint16(2), 'split.tensors.count': np.int32(count)} | (whole.metadata if i == 0 else {})
                write_gguf(tmp_path/f'm-{i + 1:05d}-of-00002.gguf', marks, {n: whole.tensors[n] for n in names[i::2]})
        convert(tmp_path/'m-00002-of-00002.gguf', tmp_path/'one.gguf', 'Q8_0')
        with open_gguf(tmp_path/'one.gguf') as one: assert len(one.tensors) == count and not [k for k in one.metadata if k.startswith('split.')] and one.tensors['blk.0.attn_k.weight'].type.name == 'Q8_0'

    def test_maps_go_first_and_must_match(self, tmp_path):
        done = convert('smollm2', tmp_path/'x.gguf', 'Q8_0', ['blk.0.*norm*=F32', '*.attn_v.weight=F16', '*.attn_?.weight=Q5_1'])
        types = {row[0]: row[3] for row in done.rows}
        assert types['blk.3.attn_v.weight'] == 'F16' and types['blk.3.attn_q.weight'] == 'Q5_1' and types['blk.3.ffn_up.weight'] == 'Q8_0'
        for maps in (['*.attn_z=F16'], ['nonsense'], ['*=Q99'], ['*.attn_q.weight=Q4_K']):
            with pytest.raises(SparkinferError): convert('smollm2', tmp_path/'y.gguf', 'Q8_0', maps)
        assert not (tmp_path/'y.gguf').exists()

    def test_other_architectures_are_refused(self, tmp_path):
        "Nothing here could say which of their tensors must stay as they are, or whether one is missing"
        x = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
        write_gguf(tmp_path/'a.gguf', {'general.architecture': 'novelty', 'novelty.block_count': 2}, {'blk.0.wonder.weight': x})
        write_folder(tmp_path/'a', {'model.wonder.weight': x}, dict(model_type='novelty'))
        for source in ('a.gguf', 'a'):
            for target, to in (('b.gguf', 'Q8_0'), ('b', 'BF16')):
                with pytest.raises(UnsupportedError, match='novelty.*knows: llama'): convert(tmp_path/source, tmp_path/target, to)
        assert sorted(p.name for p in tmp_path.iterdir()) == ['a', 'a.gguf']

    def test_values_that_no_block_can_hold(self, tmp_path):
        synth('tiny-llama', tmp_path/'whole.gguf', to='F32')
        with open_gguf(tmp_path/'whole.gguf') as whole:
            x = whole.tensors['blk.0.attn_q.weight'].dequantize()
            x[2, 3] = np.inf
            write_gguf(tmp_path/'a.gguf', whole.metadata, whole.tensors | {'blk.0.attn_q.weight': x})
        with pytest.raises(FormatError, match='not finite'): convert(tmp_path/'a.gguf', tmp_path/'b.gguf', 'Q8_0', ['*.attn_q.weight=Q4_K'])
        assert sorted(p.name for p in tmp_path.iterdir()) == ['a.gguf', 'whole.gguf']


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


# ---- what a user types and sees

from click.testing import CliRunner
from sparkinfer.cli import cli
from sparkinfer.llm import open_model

def command(*args):
    "A command line in this process; a traceback is a failure"
    done = CliRunner().invoke(cli, [str(arg) for arg in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done

def refused(*args):
    "The one line on stderr of a command that must fail"
    done = command(*args)
    assert done.exit_code == 1 and done.stdout == '' and re.fullmatch('error: .*\n', done.stderr), (done.exit_code, done.stderr)
    return done.stderr

def respelled(file, **changes):
    "Change entries of a JSON file; ... takes one out"
    entries = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in entries.items() if value is not ...}))

def remodelled(folder, **changes):
    "Change entries of a tokenizer's model"
    respelled(folder/'tokenizer.json', model=json.loads((folder/'tokenizer.json').read_text())['model'] | changes)

def rewritten(source, target, metadata=None, tensors=None):
    "A GGUF file with other metadata and tensors; ... takes one out"
    with open_gguf(source) as checkpoint: write_gguf(target, *({key: value for key, value in (mine | (other or {})).items() if value is not ...} for mine, other in ((checkpoint.metadata, metadata), (checkpoint.tensors, tensors))))
    return target

FOLDER_FAULTS = {      # what is done to a folder of tiny-llama: what must be in the line
    'no config.json': (lambda m: (m/'config.json').unlink(), 'has no config.json'),
    'no tokenizer.json': (lambda m: (m/'tokenizer.json').unlink(), 'has no tokenizer.json'),
    'a value': (lambda m: respelled(m/'config.json', hidden_size='x'), 'config.json: `hidden_size`'),
    'zero': (lambda m: respelled(m/'config.json', num_attention_heads=0), 'config.json: `num_attention_heads`'),
    'null': (lambda m: respelled(m/'config.json', rms_norm_eps=None), 'config.json: has no `rms_norm_eps`'),
    'too large for a float': (lambda m: respelled(m/'config.json', rms_norm_eps=10**400), 'config.json: `rms_norm_eps`'),
    'a shape': (lambda m: respelled(m/'config.json', intermediate_size=384), 'mlp.gate_proj.weight is 64'),
    'more layers than there are': (lambda m: respelled(m/'config.json', num_hidden_layers=2), 'layers.1.input_layernorm.weight'),
    'another model': (lambda m: respelled(m/'config.json', model_type='bert'), "config.json: model_type 'bert' is not supported"),
    'a class of another purpose': (lambda m: respelled(m/'config.json', architectures=['LlamaForSequenceClassification']), 'LlamaForSequenceClassification'),
    'a class of another family': (lambda m: respelled(m/'config.json', architectures=['BertForCausalLM']), 'BertForCausalLM'),
    'a class that is no list': (lambda m: respelled(m/'config.json', architectures='LlamaForCausalLM'), '`architectures` must be a list'),
    'an end out of range': (lambda m: respelled(m/'config.json', eos_token_id=400), 'config.json: `eos_token_id`'),
    'a negative end': (lambda m: respelled(m/'config.json', eos_token_id=[1, -5]), 'config.json: `eos_token_id`'),
    'an end that is text': (lambda m: respelled(m/'config.json', eos_token_id='2'), 'config.json: `eos_token_id`'),
    'an end in the other file': (lambda m: (m/'generation_config.json').write_text('{"eos_token_id": [1.5]}'), 'generation_config.json: `eos_token_id`'),
    'a token that is a number': (lambda m: respelled(m/'tokenizer_config.json', eos_token=5), 'tokenizer_config.json: `eos_token`'),
    'quantisation that is no object': (lambda m: respelled(m/'config.json', quantization_config='fp8'), 'config.json: `quantization_config` must be an object'),
    'quantisation of an odd kind': (lambda m: respelled(m/'config.json', quantization_config=dict(quant_method='gptq')), "config.json: quant_method 'gptq' is not supported"),
    'a mark at which the library panics': (lambda m: remodelled(m, continuing_subword_prefix='a long prefix'), 'tokenizer.json: model.continuing_subword_prefix'),
    'an option of the wrong kind': (lambda m: remodelled(m, unk_token=5), 'tokenizer.json: model.unk_token must be a string'),
    'merges of numbers': (lambda m: remodelled(m, merges=[[1, 2]]), 'tokenizer.json: model.merges must be a list of pairs of tokens'),
    'half of a surrogate pair': (lambda m: remodelled(m, merges=[['\ud800', 'a']]), 'half of a surrogate pair'),
    'no JSON': (lambda m: (m/'config.json').write_text('{"model_type": '), 'config.json is not JSON'),
    'no JSON in the tokenizer': (lambda m: (m/'tokenizer.json').write_text('{'), 'tokenizer.json is not JSON'),
    'a vocabulary that is too large': (lambda m: respelled(m/'tokenizer.json', added_tokens=[*json.loads((m/'tokenizer.json').read_text())['added_tokens'], dict(id=450, content='<|one more|>', special=True)]), 'the tokenizer has 451 tokens and the embedding 400 rows')}

@pytest.mark.parametrize('fault', FOLDER_FAULTS)
def test_quantize_refuses_a_folder_in_the_words_of_run(small_models, tmp_path, fault):
    "(It used to write half a model, or one without a vocabulary, without a word.)"
    spoil, words = FOLDER_FAULTS[fault]
    model = Path(shutil.copytree(small_models['tiny-llama'][0], tmp_path/'m'))
    spoil(model)
    with pytest.raises(SparkinferError) as told: open_model(model)
    for target, to in (('x.gguf', 'F16'), ('x', 'BF16')): said = refused('quantize', model, tmp_path/target, '--to', to)
    # the check of `run` and ours read the same files in the same order
    assert words in str(told.value) and words in said and str(model) in said and said.removeprefix('error: ').strip() == ' '.join(str(told.value).split())
    assert [p.name for p in tmp_path.iterdir()] == ['m']

FILE_FAULTS = {
    'no architecture': (dict(metadata={'general.architecture': ...}), 'has no `general.architecture`'),
    'a value': (dict(metadata={'llama.embedding_length': 'x'}), '`llama.embedding_length`'),
    'a key less': (dict(metadata={'llama.context_length': ...}), '`llama.context_length`'),
    'a tensor less': (dict(tensors={'blk.0.ffn_down.weight': ...}), '1 tensor is missing: blk.0.ffn_down.weight'),
    'a tensor of another shape': (dict(tensors={'blk.0.ffn_down.weight': np.zeros((32, 64), np.float32)}), 'blk.0.ffn_down.weight is 32 × 64'),
    'a tensor of integers': (dict(tensors={'blk.0.ffn_down.weight': np.zeros((64, 64), np.int32)}), 'blk.0.ffn_down.weight (I32)'),
    'a tensor more': (dict(tensors={'blk.0.attn_sinks.weight': np.zeros(4, np.float32)}), 'blk.0.attn_sinks.weight'),
    'an array for a name': (dict(metadata={'general.architecture': [1, 2]}), 'architecture [1, 2] is not supported'),
    'an array for a word': (dict(metadata={'llama.rope.scaling.type': [1, 2]}), '`llama.rope.scaling.type` is [1, 2]'),
    'an array for a number': (dict(metadata={'llama.attention.value_length': [1, 2]}), '`llama.attention.value_length` is [1, 2]'),
    'an array for a token': (dict(metadata={'tokenizer.ggml.eos_token_id': [1, 2]}), 'tokenizer.ggml.eos_token_id is [1, 2]'),
    'no vocabulary': (dict(metadata={'tokenizer.ggml.tokens': ...}), 'tokenizer.ggml.tokens is missing'),
    'another vocabulary': (dict(metadata={'tokenizer.ggml.eos_token_id': 400}), 'tokenizer.ggml.eos_token_id is 400')}

@pytest.mark.parametrize('fault', FILE_FAULTS)
def test_quantize_refuses_a_file_in_the_words_of_run(small_models, tmp_path, fault):
    changes, words = FILE_FAULTS[fault]
    model = rewritten(small_models['tiny-llama'][1], tmp_path/'m.gguf', **changes)
    with pytest.raises(SparkinferError) as told: open_model(model)
    for target, to in (('x.gguf', 'Q8_0'), ('x', 'BF16')): said = refused('quantize', model, tmp_path/target, '--to', to)
    assert words in said and said.removeprefix('error: ').strip() == ' '.join(str(told.value).split()) and [p.name for p in tmp_path.iterdir()] == ['m.gguf']

def test_axes_of_one_are_no_other_shape(small_models, tmp_path):
    "`run` takes a tensor of (1, rows, columns) for the matrix that it is; q's rows were then reordered as if they were one"
    folder, file = small_models['tiny-qwen35moe']
    with open_gguf(file) as plain:
        odd = {name: plain.tensors[name].dequantize()[None] for name in ('blk.3.attn_q.weight', 'blk.0.ffn_gate_inp_shexp.weight', 'blk.0.ssm_a', 'blk.0.attn_qkv.weight')}
    rewritten(file, tmp_path/'odd.gguf', tensors=odd)
    for source, made in ((file, 'plain'), (tmp_path/'odd.gguf', 'odd')): assert command('quantize', source, tmp_path/made, '--to', 'F32').exit_code == 0
    assert command('quantize', tmp_path/'odd', tmp_path/'back.gguf', '--to', 'F32').exit_code == 0
    with open_folder(tmp_path/'plain') as a, open_folder(tmp_path/'odd') as b: assert a.tensors.keys() == b.tensors.keys() and all(t.shape == b.tensors[n].shape and np.array_equal(t.dequantize(), b.tensors[n].dequantize()) for n, t in a.tensors.items())

def test_a_recommendation_that_is_no_number_names_both_its_places():
    from sparkinfer.engine.request import EngineDefaults
    for value in ('hot', '', [1], True, float('nan'), np.array([1, 2]), 10**400):
        with pytest.raises(FormatError, match=r"`general.sampling.top_k` in the model file \(`top_k` in a folder's generation_config.json\)") as told: EngineDefaults.from_metadata({'general.sampling.top_k': value})
        assert not PYTHON.search(str(told.value))

def test_half_a_model_is_refused(small_models, tmp_path):
    "One shard of two, with the other's name in no index"
    model = tmp_path/'m'
    with open_folder(small_models['tiny-llama'][0]) as whole:
        half = dict(list(whole.tensors.items())[::2])
        write_folder(model, half, whole.metadata['config'], files=[whole.path/'tokenizer.json'])
    assert 'tensors are missing' in refused('quantize', model, tmp_path/'x.gguf') and 'tensors are missing' in refused('quantize', model, tmp_path/'x')

def test_relatives_of_llama_are_converted_and_checked(small_models, tmp_path):
    "qwen2 has biases; its folder becomes a file and a folder again, and one bias of another length is refused"
    with open_folder(small_models['tiny-llama'][0]) as llama:
        tensors = {name: t.dequantize() for name, t in llama.tensors.items()}
        biases = {name.replace('weight', 'bias'): np.arange(len(values), dtype=np.float32) for name, values in tensors.items() if re.search('[qkv]_proj', name)}
        config = llama.metadata['config'] | dict(model_type='qwen2', architectures=['Qwen2ForCausalLM'])
        files = [llama.path/'tokenizer.json']
    write_folder(tmp_path/'m', tensors | biases, config, files=files)
    assert command('quantize', tmp_path/'m', tmp_path/'m.gguf', '--to', 'F32').exit_code == 0 and command('quantize', tmp_path/'m.gguf', tmp_path/'again', '--to', 'F32').exit_code == 0
    with open_gguf(tmp_path/'m.gguf') as file, open_folder(tmp_path/'again') as again:
        assert file.metadata['general.architecture'] == 'qwen2' and len(biases) == 3 and 'blk.0.attn_q.bias' in file.tensors
        assert all(np.array_equal(again.tensors[name].dequantize(), values) for name, values in (tensors | biases).items())
    write_folder(tmp_path/'odd', tensors | biases | {'model.layers.0.self_attn.q_proj.bias': np.zeros(5, np.float32)}, config, files=files)
    assert 'q_proj.bias' in refused('quantize', tmp_path/'odd', tmp_path/'x.gguf')
    respelled(tmp_path/'m'/'config.json', hidden_size=128)
    assert 'wrong shape' in refused('quantize', tmp_path/'m', tmp_path/'x.gguf')

def test_inspect_lists_what_cannot_run(small_models, tmp_path):
    for gone, names in ((['config.json'], 'config.json'), (['tokenizer.json'], 'tokenizer.json'), (['config.json', 'tokenizer.json'], 'both')):
        model = Path(shutil.copytree(small_models['tiny-llama'][0], tmp_path/names))
        for name in gone: (model/name).unlink()
        done = command('inspect', model)
        assert done.exit_code == 0 and 'model.layers.0.self_attn.q_proj.weight' in done.stdout and [line.split(' has no ')[1].split(',')[0] for line in done.stderr.splitlines()] == gone
        assert len(json.loads(command('inspect', '--json', model).stdout)['tensors']) == 11
    assert command('inspect', small_models['tiny-llama'][0]).stderr == command('inspect', small_models['tiny-llama'][1]).stderr == ''

# ---- config.json at random: the whole kind, not the case

ODD = [None, 0, -1, 1, 2, 7, 2**31 - 1, 2**63, 10**30, 10**400, 1.5, 0.0, -.5, 1e308, float('nan'), float('inf'), 'x', '', [], [1], ['x'], [[]], [None], {}, {'a': 1}, {'a': {'b': []}}, True, False, '\ud800', 'é\n\x1b[2J', ['linear_attention'], [2**62]]
ROPE = dict(rope_type='llama3', factor=8., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=64)
MORE = dict(rope_scaling=ROPE, text_config={}, eos_token_id=1, bos_token_id=1, partial_rotary_factor=1., rope_theta=1e4, sliding_window=None, attention_bias=False, mlp_only_layers=[], decoder_sparse_step=1, num_local_experts=None, full_attention_interval=None, mrope_section=None,
            quantization_config=dict(quant_method='modelopt', config_groups={'a': {'weights': {}}}, ignore=[]), compression_config=None, _name_or_path='x', query_pre_attn_scalar=None)
PYTHON = re.compile(r'Traceback|[a-z]Error\b|Exception|NoneType|object is not|unsupported operand|codec can|invalid literal|division')

def places(value, at=()):
    "Every place in a JSON value, as a path of keys; of a list the first two"
    yield at
    for key in value if isinstance(value, dict) else range(min(2, len(value))) if isinstance(value, list) else (): yield from places(value[key], (*at, key))

def with_value(value, at, new):
    if not at: return new
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[at[0]] = with_value(copy[at[0]], at[1:], new)
    return copy

@pytest.mark.parametrize('name', ['tiny-llama', 'tiny-qwen35moe', 'tiny-qwen3next'])
def test_no_value_of_config_json_ends_in_python(small_models, tmp_path, name):
    "Through quantize, inspect and what run does before it computes: an answer or one line, never an exception's own text. (A fuzz of every place with every odd value finds nothing either; here are 150 draws of it.)"
    folder, rng, fates = small_models[name][0], random.Random(name), {0: 0, 1: 0}
    model = Path(shutil.copytree(folder, tmp_path/'m'))
    config = {**MORE, **json.loads((folder/'config.json').read_text())}
    config = {key: value for key, value in config.items() if value is not None or rng.random() < .5}
    where = list(places(config))
    for i in range(150):
        plain = {key: value for key, value in config.items() if key not in MORE or key in json.loads((folder/'config.json').read_text())}
        at, odd = rng.choice(where), rng.choice(ODD)
        spoiled = with_value({**plain, at[0]: config[at[0]]} if at else plain, at, odd)
        (model/'config.json').write_text(json.dumps(spoiled))
        target, to = [(tmp_path/'x.gguf', 'F16'), (tmp_path/'x', 'BF16')][i % 2]
        said = [command('quantize', model, target, '--to', to), command('inspect', model), command('inspect', '--json', model)]
        for done in said: assert done.exit_code in (0, 1) and not PYTHON.search(done.stderr) and '\x1b' not in done.stderr and done.stderr.count('\n') <= 1 and len(done.stderr) < 2000, (at, odd, done.stderr)
        fates[said[0].exit_code] += 1
        try: open_model(model).checkpoint.close()
        except SparkinferError as error: assert not PYTHON.search(str(error)), (at, odd, error)
        if target.exists(): shutil.rmtree(target) if target.is_dir() else target.unlink()
        assert [p.name for p in tmp_path.iterdir()] == ['m'], (at, odd)
    assert min(fates.values()) > 10, fates

# ---- maps, layouts, places

def test_maps_name_what_the_target_has(small_models, tmp_path):
    folder, file = small_models['tiny-llama']
    said = refused('quantize', folder, tmp_path/'x.gguf', '--to', 'F16', '--map', '*.v_proj.weight=q8_0')
    assert "'*.v_proj.weight=q8_0' matches nothing" in said and 'names that tensors have in x.gguf, such as blk.0.attn_v.weight' in said
    said = refused('quantize', file, tmp_path/'x', '--to', 'BF16', '--map', '*.attn_v.weight=fp8')
    assert "'*.attn_v.weight=fp8' matches nothing" in said and 'names that tensors have in x, such as model.layers.0.self_attn.v_proj.weight' in said
    for target, entry in (('x.gguf', '*=Q9'), ('x.gguf', '*=Q4_K_M'), ('x.gguf', '*=IQ2_XS'), ('x.gguf', 'Q8_0'), ('x', '*=Q8_0'), ('x', '=BF16'), ('x.gguf', '*')):
        said = refused('quantize', folder, tmp_path/target, '--map', entry)
        assert f"--map '{entry}'" in said and ('Q8_0' in said if target == 'x.gguf' else 'FP8' in said)
    assert 'in OUT' in ' '.join(command('quantize', '--help').stdout.split()) and not list(tmp_path.iterdir())

@pytest.mark.parametrize('name', ['tiny-llama', 'tiny-qwen35moe', 'tiny-qwen3next'])
def test_a_map_of_everything_means_the_matrices(small_models, tmp_path, name):
    "(Norms became Q8_0 without a word.) The result must still open, and one line says what stayed"
    folder, file = small_models[name]
    done = command('quantize', file, tmp_path/'x.gguf', '--to', 'F16', '--map', '*=Q8_0')
    assert done.exit_code == 0 and done.stdout.count('that --map matches stay F32') == 1
    done = command('quantize', file, tmp_path/'x', '--to', 'BF16', '--map', '*=FP8')
    assert done.exit_code == 0 and done.stdout.count('that --map matches stay ') == 1
    for made, quantised in ((tmp_path/'x.gguf', {'Q8_0'}), (tmp_path/'x', {'FP8'})):
        parts = open_model(made)
        with parts.checkpoint as checkpoint:
            vectors = {t.type.name for n, t in checkpoint.tensors.items() if len(t.shape) < 2 or re.search('norm|conv1d|ffn_gate_inp|mlp.gate.weight', n)}
            assert vectors <= {'F32', 'BF16'} and {t.type.name for n, t in checkpoint.tensors.items() if 'down' in n} == quantised
    assert 'stay' not in command('quantize', file, tmp_path/'y.gguf', '--to', 'F16', '--map', '*.attn_v.weight=Q8_0').stdout or name != 'tiny-llama'

@pytest.mark.parametrize('args, words', [
    (['x.gguf', '--layout', 'modelopt'], ['--layout', 'x.gguf is to be a GGUF file', 'leave it out']), (['x.gguf', '--to', 'FP8'], ['a GGUF file cannot hold FP8', 'Q4_K_M', 'does not end in .gguf']), (['x.gguf', '--to', 'fp8_block'], ['FP8_BLOCK']),
    (['x', '--to', 'Q4_K'], ['a safetensors folder cannot hold Q4_K', 'NVFP4', 'let OUT end in .gguf']), (['x', '--to', 'Q9'], ['Q9', 'NVFP4']), (['x.gguf', '--to', 'Q9'], ['Q9', 'Q4_K_M']), (['x', '--refit'], ['--refit', 'GGUF']),
    (['x', '--layout', 'fp8'], ['the layout fp8 holds FP8_BLOCK', 'not NVFP4', '--to FP8_BLOCK']), (['x', '--layout', 'fp8', '--to', 'MXFP4'], ['MXFP4', '--layout modelopt'])])
def test_what_does_not_fit_the_target_is_told_what_would(small_models, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    said = refused('quantize', small_models['tiny-llama'][0], *args)
    assert all(word in said for word in words), said
    if '--to' in args and 'fp8' not in args: assert all(word in refused('synth', 'tiny-llama', *args) for word in words[:1])
    assert not list(tmp_path.iterdir())

@pytest.mark.parametrize('verb', [('quantize', 'tiny-llama'), ('synth', 'tiny-llama')])
@pytest.mark.parametrize('place', ['/proc/x', '/proc/self/x', '/sys/x', 'file/x', 'nowhere/x', 'n' * 300, 'there', 'dangling', 'locked/x'])
@pytest.mark.parametrize('suffix', ['', '.gguf'])
def test_a_place_that_cannot_be_written_is_one_line(small_models, tmp_path, verb, place, suffix):
    "Before the source is read, and before anything is made"
    if place.startswith('/') and not Path('/proc/self').exists(): pytest.skip('these are file systems of Linux')
    if place == 'locked/x' and os.geteuid() == 0: pytest.skip('root may write everywhere')
    (tmp_path/'file').write_text(''), (tmp_path/f'there{suffix}').mkdir(), (tmp_path/f'dangling{suffix}').symlink_to('nothing'), (tmp_path/'locked').mkdir(mode=0o500)
    before = sorted(tmp_path.iterdir())
    said = refused(verb[0], small_models['tiny-llama'][0] if verb[0] == 'quantize' else verb[1], tmp_path/f'{place}{suffix}')
    assert ('exists already' if place in ('there', 'dangling') else 'cannot be written') in said and Path(place).name[:20] in said and sorted(tmp_path.iterdir()) == before

@pytest.mark.parametrize('args', [['quantize', 'tiny', 'x'], ['quantize', 'tiny', 'x.gguf', '--to', 'F16'], ['synth', 'tiny-llama', 'x', '--to', 'BF16'], ['synth', 'tiny-llama', 'x.gguf', '--to', 'F16']])
@pytest.mark.parametrize('number, ended', [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_is_one_line_and_leaves_nothing(small_models, tmp_path, args, number, ended):
    "The signal comes when all bytes are written and wait for the disk, which here takes a minute"
    code = f"import os, sys, time\nos.fsync = lambda file: time.sleep(60)\nfrom sparkinfer.cli import main\nmain({[str(small_models['tiny-llama'][0]) if arg == 'tiny' else arg for arg in args]!r})"
    child = subprocess.Popen([sys.executable, '-c', code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    deadline = time.time() + 60
    def written(): return sum(p.stat().st_size for p in tmp_path.rglob('*') if p.is_file())
    while written() < 10_000 and time.time() < deadline: time.sleep(.02)
    time.sleep(.3)
    assert list(tmp_path.iterdir())
    child.send_signal(number)
    out, noise = child.communicate(timeout=60)
    assert (child.returncode, out, noise) == (ended, '', 'interrupted; nothing was written\n') and not list(tmp_path.iterdir())

def test_synth_names_its_mix(tmp_path):
    said = ' '.join(command('synth', '--help').stdout.split())
    assert 'Q4_K with Q5_K, Q6_K, Q8_0 and F32' in said and 'NVFP4 with BF16' in said
    assert 'the usual mix of a GGUF file: mostly Q4_K' in command('synth', 'tiny-llama', tmp_path/'x.gguf').stdout and 'the usual mix of a folder: BF16' in command('synth', 'tiny-llama', tmp_path/'x').stdout
    assert 'usual mix' not in command('synth', 'tiny-llama', tmp_path/'y', '--to', 'f16').stdout
