"""What a determined user found: each fault as a small test. Long text is refused before it is tokenized, a forked child gets an error and not silence, and what a file says cannot
take the machine's memory or the terminal."""
import os, re, signal, subprocess, sys, time
import httpx, numpy as np, pytest
from sparkinfer import LLM
from sparkinfer.cli import OneLine
from sparkinfer.engine.request import EngineDefaults, SamplingParams
from sparkinfer.errors import FormatError, RequestError, SparkinferError, UnsupportedError
from sparkinfer.formats.gguf import write_gguf
from sparkinfer.llm import choose_context, open_model, runner_kind
from sparkinfer.serve.app import ServeSettings, bind

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
    assert side_bytes(config) >= each and context * (kv_bytes(config) + each) < available

def test_a_template_variable_may_have_any_name(llm):
    assert llm.engine.encode_chat([dict(role='user', content='Hi')], self=1) == llm.engine.encode_chat([dict(role='user', content='Hi')])

def test_a_stop_string_has_a_length():
    SamplingParams(stop='x' * 1000)
    with pytest.raises(RequestError, match='1,000'): SamplingParams(stop=['x' * 1001])

def test_an_error_cannot_steer_the_terminal(capsys):
    OneLine('tensor blk.0.\x1b]0;owned\x07 is odd: é 歪').show()
    said = capsys.readouterr().err
    assert '\x1b' not in said and '\x07' not in said and '\\x1b' in said and 'é 歪' in said

def test_an_empty_host_is_refused():
    with pytest.raises(SparkinferError, match='every network'): bind('', 0)

@pytest.mark.parametrize('bad', [dict(shutdown_seconds=float('nan')), dict(shutdown_seconds=float('inf')), dict(body_limit_mb=float('nan')), dict(keep_alive_seconds=-1), dict(max_choices=0)])
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(SparkinferError, match=next(iter(bad)).replace('_', '-')): ServeSettings(**bad)

def test_of_two_servers_that_start_at_once_one_is_told():
    first = bind('127.0.0.1', 0)
    try:
        with pytest.raises(SparkinferError, match='taken'): bind('127.0.0.1', first.getsockname()[1])
    finally: first.close()

@pytest.mark.parametrize('args', [['run', '--raw'], ['run', '-'], ['chat', '-q', '--context', '64']])
def test_a_closed_stdin_is_no_traceback(args):
    done = subprocess.run(['sh', '-c', 'exec "$@" <&-', 'sh', sys.executable, '-m', 'sparkinfer', *args], capture_output=True, text=True, timeout=200)
    assert 'Traceback' not in done.stderr and done.returncode in (0, 2), done.stderr

@pytest.mark.parametrize('key, value', [('general.sampling.temp', 'hot'), ('general.sampling.temp', 99.0), ('general.sampling.top_k', -5)])
def test_sampling_of_a_file_names_its_key(key, value):
    with pytest.raises(FormatError, match=key): EngineDefaults.from_metadata({key: value})

def tiny(path, rows, tokens=300, kind='F32'):
    "A llama of one layer: `rows` of embedding, a vocabulary of `tokens`, query weights of type `kind`"
    from sparkinfer.formats.blocks import quant_type
    metadata = {'general.architecture': 'llama', 'llama.block_count': 1, 'llama.embedding_length': 32, 'llama.feed_forward_length': 32, 'llama.attention.head_count': 2, 'llama.context_length': 64,
                'llama.attention.layer_norm_rms_epsilon': 1e-5, 'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': 'gpt-2', 'tokenizer.ggml.merges': ['a b'], 'tokenizer.ggml.eos_token_id': 0,
                'tokenizer.ggml.tokens': ['<s>', *sorted(bytes_to_chars().values()), 'ab', *(f'x{i}' for i in range(tokens - 258))]}
    shapes = {'token_embd.weight': (rows, 32), 'output_norm.weight': (32,), **{f'blk.0.{n}.weight': (32, 32) for n in ('attn_q', 'attn_k', 'attn_v', 'attn_output', 'ffn_gate', 'ffn_up', 'ffn_down')},
              **{f'blk.0.{n}.weight': (32,) for n in ('attn_norm', 'ffn_norm')}}
    tensors = {name: np.ones(shape, np.float32) * 0.01 for name, shape in shapes.items()}
    if kind != 'F32': tensors['blk.0.attn_q.weight'] = (quant_type(kind), (32, 32), np.zeros(32 * 32 * 4, np.uint8))
    write_gguf(path, metadata, tensors)
    return path

def bytes_to_chars():
    "The 256 characters that stand for bytes in a byte-level vocabulary"
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)}

def test_vocabulary_and_embedding_must_agree(tmp_path):
    open_model(str(tiny(tmp_path/'right.gguf', 300))).checkpoint.close()
    for rows in (100, 400):
        with pytest.raises(FormatError, match='300.*embedding'): open_model(str(tiny(tmp_path/f'{rows}.gguf', rows)))

def test_a_tensor_of_integers_is_named(tmp_path):
    with pytest.raises(UnsupportedError, match=r'blk\.0\.attn_q\.weight \(I32\)'): open_model(str(tiny(tmp_path/'odd.gguf', 300, kind='I32')))

def test_a_second_interrupt_ends_a_stream_with_an_error_event():
    "The client of an answer that is cut off hears of it, and the log holds no traceback"
    server = subprocess.Popen([sys.executable, '-u', '-m', 'sparkinfer', 'serve', '--port', '0', '--context', '4096'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        while not (url := re.search(r'http://127\.0\.0\.1:\d+', lines[-1] if lines else '')): lines.append(server.stdout.readline())
        with httpx.stream('POST', f'{url[0]}/v1/completions', json=dict(prompt='a', max_tokens=3500, stream=True, ignore_eos=True), timeout=100) as answer:
            parts = answer.iter_lines()
            next(parts)
            for _ in range(2):
                server.send_signal(signal.SIGINT)
                time.sleep(0.4)
            said = [line for line in parts if line]
        rest = server.stdout.read()
        assert server.wait(20) in (0, 130, -2) and 'Traceback' not in rest, rest
        assert 'server_shutting_down' in said[-2] and said[-1] == 'data: [DONE]', said[-3:]
    finally: server.kill()
