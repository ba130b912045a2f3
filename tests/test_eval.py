"""`sparkinfer eval`: files and folders, any cut, other engines as reference, and an exit code that says no."""
import errno, importlib.util, json, os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sparkinfer.cli import cli
from sparkinfer.measure.accuracy import llama_cpp_logits, transformers_logits
from sparkinfer.models.convert import convert
from sparkinfer.models.synthetic import synth

TINY = Path(__file__).resolve().parent.parent/'data'/'reference'/'tiny'
needs = lambda package: pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f'{package} comes with the parity extra')

@pytest.fixture(scope='module')
def models(tmp_path_factory):
    "One hybrid of noise: in the usual mix of types, and in float32 as a file and as a folder"
    folder = tmp_path_factory.mktemp('eval')
    synth('tiny-qwen35moe', folder/'mix.gguf'), synth('tiny-qwen35moe', folder/'exact.gguf', to='F32'), synth('tiny-qwen35moe', folder/'folder', 'safetensors', to='F32')
    return folder

def run(*arguments):
    result = CliRunner().invoke(cli, ['eval', *map(str, arguments)])
    return result.exit_code, result.output

def figures(output): return json.loads(output.strip().splitlines()[-1])['results'][0]

def worst(a, b): return float((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max())

def test_logits_of_folder_and_file_in_any_chunks(models, tmp_path):
    "Guards against rows that depend on the cut, and against folders that only some of the commands open"
    ids, found = np.random.default_rng(0).integers(0, 1000, 70).tolist(), []
    (tmp_path/'ids.json').write_text(json.dumps(ids))
    for name, runner, chunk in [('exact.gguf', 'spec', 128), ('exact.gguf', 'spec', 1), ('exact.gguf', 'spec', 7), ('folder', 'spec', 64), ('folder', 'cpu32', 33), ('exact.gguf', 'cpu32', 1)]:
        code, output = run('logits', models/name, '--ids', tmp_path/'ids.json', '--out', tmp_path/'x.npy', '--runner', runner, '--chunk', chunk)
        assert code == 0 and json.loads(output.splitlines()[-1])['shape'] == [70, 1024], output
        found.append(np.load(tmp_path/'x.npy'))
    assert found[0].dtype == np.float32 and max(worst(other, found[0]) for other in found[1:]) < 1e-4

def test_a_bar_that_is_missed_is_an_exit_code(models):
    code, output = run('kl', models/'mix.gguf', '--against', models/'folder', '--runner', 'spec', '--tokens', 60, '--max-kl', 1e-6, '--min-top1', 1)
    told = figures(output)
    assert code == 1 and output.count('FAILED') == 2 and told['mean_kl'] > 1e-6 and told['top1_agreement'] < 1
    code, output = run('kl', models/'exact.gguf', '--against', models/'folder', '--runner', 'spec', '--tokens', 60, '--max-kl', 1e-6, '--min-top1', 1)
    told = figures(output)
    assert code == 0 and told['p99_kl'] < 1e-6 and abs(told['perplexity'] / told['reference_perplexity'] - 1) < 1e-4 and 'worst positions' in output

def test_logits_are_written_whole_or_not_at_all(models, tmp_path, monkeypatch):
    "Guards against a model that is overwritten by its own logits, half a file after a full disk, and ids that only look like numbers"
    ids, out, before = tmp_path/'ids.json', tmp_path/'x.npy', (models/'mix.gguf').read_bytes()
    ids.write_text('[1, 2, 3]')
    code, output = run('logits', models/'mix.gguf', '--ids', ids, '--out', models/'mix.gguf', '--runner', 'spec')
    assert code == 1 and 'is there already' in output and (models/'mix.gguf').read_bytes() == before
    with monkeypatch.context() as patched:
        def full(*_): raise OSError(errno.ENOSPC, 'No space left on device')
        patched.setattr(np.lib.format, 'write_array_header_1_0', full)
        code, output = run('logits', models/'mix.gguf', '--ids', ids, '--out', out, '--runner', 'spec')
        assert code == 1 and 'cannot be written' in output and [p.name for p in tmp_path.iterdir()] == ['ids.json'], output
    mine, aside = tmp_path/'x.npy.part', tmp_path/'aside'
    aside.write_text('precious')
    mine.symlink_to(aside)
    if hasattr(os, 'mkfifo'):
        os.mkfifo(tmp_path/'pipe')
        code, output = run('logits', models/'mix.gguf', '--ids', ids, '--out', tmp_path/'pipe', '--runner', 'spec')
        assert code == 1 and 'is no file' in output, output
    assert run('logits', models/'mix.gguf', '--ids', ids, '--out', out, '--runner', 'spec')[0] == 0 and np.load(out).shape == (3, 1024)
    assert run('logits', models/'mix.gguf', '--ids', ids, '--out', out, '--runner', 'spec')[0] == 0                # logits may replace logits
    assert aside.read_text() == 'precious' and mine.is_symlink() and not out.is_symlink()
    for wrong, says in ((b'[true]', 'list of token ids'), (b'[\xff]', 'list of token ids'), (b'{}', 'list of token ids')):
        ids.write_bytes(wrong)
        code, output = run('logits', models/'mix.gguf', '--ids', ids, '--out', out)
        assert code == 1 and says in output, output
    code, output = run('kl', models/'mix.gguf', '--max-kl', 'nan')
    assert code == 2 and 'a number is needed' in output

def test_what_cannot_be_compared_is_said(models, tmp_path):
    for name in ('config.json', 'model.safetensors'): (tmp_path/name).write_bytes((TINY/'qwen3'/name).read_bytes())
    for arguments, words in [((models/'mix.gguf', '--against', 'smollm2'), 'different tokenizers'), ((tmp_path,), 'tokenizer.json'), ((models/'mix.gguf', '--runner', 'abacus'), 'abacus'), ((models/'mix.gguf', '--against', models/'none.npy'), 'none.npy')]:
        result = CliRunner().invoke(cli, ['eval', 'kl', *map(str, arguments), '--tokens', '20'])
        assert result.exit_code and words in f'{result.output} {result.exception}', result.output

@needs('xllamacpp')
@pytest.mark.parametrize('name', ['mix.gguf', 'folder'])
def test_against_llama_cpp(models, name):
    code, output = run('kl', models/name, '--against', 'llama.cpp', '--runner', 'spec', '--tokens', 100)
    assert code == 0 and figures(output)['against'] == 'llama.cpp' and figures(output)['mean_kl'] < .2, output

@needs('transformers')
@pytest.mark.parametrize('name', ['exact.gguf', 'mix.gguf', 'folder'])
def test_against_transformers(models, name):
    code, output = run('kl', models/name, '--against', 'hf', '--runner', 'spec', '--tokens', 100, '--max-kl', 1e-7)
    assert code == 0 and figures(output)['max_relative_error'] < 1e-4, output

@needs('transformers')
@pytest.mark.parametrize('name', ['llama', 'qwen3', 'qwen3_moe', 'qwen3_next', 'qwen3_5-r1', 'qwen3_5-r2', 'qwen3_5-r3', 'qwen3_5_moe'])
def test_transformers_loads_the_references(name):
    "The checkpoints as files, where the record came from models in memory. Guards against names or shapes that only we would read"
    record = np.load(TINY/name/'logits.npz')
    rows = np.concatenate(list(transformers_logits(TINY/name, record['ids'][:75], dtype='float64')))
    assert worst(rows[-12:], record['prompt_75'][-12:]) < 2e-5
