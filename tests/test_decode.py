"Any bytes, any number of blocks, any place in memory: the decoders against `gguf.quants`, and the door in front of the kernels"
import warnings
import gguf, numpy as np, pytest
from hypothesis import given, settings, strategies as st
from sparkinfer.errors import FormatError, UnsupportedError
from sparkinfer.formats.blocks import QUANT_TYPES, coder, quant_type, random_blocks
from sparkinfer.formats.fast_decode import KERNELS, decode_into, spec_into
from sparkinfer.formats.gguf import FEW, Tensor

UNKNOWN_TO_GGUF = {'Q1_0', 'Q2_0'}           # fast_decode's notebook compares these with llama.cpp's C
READABLE = sorted(name for name in QUANT_TYPES if coder('decode', name))

def reference(name, blocks):
    with warnings.catch_warnings(), np.errstate(all='ignore'):
        warnings.simplefilter('ignore')
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype(np.float32).reshape(len(blocks), -1)

def test_every_stored_type_has_a_decoder():
    assert set(QUANT_TYPES) - set(READABLE) == {'Q8_1', 'Q8_K', 'I8', 'I16', 'I32', 'I64', 'F64'}
    assert set(KERNELS) == set(READABLE) - {'F32'}

@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(READABLE), count=st.integers(1, 9), offset=st.integers(0, 7), seed=st.integers(0, 2**32 - 1), wild=st.booleans())
def test_spec_and_kernel_equal_the_reference(name, count, offset, seed, wild):
    quant = quant_type(name)
    memory = np.random.default_rng(seed).integers(0, 256, offset + count * quant.block_bytes, np.uint8)
    data = memory[offset:]
    if not wild: data[:] = random_blocks(name, count, seed).ravel()
    data.flags.writeable = seed % 2 == 0
    blocks = data.reshape(count, -1)
    with np.errstate(all='ignore'): spec = quant.decode(blocks)
    kernel = decode_into(name, data, np.empty(spec.shape, np.float32))
    assert np.array_equal(kernel, spec, equal_nan=True)
    if name not in UNKNOWN_TO_GGUF: assert np.array_equal(spec, reference(name, blocks), equal_nan=True)
    if not wild: assert np.isfinite(spec).all() and np.array_equal(kernel.view(np.uint32), spec.view(np.uint32))
    if not wild and name not in UNKNOWN_TO_GGUF: assert np.array_equal(spec.view(np.uint32), reference(name, blocks).view(np.uint32))

@pytest.mark.parametrize('name', ['Q4_K', 'Q8_0', 'NVFP4', 'IQ2_S', 'F16'])
def test_tensor_takes_the_same_values_from_both_roads(name):
    quant = quant_type(name)
    for weights in (FEW, FEW - 256):           # the first by kernel, the second by spec
        tensor = Tensor('w', (weights // 256, 256), quant, random_blocks(name, weights // quant.block_size).ravel())
        assert np.array_equal(tensor.dequantize(), tensor.dequantize(spec=True))
        assert np.array_equal(tensor.dequantize(np.array([7, 2])), tensor.dequantize()[[7, 2]])

@pytest.mark.parametrize('into', [decode_into, spec_into])
def test_sizes_that_do_not_fit_are_refused(into):
    blocks = random_blocks('Q6_K', 2)
    with pytest.raises(FormatError, match='not a whole number of Q6_K blocks'): into('Q6_K', blocks.ravel()[:-1], np.empty(512, np.float32))
    with pytest.raises(ValueError, match='512 weights, the result has room for 511'): into('Q6_K', blocks, np.empty(511, np.float32))
    with pytest.raises(ValueError, match='contiguous'): into('Q6_K', blocks, np.empty((512, 2), np.float32)[:, 0])
    frozen = np.empty(512, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match='writable'): into('Q6_K', blocks, frozen)
    with pytest.raises(UnsupportedError, match='Q8_1'): into('Q8_1', np.zeros(36, np.uint8), np.empty(32, np.float32))
    with pytest.raises(UnsupportedError, match='unknown'): into('Q7_7', blocks, np.empty(512, np.float32))
