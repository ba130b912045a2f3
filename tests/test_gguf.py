"""The GGUF reader and writer against the reference implementation, on the real model and on made-up files."""
import os
import gguf, numpy as np, pytest
from hypothesis import given, settings, strategies as st
from sparkinfer.errors import FormatError, ModelNotFound, SparkinferError
from sparkinfer.formats.blocks import QUANT_TYPES
from sparkinfer.formats.gguf import Tensor, describe, open_gguf, write_gguf
from sparkinfer.model_store import resolve


def same(a, b):
    if isinstance(a, (list, np.ndarray)): return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b or (a != a and b != b)


# ---- the real model

def test_default_model_equals_the_reference_reader():
    oracle = gguf.GGUFReader(resolve('smollm2'))
    with open_gguf(resolve('smollm2')) as checkpoint:
        assert list(checkpoint.tensors) == [t.name for t in oracle.tensors] and len(checkpoint.tensors) == 272
        for t in oracle.tensors:
            ours = checkpoint.tensors[t.name]
            assert ours.shape == tuple(int(n) for n in t.shape[::-1]) and ours.type.id == int(t.tensor_type)
            assert np.array_equal(ours.data, t.data.view(np.uint8).reshape(-1))
        keys = [k for k in oracle.fields if not k.startswith('GGUF.')]
        assert list(checkpoint.metadata) == keys
        for k in keys:
            ours = checkpoint.metadata[k]
            assert same(ours, np.asarray(oracle.fields[k].contents()) if isinstance(ours, np.ndarray) else oracle.fields[k].contents()), k
        assert len(checkpoint.metadata['tokenizer.ggml.tokens']) == 49152 and type(checkpoint.metadata['tokenizer.ggml.merges'][0]) is str
        name = 'blk.0.attn_q.weight'
        assert np.array_equal(checkpoint.tensors[name].dequantize(), gguf.quants.dequantize(next(t.data for t in oracle.tensors if t.name == name), gguf.GGMLQuantizationType.Q4_1))


def test_default_model_written_again_is_the_same_file(tmp_path):
    "So our layout is the one that llama.cpp's own tools write"
    with open_gguf(resolve('smollm2')) as checkpoint:
        write_gguf(tmp_path/'again.gguf', checkpoint.metadata, checkpoint.tensors, kinds=checkpoint.kinds)
    assert (tmp_path/'again.gguf').read_bytes() == resolve('smollm2').read_bytes()


def test_description_of_the_default_model():
    with open_gguf(resolve('smollm2')) as checkpoint: text = describe(checkpoint)
    for words in ('general.architecture', "'llama'", '(49152 elements)', 'blk.29.ffn_down.weight', '576 × 1536', 'Q4_1  210 tensors', '106,168,320 weights', '5.00 bits per weight', '5.74 bits per weight', '272 tensors'):
        assert words in text, words
    assert max(map(len, text.splitlines())) < 260


# ---- made-up files

numbers = st.sampled_from(['uint8', 'int8', 'uint16', 'int16', 'uint32', 'int32', 'uint64', 'int64', 'float32', 'float64'])
def of_dtype(kind):
    dtype = np.dtype(kind)
    if dtype.kind == 'f': return st.floats(width=dtype.itemsize * 8)
    return st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
texts = st.text(st.characters(exclude_categories=['Cs']), max_size=300)
scalars = st.booleans() | texts | st.integers(-2**63, 2**64 - 1) | st.floats(width=32) | numbers.flatmap(lambda k: of_dtype(k).map(np.dtype(k).type))
arrays = numbers.flatmap(lambda k: st.lists(of_dtype(k), max_size=40).map(lambda v: np.array(v, k))) | st.lists(texts, max_size=40) | st.lists(st.booleans(), min_size=1, max_size=9).map(lambda v: np.array(v, bool))
nested = st.lists(arrays, min_size=1, max_size=4)
keys = st.text('abc.xyz_é', min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(keys, scalars | arrays | nested, max_size=8))
def test_metadata_round_trip(tmp_path_factory, metadata):
    path = tmp_path_factory.mktemp('meta')/'m.gguf'
    write_gguf(path, metadata, {'w': np.ones((1, 1), np.float32)})
    with open_gguf(path) as checkpoint:
        assert list(checkpoint.metadata) == list(metadata)
        for k, v in metadata.items(): assert same(v, checkpoint.metadata[k]), (k, v, checkpoint.metadata[k])
        write_gguf(path.with_name('again.gguf'), checkpoint.metadata, checkpoint.tensors, kinds=checkpoint.kinds)
    assert path.with_name('again.gguf').read_bytes() == path.read_bytes()
    for p in path.parent.iterdir(): p.unlink()


