"""Record the errors of llama.cpp's quantiser on real weights: data/reference/llama-cpp-quantize.json.

    python tools/llama_cpp_quantize.py data/reference/llama-cpp-quantize.json

The library comes from `llama-cpp-python` if it is installed, else from `xllamacpp`. No importance matrix, as in a plain `llama-quantize`. nbs/formats/04_quantize.ipynb reads the record."""
import ctypes as c, importlib.metadata, importlib.util, json, sys
from pathlib import Path
import numpy as np
from sparkinfer.formats.blocks import quant_type
from sparkinfer.formats.gguf import open_gguf
from sparkinfer.formats.quantize import K_LAYOUTS, SIMPLE_CODES, sample_weights
from sparkinfer.model_store import resolve

LIBRARIES = (('llama_cpp', 'llama-cpp-python', 'lib/libggml-base.so*'), ('xllamacpp', 'xllamacpp', 'xllamacpp*.so'))

def library():
    "(handle, 'package version') of the first installed package that carries ggml"
    for module, package, pattern in LIBRARIES:
        spec = importlib.util.find_spec(module)
        for path in sorted(Path(spec.submodule_search_locations[0]).glob(pattern)) if spec else ():
            return c.CDLL(str(path)), f'{package} {importlib.metadata.version(package)}'
    raise SystemExit('neither llama-cpp-python nor xllamacpp is installed')

def llama_cpp_quantize(values, name):
    "llama.cpp's quantiser on values (rows, columns) float32 → uint8 (blocks, block_bytes)"
    ggml, quant, values = library()[0], quant_type(name), np.ascontiguousarray(values, np.float32)
    ggml.ggml_quantize_chunk.restype, ggml.ggml_quantize_chunk.argtypes = c.c_size_t, [c.c_int, c.c_void_p, c.c_void_p, c.c_int64, c.c_int64, c.c_int64, c.c_void_p]
    out = np.zeros((values.size // quant.block_size, quant.block_bytes), np.uint8)
    ggml.ggml_quantize_init(quant.id)
    assert ggml.ggml_quantize_chunk(quant.id, values.ctypes.data, out.ctypes.data, 0, *values.shape, None) == out.nbytes
    return out

def main(out):
    samples, errors = sample_weights(open_gguf(resolve('smollm2'))), {}
    for sample, x in samples.items():
        back = {name: quant_type(name).decode(llama_cpp_quantize(x, name)).reshape(x.shape) for name in [*K_LAYOUTS, *SIMPLE_CODES]}
        errors[sample] = {name: float(np.sqrt(np.mean((y - np.float64(x)) ** 2) / np.mean(np.float64(x) ** 2))) for name, y in back.items()}
    record = dict(about='root mean square error of llama.cpp\'s quantiser over that of the weights', model='SmolLM2-135M-Instruct Q4_1, two samples of 2**20 weights, see formats.quantize.sample_weights',
                  command='python tools/llama_cpp_quantize.py data/reference/llama-cpp-quantize.json', library=library()[1], relative_error=errors)
    Path(out).write_text(json.dumps(record, indent=1) + '\n')

if __name__ == '__main__': main(sys.argv[1])
