"""Hostile safetensors folders. A spoiled file opens, or is refused with an error that names the file and the tensor; it never crashes, hangs, reads outside, or makes us allocate what it only claims."""
import json, os, random, struct, tracemalloc
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from sparkinfer.errors import FormatError, ModelNotFound, SparkinferError, UnsupportedError
from sparkinfer.formats.safetensors import Deferred, describe_folder, open_checkpoint, open_folder, read_header, write_folder

HUGE = 2**64 - 1


def file(header, data=b'', length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack('<Q', len(text) if length is None else length) + text + data


def entry(dtype='F32', shape=(2, 4), offsets=(0, 32), **more): return {'dtype': dtype, 'shape': list(shape), 'data_offsets': list(offsets)} | more
def one(data=bytes(32), **changes): return file({'w': entry() | changes}, data)
def raw(text, data=bytes(32)): return file(text.encode(), data)


W = json.dumps(entry())
HOSTILE = {     # name: (file, words that the message must have)
    'empty file': (b'', ['is empty']),
    'seven bytes': (bytes(7), ['7 bytes long']),
    'length alone': (struct.pack('<Q', 2), ['2 bytes long', 'only 0']),
    'GGUF': (b'GGUF' + bytes(60), ['is a GGUF file']),
    'LFS pointer': (b'version https://git-lfs.github.com/spec/v1\noid sha256:0\n', ['git lfs pull']),
    'web page': (b'<html>' + bytes(60), ['web page']),
    'pickle in a zip': (b'PK\3\4' + bytes(60), ['zip archive']),
    'text': (b'hello, world, this is no model', ['100000000', "b'hello, wor"]),
    'header of 2**64 - 1': (file(b'{}', length=HUGE), [str(HUGE)]),
    'header of 2**63': (file(b'{}', length=2**63), [str(2**63)]),
    'header of 99 MB': (file(b'{}', length=99_000_000), ['99000000', 'cut short']),
    'header one byte short': (file(b'{}', length=3), ['3 bytes long', 'only 2']),
    'header of nothing': (file(b'', length=0) + b'x', ['brace']),
    'header that is a list': (file(b'[]'), ['brace']),
    'header with a byte order mark': (file(b'\xef\xbb\xbf{}'), ['brace']),
    'header in UTF-16': (file('{}'.encode('utf-16')), ['brace']),
    'header not UTF-8': (file(b'{"\xff": 1}'), ['UTF-8', 'byte 10']),
    'header cut': (raw('{"w": {"dtype":'), ['not JSON']),
    'two headers': (raw('{} {}'), ['not JSON']),
    'comment': (raw('{/* */}'), ['not JSON']),
    'trailing comma': (raw('{"w": ' + W + ',}'), ['not JSON']),
    'lists 100,000 deep': (raw('{"w":' + '[' * 100_000), ['deep']),
    'objects 100,000 deep': (raw('{"w":' * 100_000), ['deep']),
    'deep and closed': (raw('{"w":' + '[' * 50_000 + ']' * 50_000 + '}'), ['deep']),
    'a name twice': (raw('{"w": ' + W + ', "w": ' + W + '}'), ["'w'", 'twice']),
    'a field twice': (raw('{"w": {"dtype": "F32", "dtype": "U8", "shape": [32], "data_offsets": [0, 32]}}'), ["'dtype'", 'twice']),
    'metadata twice': (raw('{"__metadata__": {}, "__metadata__": {}}', b''), ["'__metadata__'", 'twice']),
    'metadata not strings': (raw('{"__metadata__": {"a": 1}}', b''), ['__metadata__']),
    'metadata a list': (raw('{"__metadata__": []}', b''), ['__metadata__']),
    'NaN': (raw('{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 32]}}'), ['NaN']),
    'infinity': (raw('{"w": {"dtype": "F32", "shape": [8], "data_offsets": [0, Infinity]}}'), ['Infinity']),
    'a number of 5000 digits': (raw('{"w": {"dtype": "F32", "shape": [' + '9' * 5000 + '], "data_offsets": [0, 32]}}'), ['header']),
    'no name': (file({'': entry()}, bytes(32)), ['without a name']),
    'half a surrogate': (raw('{"\\ud800": ' + W + '}'), ['ud800', 'Unicode']),
    'a tensor that is a list': (file({'w': []}), ["'w'", 'dtype']),
    'a tensor that is null': (file({'w': None}), ["'w'", 'dtype']),
    'no dtype': (file({'w': {'shape': [], 'data_offsets': [0, 4]}}, bytes(4)), ["'w'", 'dtype']),
    'unknown dtype': (one(dtype='F5'), ["'w'", "'F5'", 'unknown']),
    'lower case dtype': (one(dtype='f32'), ["'w'", "'f32'"]),
    'dtype a number': (one(dtype=7), ["'w'", 'dtype']),
    'dtype a list': (one(dtype=['F32']), ["'w'", 'dtype']),
    'a very long dtype': (one(dtype='F' * 60_000), ["'w'", 'unknown']),
    'shape a number': (one(shape=8), ["'w'", 'shape']),
    'shape with a float': (one(shape=[8.0]), ["'w'", 'shape']),
    'shape with a bool': (one(shape=[True, 8]), ["'w'", 'shape']),
    'shape with a string': (one(shape=['8']), ["'w'", 'shape']),
    'negative shape': (one(shape=[-2, -4]), ["'w'", 'shape']),
    'shape of 2**64': (one(shape=[2**64]), ["'w'", '63 bits']),
    'a product that wraps to 8': (one(shape=[2**32 + 1, 2**32 - 1, 8]), ["'w'", '63 bits']),
    'a product that wraps to 0': (one(shape=[2**32, 2**32], data_offsets=[0, 0], data=b''), ["'w'", '63 bits']),
    'bytes that wrap to 0': (one(shape=[2**62], data_offsets=[0, 0], data=b''), ["'w'", 'span 0']),
    'a thousand axes': (one(shape=[1] * 1000), ["'w'", '1000 axes']),
    'shape too small': (one(shape=[7]), ["'w'", '28 bytes', '32']),
    'shape too large': (one(shape=[9]), ["'w'", '36 bytes', '32']),
    'half a byte': (one(dtype='F4', shape=[3], data_offsets=[0, 2], data=bytes(2)), ["'w'", '1.5 bytes']),
    'one offset': (one(data_offsets=[0]), ["'w'", 'data_offsets']),
    'three offsets': (one(data_offsets=[0, 32, 64]), ["'w'", 'data_offsets']),
    'negative offset': (one(data_offsets=[-32, 0]), ["'w'", 'data_offsets']),
    'float offset': (one(data_offsets=[0, 32.0]), ["'w'", 'data_offsets']),
    'backwards': (one(data_offsets=[32, 0]), ["'w'", '32', 'before']),
    'past the end': (file({'w': entry(offsets=(2**40, 2**40 + 32))}, bytes(32)), ["'w'", 'missing']),
    'at the end of 63 bits': (file({'w': entry(shape=(2**60,), offsets=(0, 2**62))}, bytes(32)), ["'w'", 'missing']),
    'one byte short': (one(data=bytes(31)), ["'w'", '1 bytes are missing']),
    'one byte more': (one(data=bytes(33)), ['1 bytes at the end']),
    'no data': (one(data=b''), ["'w'", '32 bytes are missing']),
    'data and no tensors': (file({}, bytes(5)), ['5 bytes at the end']),
    'a gap before': (file({'w': entry(offsets=(4, 36))}, bytes(36)), ["'w'", '4 bytes before']),
    'a gap between': (file({'v': entry(), 'w': entry(offsets=(40, 72))}, bytes(72)), ["'w'", '8 bytes before']),
    'overlap': (file({'v': entry(), 'w': entry(offsets=(31, 63))}, bytes(63)), ["'v'", "'w'", 'overlap']),
    'the same place': (file({'v': entry(), 'w': entry()}, bytes(32)), ["'v'", "'w'", 'overlap']),
    'inside of another': (file({'v': entry(shape=(4, 4), offsets=(0, 64)), 'w': entry(offsets=(8, 40))}, bytes(64)), ["'v'", "'w'", 'overlap'])}


def measured(path, function):
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as error: function(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally: tracemalloc.stop()
    return str(error.value), peak


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_header_is_refused_by_name(name, tmp_path):
    content, words = HOSTILE[name]
    path = tmp_path/'model.safetensors'
    path.write_bytes(content)
    for function in (open_folder, lambda p: open_folder(p.parent)):
        message, peak = measured(path, function)
        assert str(path) in message and '\n' not in message and len(message) < 500 + len(str(path))
        for word in words: assert word in message, (word, message)
        assert peak < (1 << 18) + 40 * len(content), f'{peak} bytes were allocated for a file of {len(content)}'


@pytest.mark.parametrize('first', [b'<', b'PK', b'G'])
def test_a_length_may_look_like_another_format(first, tmp_path):
    "A header of 60 bytes makes a file start with '<', as web pages do: one file in 256 has such a length"
    header = b'{"w":' + W.encode() + b'}'
    header += b' ' * ((int.from_bytes(first, 'little') - len(header)) % 256 ** len(first))
    (tmp_path/'model.safetensors').write_bytes(file(header, bytes(32)))
    assert (tmp_path/'model.safetensors').read_bytes().startswith(first)
    with open_folder(tmp_path) as checkpoint: assert list(checkpoint.tensors) == ['w']


def test_good_file_from_the_same_pieces_opens(tmp_path):
    "Else the table above might be refused for a fault of its own making"
    header = {'__metadata__': {'format': 'pt'}, 'w': entry(offsets=(4, 36)), 'empty': entry(shape=(0, 4), offsets=(4, 4)), 'scalar': entry(shape=(), offsets=(0, 4)), 'é': entry(offsets=(36, 68), extra='ignored')}
    (tmp_path/'model.safetensors').write_bytes(file(json.dumps(header, ensure_ascii=False).encode() + b'   ', bytes(68)))
    with open_folder(tmp_path) as checkpoint: assert {n: t.shape for n, t in checkpoint.tensors.items()} == {'w': (2, 4), 'empty': (0, 4), 'scalar': (), 'é': (2, 4)} and checkpoint.tensors['empty'].dequantize().shape == (0, 4)


# ---- the index

def with_index(folder, index, files=('a.safetensors',)):
    folder.mkdir(exist_ok=True)
    for name in files: (folder/name).write_bytes(one())
    (folder/'model.safetensors.index.json').write_text(index if isinstance(index, str) else json.dumps(index))
    return folder


@pytest.mark.parametrize('shard', ['../secret.safetensors', '/etc/secret.safetensors', 'sub/a.safetensors', '..', '', '.safetensors', '.hidden.safetensors', 'a\0.safetensors', 'a.bin', 'C:\\a.safetensors', '..\\a.safetensors', '\ud800.safetensors', '~/../x.safetensors'])
def test_shards_are_names_of_files_in_this_folder(shard, tmp_path):
    (tmp_path/'secret.safetensors').write_bytes(one())
    with pytest.raises(FormatError, match='not the name of a safetensors file in this folder') as error: open_folder(with_index(tmp_path/'m', {'weight_map': {'w': shard}}))
    str(error.value).encode()


@pytest.mark.parametrize('index, words', [
    ('[]', ['not a JSON object']), ('{}', ['weight_map']), ({'weight_map': {}}, ['weight_map']), ({'weight_map': []}, ['weight_map']), ({'weight_map': {'w': 7}}, ['weight_map']), ('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}', ["'w'", 'twice']),
    ('{"weight_map"', ['not JSON']), ('{"weight_map":' * 50_000, ['deep']), ({'weight_map': {'w': 'gone.safetensors', 'v': 'a.safetensors'}}, ['1 of 2 files are missing', 'gone.safetensors']),
    ({'weight_map': {f'w{i}': f'{i}.safetensors' for i in range(50)}}, ['50 of 50', 'and 42 more']), ({'weight_map': {'other': 'a.safetensors'}}, ['not in the file that the index names', 'other (in a.safetensors)'])])
def test_hostile_index(index, words, tmp_path):
    folder = with_index(tmp_path/'m', index)
    with pytest.raises(FormatError) as error: open_folder(folder)
    assert str(folder) in str(error.value) and '\n' not in str(error.value) and len(str(error.value)) < 600
    for word in words: assert word in str(error.value), (word, str(error.value))


def test_two_copies_of_a_tensor(tmp_path):
    "The index decides; without one, nobody does"
    folder = with_index(tmp_path/'m', {'weight_map': {'w': 'b.safetensors'}}, ())
    (folder/'a.safetensors').write_bytes(file({'w': entry(), 'v': entry(offsets=(32, 64))}, bytes(64)))
    (folder/'b.safetensors').write_bytes(one(np.ones(8, np.float32).tobytes()))
    (folder/'model.safetensors.index.json').write_text(json.dumps({'weight_map': {'w': 'b.safetensors', 'v': 'a.safetensors'}}))
    with open_folder(folder) as checkpoint: assert checkpoint.tensors['w'].dequantize().all()
    for i, content in enumerate((one(), one())): (tmp_path/f'x-{i + 1:05d}-of-00002.safetensors').write_bytes(content)
    with pytest.raises(FormatError, match="'w' occurs in x-00001-of-00002.safetensors too"): open_folder(tmp_path)


def test_shard_that_is_no_file(tmp_path):
    (tmp_path/'model.safetensors').mkdir()
    with pytest.raises((FormatError, ModelNotFound)): open_folder(tmp_path)
    (tmp_path/'model.safetensors').rmdir()
    os.mkfifo(tmp_path/'model.safetensors')
    with pytest.raises(FormatError, match='ordinary'): open_folder(tmp_path)                       # and it does not wait for somebody to write into it


def test_large_text_files(tmp_path):
    (tmp_path/'model.safetensors').write_bytes(one())
    with open(tmp_path/'config.json', 'wb') as f: f.truncate(200_000_000)                          # a hole, not 200 MB of disk
    message, peak = measured(tmp_path, open_folder)
    assert 'config.json' in message and '200.0 MB' in message and peak < 1 << 18


# ---- random damage

def sample(folder):
    "A small folder with every scheme and all text files"
    draw = np.random.default_rng(0)
    def tensor(kind, *shape):
        values = draw.normal(size=shape).astype(np.float32)
        return Deferred(kind, shape, lambda: values, input_scale=.5 if kind in ('NVFP4', 'FP8') else None)
    tensors = {f'{kind}.weight': tensor(kind, 4, 32) for kind in ('NVFP4', 'MXFP4', 'FP8', 'FP8_CHANNEL', 'FP8_BLOCK', 'BF16', 'F16', 'F32')} | {'ids': np.arange(5), 'flag': np.array(True)}
    write_folder(folder, tensors, {'model_type': 'demo', 'text_config': {}}, generation_config={'eos_token_id': 1})
    (folder/'tokenizer_config.json').write_text('{"chat_template": "x"}')
    return folder


def opens_or_refuses(folder):
    "Look at everything in a folder; True when it opened. Any exception but ours is a fault."
    try: checkpoint = open_checkpoint(folder)
    except SparkinferError as e:
        assert str(e) and '\n' not in str(e) and len(str(e)) < 3000
        str(e).encode()
        return False
    with checkpoint, np.errstate(all='ignore'):
        for text in (describe_folder(checkpoint), repr(checkpoint), checkpoint._repr_markdown_()): text.encode()
        for t in checkpoint.tensors.values():
            repr(t)
            try: assert t.dequantize().shape == t.shape
            except SparkinferError: pass
            checkpoint.release(t)
    return True


def test_cut_at_every_byte(tmp_path):
    folder = sample(tmp_path/'m')
    content = (folder/'model.safetensors').read_bytes()
    assert opens_or_refuses(folder)
    for length in range(0, len(content), 3):
        (folder/'model.safetensors').write_bytes(content[:length])
        assert not opens_or_refuses(folder), length


NUMBERS = [str(n).encode() for n in (0, 1, 2, 3, 4, 16, 31, 32, 64, 100, 2**31, 2**32, 2**62, 2**63, 2**64, -1)] + [b'1.5', b'null', b'true', b'[]', b'""', b'{}', b'NaN', b'1e999']
WORDS = [b'"F32"', b'"U8"', b'"F8_E4M3"', b'"BF16"', b'"F4"', b'"I8"', b'weight_scale', b'_scale_2', b'_scale_inv', b'_packed', b'_blocks', b'_scales', b'.weight', b'shape', b'data_offsets', b'dtype', b'__metadata__', b'input_scale', b'\xff', b'\\ud800']

def mutate(content, rng, header):
    "One to four small changes, most of them in the header; half of these keep it JSON"
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(content)) if rng.random() < .15 or not header else 8 + rng.randrange(header)
        what, size = rng.randrange(7), rng.choice((1, 2, 8))
        if what == 0: content[at:at + 1] = bytes([content[min(at, len(content) - 1)] ^ 1 << rng.randrange(8)])
        if what == 1: content[at:at + size] = rng.randbytes(size)
        if what == 2 and rng.random() < .3: content[0:8] = struct.pack('<Q', rng.choice((0, 1, header - 1, header + 1, len(content), 2**31, 2**63, HUGE)) % 2**64)
        if what in (3, 4):                                                                        # a number becomes another, of the same length where possible
            text = bytes(content[8:8 + header])
            spots = [i for i in range(len(text)) if text[i:i + 1].isdigit() and not text[i - 1:i].isdigit()]
            if spots:
                i = rng.choice(spots); j = i
                while text[j:j + 1].isdigit(): j += 1
                new = text[:i] + rng.choice(NUMBERS) + text[j:]
                content[:8 + header] = struct.pack('<Q', len(new)) + new; header = len(new)
        if what in (5, 6):                                                                        # a word becomes another
            text, old = bytes(content[8:8 + header]), rng.choice(WORDS)
            if old in text:
                i = rng.choice([k for k in range(len(text)) if text.startswith(old, k)])
                new = text[:i] + rng.choice(WORDS) + text[i + len(old):]
                content[:8 + header] = struct.pack('<Q', len(new)) + new; header = len(new)
    return bytes(content)


@pytest.mark.parametrize('seed', range(4))
def test_random_mutations_open_or_are_refused(tmp_path, seed):
    folder, rng, opened = sample(tmp_path/'m'), random.Random(seed), 0
    content = (folder/'model.safetensors').read_bytes()
    header = struct.unpack('<Q', content[:8])[0]
    for _ in range(700):
        (folder/'model.safetensors').write_bytes(mutate(content, rng, header))
        opened += opens_or_refuses(folder)
    assert 0 < opened < 700, 'the mutations must be neither harmless nor all fatal, or they test nothing'


@pytest.mark.parametrize('name', ['config.json', 'hf_quant_config.json', 'tokenizer_config.json', 'generation_config.json'])
def test_random_mutations_of_the_text_files(tmp_path, name):
    folder, rng = sample(tmp_path/'m'), random.Random(name)
    content = (folder/name).read_bytes()
    for _ in range(250):
        (folder/name).write_bytes(b'x'.join(mutate(b'12345678' + content, rng, len(content))[8:].split(b'x', 1)))
        opens_or_refuses(folder)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(['modelopt', 'compressed-tensors', 'fp8', 'NVFP4', 'int', 'dense']),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(['quant_method', 'format', 'config_groups', 'weights', 'type', 'quant_algo', 'quantized_layers', 'ignore', 'weight_block_size', 'block_structure', 'sparsity_config', 'transform_config', 'g']), inner, max_size=5), max_leaves=12)

