"""Record what llama.cpp's quantiser does: data/reference/llama-cpp-quantize.json.

    python tools/llama_cpp_quantize.py data/reference/llama-cpp-quantize.json

* `relative_error`: of each type on two samples of real weights, without an importance matrix, as in a plain `llama-quantize`
* `file`: SmolLM2 as Q4_K_M by its own quantiser (from float32), and how llama.cpp judges that file on data/text/styles.txt. Only where `llama-cpp-python` is installed; else the recorded part is kept.

The library comes from `llama-cpp-python` if it is installed, else from `xllamacpp`. nbs/formats/04_quantize.ipynb and nbs/models/06_convert.ipynb read the record."""
import ctypes as c, importlib.metadata, importlib.util, json, sys, tempfile
from pathlib import Path
import numpy as np
from sparkinfer.formats.blocks import quant_type
from sparkinfer.formats.gguf import open_gguf
from sparkinfer.formats.quantize import K_LAYOUTS, SIMPLE_CODES, sample_weights
from sparkinfer.measure.accuracy import compare_sources, llama_cpp_logits, text_ids
from sparkinfer.model_store import resolve
from sparkinfer.models.convert import convert

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

def relative_errors():
    errors = {}
    for sample, x in sample_weights(open_gguf(resolve('smollm2'))).items():
        back = {name: quant_type(name).decode(llama_cpp_quantize(x, name)).reshape(x.shape) for name in [*K_LAYOUTS, *SIMPLE_CODES]}
        errors[sample] = {name: float(np.sqrt(np.mean((y - np.float64(x)) ** 2) / np.mean(np.float64(x) ** 2))) for name, y in back.items()}
    return errors

def quantised_file(folder):
    "SmolLM2 in float32 through `llama_model_quantize`, held against the float32 file and against our own Q4_K_M"
    import llama_cpp
    plain, theirs, ours = folder/'f32.gguf', folder/'theirs.gguf', folder/'ours.gguf'
    convert('smollm2', plain, 'F32'), convert('smollm2', ours, 'Q4_K_M')
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = 15, 2
    assert llama_cpp.llama_model_quantize(str(plain).encode(), str(theirs).encode(), c.byref(params)) == 0
    a, b = open_gguf(theirs), open_gguf(ours)
    ids, _ = text_ids(a.metadata, tokens=512)
    reference = list(llama_cpp_logits(plain, ids))
    judged = {name: compare_sources(reference, llama_cpp_logits(path, ids), ids, name, 'float32, llama.cpp').record() for name, path in (('theirs', theirs), ('ours', ours))}
    return dict(text='data/text/styles.txt', positions=len(ids), perplexity=judged['theirs']['perplexity'], reference_perplexity=judged['theirs']['reference_perplexity'], mean_kl=judged['theirs']['mean_kl'],
                ours_then=dict(perplexity=judged['ours']['perplexity'], mean_kl=judged['ours']['mean_kl'], same_type=sum(t.type is b.tensors[n].type for n, t in a.tensors.items()), same_bytes=sum(np.array_equal(t.data, b.tensors[n].data) for n, t in a.tensors.items()), tensors=len(a.tensors)))

def main(out):
    before = json.loads(Path(out).read_text()) if Path(out).exists() else {}
    record = dict(about="llama.cpp's quantiser: root mean square error over that of the weights; and its Q4_K_M of SmolLM2 as llama.cpp judges it", model='SmolLM2-135M-Instruct Q4_1; samples: formats.quantize.sample_weights',
                  command='python tools/llama_cpp_quantize.py data/reference/llama-cpp-quantize.json', library=library()[1], relative_error=relative_errors())
    with tempfile.TemporaryDirectory() as folder: record['file'] = quantised_file(Path(folder)) if importlib.util.find_spec('llama_cpp') else before.get('file')
    Path(out).write_text(json.dumps(record, indent=1) + '\n')

if __name__ == '__main__': main(sys.argv[1])