def test_file_of_the_reference_writer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path/'w.gguf', 'llama')
    writer.add_block_count(3); writer.add_string('some.text', 'häh'); writer.add_array('ints', [1, -2]); writer.add_array('words', ['a', 'bc']); writer.add_custom_alignment(128)
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer.add_tensor('plain', values)
    writer.add_tensor('packed', gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q5_1), raw_dtype=gguf.GGMLQuantizationType.Q5_1)
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
    with open_gguf(tmp_path/'w.gguf') as checkpoint:
        assert checkpoint.alignment == 128 and checkpoint.metadata['llama.block_count'] == 3 and checkpoint.metadata['words'] == ['a', 'bc'] and checkpoint.metadata['ints'].tolist() == [1, -2]
        assert np.array_equal(checkpoint.tensors['plain'].dequantize(), values)
        assert np.array_equal(checkpoint.tensors['packed'].data, QUANT_TYPES['Q5_1'].encode(values.reshape(-1, 32)).ravel())


@pytest.mark.parametrize('version', [2, 3])
@pytest.mark.parametrize('alignment', [1, 8, 32, 4096])
def test_versions_and_alignments(tmp_path, version, alignment):
    tensors = {'a': np.arange(5, dtype=np.float32), 'b': np.arange(6, dtype=np.float16).reshape(2, 3), 'c': ('Q8_0', (1, 32), bytes(34))}
    write_gguf(tmp_path/'v.gguf', {'general.alignment': alignment}, tensors, version=version)
    with open_gguf(tmp_path/'v.gguf') as checkpoint:
        assert (checkpoint.version, checkpoint.alignment) == (version, alignment)
        assert np.array_equal(checkpoint.tensors['a'].dequantize(), tensors['a']) and np.array_equal(checkpoint.tensors['b'].dequantize(), tensors['b']) and not checkpoint.tensors['c'].dequantize().any()
        for t in checkpoint.tensors.values(): checkpoint.release(t)


def test_vocabulary_of_250_000(tmp_path):
    tokens = [f'Ġtoken{i}' for i in range(250_000)]
    write_gguf(tmp_path/'v.gguf', {'tokenizer.ggml.tokens': tokens, 'tokenizer.ggml.merges': [f'{i} {i}' for i in range(250_000)], 'tokenizer.ggml.token_type': np.ones(250_000, np.int32)}, {})
    with open_gguf(tmp_path/'v.gguf') as checkpoint: assert checkpoint.metadata['tokenizer.ggml.tokens'] == tokens and checkpoint.metadata['tokenizer.ggml.merges'][-1] == '249999 249999'


def test_every_type_is_listed_and_measured(tmp_path):
    tensors = {f'{name}.weight': (quant, (2, 256), bytes(quant.nbytes(512))) for name, quant in QUANT_TYPES.items()}
    write_gguf(tmp_path/'t.gguf', {}, tensors)
    with open_gguf(tmp_path/'t.gguf') as checkpoint:
        text = describe(checkpoint)
        for name, t in checkpoint.tensors.items():
            assert name in text and t.type.name in text
            try: assert t.dequantize().shape == (2, 256)
            except SparkinferError as e: assert t.type.name in str(e)
        assert checkpoint._repr_markdown_().count('| 512 |') == len(QUANT_TYPES)


def test_rows_of_a_tensor():
    values = np.random.default_rng(1).normal(size=(7, 2, 64)).astype(np.float32)
    tensor = Tensor('e', values.shape, QUANT_TYPES['Q4_1'], QUANT_TYPES['Q4_1'].encode(values.reshape(-1, 32)).ravel())
    whole = tensor.dequantize()
    for rows in (0, -1, slice(2, 6, 3), [3, 3, 0], np.array([[1, 2], [6, 5]]), np.zeros(0, int)): assert np.array_equal(tensor.dequantize(rows), whole[rows])


# ---- split files

def split(folder, parts, **marks):
    for i, names in enumerate(parts):
        metadata = {'general.name': 'big', 'general.architecture': 'llama'} if i == 0 else {}
        metadata |= {'split.no': np.uint16(i), 'split.count': np.uint16(len(parts)), 'split.tensors.count': np.int32(sum(map(len, parts)))} | marks
        write_gguf(folder/f'big-{i + 1:05d}-of-{len(parts):05d}.gguf', metadata, {n: np.full((2, 3), ord(n), np.float32) for n in names}, overwrite=True)
    return [folder/f'big-{i + 1:05d}-of-{len(parts):05d}.gguf' for i in range(len(parts))]


