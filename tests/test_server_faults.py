"""Everything that a client can do wrong, against each POST route; after each, a good request must succeed and nothing may be left running.

The routes are those that the application mounts, so a new one is attacked from its first day."""
import asyncio, json, resource, shlex, signal, socket, subprocess, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
import httpx, pytest
from sparkinfer.engine.scheduler import EngineLimits
from sparkinfer.engine.request import DeadlineExceeded, EngineBusy, FinishEvent, Request, SamplingParams, Usage
from sparkinfer.serve.app import ROUTES, ServeSettings, background_server
from sparkinfer.serve.protocol import ApiError
from sparkinfer.serve.running import Bell, RunningJob, log_unexpected
from test_server_openai import build, slowly

CHAT, TEXT = '/v1/chat/completions', '/v1/completions'
GOOD = {CHAT: dict(model='m', messages=[dict(role='user', content='greet')]), TEXT: dict(model='m', prompt='greet=')}
POSTS = [r for r in ROUTES if r.method == 'POST']
READING = [r for r in POSTS if r.body is not None]
GENERATING = [r for r in READING if r.kind == 'generate']
by_path = dict(ids=lambda route: route.path if hasattr(route, 'path') else None)
GOOD_ANYWHERE = dict(model='org/tiny', messages=[dict(role='user', content='greet')], prompt='greet=', input='greet', max_tokens=32, stream=False)      # what a dialect does not know is left out

def good(route, **more):
    "A valid body for this route"
    known = route.body.model_fields if route.body else GOOD_ANYWHERE
    return {k: v for k, v in GOOD_ANYWHERE.items() if k in known and not (k == 'prompt' and 'input' in known)} | more

def same_shape(body, sample, where=''):
    "An error's body has the keys and types of what its dialect writes"
    assert isinstance(body, type(sample)) or sample is None, f'{where or "the body"} is {body!r}, not like {sample!r}'
    if isinstance(sample, dict):
        assert set(sample) <= set(body), f'{where} lacks {set(sample) - set(body)}: {body}'
        for key in sample: same_shape(body[key], sample[key], f'{where}.{key}')

def refused_in_shape(answer, route, *statuses):
    "The answer is an error of one of these statuses, in the shape of the route's dialect, with a message for people"
    assert answer.status_code in statuses, (route.path, answer.status_code, answer.text[:300])
    assert answer.headers['content-type'] == 'application/json'
    same_shape(answer.json(), route.dialect.error(ApiError(answer.status_code, 'words')))
    assert 'Traceback' not in answer.text and 'pydantic' not in answer.text and len(answer.content) < 3000
    return answer.json()

def path_of(route): return route.path.replace('{id}', 'x').replace('{model:path}', 'org/tiny')

def works(http, route):
    "A valid request is served on this route; on one that generates nothing, anywhere"
    route = route if route in GENERATING else GENERATING[0]
    answer = http.post(path_of(route), json=good(route))
    assert answer.status_code == 200 and 'Hello there!' in answer.text, (route.path, answer.status_code, answer.text[:300])
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
    dict(response_format=dict(type='yaml')), dict(response_format=dict(type='json_schema')), dict(response_format='text'), dict(response_format=7), dict(grammar='root ::='), dict(guided_json='x'), dict(guided_regex='('), dict(guided_choice='x'), dict(json_schema={'type': 5}), dict(structured_outputs={}), dict(ignore_eos='x'),
]
BAD_CHAT = [dict(messages=m) for m in (None, 'x', {}, [], [None], ['x'], [123], [{}], [[]], [dict(role=123, content='x')], [dict(role='user', content=123)], [dict(role='user', content={})], [dict(role='user')], [dict(role='user', content=None)], [dict(role='user', content=[None])],
    [dict(role='user', content=[dict(type='text')])], [dict(role='user', content=[dict(type='text', text=5)])], [dict(role='user', content=[dict(type='image_url', image_url=dict(url='http://x/y.png'))])], [dict(role='user', content=[dict(type='input_audio', input_audio={})])], [dict(role='user', content=[dict(type={})])],
    [dict(role='wizard', content='x')], [dict(role='', content='x')], [dict(role='tool', content='x', tool_call_id='1')], [dict(role='assistant', tool_calls=[dict(id='1', type='function', function=dict(name='f', arguments='{'))])], [dict(role='user', content='x' * 5000)])]
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
    for method, path, status in (('GET', '/v1', 404), ('POST', '/v1/nothing', 404), ('GET', CHAT, 405), ('DELETE', TEXT, 405), ('POST', '/v1/models', 405), ('OPTIONS', CHAT, 405), ('GET', '/docs', 404)):
        refused(http.request(method, path, follow_redirects=True), status)
    for name in ('%E2%82', 'x' * 5000): assert http.get('/v1/models/' + name).json()['id'] == 'org/tiny'
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
        assert 'Traceback' not in process.stderr.read() and 'stopping: 1 request may go on for 1 s' in process.stdout.read()
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


