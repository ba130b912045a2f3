"""Who operates a server: keys, limits, settings and where they came from, logs, metrics, errors in every dialect's own shape, a goodbye that ends"""
import json, logging, os, re, shutil, signal, socket, subprocess, sys, threading, time
import httpx, pytest
from prometheus_client.parser import text_string_to_metric_families
from sparkinfer.errors import SparkinferError
from sparkinfer.serve.app import ROUTES, Router, ServeSettings, background_server
from sparkinfer.serve.metrics import ENGINE_METRICS, SERVER_METRICS
from sparkinfer.serve.protocol import ApiError
from sparkinfer.serve.settings import ServeSettings
from test_server_faults import CHAT, GENERATING, TEXT, by_path, good, path_of, refused_in_shape
from test_server_openai import build, slowly

quick = dict(port=0, shutdown_seconds=0.3)

@pytest.fixture(scope='module')
def locked():
    with background_server(build, ServeSettings(**quick, api_key='correct horse')) as state: yield state

# ---- keys

@pytest.mark.parametrize('route', [r for r in ROUTES if not r.public], **by_path)
def test_every_route_that_is_not_public_wants_the_key(locked, route):
    for headers in ({}, {'Authorization': 'Bearer wrong'}, {'Authorization': 'correct horse'}, {'Authorization': 'Basic correct horse'}, {'x-api-key': 'wrong'}, {'x-api-key': ''}, {'Authorization': b'Bearer \xff\xfe'}):
        answer = httpx.request(route.method, locked.url + path_of(route), json=good(route) if route.body else None, headers=headers)
        refused_in_shape(answer, route, 401)
        assert answer.headers['www-authenticate'] == 'Bearer' and 'correct' not in answer.text
    for headers in ({'Authorization': 'Bearer correct horse'}, {'authorization': 'bearer correct horse'}, {'X-API-Key': 'correct horse'}, {'x-api-key': 'correct horse', 'Authorization': 'Bearer other'}):
        assert httpx.request(route.method, locked.url + path_of(route), json=good(route) if route.body else None, headers=headers).status_code != 401

def test_public_routes_need_none(locked):
    for path in ('/', '/health', '/v1/models', '/v1/models/org%2Ftiny', '/metrics', '/version', '/openapi.json'): assert httpx.get(locked.url + path).status_code == 200, path

def test_the_key_is_shown_nowhere(locked, caplog):
    caplog.set_level(logging.DEBUG)
    key = {'Authorization': 'Bearer correct horse'}
    info = httpx.get(locked.url + '/v1/info', headers=key)
    httpx.post(locked.url + CHAT, json=dict(messages=[]), headers=key)
    texts = [info.text, httpx.get(locked.url + '/metrics').text, httpx.get(locked.url + '/', headers={'Accept': 'text/html'}).text, caplog.text, repr(locked.shown)]
    assert info.json()['settings']['api_key'] == dict(value='****', source='setting') and not [t for t in texts[:4] if 'correct horse' in t]

# ---- the shape of what goes wrong

def test_paths_that_do_not_exist_belong_to_a_dialect():
    table = Router(ROUTES)
    for route in ROUTES: assert table.dialect(path_of(route) + '/nothing') is table.find(route.method, path_of(route))[0].dialect or route.path == '/'
    names = {path: table.dialect(path).name for path in ('/v1/nothing', '/v1/messages/nothing', '/nothing', '/v1/responses/x/nothing')}
    assert names['/v1/nothing'] == names['/nothing'] == 'openai' and names['/v1/messages/nothing'] == 'anthropic'

@pytest.mark.parametrize('route', GENERATING, **by_path)
def test_loading_stopping_and_full_in_every_shape(route):
    go = threading.Event()
    def slow(report):
        go.wait(20)
        return build(script=lambda h: ord('a'), gate=slowly(0.01), max_queue=0, max_running=1)
    with background_server(slow, ServeSettings(**quick), wait_ready=False) as state:
        post = lambda: httpx.post(state.url + path_of(route), json=good(route), timeout=20)
        refused_in_shape(post(), route, 503)
        go.set(); state.changed.wait(10)
        with httpx.stream('POST', state.url + TEXT, json=dict(prompt='x', max_tokens=400, stream=True), timeout=20) as running:
            lines = running.iter_lines()
            next(lines)
            refused_in_shape(post(), route, 429, 529)
        state.stopping = True
        refused_in_shape(post(), route, 503)
        state.stopping = False

