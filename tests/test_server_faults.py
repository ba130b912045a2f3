"""Everything that a client can do wrong, against each POST route; after each, a good request must succeed and nothing may be left running."""
import asyncio, json, shlex, signal, socket, subprocess, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
import httpx, pytest
from sparkinfer.engine.scheduler import EngineLimits
from sparkinfer.engine.request import DeadlineExceeded, EngineBusy, FinishEvent, Request, SamplingParams, Usage
from sparkinfer.serve.app import ServeSettings, background_server
from sparkinfer.serve.running import Bell, RunningJob, log_unexpected
from test_server_openai import build, slowly

CHAT, TEXT = '/v1/chat/completions', '/v1/completions'
GOOD = {CHAT: dict(model='m', messages=[dict(role='user', content='greet')]), TEXT: dict(model='m', prompt='greet=')}
DEEP = b'[' * 10**6

RAW = {   # bodies that are not even a JSON object
    'empty': b'', 'open list': b'[', 'null': b'null', 'a string': b'"x"', 'a number': b'7', 'a list': b'[1, 2]', 'trailing comma': b'{"model": "m",}', 'single quotes': b"{'model': 'm'}", 'cut': b'{"model": "m", "messages": [{"role": "us',
    'two objects': b'{}{}', 'not UTF-8': b'{"model": "\xff\xfe"}', 'UTF-16': '{}'.encode('utf-16'), 'NaN': b'{"temperature": NaN}', 'deep lists': DEEP, 'deep closed': b'{"a": ' + b'[' * 10**5 + b']' * 10**5 + b'}', 'zero bytes': b'\0' * 1000,
    'huge number': b'{"seed": ' + b'9' * 10_000 + b'}', 'half a surrogate': b'{"model": "\\ud800"}', 'form': b'model=m&prompt=x',
}
FIELDS = [    # fields that are refused with 400 on both routes
    dict(model=123), dict(model=['m']), dict(max_tokens=0), dict(max_tokens=-1), dict(max_tokens='5'), dict(max_tokens=1.5), dict(max_tokens=True), dict(max_tokens=10**30), dict(max_completion_tokens=0), dict(temperature=-0.1), dict(temperature=2.1), dict(temperature='1'), dict(temperature=[]),
    dict(temperature=1e400), dict(temperature=10**400), dict(top_p=-0.1), dict(top_p=1.1), dict(top_p={}), dict(top_k=-2), dict(top_k=1.5), dict(min_p=-1), dict(min_p=2), dict(repetition_penalty=0), dict(repeat_penalty='x'), dict(presence_penalty=2.1), dict(frequency_penalty=-2.1),
    dict(seed='x'), dict(seed=1.5), dict(seed=2**64), dict(n=0), dict(n=-1), dict(n='2'), dict(n=10**9), dict(stop=''), dict(stop=5), dict(stop=['']), dict(stop=['a', None]), dict(stop=['a'] * 5), dict(stop={}), dict(stop_token_ids='x'), dict(stop_token_ids=[10**9]), dict(stop_token_ids=[-1]),
    dict(logit_bias=[]), dict(logit_bias='x'), dict(logit_bias={'x': 1}), dict(logit_bias={'-1': 1}), dict(logit_bias={'100000': 1}), dict(logit_bias={'1': 'x'}), dict(logit_bias={'1': 101}), dict(logit_bias={'1': None}), dict(stream='yes'), dict(stream=1), dict(stream_options={}), dict(stream=True, stream_options=[]),
    dict(stream=True, stream_options=dict(include_usage='x')), dict(tools=[dict(type='function', function=dict(name='f'))]), dict(tools='x'), dict(tools={'a': 1}), dict(tool_choice='required'), dict(tool_choice=dict(type='function', function=dict(name='f'))), dict(functions=[{}]),
    dict(response_format=dict(type='json_object')), dict(response_format=dict(type='json_schema')), dict(response_format='text'), dict(response_format=7), dict(grammar='root ::= "a"'), dict(guided_json={'a': 1}), dict(ignore_eos='x'),
]
BAD_CHAT = [dict(messages=m) for m in (None, 'x', {}, [], [None], ['x'], [123], [{}], [[]], [dict(role=123, content='x')], [dict(role='user', content=123)], [dict(role='user', content={})], [dict(role='user')], [dict(role='user', content=None)], [dict(role='user', content=[None])],
    [dict(role='user', content=[dict(type='text')])], [dict(role='user', content=[dict(type='text', text=5)])], [dict(role='user', content=[dict(type='image_url', image_url=dict(url='http://x/y.png'))])], [dict(role='user', content=[dict(type='input_audio', input_audio={})])], [dict(role='user', content=[dict(type={})])],
    [dict(role='wizard', content='x')], [dict(role='', content='x')], [dict(role='tool', content='x', tool_call_id='1')], [dict(role='assistant', tool_calls=[dict(id='1', type='function', function=dict(name='f', arguments='{}'))])], [dict(role='user', content='x' * 5000)])]