@settings(max_examples=200, deadline=None)
@given(JSON, JSON, st.sampled_from(['quantization_config', 'text_config', 'architectures', 'model_type']))
def test_any_json_as_a_config(tmp_path_factory, config, theirs, key):
    folder = tmp_path_factory.mktemp('config')
    (folder/'model.safetensors').write_bytes(one())
    (folder/'config.json').write_text(json.dumps({key: config}))
    (folder/'hf_quant_config.json').write_text(json.dumps({'quantization': theirs}))
    opens_or_refuses(folder)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120))
def test_arbitrary_bytes_after_a_length(tail):
    for start in (b'', struct.pack('<Q', len(tail)), struct.pack('<Q', len(tail) + 1) + b'{', struct.pack('<Q', len(tail) + 6) + b'{"w":{'):
        try: read_header(start + tail, 'x')
        except FormatError: pass


def test_names_cannot_write_to_the_terminal(tmp_path):
    "A line break or an escape code in a name must not reach the screen, in a message or in the description"
    evil = 'w\n\x1b[2Jowned'
    def written(tensors, folder):
        folder.mkdir()
        (folder/'config.json').write_text(json.dumps({'model_type': evil, 'architectures': [evil], 'quantization_config': {'quant_method': 'fp8', 'format': evil, 'ignore': [evil]}}))
        (folder/'model.safetensors').write_bytes(file(tensors, bytes(32)))
        return folder
    with open_folder(written({evil: entry()}, tmp_path/'a')) as checkpoint:
        texts = [describe_folder(checkpoint), repr(checkpoint), checkpoint._repr_markdown_()]
    for i, tensors in enumerate(({evil + '.weight': entry('F8_E4M3', (4, 8))}, {evil + '_packed': entry('U8', (4, 8))}, {evil: entry('F8_E4M3', (32,))}, {evil + '.qweight': entry()}, {evil: entry(evil)})):
        with pytest.raises((FormatError, UnsupportedError)) as error: open_folder(written(tensors, tmp_path/f'b{i}'))
        texts.append(str(error.value))
    for text in texts: assert '\x1b' not in text and 'owned' in text and '\nw' not in text


def test_long_names_make_short_messages(tmp_path):
    (tmp_path/'model.safetensors').write_bytes(file({'k' * 60_000 + str(i) + '.weight': entry('U8', (1, 8), (8 * i, 8 * i + 8)) for i in range(100)}, bytes(800)))
    with pytest.raises(FormatError, match='100 quantised tensors') as error: open_folder(tmp_path)
    assert len(str(error.value)) < 3000