def test_a_fault_of_the_model_is_told_in_every_shape():
    with background_server(lambda report: build(script=lambda h: RuntimeError('boom') if len(h) > 3 else ord('a')), ServeSettings(**quick)) as state:
        for route in GENERATING:
            answer = httpx.post(state.url + path_of(route), json=good(route), timeout=20)
            refused_in_shape(answer, route, 500)
            assert 'boom' not in answer.text

# ---- web pages of others

def test_no_other_page_may_call_unless_it_is_named():
    origin = {'Origin': 'http://page.example'}
    preflight = {**origin, 'Access-Control-Request-Method': 'POST', 'Access-Control-Request-Headers': 'content-type'}
    with background_server(build, ServeSettings(**quick)) as state:
        for answer in (httpx.get(state.url + '/health', headers=origin), httpx.post(state.url + TEXT, json=dict(prompt='greet='), headers=origin), httpx.options(state.url + CHAT, headers=preflight)):
            assert not [name for name in answer.headers if name.startswith('access-control')]
    with background_server(build, ServeSettings(**quick, cors_origins=('http://page.example',))) as state:
        assert httpx.options(state.url + CHAT, headers=preflight).headers['access-control-allow-origin'] == 'http://page.example'
        stream = httpx.post(state.url + CHAT, json=dict(messages=[dict(role='user', content='greet')], stream=True), headers=origin)
        assert stream.headers['access-control-allow-origin'] == 'http://page.example' and stream.text.endswith('[DONE]\n\n')
        assert 'access-control-allow-origin' not in httpx.get(state.url + '/health', headers={'Origin': 'http://evil.example'}).headers

# ---- the log

def lines_of(caplog): return [json.loads(r.getMessage()) for r in caplog.records if r.name == 'sparkinfer.requests']

def test_one_line_of_json_for_each_request(caplog):
    caplog.set_level(logging.INFO, 'sparkinfer.requests')
    with background_server(lambda report: build(gate=slowly(0.002)), ServeSettings(**quick, log_requests=True)) as state:
        chat = dict(messages=[dict(role='user', content='greet, my secret')])
        ids = [httpx.post(state.url + CHAT, json=chat | more, timeout=20).headers['x-request-id'] for more in ({}, dict(stream=True), dict(temperature=9))]
        httpx.get(state.url + '/no/such/path?token=secret')
        httpx.get(state.url + '/health')
        with httpx.stream('POST', state.url + CHAT, json=dict(messages=[dict(role='user', content='long')], stream=True)) as r: next(lines := r.iter_lines())
        end = time.perf_counter() + 5
        while len(lines_of(caplog)) < 6: assert time.perf_counter() < end; time.sleep(0.01)
    whole, streamed, refused, lost, health, left = lines_of(caplog)
    assert [x['id'] for x in (whole, streamed, refused)] == ids and whole['route'] == streamed['route'] == CHAT and whole['model'] == 'org/tiny'
    for line in (whole, streamed): assert line['status'] == 200 and line['completion_tokens'] == 9 and line['prompt_tokens'] > 10 and 0 < line['first_token_seconds'] < line['seconds'] and line['method'] == 'POST'
    assert (whole['stream'], streamed['stream'], refused['status'], lost['status'], lost['route'], health['status'], left['status']) == (False, True, 400, 404, 'other', 200, 499)
    assert 'secret' not in caplog.text and 'Hello' not in caplog.text

def test_prompts_are_logged_only_when_asked_for(caplog):
    caplog.set_level(logging.INFO, 'sparkinfer.requests')
    with background_server(build, ServeSettings(**quick, log_requests=True, log_prompts=True)) as state: httpx.post(state.url + TEXT, json=dict(prompt='greet=\n"'))
    assert json.loads(lines_of(caplog)[0]['body']) == dict(prompt='greet=\n"')
    caplog.clear()
    with background_server(build, ServeSettings(**quick)) as state: httpx.post(state.url + TEXT, json=dict(prompt='greet='))
    assert lines_of(caplog) == []

