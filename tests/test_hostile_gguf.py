"""Hostile GGUF files. A spoiled file opens, or is refused with a FormatError that names the key or tensor; it never crashes, hangs, or makes us allocate what it only claims."""
import random, struct, tracemalloc
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from sparkinfer.errors import FormatError, UnsupportedError
from sparkinfer.formats.blocks import QUANT_TYPES
from sparkinfer.formats.gguf import describe, open_gguf, read_header, write_gguf

U32, BOOL, STRING, ARRAY, HUGE = 4, 7, 8, 9, 2**64 - 1


def text(s): return struct.pack('<Q', len(s)) + s
def key(name, kind, value): return text(name) + struct.pack('<I', kind) + value
def array(kind, count, elements=b''): return struct.pack('<IQ', kind, count) + elements
def info(name=b'w', ne=(32,), kind=0, offset=0, axes=None): return text(name) + struct.pack(f'<I{len(ne)}QIQ', len(ne) if axes is None else axes, *ne, kind, offset)


def file(keys=(), tensors=(), data=256, version=3, counts=None):
    "A file from its pieces, with a data section of `data` bytes"
    head = b'GGUF' + struct.pack('<IQQ', version, *(counts or (len(tensors), len(keys)))) + b''.join(keys) + b''.join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


ALIGN = b'general.alignment'
HOSTILE = {     # name: (file, words that the message must have)
    'empty file': (b'', ['is empty']),
    'not GGUF': (b'hello, world', ['not a GGUF file', "b'hello, w'"]),
    'three bytes': (b'GGU', ['not a GGUF file', "b'GGU'"]),
    'magic alone': (b'GGUF', ['the version']),
    'old GGML': (b'tjgg' + bytes(60), ['before GGUF']),
    'LFS pointer': (b'version https://git-lfs.github.com/spec/v1\noid sha256:0\n', ['git lfs pull']),
    'zip': (b'PK\3\4' + bytes(60), ['zip archive']),
    'safetensors': (struct.pack('<Q', 2) + b'{}', ['safetensors']),
    'version 0': (file(version=0), ['version 0']),
    'version 1': (file(version=1), ['version 1', 'convert']),
    'version 4': (file(version=4), ['version 4']),
    'big-endian': (b'GGUF' + struct.pack('>IQQ', 3, 0, 0), ['big-endian']),
    'counts missing': (b'GGUF' + struct.pack('<I', 3), ['the number of tensors']),
    'key count absurd': (file(counts=(0, HUGE)), ['metadata', str(HUGE)]),
    'tensor count absurd': (file(counts=(HUGE, 0)), ['tensor table', str(HUGE)]),
    'tensor count is minus one': (file(counts=(2**63, 0)), ['tensor table']),
    'key longer than the file': (file([struct.pack('<Q', 60_000) + b'k' * 40], counts=(0, 1)), ['metadata key 0', '60000']),
    'key longer than anything': (file([struct.pack('<Q', HUGE)], counts=(0, 1)), ['metadata key 0', str(HUGE)]),
    'key without a name': (file([key(b'', U32, bytes(4))]), ['key 0', 'empty']),
    'key not UTF-8': (file([key(b'\xff\xfe', U32, bytes(4))]), ['metadata key 0', 'UTF-8']),
    'key of unknown kind': (file([key(b'some.key', 13, bytes(8))]), ['some.key', '13']),
    'key twice': (file([key(b'some.key', U32, bytes(4))] * 2), ['some.key', 'twice']),
    'bool that is 2': (file([key(b'some.key', BOOL, b'\2')]), ['some.key', 'bool']),
    'string longer than the file': (file([key(b'some.key', STRING, struct.pack('<Q', 10**15))]), ['some.key', str(10**15)]),
    'string of 2**64 - 1': (file([key(b'some.key', STRING, struct.pack('<Q', HUGE))]), ['some.key', str(HUGE)]),
    'string not UTF-8': (file([key(b'some.key', STRING, text(b'abc\xc3'))]), ['some.key', 'UTF-8']),
    'array of unknown kind': (file([key(b'some.key', ARRAY, array(99, 1, bytes(8)))]), ['some.key', '99']),
    'array of 2**61 uint64': (file([key(b'some.key', ARRAY, array(10, 2**61))]), ['some.key', str(2**61)]),     # 8 · 2**61 wraps to 0
    'array of 2**61 strings': (file([key(b'some.key', ARRAY, array(STRING, 2**61))]), ['some.key', str(2**61)]),
    'array of 2**64 - 1 bytes': (file([key(b'some.key', ARRAY, array(0, HUGE))]), ['some.key', str(HUGE)]),
    'array of too many arrays': (file([key(b'some.key', ARRAY, array(ARRAY, 2**62))]), ['some.key', 'arrays']),
    'array 1000 deep': (file([key(b'some.key', ARRAY, array(ARRAY, 1) * 1000 + array(0, 0))]), ['some.key', 'deep']),
    'array with a bad bool': (file([key(b'some.key', ARRAY, array(BOOL, 3, b'\1\0\7'))]), ['some.key', 'element 2']),
    'array with a bad string': (file([key(b'some.key', ARRAY, array(STRING, 3, text(b'a') + text(b'\xff') + text(b'c')))]), ['element 1', 'some.key', 'UTF-8']),
    'array whose string runs away': (file([key(b'some.key', ARRAY, array(STRING, 3, text(b'a') + struct.pack('<Q', 2**63) + text(b'c')))]), ['element 1', 'some.key', str(2**63)]),
    'nested array with a bad kind': (file([key(b'some.key', ARRAY, array(ARRAY, 2, array(0, 1, b'x') + array(77, 1)))]), ['element 1', 'some.key', '77']),
    'alignment 0': (file([key(ALIGN, U32, struct.pack('<I', 0))]), ['general.alignment', '0', 'power of two']),
    'alignment 3': (file([key(ALIGN, U32, struct.pack('<I', 3))]), ['general.alignment', '3', 'power of two']),
    'alignment negative': (file([key(ALIGN, 5, struct.pack('<i', -32))]), ['general.alignment', '-32']),
    'alignment a string': (file([key(ALIGN, STRING, text(b'32'))]), ['general.alignment', 'string']),
    'alignment a float': (file([key(ALIGN, 6, struct.pack('<f', 32))]), ['general.alignment', 'float32']),
    'alignment a bool': (file([key(ALIGN, BOOL, b'\1')]), ['general.alignment', 'bool']),
    'alignment an array': (file([key(ALIGN, ARRAY, array(U32, 1, struct.pack('<I', 32)))]), ['general.alignment', 'array']),
    'alignment of 2**63': (file([key(ALIGN, 10, struct.pack('<Q', 2**63))], [info()]), ["'w'", 'missing']),
    'tensor without a name': (file(tensors=[info(b'')]), ['tensor 0', 'empty']),
    'tensor name not UTF-8': (file(tensors=[info(b'\xc0\x80')]), ['tensor 0', 'UTF-8']),
    'tensor name longer than the file': (file(tensors=[struct.pack('<Q', HUGE) + bytes(32)]), ['tensor 0', str(HUGE)]),
    'tensor twice': (file(tensors=[info(), info(offset=128)]), ["'w'", 'twice']),
    'no axes': (file(tensors=[info(ne=())]), ["'w'", 'no axes']),
    'five axes': (file(tensors=[info(ne=(32, 1, 1, 1, 1))]), ["'w'", '5 axes']),
    'a million axes': (file(tensors=[info(axes=10**6)]), ["'w'", '1000000 axes']),
    'a zero in the shape': (file(tensors=[info(ne=(32, 0))]), ["'w'", 'zero']),
    'nothing but zeros': (file(tensors=[info(ne=(0, 0))]), ["'w'", 'zero']),
    'a product that wraps to 4': (file(tensors=[info(ne=(4194305, 4194305, 211106198978564))]), ["'w'", '63 bits']),
    'a product that wraps to 0': (file(tensors=[info(ne=(2**32, 2**32))]), ["'w'", '63 bits']),
    'bytes that wrap': (file(tensors=[info(ne=(2**31, 2**31))]), ["'w'", 'missing']),                # 4 bytes each: 2**64
    'minus one values': (file(tensors=[info(ne=(HUGE,))]), ["'w'", '63 bits']),
    'unknown type': (file(tensors=[info(kind=1234)]), ["'w'", '1234', 'unknown']),
    'withdrawn type': (file(tensors=[info(kind=4)]), ["'w'", 'Q4_2', 'withdrawn']),
    'row not whole blocks': (file(tensors=[info(ne=(33,), kind=3)]), ["'w'", '33', '32', 'Q4_1']),
    'offset at the end': (file(tensors=[info(offset=256)]), ["'w'", '128 bytes are missing']),
    'offset past the end': (file(tensors=[info(offset=2**40)]), ["'w'", 'missing']),
    'offset that wraps': (file(tensors=[info(offset=2**64 - 32)]), ["'w'", 'missing']),
    'offset not aligned': (file(tensors=[info(offset=8)]), ["'w'", '8', 'alignment 32']),
    'one byte short': (file(tensors=[info(ne=(64,))])[:-1], ["'w'", '1 bytes are missing']),
    'data section missing': (file(tensors=[info()], data=0), ["'w'", '128 bytes are missing']),
    'overlap': (file(tensors=[info(b'v', ne=(32,)), info(b'w', offset=96)]), ["'v'", "'w'", 'overlap']),
    'same place': (file(tensors=[info(b'v'), info(b'w')]), ["'v'", "'w'", 'overlap'])}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_header_is_refused_by_name(name, tmp_path):
    content, words = HOSTILE[name]
    path = tmp_path/'bad.gguf'
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as error: open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally: tracemalloc.stop()
    message = str(error.value)
    assert str(path) in message and '\n' not in message and len(message) < 500 + len(str(path))
    for word in words: assert word in message, (word, message)
    assert peak < 1 << 18, f'{peak} bytes were allocated for a file of {len(content)}'