# ---- every route

@pytest.mark.parametrize('route', READING, **by_path)
def test_any_route_takes_a_good_body_and_no_malformed_one(http, route):
    if route.kind == 'generate': works(http, route)
    for name, body in RAW.items():
        answer = http.post(path_of(route), content=body, headers={'Content-Type': 'application/json'})
        refused_in_shape(answer, route, *([400] if route.kind != 'unsupported' else [501]))
    works(http, route)

WRONG_TYPES = [None, 'x', 5, 1.5, True, [], {}, [None], ['x'], [123], [{}], [[]], {'a': 1}, '', -1, 10**30, [dict(role=123, content='x')], [dict(role='user', content=123)], [dict(role='user')], [dict(role='wizard', content='x')], [dict(role='user', content=[None])], [dict(role='user', content=[dict(type={})])]]

@pytest.mark.parametrize('route', [r for r in READING if r.kind != 'unsupported'], **by_path)
def test_any_field_may_be_of_the_wrong_type(http, route):
    "Each field of the body in turn is something else: a client's mistake is a 4xx in the dialect's shape (or is taken), never a 5xx, and the server lives"
    for name in route.body.model_fields:
        for value in WRONG_TYPES:
            answer = http.post(path_of(route), json=good(route, **{name: value}))
            assert answer.status_code < 500 or answer.status_code == 501, (route.path, name, value, answer.status_code, answer.text[:300])
            if answer.status_code != 200: refused_in_shape(answer, route, *range(400, 500), 501)
    works(http, route)
    assert http.get('/health').json()['failed'] == 0

@pytest.mark.parametrize('route', READING, **by_path)
def test_large_bodies_on_any_route(server, http, route):
    body = json.dumps(good(route, filler='x' * 3_000_000)).encode()
    for size in (3_000_000, 20_000_000):
        try: answer = http.post(path_of(route), content=body if size < 20_000_000 else b'{"a": "' + b'x' * size + b'"}')
        except httpx.TransportError: assert size > 8_000_000   # refused by its declared length; the client was still sending
        else: refused_in_shape(answer, route, 413 if route.kind != 'unsupported' else 501)
    works(http, route)

@pytest.mark.parametrize('route', [r for r in ROUTES if r.kind == 'unsupported'], **by_path)
def test_what_is_not_offered_says_why(http, route):
    error = refused_in_shape(http.request(route.method, path_of(route), json=good(route)), route, 501)
    assert route.reason and route.reason[:40] in json.dumps(error, ensure_ascii=False)

@pytest.mark.parametrize('route', POSTS, **by_path)
def test_wrong_method_wrong_path_and_a_lying_length(server, http, route):
    path = path_of(route)
    if not any(r.path == route.path and r.method in ('GET', 'PUT') for r in ROUTES):
        for method in ('GET', 'PUT'):
            answer = http.request(method, path)
            refused_in_shape(answer, route, 405)
            assert 'POST' in answer.headers['allow']
    refused_in_shape(http.post(path + '/nothing/here'), route, 404)
    body = json.dumps(good(route)).encode()
    head = lambda length: f'POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n'.encode()
    assert b' 400 ' in raw(server, head('five') + body) and b' 400 ' in raw(server, head(-5) + body)
    if route in READING and route.kind != 'unsupported': assert b' 400 ' in raw(server, head(len(body) - 10) + body, wait=0.3)
    raw(server, head(len(body) + 10) + body, wait=0.1, close=True)
    works(http, route)

@pytest.mark.parametrize('route', GENERATING, **by_path)
def test_a_client_that_closes_its_half_of_the_connection(server, http, route):
    "No more bytes will come from it; most often it has gone altogether, so nothing goes on for it"
    body = json.dumps(good(route) | {k: v for k, v in dict(messages=[dict(role='user', content='long')], prompt='long=', input='long', stream=True).items() if k in good(route)}).encode()
    raw(server, f'POST {path_of(route)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n'.encode() + body, wait=0.5, close=True)
    end = time.perf_counter() + 2
    while (h := server.engine.health()).active or h.queued: assert time.perf_counter() < end, h
    works(http, route)

# ---- connections

