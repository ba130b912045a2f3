"The bench under load against servers whose delays are known: its accounting, and what it does when a client or a server dies"
import json, os, re, signal, socket, socketserver, subprocess, sys, threading, time
from contextlib import contextmanager
import pytest
from sparkinfer.engine.engine import Engine
from sparkinfer.errors import SparkinferError
from sparkinfer.measure.serving import CLIENT, Answer, Child, Contender, Load, answer_lines, client_round, completion_body, engine_round, percentiles, prefix_turns, summary
from sparkinfer.serve.app import ServeSettings, background_server
from support import ScriptedRunner, TinyTokenizer, saying, slowly

pytestmark = pytest.mark.skipif(sys.platform == 'win32', reason='signals of Unix')
HEAD = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n'
END = b'0\r\n\r\n'

def chunk(*events): return b''.join(b'%x\r\n%s\r\n' % (len(e), e) for e in events)
def text(piece): return b'data: ' + json.dumps(dict(choices=[dict(text=piece)])).encode() + b'\n\n'
def usage(tokens): return b'data: ' + json.dumps(dict(choices=[], usage=dict(completion_tokens=tokens, prompt_tokens=3))).encode() + b'\n\ndata: [DONE]\n\n'

@contextmanager
def scripted(script):
    "A server: `script(body)` yields seconds to sleep and bytes to send"
    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            length = 0
            while line := self.rfile.readline().strip():
                if line.lower().startswith(b'content-length:'): length = int(line.split(b':')[1])
            for what in script(json.loads(self.rfile.read(length))):
                if isinstance(what, bytes): self.wfile.write(what)
                else: time.sleep(what)
    class Server(socketserver.ThreadingTCPServer): daemon_threads, block_on_close, request_queue_size = True, False, 64
    with Server(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True).start()
        yield f'http://127.0.0.1:{server.server_address[1]}'
        server.shutdown()

def speaking(first, gap, tokens, said=None):
    "A script: a token after `first` seconds, then one each `gap`"
    def script(body):
        yield HEAD
        for k in range(tokens):
            yield gap if k else first
            yield chunk(text('x'))
        yield chunk(usage(tokens if said is None else said)) + END
    return script

# ---- accounting

def test_waiting_times_are_the_servers():
    "A delay may be longer on a busy machine, never shorter"
    with scripted(speaking(0.08, 0.02, 6)) as url: seen = client_round(url, [completion_body([1, 2, 3], 6) for _ in range(8)])
    answers = [Answer(**a) for a in seen['answers']]
    assert all(a.first >= 0.08 and a.tokens == 6 and a.prompt_tokens == 3 and len(a.gaps) == 5 and sum(a.gaps) >= 0.095 for a in answers)
    assert 0.18 <= seen['wall'] < 8 * 0.18, 'eight requests at once take as long as one'
    assert percentiles([a.first for a in answers])['p50'] >= 80

def test_each_answer_has_its_own_clock():
    "Requests that are served one after the other wait longer and longer; the figures must say so"
    turn = threading.Lock()
    def script(body):
        with turn: yield from speaking(0.05, 0.01, 2)(body)
    with scripted(script) as url: seen = client_round(url, [completion_body([i], 2) for i in range(4)])
    first = sorted(a['arrivals'][0] for a in seen['answers'])
    assert all(t >= 0.05 + 0.06 * k for k, t in enumerate(first)) and seen['wall'] >= first[-1]

def test_the_client_uses_little_processor_time():
    with scripted(speaking(0.1, 0.01, 32)) as url: seen = client_round(url, [completion_body([i] * 512, 32) for i in range(16)])
    assert seen['cpu'] < 0.25 * seen['wall']

@contextmanager
def contender(url, client=None):
    "A Contender whose server child only says where the scripted server is"
    code = f'from sparkinfer.measure.serving import answer_lines, own_stdout; answer_lines(own_stdout(), lambda **_: dict(step_seconds=1, runner_seconds=1), url={url!r})'
    with closing_child('the client', CLIENT) as client:
        client.reply()
        made = Contender('sparkinfer', code, client)
        try: yield made
        finally: made.close()

@contextmanager
def closing_child(*args, **kwargs):
    child = Child(*args, **kwargs)
    try: yield child
    finally: child.close()

def test_rates_follow_from_the_wall():
    load = Load(16, 5, 3)
    with scripted(speaking(0.05, 0.02, 5)) as url, contender(url) as server:
        walls = [server.turn(load, 1000) for _ in range(2)]
        assert server.seed == 2
    line = summary(server, load)
    assert line['seconds'] == [round(w, 4) for w in walls] and min(walls) >= 0.13
    assert line['tok_s'] == pytest.approx(15 / (sum(walls) / 2), rel=1e-3) and line['total_tok_s'] == pytest.approx(63 / (sum(walls) / 2), rel=1e-3)
    assert line['pieces'] == 15 and line['itl_ms']['p50'] >= 15 and 'engine_share' not in line and (sys.platform != 'linux' or line['peak_mb'] > 10)

def test_a_short_answer_is_refused():
    "An answer that ended early would look like a fast one"
    with scripted(speaking(0, 0, 3, said=2)) as url, contender(url) as server:
        with pytest.raises(SparkinferError, match='wrote 2 tokens where 3'): server.turn(Load(4, 3, 1), 1000)