BAD_CHAT += [dict(logprobs='yes'), dict(logprobs=1), dict(top_logprobs=3), dict(logprobs=True, top_logprobs=21), dict(logprobs=True, top_logprobs=-1), dict(modalities=['audio']), dict(modalities='text'), dict(audio={'voice': 'x'}), dict(chat_template_kwargs=[]), dict(chat_template_kwargs={'messages': []}), dict(reasoning_effort=5)]
BAD_TEXT = [dict(prompt=p) for p in (None, {}, [], [[]], '', 5, True, [1, 'a'], ['a', 1], [1.5], [True], [-1], [10**9], [2**70], [['a']], [[1], []], [[1], 'a', {}], ['x'] * 65, 'x' * 5000, [5] * 5000, ['ok', 'x' * 5000])]
BAD_TEXT += [dict(suffix='x'), dict(suffix=5), dict(best_of=2), dict(best_of='x'), dict(logprobs=21), dict(logprobs=-1), dict(logprobs=True), dict(echo='x'), dict(echo=True, logprobs=1)]

@pytest.fixture(scope='module')
def server():
    with background_server(build, ServeSettings(port=0, body_limit_mb=2, shutdown_seconds=0.5)) as state: yield state

@pytest.fixture(scope='module')
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as c: yield c

def alive(http, route=CHAT):
    answer = http.post(route, json=GOOD[route])
    assert answer.status_code == 200, answer.text
    choice = answer.json()['choices'][0]
    assert (choice['message']['content'] if route == CHAT else choice['text']) == 'Hello there!'

def refused(answer, status=400):
    assert answer.status_code == status, (answer.status_code, answer.text[:300])
    assert answer.headers['content-type'] == 'application/json'
    error = answer.json()['error']
    assert {'message', 'type', 'param', 'code'} <= set(error) and isinstance(error['message'], str) and 5 < len(error['message']) < 1100
    assert 'Traceback' not in error['message'] and 'pydantic' not in error['message']
    return error

@pytest.mark.parametrize('route', [CHAT, TEXT])
@pytest.mark.parametrize('name', RAW)
def test_bodies_that_are_no_json_object(http, route, name):
    assert refused(http.post(route, content=RAW[name], headers={'Content-Type': 'application/json'}))['type'] == 'invalid_request_error'
    alive(http, route)

@pytest.mark.parametrize('route', [CHAT, TEXT])
def test_fields_of_the_wrong_type_or_range(http, route):
    for fields in FIELDS + (BAD_CHAT if route == CHAT else BAD_TEXT):
        for stream in ([{}] if 'stream' in fields or 'stream_options' in fields else [{}, dict(stream=True)]):
            body = json.dumps({**GOOD[route], **stream, **fields}).replace('Infinity', '1e400')
            try: error = refused(http.post(route, content=body))
            except AssertionError as e: raise AssertionError(f'{str(fields)[:200]}: {e}') from None
            assert error['param'] is not None or error['code'] is not None, (fields, error)
        alive(http, route)
    assert http.get('/health').json()['failed'] == 0

@pytest.mark.parametrize('route', [CHAT, TEXT])
def test_what_must_be_accepted(http, route):
    for fields in (dict(model=None), dict(temperature=None, top_p=None, stop=None, seed=None, n=None, max_tokens=None, logit_bias=None, stream=None, stream_options=None, tools=None, tool_choice=None, response_format=None, logprobs=None), dict(tools=[]), dict(tool_choice='auto'), dict(stop=[]), dict(logit_bias={}),
                   dict(response_format=dict(type='text')), dict(temperature=2, top_p=0, top_k=-1, min_p=1), dict(temperature=0), dict(user='u', metadata={}, store=False, a_field_of_2031={'x': [1]}, service_tier='auto', parallel_tool_calls=True), dict(seed=-1), dict(seed=2**63), dict(max_tokens=10**9)):
        answer = http.post(route, json={**GOOD[route], **fields})
        assert answer.status_code == 200, (fields, answer.text)
    missing = {k: v for k, v in GOOD[route].items() if k != 'model'}
    assert http.post(route, json=missing).json()['model'] == 'org/tiny'
    assert http.post(route, content=json.dumps(missing)).status_code == 200   # no content type, as from a hasty curl