def test_bytes_that_are_no_http_and_heads_without_end(server, http):
    for junk in (b'NONSENSE\r\n\r\n', b'\x16\x03\x01\x02\x00\x01\x00', b'GET / HTTP/9.9\r\n\r\n', b'POST ' + b'/x' * 35_000, b'GET / HTTP/1.1\r\n' + b'X: ' + b'a' * 70_000, b'GET / HTTP/1.1\r\n' + b''.join(b'X%d: a\r\n' % k for k in range(7_000))):
        out = raw(server, junk, wait=1.0)
        head, _, body = out.partition(b'\r\n\r\n')
        assert head.startswith(b'HTTP/1.1 400') and json.loads(body)['error']['code'] == 'invalid_http', (junk[:30], out[:200])
    for endless in (b'GET / HTTP/1.1\r\nX: ' + b'a' * 5_000_000, b'A' * 5_000_000):
        try: assert len(raw(server, endless, wait=1.0)) < 1000
        except ConnectionError: pass                                                                    # it was still talking when we hung up
    alive(http)

def test_a_thousand_idle_connections(http):
    "They cost files and nothing else, and those that never send a request are closed"
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with background_server(build, ServeSettings(port=0, shutdown_seconds=0.2, idle_seconds=3)) as state, httpx.Client(base_url=state.url, timeout=30) as client:
        host, port = state.url.removeprefix('http://').split(':')
        idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(1000)]
        for k, s in enumerate(idle):
            if k % 3 == 1: s.sendall(b'POST /v1/completions HTT')                                       # a head that stops in the middle
            if k % 3 == 2: s.sendall(b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n')                        # one request, then nothing
        alive(client)
        end = time.perf_counter() + 20
        while state.metrics.connections() > 5: assert time.perf_counter() < end, state.metrics.connections(); time.sleep(0.05)
        for s in idle: s.close()
        alive(client)

def resident(): return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmRSS')) / 1e3

def test_clients_that_do_not_read():
    "They hold neither the engine nor memory: others are served meanwhile, and they are cut off"
    with background_server(lambda report: build(script=lambda h: ord('a'), gate=slowly(0.0005), max_queue=50), ServeSettings(port=0, shutdown_seconds=0.2, send_seconds=1)) as state:
        host, port = state.url.removeprefix('http://').split(':')
        body = json.dumps(dict(prompt=['='] * 60, n=8, max_tokens=500, stream=True, logprobs=5)).encode()      # 240,000 events of some 400 bytes
        before = resident()
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.connect((host, int(port)))
            s.sendall(f'POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n'.encode() + body)
            while state.engine.health().active == 0: time.sleep(0.01)
            assert httpx.post(state.url + TEXT, json=dict(prompt='x', max_tokens=3), timeout=30).json()['choices'][0]['text'] == 'aaa'
            end = time.perf_counter() + 30
            while (h := state.engine.health()).active or h.queued: assert time.perf_counter() < end, h; time.sleep(0.05)
            assert resident() - before < 150, 'memory grew while nobody read'
        while not state.metrics.requests[TEXT, 408]: assert time.perf_counter() < end, state.metrics.requests; time.sleep(0.01)
        assert h.cancelled >= 1
        assert httpx.post(state.url + TEXT, json=dict(prompt='x', max_tokens=3), timeout=30).status_code == 200

def test_a_client_that_stops_sending():
    with background_server(build, ServeSettings(port=0, shutdown_seconds=0.2, read_seconds=0.3)) as state:
        for route in READING[:4]:
            out = raw(state, f'POST {path_of(route)} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n'.encode() + b'{"model":', wait=2.0)
            assert out.startswith(b'HTTP/1.1 408'), out[:200]
            same_shape(json.loads(out.partition(b'\r\n\r\n')[2]), route.dialect.error(ApiError(408, 'words')))

# ---- made-up requests from the server's own description

def test_requests_made_from_the_openapi_page(server, http):
    "schemathesis writes bodies that the description allows and bodies that it does not; none of them may be a fault of the server"
    schemathesis = pytest.importorskip('schemathesis')
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    schema = schemathesis.openapi.from_dict(http.get('/openapi.json').json())
    statuses, methods = {}, list(schemathesis.GenerationMode)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {(o.method.upper(), o.path) for o in operations} >= {(r.method, r.path.replace(':path}', '}')) for r in ROUTES}
    for operation in operations:
        for mode in methods:
            strategy = operation.as_strategy(generation_mode=mode)
            @settings(max_examples=6, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
            @given(case=strategy)
            def attack(case):
                answer = case.call(base_url=server.url, timeout=30)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                assert answer.status_code < 500 or answer.status_code == 501, (case.method, case.path, case.body, answer.status_code, answer.text[:300])
            try: attack()
            except Exception as error:
                if 'Unsatisfiable' not in type(error).__name__: raise
    assert statuses.get(200, 0) > 10 and sum(statuses.values()) > 100, statuses
    alive(http)