def test_a_prefix_is_cold_once_and_warm_once():
    seen = set()
    def script(body):
        key = tuple(body['prompt'][:50])
        yield from speaking(0.01 if key in seen else 0.2, 0, 2)(body)
        seen.add(key)
    with scripted(script) as url, contender(url) as server: line = prefix_turns(server, 50, 1000, 3, tokens=2)
    assert len(seen) == 3 and line['cold_ms']['p50'] >= 200 and 10 <= line['warm_ms']['p50'] < 200 and line['times_faster'] > 1

# ---- our own engine and server, with a model whose step takes a known time

@pytest.fixture
def tokenizer(): return TinyTokenizer()

def test_engine_and_http_see_the_same_steps(tokenizer):
    "Both ways to ask must see the time that a step takes; HTTP only adds to it"
    def engine(report=None): return Engine(ScriptedRunner(saying(tokenizer, 'a' * 100), tokenizer, gate=slowly(0.01)), tokenizer)
    prompts = [[97 + k] * 8 for k in range(3)]
    with engine() as direct: seen = engine_round(direct, prompts, 6)
    with background_server(engine, ServeSettings(port=0, shutdown_seconds=0)) as state: heard = client_round(state.url, [completion_body(ids, 6) for ids in prompts])
    for result in (seen, heard):
        assert result['wall'] >= 0.055
        for a in result['answers']: assert a['tokens'] == 6 and a['prompt_tokens'] == 8 and a['arrivals'][0] >= 0.01 and a['arrivals'][-1] >= 0.055

def test_an_engine_that_fails_is_not_an_answer(tokenizer):
    def broken(history): raise ValueError('no numbers')
    with Engine(ScriptedRunner(broken, tokenizer), tokenizer) as engine:
        with pytest.raises(Exception, match='no numbers'): engine_round(engine, [[97, 98]], 4)

# ---- what dies does not hang

def silence(body):
    yield HEAD
    yield 60.0

@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGTERM])
def test_a_client_that_dies_ends_the_bench(how):
    with scripted(silence) as url, closing_child('the client', CLIENT) as client:
        client.reply()
        threading.Timer(0.3, lambda: os.kill(client.child.pid, how)).start()
        began = time.monotonic()
        with pytest.raises(SparkinferError, match=f'the client ended with code -{how}'): client.ask(url=url, bodies=[completion_body([1], 1)])
        assert time.monotonic() - began < 20
        with pytest.raises(SparkinferError, match='ended'): client.ask(url=url, bodies=[])

def test_a_client_that_never_starts():
    with closing_child('the client', 'raise SystemExit("no such module")') as client:
        with pytest.raises(SparkinferError, match='code 1.*no such module'): client.reply()

def test_a_child_that_is_silent():
    with closing_child('the server', 'import time; time.sleep(60)', patience=0.3) as child:
        with pytest.raises(SparkinferError, match='said nothing for 0.3 s'): child.reply()
        child.child.kill()

def test_a_stopped_server_can_be_closed():
    "One that waits for its turn is stopped; closing must not wait for a process that cannot act"
    child = Child('the server', 'from sparkinfer.measure.serving import answer_lines, own_stdout; answer_lines(own_stdout(), lambda **_: {}, ready=1)')
    child.reply()
    child.pause()
    child.close()
    assert child.child.poll() == 0

def cut(body):
    yield HEAD
    yield chunk(text('a'))

def busy(body): yield b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 17\r\n\r\n{"error": "full"}'

def failing(body):
    yield HEAD
    yield chunk(text('a'), b'data: {"error": {"message": "no numbers"}}\n\n', b'data: [DONE]\n\n') + END

@pytest.mark.parametrize('script, says', [(cut, 'in the middle'), (busy, '503.*full'), (failing, 'no numbers'), (silence, 'heard nothing')], ids=['cut', 'busy', 'failing', 'silent'])
def test_a_server_that_fails_is_one_line(script, says):
    with scripted(script) as url:
        with pytest.raises(SparkinferError, match=says): client_round(url, [completion_body([1], 2)] * 2, patience=0.5)

def test_no_server():
    with socket.create_server(('127.0.0.1', 0)) as free: port = free.getsockname()[1]
    with pytest.raises(SparkinferError, match='connection'): client_round(f'http://127.0.0.1:{port}', [completion_body([1], 2)])

# ---- the command

def sparkinfer(*args): return subprocess.run([sys.executable, '-m', 'sparkinfer', *map(str, args)], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)

def test_help():
    done = sparkinfer('bench', 'serving', '--help')
    assert done.returncode == 0 and done.stdout.startswith('Usage: sparkinfer bench serving [OPTIONS] [MODEL]')
    for option in ('--prompts', '--tokens', '--requests', '--rounds', '--prefix', '--http', '--compare', '--save'): assert option in done.stdout
    assert 'serving' in sparkinfer('bench', '--help').stdout

@pytest.mark.parametrize('args, code, says', [(['--requests', '0'], 2, 'not a list'), (['--requests', ''], 2, 'empty'), (['--prompts', '12x'], 2, 'not a list'), (['--tokens', '1'], 2, 'range'), (['--rounds', '0'], 2, 'range'),
                                              (['--threads', '0'], 2, 'range'), (['--prefix', '-1'], 2, 'range'), (['--prompts', '9000'], 1, 'trained for 8,192'), (['--prefix', '8190'], 1, 'trained for 8,192'), (['nowhere.gguf'], 1, 'nowhere.gguf')])
def test_bad_settings_are_refused(args, code, says):
    done = sparkinfer('bench', 'serving', *args)
    assert done.returncode == code and done.stdout == '' and says in done.stderr and 'Traceback' not in done.stderr
    if code == 1: assert re.search(r'error: [^\n]*\n$', done.stderr)