# ---- metrics

def families(state): return {f.name: f for f in text_string_to_metric_families(httpx.get(state.url + '/metrics').text)}
def value(found, name, **labels): return next(s.value for s in found[name].samples if labels.items() <= s.labels.items())

def test_metrics_are_the_documented_ones_and_count():
    with background_server(lambda report: build(gate=slowly(0.004)), ServeSettings(**quick)) as state:
        for k in range(3): httpx.post(state.url + CHAT, json=dict(messages=[dict(role='user', content='greet')], stream=k == 2))
        httpx.post(state.url + CHAT, content=b'[')
        for k in range(20): httpx.get(f'{state.url}/made/up/{k}')
        found = families(state)
        assert {name.removesuffix('_total') for name, *_ in SERVER_METRICS + ENGINE_METRICS} == set(found)
        assert value(found, 'sparkinfer_requests', route=CHAT, status='200') == 3 and value(found, 'sparkinfer_requests', route=CHAT, status='400') == 1 and value(found, 'sparkinfer_requests', route='other') == 20
        assert len(found['sparkinfer_requests'].samples) < 8, 'a client must not be able to make up names'
        assert value(found, 'sparkinfer_completion_tokens') == 3 * 9 and value(found, 'sparkinfer_prompt_tokens') > 20 and value(found, 'sparkinfer_engine_finished') == 3
        count = lambda name: next(s.value for s in found[name].samples if s.name.endswith('_count'))
        assert count('sparkinfer_time_to_first_token_seconds') == count('sparkinfer_request_seconds') == 3 and count('sparkinfer_inter_token_seconds') >= 3
        assert value(found, 'sparkinfer_kv_pages_free') <= value(found, 'sparkinfer_kv_pages') and value(found, 'sparkinfer_ready') == 1 and value(found, 'sparkinfer_cached_tokens') > 0

def test_metrics_and_health_while_loading_and_when_failed():
    def fails(report): raise SparkinferError('cut short')
    with background_server(fails, ServeSettings(**quick), wait_ready=False) as state:
        state.changed.wait(10)
        found = families(state)
        assert value(found, 'sparkinfer_ready') == 0 and 'sparkinfer_kv_pages' not in found
        assert httpx.get(state.url + '/health').status_code == 503

# ---- settings

def test_info_shows_what_is_in_force(locked):
    info = httpx.get(locked.url + '/v1/info', headers={'x-api-key': 'correct horse'}).json()
    assert info['settings']['port'] == dict(value=0, source='setting') and info['settings']['body_limit_mb'] == dict(value=16, source='default')
    assert set(info['settings']) == set(ServeSettings.__dataclass_fields__) and info['warnings'] == [] and info['defaults']['temperature']['source']

