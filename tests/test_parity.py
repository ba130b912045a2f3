"""The forward pass against other people's: a record of transformers' logits (everyday), transformers and llama.cpp themselves (where the `parity` extra is installed).

Teacher-forced on the first 512 tokens of data/text/styles.txt, SmolLM2-135M-Instruct in Q4_1. `data/reference/smollm2-q4_1.npz` is remade by
`python -m sparkinfer.measure.accuracy record smollm2 data/reference/smollm2-q4_1`; what it holds stands in nbs/measure/01_accuracy.ipynb.
On a machine with a GPU: `SPARKINFER_TEST_DEVICE=cuda pytest tests/test_parity.py -k Cuda`.
"""
import importlib.util, json, os, subprocess, sys
from pathlib import Path

import numpy as np
import pytest

from sparkinfer.measure.accuracy import (compare_record, compare_sources, dequantised, llama_cpp_logits, logits_of, make_runner, open_model, stored_logits, text_ids,
                                             transformers_logits)
from sparkinfer.models.forward import Batch, SpecRunner
from sparkinfer.ops.sampling import log_softmax

REFERENCE = Path(__file__).resolve().parent.parent/'data'/'reference'/'smollm2-q4_1'
LIMIT = 1e-4                            # max over positions of ‖logits − ref‖₂ / ‖ref‖₂, for arithmetic in float32 on the same weights
needs = lambda package: pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f'{package} comes with the parity extra')

@pytest.fixture(scope='module')
def record(): return dict(np.load(f'{REFERENCE}.npz'))

@pytest.fixture(scope='module')
def recorded_results(): return {r['model']: r for r in json.loads(Path(f'{REFERENCE}.json').read_text())['results']}

@pytest.fixture(scope='module')
def model(): return open_model('smollm2')

@pytest.fixture(scope='module')
def spec(model): return SpecRunner().load(model[1], max_context=576)

@pytest.fixture(scope='module')
def spec_logits(spec, record, tmp_path_factory):
    "The spec's logits of the whole text, in a file: 100 MB that need not stay in memory"
    path = tmp_path_factory.mktemp('parity')/'spec.npy'
    np.save(path, np.concatenate(list(logits_of(spec, record['ids']))))
    return path

def worst_errors(record, blocks):
    columns = compare_record(record, blocks)
    assert columns['agrees'].all()
    return {name: float(columns[name].max()) for name in ('relative_error', 'top_error', 'log_sum_exp_error')}

def greedy_ids(runner, prompt, count):
    runner.reset(0)
    ids, start = list(map(int, prompt)), 0
    for _ in range(count):
        row = runner.collect(runner.submit(Batch.of(ids[start:], start=start))).logits[0]
        start = len(ids)
        ids.append(int(row.argmax()))
    return ids[len(prompt):]

def test_tokens_are_those_of_the_record(model, record):
    "A tokenizer that cuts the text differently would compare nothing with nothing"
    ids, _ = text_ids(model[2], tokens=512)
    assert ids.tolist() == record['ids'].tolist()

def test_spec_matches_transformers(record, spec_logits):
    errors = worst_errors(record, stored_logits(spec_logits, record['ids']))
    assert errors['relative_error'] <= LIMIT and errors['top_error'] <= LIMIT and errors['log_sum_exp_error'] <= 1e-3, errors

def test_greedy_golden(spec, record):
    "` 6, 7, 8, 9, 10, 11, 12,`: the best token is ahead by 1.9 at least, so no rounding can flip it"
    assert record['greedy_gap'] > 1.8 and record['greedy_ids'][:11].tolist() == [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41]
    assert greedy_ids(spec, record['prompt_ids'], len(record['greedy_ids'])) == record['greedy_ids'].tolist()

@pytest.fixture(scope='module')
def runner(model):
    runner = make_runner('cpu', model[1], 576)
    yield runner
    runner.close()

