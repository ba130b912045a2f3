"""What a determined user found: each fault as a small test. Long text is refused before it is tokenized, a forked child gets an error and not silence, and what a file says cannot
take the machine's memory or the terminal."""
import os, time
import numpy as np, pytest
from sparkinfer import LLM
from sparkinfer.cli import OneLine
from sparkinfer.engine.request import SamplingParams
from sparkinfer.errors import RequestError, SparkinferError
from sparkinfer.llm import choose_context, open_model, runner_kind
from sparkinfer.serve.app import bind

@pytest.fixture(scope='module')
def llm():
    with LLM.load('smollm2', context=256, progress=False) as llm: yield llm

def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(llm):
    for send in (lambda: llm.generate('ab1 ' * 2_000_000, max_tokens=1), lambda: llm.chat('ab1 ' * 2_000_000, max_tokens=1)):
        start = time.process_time()
        with pytest.raises(RequestError) as refused: send()
        assert refused.value.code == 'context_length_exceeded' and '256' in str(refused.value)
        assert time.process_time() - start < 2, 'tokenizing 8 MB takes ten seconds and two gigabytes'

def test_spaces_are_not_refused_too_early(llm):
    "The vocabulary's longest token is a run of spaces: text of many bytes and few tokens must still be let through to be counted"
    assert len(llm.engine.encode_prompt(' ' * 1200)) < 256

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork here')
def test_a_forked_child_gets_an_error(llm):
    llm.generate('1, 2,', max_tokens=1)
    child = os.fork()
    if child == 0:
        try: llm.generate('1, 2,', max_tokens=1)
        except SparkinferError as error: os._exit(0 if 'forked' in str(error) else 2)
        except BaseException: os._exit(3)
        os._exit(4)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done: break
        time.sleep(0.05)
    else:
        os.kill(child, 9); os.waitpid(child, 0)
        pytest.fail('the child hangs')
    assert os.waitstatus_to_exitcode(status) == 0

def test_an_absurd_context_counts_all_its_buffers(llm):
    "Beside keys and values a position costs a row of the rotary table and a part of attention's partial answers"
    from sparkinfer.models.cpu_runner import CHUNK, buffer_sizes
    parts = open_model('smollm2')
    kind, config = runner_kind('cpu'), parts.config
    small, large = (sum(buffer_sizes(config, 4, chunks, 1).values()) for chunks in (100, 10_100))
    each = (large - small) / (10_000 * CHUNK)
    available = 1 << 30
    context = choose_context(parts.weights, kind, None, available)
    from sparkinfer.llm import kv_bytes, side_bytes
    assert side_bytes(config) >= each and context * (kv_bytes(config, 2) + each) < available

def test_a_stop_string_has_a_length():
    SamplingParams(stop='x' * 1000)
    with pytest.raises(RequestError, match='1,000'): SamplingParams(stop=['x' * 1001])

def test_an_error_cannot_steer_the_terminal(capsys):
    OneLine('tensor blk.0.\x1b]0;owned\x07 is odd: é 歪').show()
    said = capsys.readouterr().err
    assert '\x1b' not in said and '\x07' not in said and '\\x1b' in said and 'é 歪' in said

def test_an_empty_host_is_refused():
    with pytest.raises(SparkinferError, match='every network'): bind('', 0)