def test_missing_fields(http):
    assert refused(http.post(CHAT, json=dict(model='m')))['param'] == 'messages'
    assert refused(http.post(TEXT, json=dict(model='m')))['param'] == 'prompt'

def test_unknown_paths_and_methods(http):
    for method, path, status in (('GET', '/v1', 404), ('POST', '/v1/nothing', 404), ('GET', CHAT, 405), ('DELETE', TEXT, 405), ('POST', '/v1/models', 405), ('OPTIONS', CHAT, 405), ('GET', '/v1/models/%E2%82', 404), ('GET', '/v1/models/' + 'x' * 5000, 404), ('GET', '/docs', 404)):
        refused(http.request(method, path, follow_redirects=True), status)
    schema = http.get('/openapi.json').json()['paths'][CHAT]['post']['requestBody']['content']['application/json']['schema']
    assert schema['properties']['messages']['items']['properties']['role'] and '$ref' not in str(schema)
    assert 'access-control-allow-origin' not in http.post(CHAT, json=GOOD[CHAT], headers={'Origin': 'http://evil.example'}).headers
    alive(http)

@pytest.mark.parametrize('size', [50_000, 1_000_000, 3_000_000, 20_000_000])
@pytest.mark.parametrize('route', [CHAT, TEXT])
def test_large_bodies(server, http, route, size):
    text = 'x' * size
    body = json.dumps(dict(messages=[dict(role='user', content=text)]) if route == CHAT else dict(prompt=text)).encode()
    try: error = refused(http.post(route, content=body), 413 if size > 2_000_000 else 400)
    except httpx.TransportError: assert size > 8_000_000   # refused by its declared length; the client was still sending
    else: assert error['code'] == ('body_too_large' if size > 2_000_000 else 'context_length_exceeded')
    def parts():
        for k in range(0, len(body), 100_000): yield body[k:k + 100_000]
    try: refused(http.post(route, content=parts()), 413 if size > 2_000_000 else 400)   # chunked, without a declared length
    except httpx.TransportError: assert size > 8_000_000
    alive(http, route)

def raw(server, data, wait=2.0, close=False):
    "What the server answers to these bytes on a socket; `close`: we hang up after sending"
    host, port = server.url.removeprefix('http://').split(':')
    with socket.create_connection((host, int(port)), timeout=wait) as s:
        s.sendall(data)
        if close: s.shutdown(socket.SHUT_WR)
        out = b''
        try:
            while part := s.recv(65536): out += part
        except TimeoutError: pass
        return out

def test_broken_http(server, http):
    body = json.dumps(GOOD[CHAT]).encode()
    head = lambda length, extra='': f'POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{extra}\r\n'.encode()
    assert b' 400 ' in raw(server, head(len(body) - 10) + body, wait=0.5)           # declared too short: cut JSON
    raw(server, head(len(body) + 10) + body, wait=0.3, close=True)                            # too long: the client hangs up while we wait
    assert b' 400 ' in raw(server, head('x') + body) and b' 400 ' in raw(server, head(-5) + body)
    assert b' 400 ' in raw(server, b'NONSENSE\r\n\r\n')
    assert b' 413 ' in raw(server, head(10**12), wait=2.0)
    raw(server, b'', close=True)
    raw(server, head(10)[:20], close=True)
    assert b' 200 ' in raw(server, head(len(body), 'Connection: close\r\n') + body)
    alive(http)