def test_good_file_from_the_same_pieces_opens(tmp_path):
    "Else the table above might be refused for a fault of its own making"
    keys = [key(ALIGN, U32, struct.pack('<I', 32)), key(b'a', ARRAY, array(STRING, 2, text(b'x') + text(b''))), key(b'b', ARRAY, array(ARRAY, 1, array(BOOL, 2, b'\1\0'))), key(b'c', BOOL, b'\1')]
    (tmp_path/'good.gguf').write_bytes(file(keys, [info(b'v'), info(b'w', offset=128)]))
    with open_gguf(tmp_path/'good.gguf') as checkpoint:
        assert checkpoint.metadata['a'] == ['x', ''] and checkpoint.metadata['b'][0].tolist() == [True, False] and list(checkpoint.tensors) == ['v', 'w']


def sample_file(path):
    "A small file with every kind of value and some of each type of tensor"
    draw = np.random.default_rng(0)
    metadata = {'general.architecture': 'llama', 'general.alignment': 32, 'flag': True, 'real': 1.5, 'long': np.int64(-5), 'tokens': ['a', 'bc', 'é', ''], 'scores': np.arange(4, dtype=np.float32),
                'nested': [np.arange(3), ['x']], 'split.count': 1, 'flags': np.array([True, False])}
    tensors = {name: (name, (2, quant.block_size), draw.integers(0, 256, 2 * quant.block_bytes, np.uint8)) for name, quant in QUANT_TYPES.items() if name in ('F32', 'F16', 'BF16', 'Q4_1', 'Q8_0', 'Q6_K', 'IQ4_NL')}
    return write_gguf(path, metadata, tensors).read_bytes()