def started(*args, **env):
    "A `sparkinfer serve` of its own; its URL once it is ready"
    process = subprocess.Popen([sys.executable, '-u', '-m', 'sparkinfer', 'serve', *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env)
    said = ''
    while 'curl' not in said:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        said += line
    return process, re.search(r'ready at (http://\S+?)/v1', said)[1], said

def test_a_server_from_a_file_the_environment_and_flags(tmp_path):
    (tmp_path/'server.toml').write_text('# ours\nport = 0\ncontext = 256\nmax_running = 3\nlog-requests = true\napi_key = "from the file"\n' + f'cache_file = {json.dumps(str(tmp_path/"cache"))}\n')
    process, url, said = started('--config', tmp_path/'server.toml', '--body-limit-mb', 2, SPARKINFER_MAX_RUNNING='2', SPARKINFER_API_KEY='from-env', SPARKINFER_PROT='1', SPARKINFER_TEMPERATURE='0.5')
    try:
        assert httpx.get(url + '/v1/info').status_code == 401 and 'from-env' not in said and '$SPARKINFER_API_KEY' in said
        info = httpx.get(url + '/v1/info', headers={'x-api-key': 'from-env'}).json()
        settings, strange = info['settings'], info['warnings']
        assert any(line.startswith('SPARKINFER_PROT is no setting and is ignored') for line in strange), strange
        assert httpx.post(url + TEXT, json=dict(prompt='word ' * 60, max_tokens=2), headers={'x-api-key': 'from-env'}, timeout=60).status_code == 200
        want = dict(context=(256, 'file'), max_running=(2, 'environment'), body_limit_mb=(2, 'flag'), log_requests=(True, 'file'), api_key=('****', 'environment'), temperature=(0.5, 'environment'), host=('127.0.0.1', 'default'), model=('smollm2', 'default'))
        assert {name: (settings[name]['value'], settings[name]['source']) for name in want} == want
    finally: process.send_signal(signal.SIGTERM)
    _, noise = process.communicate(timeout=30)
    logged = [json.loads(line) for line in noise.splitlines() if line.startswith('{')]
    assert process.returncode == 0 and (tmp_path/'cache').stat().st_size > 1000, 'SIGTERM ended the process before its cache was written'
    assert [line['status'] for line in logged] == [401, 200, 200] and 'SPARKINFER_PROT is no setting' in noise and 'from-env' not in noise and 'Traceback' not in noise

def test_help_says_what_a_word_may_be():
    help = subprocess.run([sys.executable, '-m', 'sparkinfer', 'serve', '--help'], capture_output=True, text=True, env=dict(os.environ, COLUMNS='200')).stdout
    assert re.search(r'--kv-type \[f16\|bf16\|f32\|int8\]', help), help

@pytest.mark.parametrize('text, says', [('prot = 1', "did you mean 'port'?"), ('port = "x"', 'a whole number'), ('slots = 2\nmax_running = 4', 'no more requests run together'), ('kv_tokens = 100\ncontext = 256', 'raise kv_tokens'), ('spill_mb = 5\nno_prefix_cache = true', 'there is none'), ('port =', 'TOML')])
def test_a_file_that_cannot_be_meant_is_one_line(tmp_path, text, says):
    (tmp_path/'server.toml').write_text(text)
    done = subprocess.run([sys.executable, '-m', 'sparkinfer', 'serve', '--config', tmp_path/'server.toml'], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and re.fullmatch(r'error: .*\n', done.stderr) and says in done.stderr, done.stderr

# ---- the goodbye

def test_shutdown_is_bounded_whatever_clients_do():
    "Streams that run, one that nobody reads, idle connections, a body half sent"
    state_of = background_server(lambda report: build(script=lambda h: ord('a'), gate=slowly(0.01)), ServeSettings(**quick))
    state = state_of.__enter__()
    host, port = state.url.removeprefix('http://').split(':')
    open_ones = [socket.create_connection((host, int(port))) for _ in range(3)]
    body = json.dumps(dict(prompt='x', max_tokens=480, stream=True)).encode()
    head = f'POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n'.encode()
    open_ones[0].sendall(head + body)
    open_ones[1].sendall(head + body[:10])
    while state.engine.health().active == 0: time.sleep(0.01)
    began = time.perf_counter()
    state_of.__exit__(None, None, None)
    assert time.perf_counter() - began < 8
    text = b''
    open_ones[0].settimeout(2)
    while part := open_ones[0].recv(65536): text += part
    assert b'server_shutting_down' in text and b'[DONE]' in text
    for s in open_ones: s.close()

@pytest.mark.parametrize('args, env, text, says', [
    ([], dict(SPARKINFER_PORT='abc'), '', 'SPARKINFER_PORT'), ([], dict(SPARKINFER_PORT='70000'), '', 'SPARKINFER_PORT is 70000'), ([], {}, 'port = 70000', 'a.toml: port is 70000'), ([], {}, 'kv_type = "int4"', 'a.toml'),
    (['--max-output', '5', '--max-tokens', '100'], {}, '', 'no answer gets longer than max_output'), (['--context', '1', '--slots', '4', '--port', '0'], {}, '', 'the smallest is 4 tokens')])
def test_a_bad_value_is_named_as_it_was_given(tmp_path, args, env, text, says):
    (tmp_path/'a.toml').write_text(text)
    done = subprocess.run([sys.executable, '-m', 'sparkinfer', 'serve', *args], env=os.environ | env | dict(SPARKINFER_CONFIG=str(tmp_path/'a.toml')), capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and says in done.stderr and 'Traceback' not in done.stderr, done.stderr