def test_client_leaves_at_every_moment(server, http):
    "While sending, before the answer, during the stream: nothing keeps running"
    body = json.dumps(dict(GOOD[CHAT], messages=[dict(role='user', content='long')], stream=True, ignore_eos=True)).encode()
    host, port = server.url.removeprefix('http://').split(':')
    for k in range(20):
        s = socket.create_connection((host, int(port)))
        data = f'POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n'.encode() + body
        s.sendall(data[:len(data) * k // 10] if k < 10 else data)
        if k >= 10: s.recv(10 * (k - 9))
        if k % 2: s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\x01\0\0\0\0\0\0\0')   # a reset in place of a polite goodbye
        s.close()
    end = time.perf_counter() + 2
    while (h := server.engine.health()).active or h.queued:
        assert time.perf_counter() < end, h
        time.sleep(0.01)
    assert h.failed == 0
    alive(http)

def test_many_clients_at_once(server, http):
    results = []
    def client(k):
        route = (CHAT, TEXT)[k % 2]
        try:
            if k % 3 == 0: results.append(httpx.post(server.url + route, content=b'[', timeout=30).status_code)
            else: results.append(httpx.post(server.url + route, json=dict(GOOD[route], stream=k % 4 == 1), timeout=30).status_code)
        except Exception as e: results.append(e)
    threads = [threading.Thread(target=client, args=(k,)) for k in range(30)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert sorted(results) == [200] * 20 + [400] * 10, results
    alive(http)

PROGRAM = """
import sys; sys.path.insert(0, {tests!r})
from sparkinfer.serve.app import ServeSettings, serve
from test_server_openai import build, slowly
serve(lambda report: build(script=lambda h: ord('a'), gate=slowly(0.01)), ServeSettings(port={port}, shutdown_seconds=1), echo=lambda line: print(line, flush=True))
"""

@pytest.mark.parametrize('sign', [signal.SIGINT, signal.SIGTERM])
def test_the_printed_curl_line_works_and_ctrl_c_ends_in_bounded_time(sign):
    with socket.create_server(('127.0.0.1', 0)) as s: port = s.getsockname()[1]
    process = subprocess.Popen([sys.executable, '-c', PROGRAM.format(tests=str(Path(__file__).parent), port=port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not (line := process.stdout.readline()).strip().startswith('curl'): assert process.poll() is None, process.stderr.read()
        words = shlex.split(line)
        url, body = words[1], words[words.index('-d') + 1]
        streaming = dict(json.loads(body), stream=True, max_tokens=400)
        answer = httpx.post(url, content=json.dumps(dict(json.loads(body), max_tokens=3)), headers={'Content-Type': 'application/json'})
        assert answer.status_code == 200 and answer.json()['choices'][0]['message']['content'] == 'aaa', answer.text
        with httpx.stream('POST', url, json=streaming, timeout=20) as r:
            lines = r.iter_lines()
            for _ in range(4): next(lines)
            begin = time.perf_counter()
            process.send_signal(sign)
            rest = list(lines)
        assert 'server_shutting_down' in rest[-4] and rest[-2] == 'data: [DONE]'
        process.wait(10)
        assert time.perf_counter() - begin < 6
        assert 'Traceback' not in process.stderr.read()
    finally:
        process.kill()
        process.wait()

def test_ctrl_c_while_loading():
    program = "import time\nfrom sparkinfer.serve.app import ServeSettings, serve\ndef load(report):\n    report('thinking')\n    time.sleep(30)\nserve(load, ServeSettings(port={port}))\nprint('the end')"
    with socket.create_server(('127.0.0.1', 0)) as s: port = s.getsockname()[1]
    process = subprocess.Popen([sys.executable, '-c', program.format(port=port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(300):
            try:
                if httpx.get(f'http://127.0.0.1:{port}/health').json()['stage'] == 'thinking': break
            except httpx.TransportError: pass
            time.sleep(0.05)
        begin = time.perf_counter()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert time.perf_counter() - begin < 5 and out == 'the end\n' and err == ''
    finally:
        process.kill()
        process.wait()


def test_a_limit_that_was_reached_is_no_traceback_in_the_log(caplog):
    "Fault: each request whose time was over wrote forty lines into the server's log"
    with background_server(lambda report: build(gate=slowly(0.02)), ServeSettings(port=0, shutdown_seconds=0.2)) as state:
        answer = httpx.post(state.url + TEXT, json=dict(prompt='long=', max_seconds=0), timeout=30)
        assert answer.status_code == 504 and answer.json()['error']['code'] == 'deadline_exceeded'
        assert b'deadline_exceeded' in httpx.post(state.url + TEXT, json=dict(prompt='long=', max_seconds=0, stream=True), timeout=30).content
    for code in ('queue_full', 'closing', 'failed'): log_unexpected(EngineBusy('no', code))
    assert not [r for r in caplog.records if r.name == 'sparkinfer.serve']
    log_unexpected(ZeroDivisionError('a fault'))
    assert [r.exc_info[0] for r in caplog.records if r.name == 'sparkinfer.serve'] == [ZeroDivisionError]

def test_several_prompts_wait_for_a_place_in_the_queue():
    "Fault: a request of six prompts found the queue full of its own and ended half-way with 429"
    with background_server(lambda report: build(gate=slowly(0.005), max_queue=1), ServeSettings(port=0, shutdown_seconds=0.2)) as state:
        others = [state.engine.submit(Request(list(b'long='), SamplingParams(temperature=0))) for _ in range(4)]
        for stream in others: next(stream)                                                          # all places are taken, so its first prompt fills the queue
        answer = httpx.post(state.url + TEXT, json=dict(prompt=['greet='] * 6, temperature=0), timeout=60)
        assert answer.status_code == 200 and [c['text'] for c in answer.json()['choices']] == ['Hello there!'] * 6, answer.text
        assert (h := state.engine.health()).active == h.queued == 0

class FullNow:
    "An engine whose submits say what they are told: 'ok', or a code of EngineBusy. Its answers end at once"
    max_running, limits = 2, EngineLimits()
    def __init__(self, *says): self.says, self.taken = list(says), []
    def submit(self, request):
        if (said := self.says.pop(0) if self.says else 'ok') != 'ok': raise EngineBusy('no', said)
        self.taken.append(request)
        return Ended()

class Ended:
    def __init__(self): self.events = [FinishEvent(0, 'stop', 'x', Usage(1, 1), 0)]
    def cancel(self): pass
    def take(self, wake):
        events, self.events = self.events, []
        return events, True

def run_job(engine, poke=None, until=None, **knobs):
    "The indices of all that the job of four prompts gives, and None for each poke, every `poke` seconds; `until(running)` may stop it then"
    async def collect():
        running, got = RunningJob(engine, SimpleNamespace(requests=[Request([k + 1], **knobs) for k in range(4)]), Bell(asyncio.get_running_loop())), []
        async def poking():
            while poke: await asyncio.sleep(poke); running.poke()
        poker = asyncio.create_task(poking())
        while (news := await running.news()) is not None:
            got += [index for index, _ in news] or [None]
            if not news and until: until(running)
        poker.cancel()
        return got
    return asyncio.run(asyncio.wait_for(collect(), 20))

def test_a_queue_full_of_others_is_waited_for():
    "Its own answers have ended, and nobody tells when a place is free. Only the first request may be refused; an engine that closes refuses any"
    engine = FullNow('ok', 'queue_full', *['queue_full'] * 5)
    assert sorted(run_job(engine)) == [0, 1, 2, 3] and [r.prompt_ids[0] for r in engine.taken] == [1, 2, 3, 4] and not engine.says
    quiet = run_job(FullNow('ok', *['queue_full'] * 8), poke=0.1)                               # the client hears that the server lives
    assert sorted(i for i in quiet if i is not None) == [0, 1, 2, 3] and quiet.count(None) >= 2
    left = FullNow('ok', *['queue_full'] * 10**6)
    assert [i for i in run_job(left, 0.1, until=lambda running: running.cancel()) if i is not None] == [0]      # the client left meanwhile
    for says in (['queue_full'], ['ok', 'closing'], ['ok', 'queue_full', 'failed']):
        with pytest.raises(EngineBusy) as caught: run_job(FullNow(*says))
        assert caught.value.code == says[-1]
    with pytest.raises(DeadlineExceeded, match='within 0.3 s'): run_job(FullNow('ok', *['queue_full'] * 10**6), max_seconds=0.3)

def test_the_time_of_several_prompts_counts_from_their_arrival():
    "Fault: each prompt had the whole time anew from when it was its turn, so sixty-four could take sixteen times as long"
    with background_server(lambda report: build(script=lambda h: ord('a'), gate=slowly(0.01)), ServeSettings(port=0, shutdown_seconds=0.2)) as state:
        body = dict(prompt=['='] * 12, max_tokens=30, max_seconds=0.6)                              # twelve, four at a time, of 30 steps of 10 ms: 0.9 s
        answer = httpx.post(state.url + TEXT, json=body, timeout=30)
        assert answer.status_code == 504 and answer.json()['error']['code'] == 'deadline_exceeded', answer.text[:300]
        end = time.perf_counter() + 5
        while (h := state.engine.health()).active or h.queued: assert time.perf_counter() < end, h
    with background_server(lambda report: build(script=lambda h: ord('a'), gate=slowly(0.01), max_seconds=0.6), ServeSettings(port=0, shutdown_seconds=0.2)) as state:      # the server's own limit likewise
        assert httpx.post(state.url + TEXT, json=dict(prompt=['='] * 12, max_tokens=30), timeout=30).status_code == 504
    engine = FullNow()
    run_job(engine, max_seconds=100)
    assert [r.max_seconds for r in engine.taken[:1]] == [100] and all(99 < r.max_seconds < 100 for r in engine.taken[1:])