class TestCpuRunner:
    "The fast path on the file's own blocks, and with float32 weights"

    def test_with_float_weights_matches_transformers(self, model, record):
        "The kernels' arithmetic alone, without 8-bit activations or half-float memory"
        runner = make_runner('cpu32', model[1], 512)
        try: errors = worst_errors(record, logits_of(runner, record['ids']))
        finally: runner.close()
        assert errors['relative_error'] <= LIMIT and errors['top_error'] <= LIMIT, errors

    def test_loses_no_more_than_llama_cpp(self, runner, record, recorded_results, spec_logits):
        "Both work with 8-bit activations and lose something; both are held against the same dequantised file"
        ids, peer = record['ids'], recorded_results['llama.cpp']
        ours = compare_sources(stored_logits(spec_logits, ids), logits_of(runner, ids), ids)
        assert ours.mean_kl <= 1.15 * peer['mean_kl'] and ours.top1 >= peer['top1_agreement'] - 0.01, (ours.record(), peer)

    def test_greedy_golden(self, runner, record):
        assert greedy_ids(runner, record['prompt_ids'], len(record['greedy_ids'])) == record['greedy_ids'].tolist()

@pytest.fixture(scope='module')
def on_gpu(model):
    from sparkinfer.cuda.graphs import use_card
    use_card(int(os.environ['SPARKINFER_TEST_DEVICE'].partition(':')[2] or 0))
    runner = make_runner('cuda', model[1], 576)
    yield runner
    runner.close()

@pytest.mark.skipif(not os.environ.get('SPARKINFER_TEST_DEVICE', '').startswith('cuda'), reason='needs a GPU, and SPARKINFER_TEST_DEVICE')
class TestCudaRunner:
    "The GPU's kernels on the file's own blocks, and with float32 weights"

    def test_with_float_weights_matches_transformers(self, on_gpu, model, record):
        "Keys and values are half floats there, so the bound is that of `models.cuda_check`"
        runner = make_runner('cuda', dequantised(model[1]), 512)
        try: errors = worst_errors(record, logits_of(runner, record['ids']))
        finally: runner.close()
        assert errors['relative_error'] <= 1e-2 and errors['top_error'] <= 1e-2, errors

    def test_loses_no_more_than_the_cpu(self, on_gpu, runner, record, spec_logits):
        ids = record['ids']
        gpu, cpu = (compare_sources(stored_logits(spec_logits, ids), logits_of(r, ids), ids) for r in (on_gpu, runner))
        print(f'mean KL {gpu.mean_kl:.3g}, of the CPU {cpu.mean_kl:.3g}; top-1 {gpu.top1:.4f} and {cpu.top1:.4f}')
        assert gpu.mean_kl <= 1.15 * cpu.mean_kl and gpu.top1 >= cpu.top1 - 0.01, (gpu.record(), cpu.record())

    def test_greedy_golden(self, on_gpu, record):
        assert greedy_ids(on_gpu, record['prompt_ids'], len(record['greedy_ids'])) == record['greedy_ids'].tolist()

@needs('torch')
@needs('transformers')
def test_transformers_still_says_so(model, record):
    "The record against a live run, in float32: guards against a record of something else"
    errors = worst_errors(record, transformers_logits(model[0], record['ids']))
    assert errors['relative_error'] <= 5e-5, errors

@needs('xllamacpp')
def test_llama_cpp_still_says_so(model, record, recorded_results, spec_logits):
    result = compare_sources(stored_logits(spec_logits, record['ids']), llama_cpp_logits(model[0], record['ids']), record['ids'])
    peer = recorded_results['llama.cpp']
    assert abs(result.mean_kl / peer['mean_kl'] - 1) < 0.25 and abs(result.top1 - peer['top1_agreement']) <= 0.01, (result.record(), peer)

PUBLIC_API = """
import json, sys, xllamacpp
path, ids = sys.argv[1], json.loads(sys.argv[2])
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.cpuparams.n_threads = path, 256, 1, 2
answer = xllamacpp.Server(p).handle_completions(dict(prompt=ids, n_predict=1, n_probs=200, temperature=0, samplers=["temperature"], cache_prompt=False))
print("ANSWER" + json.dumps([[t["id"], t["logprob"]] for t in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]))
"""

@needs('xllamacpp')
def test_llama_cpp_through_its_c_api_equals_its_public_api(model, record):
    "We pass C structs by hand; another layout would give a wrong model silently"
    ids = record['ids'][:40].tolist()
    out = subprocess.run([sys.executable, '-c', PUBLIC_API, str(model[0]), json.dumps(ids)], capture_output=True, text=True, check=True).stdout
    public = json.loads(next(line for line in out.splitlines() if line.startswith('ANSWER'))[6:])
    *_, block = llama_cpp_logits(model[0], ids, chunk=1)
    logprobs = log_softmax(block)[0]
    assert len(public) == 200 and max(abs(logprobs[i] - p) for i, p in public) < 0.05