def test_split_opens_from_any_part(tmp_path):
    for path in split(tmp_path, ['', 'ab', 'c']):
        with open_gguf(path) as checkpoint:
            assert list(checkpoint.tensors) == list('abc') and checkpoint.metadata == {'general.name': 'big', 'general.architecture': 'llama'} and checkpoint.path == path
            assert all((t.dequantize() == ord(n)).all() for n, t in checkpoint.tensors.items())
            assert 'part 3: big-00003-of-00003.gguf' in describe(checkpoint) and '3 parts' in repr(checkpoint)


def test_split_through_links(tmp_path):
    "A Hugging Face cache holds links under the real names to files named by their hash"
    (tmp_path/'blobs').mkdir(); (tmp_path/'snapshot').mkdir()
    for i, path in enumerate(split(tmp_path/'blobs', ['a', 'b'])):
        path.rename(tmp_path/'blobs'/f'hash{i}')
        (tmp_path/'snapshot'/path.name).symlink_to(tmp_path/'blobs'/f'hash{i}')
    with open_gguf(tmp_path/'snapshot'/'big-00002-of-00002.gguf') as checkpoint: assert list(checkpoint.tensors) == ['a', 'b']


@pytest.mark.parametrize('fault, words', [
    (lambda p: p[1].unlink(), 'big-00002-of-00003.gguf: part 2 of 3 is missing'),
    (lambda p: p[2].write_bytes(p[1].read_bytes()), "big-00003-of-00003.gguf: should be part 2 of 3"),
    (lambda p: p[1].write_bytes(p[1].read_bytes()[:-40]), "big-00002-of-00003.gguf: tensor 'b'"),
    (lambda p: p[2].write_bytes(b''), 'big-00003-of-00003.gguf: is empty')])
def test_split_faults_name_the_part(tmp_path, fault, words):
    paths = split(tmp_path, ['a', 'b', 'c'])
    fault(paths)
    with pytest.raises(FormatError) as error: open_gguf(paths[0])
    assert words in str(error.value)


def test_split_promises_are_held(tmp_path):
    with pytest.raises(FormatError, match="tensor 'a' occurs in another part"): open_gguf(split(tmp_path, ['a', 'a'])[0])
    paths = split(tmp_path, ['a', 'b'], **{'split.tensors.count': np.int32(5)})
    with pytest.raises(FormatError, match='promises 5 tensors, the parts hold 2'): open_gguf(paths[1])
    renamed = paths[0].rename(tmp_path/'model.gguf')
    with pytest.raises(FormatError, match='-00001-of-00002.gguf'): open_gguf(renamed)
    write_gguf(tmp_path/'one.gguf', {'split.count': 'three'}, {})
    with pytest.raises(FormatError, match="'split.count' is of type string"): open_gguf(tmp_path/'one.gguf')


# ---- what is not a model file

def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(ModelNotFound, match='no such file'): open_gguf(tmp_path/'nowhere.gguf')
    with pytest.raises(FormatError, match='is a directory'): open_gguf(tmp_path)
    if hasattr(os, 'mkfifo'):
        os.mkfifo(tmp_path/'pipe')
        with pytest.raises(FormatError, match='not an ordinary file'): open_gguf(tmp_path/'pipe')


def test_writer_never_leaves_half_a_file(tmp_path):
    with pytest.raises(FormatError): write_gguf(tmp_path/'a.gguf', {}, {'w': ('Q4_1', (1, 32), bytes(19))})
    write_gguf(tmp_path/'a.gguf', {}, {'w': np.ones((1, 4), np.float32)})
    with pytest.raises(FileExistsError): write_gguf(tmp_path/'a.gguf', {}, {})
    with open_gguf(tmp_path/'a.gguf') as mapped:            # replacing a file that is mapped leaves the old bytes to those who hold it
        write_gguf(tmp_path/'a.gguf', {}, {'w': np.zeros((1, 4), np.float32)}, overwrite=True)
        assert (mapped.tensors['w'].dequantize() == 1).all()
    assert [p.name for p in tmp_path.iterdir()] == ['a.gguf']


def test_closing_leaves_views_alive(tmp_path):
    write_gguf(tmp_path/'a.gguf', {}, {'w': np.arange(4000, dtype=np.float32)})
    checkpoint = open_gguf(tmp_path/'a.gguf')
    view = checkpoint.tensors['w'].data
    assert not view.flags.writeable
    checkpoint.release('w'); checkpoint.close(); checkpoint.close(); checkpoint.release()
    assert checkpoint.closed and np.array_equal(view.view(np.float32), np.arange(4000))