def opens_or_refuses(path, content):
    "Open `content` as a file and look at everything in it; True when it opened. Any exception but FormatError is a fault."
    path.write_bytes(content)
    try: checkpoint = open_gguf(path)
    except FormatError as e:
        assert str(e) and '\n' not in str(e)
        return False
    with checkpoint, np.errstate(all='ignore'):
        describe(checkpoint), repr(checkpoint)
        for t in checkpoint.tensors.values():
            assert t.nbytes <= len(content)
            try: t.dequantize()
            except UnsupportedError: pass
            checkpoint.release(t)
    return True


def test_cut_at_every_byte(tmp_path):
    content = sample_file(tmp_path/'good.gguf')
    assert opens_or_refuses(tmp_path/'cut.gguf', content)
    with open_gguf(tmp_path/'good.gguf') as checkpoint: end = max(start + checkpoint.tensors[n].nbytes for n, (_, start) in checkpoint._places.items())
    for length in range(len(content)): assert opens_or_refuses(tmp_path/'cut.gguf', content[:length]) == (length >= end), length       # the padding at the end may be missing


INTERESTING = [struct.pack('<Q', v % 2**64) for v in (0, 1, 2, 3, 4, 7, 31, 32, 33, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, -1, -32)]

def mutate(content, rng):
    "One to four small changes, most of them in the header, where they matter"
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(content) if rng.random() < .2 else min(len(content), 900)) if content else 0
        what, size = rng.randrange(6), rng.choice((1, 4, 8))
        if what == 0: content[at:at + 1] = bytes([content[at] ^ 1 << rng.randrange(8)])
        if what == 1: content[at:at + size] = rng.choice(INTERESTING)[:size]
        if what == 2: del content[at:at + rng.choice((1, 4, 8, 40))]
        if what == 3: content[at:at] = rng.randbytes(rng.choice((1, 4, 8, 40)))
        if what == 4: content[at:at] = content[at:at + rng.choice((8, 20, 60))]
        if what == 5: content[at:at + size] = rng.randbytes(size)
    return bytes(content)


@pytest.mark.parametrize('seed', range(4))
def test_random_mutations_open_or_are_refused(tmp_path, seed):
    content, rng = sample_file(tmp_path/'good.gguf'), random.Random(seed)
    opened = sum(opens_or_refuses(tmp_path/'bad.gguf', mutate(content, rng)) for _ in range(1500))
    assert 0 < opened < 1500, 'the mutations must be neither harmless nor all fatal, or they test nothing'


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_after_the_magic(tail):
    for start in (b'', b'GGUF\3\0\0\0', b'GGUF\3\0\0\0' + struct.pack('<QQ', 1, 1)):
        try: read_header(start + tail, 'x')
        except FormatError: pass


def test_only_what_lies_in_the_cache_was_downloaded(tmp_path, monkeypatch):
    "Fault: `serve README.md` was told of a download that nobody had made"
    monkeypatch.setenv('SPARKINFER_CACHE', str(tmp_path/'cache'))
    (tmp_path/'cache'/'models').mkdir(parents=True)
    for folder, content, says in ((tmp_path, b'<!-- notes -->', "is not a GGUF file: it starts with b'<!-- not"), (tmp_path, b'<!DOCTYPE html>', 'is a web page, not a GGUF file'), (tmp_path/'cache'/'models', b'<?xml version="1.0"?>', 'the download went wrong')):
        (folder/'x.gguf').write_bytes(content)
        with pytest.raises(FormatError, match=says): open_gguf(folder/'x.gguf')

def test_long_names_make_short_messages():
    "A message for each element of an array that repeats a 65 kB key costs minutes; this file has 200,000 elements"
    name = b'k' * 65535
    content = file([key(name, ARRAY, array(ARRAY, 200_000, array(0, 0) * 199_999 + array(55, 0)))])
    with pytest.raises(FormatError, match='element 199999 .*55') as error: read_header(content, 'x')
    assert len(str(error.value)) < 400
    with pytest.raises(FormatError, match='65536 bytes long'): read_header(file([key(name + b'k', U32, bytes(4))]), 'x')


def test_names_cannot_write_to_the_terminal(tmp_path):
    "inspect prints names from the file: a line break or an escape code in one must not reach the screen"
    evil = 'blk\n\x1b[2Jowned'
    write_gguf(tmp_path/'evil.gguf', {evil: evil, 'general.architecture': evil}, {evil: np.ones(1, np.float32)})
    with open_gguf(tmp_path/'evil.gguf') as checkpoint:
        assert checkpoint.metadata[evil] == evil and evil in checkpoint.tensors
        for text in (describe(checkpoint), repr(checkpoint), checkpoint._repr_markdown_()): assert '\x1b' not in text and 'owned' in text and '\nblk' not in text
