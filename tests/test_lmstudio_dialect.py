"""LM Studio's two APIs over a real socket: v0 is OpenAI's answer with numbers, which OpenAI's own client must still read; v1 is a stream of named stages, each with its beginning and end"""
import json, time
from contextlib import contextmanager
import httpx, openai, pytest
from dialects import BROKEN, SAID, SCHEMA, engine, failing
from sparkinfer.serve.app import ServeSettings, background_server
from support import scripted_engine, slowly

@contextmanager
def serving(factory=None, **settings):
    with background_server(factory or engine(), ServeSettings(port=0, shutdown_seconds=0.5, **settings)) as state: yield state

@pytest.fixture(scope='module')
def server():
    with serving() as state: yield state

NUMBERS = {'tokens_per_second', 'time_to_first_token', 'generation_time', 'stop_reason'}
def asked(text, **knobs): return dict(dict(model='any', messages=[dict(role='user', content=text)], temperature=0, seed=1), **knobs)

def both(url, text, **knobs):
    "(whole answer, text, reasoning, last chunk) of v0's chat, asserted to be equal streamed and whole"
    whole = httpx.post(url + '/api/v0/chat/completions', json=asked(text, **knobs), timeout=30).json()
    raw = httpx.post(url + '/api/v0/chat/completions', json=asked(text, stream=True, **knobs), timeout=30).text
    assert raw.endswith('data: [DONE]\n\n')
    chunks = [json.loads(line.removeprefix('data: ')) for line in raw.split('\n\n')[:-2]]
    deltas = [c['delta'] for chunk in chunks for c in chunk['choices']]
    message, add = whole['choices'][0]['message'], lambda key: ''.join(d.get(key) or '' for d in deltas)
    assert (add('content'), add('reasoning_content')) == (message['content'] or '', message.get('reasoning_content') or '')
    calls = {}
    for part in (c for d in deltas for c in d.get('tool_calls') or []):
        known = calls.setdefault(part['index'], ['', ''])
        for k, key in enumerate(('name', 'arguments')): known[k] += part['function'].get(key) or ''
    assert list(map(tuple, calls.values())) == [(c['function']['name'], c['function']['arguments']) for c in message.get('tool_calls') or []]
    last = chunks[-1]
    assert last['choices'] == [] and last['usage']['total_tokens'] == whole['usage']['total_tokens'] and last['stats']['stop_reason'] == whole['stats']['stop_reason']
    for answer in (whole, last): assert set(answer['stats']) == NUMBERS and set(answer['model_info']) == {'arch', 'quant', 'format', 'context_length'} and answer['runtime']['supported_formats']
    return whole

@pytest.mark.parametrize('prompt', ['greet', 'family', 'nothing', 'ponder'])
def test_v0_streamed_is_whole(server, prompt):
    whole = both(server.url, prompt)
    assert whole['stats']['stop_reason'] == 'eosFound' and whole['choices'][0]['finish_reason'] == 'stop'
    if prompt != 'ponder': assert whole['choices'][0]['message']['content'] == SAID[prompt]

TOOLS = [dict(type='function', function=dict(name='weather', parameters=SCHEMA)), dict(type='function', function=dict(name='clock', parameters=dict(type='object', properties={})))]

@pytest.mark.parametrize('prompt,names', [('look outside', ['weather']), ('two at once', ['weather', 'clock']), ('speak after', ['clock'])])
def test_v0_tools(server, prompt, names):
    whole = both(server.url, prompt, tools=TOOLS)
    assert [c['function']['name'] for c in whole['choices'][0]['message']['tool_calls']] == names and whole['stats']['stop_reason'] == 'toolCalls'

@pytest.mark.parametrize('prompt', ['ponder', 'two at once'])
def test_v0_cut_anywhere(server, prompt):
    for limit in range(1, len(SAID[prompt].encode()), 11):
        whole = both(server.url, prompt, tools=TOOLS, max_tokens=limit)
        assert whole['usage']['completion_tokens'] <= limit
        if whole['choices'][0]['finish_reason'] == 'length': assert whole['stats']['stop_reason'] == 'maxPredictedTokensReached' and whole['usage']['completion_tokens'] == limit

def test_v0_says_why_it_stopped(server):
    assert both(server.url, 'letters', stop=['O P Q'])['stats']['stop_reason'] == 'stopStringFound'
    assert both(server.url, 'letters', max_tokens=3)['stats']['stop_reason'] == 'maxPredictedTokensReached'
    assert both(server.url, 'letters', max_tokens=-1, ttl=60, draft_model='small')['stats']['stop_reason'] == 'eosFound'
    with serving(lambda report: scripted_engine(lambda prompt: 'a' * 500, max_context=64)) as state:
        assert both(state.url, 'x')['stats']['stop_reason'] == 'contextLengthReached'

def test_v0_numbers_are_those_of_the_clock():
    with serving(lambda report: scripted_engine('abcdefghij', gate=slowly(0.05))) as state:
        stats = both(state.url, 'x')['stats']
        assert 5 < stats['tokens_per_second'] <= 20.5 and stats['time_to_first_token'] >= 0.05 and stats['generation_time'] >= 0.45

def test_openais_client_reads_v0(server):
    with openai.OpenAI(base_url=server.url + '/api/v0', api_key='none') as client:
        answer = client.chat.completions.create(model='m', messages=[dict(role='user', content='greet')], temperature=0)
        assert answer.choices[0].message.content == 'Hello there!' and answer.stats['stop_reason'] == 'eosFound'
        assert ''.join(c.choices[0].delta.content or '' for c in client.chat.completions.create(model='m', messages=[dict(role='user', content='family')], temperature=0, stream=True) if c.choices) == SAID['family']
        text = client.completions.create(model='m', prompt='greet', temperature=0, max_tokens=5)
        assert text.choices[0].text == 'Hello' and text.model_info['context_length'] == 4096
        assert [m.id for m in client.models.list()] == ['org/tiny'] and client.models.retrieve('org/tiny').state == 'loaded'
        assert client.models.retrieve('other').id == 'org/tiny'                      # under any name, as /v1/models/NAME

def events(url, **body):
    text = httpx.post(url + '/api/v1/chat', json=dict(body, stream=True), timeout=30).text
    found = [part.split('\n') for part in text.split('\n\n')[:-1]]
    out = [(name.removeprefix('event: '), json.loads(data.removeprefix('data: '))) for name, data in (f for f in found if not f[0].startswith(':'))]
    assert all(name == data['type'] for name, data in out)
    return out

@pytest.mark.parametrize('prompt', ['greet', 'family', 'nothing', 'ponder'])
def test_v1_stages_open_and_end_one_after_the_other(server, prompt):
    whole = httpx.post(server.url + '/api/v1/chat', json=dict(model='m', input=prompt, temperature=0)).json()
    found = events(server.url, model='m', input=prompt, temperature=0)
    assert found[0][0] == 'chat.start' and found[-1][0] == 'chat.end' and found[-1][1]['result']['output'] == whole['output']
    stage = None
    for name, data in found[1:-1]:
        kind, what = name.split('.')
        if what == 'start': assert stage is None; stage = kind
        else: assert stage == kind
        if what == 'end': stage = None
    assert stage is None
    for item in whole['output']: assert ''.join(d['content'] for n, d in found if n == item['type'] + '.delta') == item['content']
    assert [o['type'] for o in whole['output']] == {'nothing': [], 'ponder': ['reasoning', 'message']}.get(prompt, ['message'])
    assert whole['stats']['input_tokens'] > 0 and (whole['stats']['reasoning_output_tokens'] > 0) == (prompt == 'ponder')

@pytest.mark.parametrize('reasoning,kinds', [(None, ['reasoning', 'message']), ('on', ['reasoning', 'message']), ('low', ['reasoning', 'message']), ('off', ['message'])], ids=str)
def test_v1_reasoning_is_the_templates(reasoning, kinds):
    with serving(engine(lambda prompt: 'Hm.\n</think>\n\nYes.' if prompt.endswith('<think>\n') else 'Yes.', opens=True)) as state:
        answer = httpx.post(state.url + '/api/v1/chat', json=dict(input='a', temperature=0, system_prompt='S', **(dict(reasoning=reasoning) if reasoning else {}))).json()
        assert [o['type'] for o in answer['output']] == kinds and answer['output'][-1]['content'] == 'Yes.'

def test_v1_keeps_conversations():
    "Over HTTP: turns by response_id, a branch, none if not wanted, the other API's conversations, and the store's bound"
    heard = []
    def reply(prompt):
        if not heard or heard[-1] != prompt: heard.append(prompt)
        return f'</think>\n\nanswer {prompt.count("<|user|>")}'
    with serving(engine(reply, opens=True)) as state:
        post = lambda path='/api/v1/chat', **body: httpx.post(state.url + path, json=dict(dict(temperature=0), **body), timeout=30).json()
        first = post(input='a', system_prompt='S')
        streamed = httpx.post(state.url + '/api/v1/chat', json=dict(input='b', previous_response_id=first['response_id'], stream=True, temperature=0)).text
        second = json.loads(streamed.split('event: chat.end\ndata: ')[1].split('\n')[0])['result']
        assert second['response_id'].startswith('resp_') and second['output'][-1]['content'] == 'answer 2'
        assert '<|system|>S<|user|>a<|assistant|>answer 1<|user|>b<|assistant|>' in heard[-1]
        branch = post(input='c', previous_response_id=first['response_id'])
        assert heard[-1].startswith('<|system|>S<|user|>a<|assistant|>answer 1<|user|>c') and branch['response_id'] != second['response_id']
        assert 'response_id' not in post(input='d', previous_response_id=second['response_id'], store=False) and heard[-1].count('<|user|>') == 3
        other = post('/v1/responses', input='e', previous_response_id=second['response_id'])
        assert heard[-1].count('<|user|>') == 3 and post(input='f', previous_response_id=other['id'])['output'][-1]['content'] == 'answer 4'
        assert httpx.get(state.url + f"/v1/responses/{second['response_id']}").json()['output'][-1]['content'][0]['text'] == 'answer 2'
        unknown = httpx.post(state.url + '/api/v1/chat', json=dict(input='x', previous_response_id='resp_none'))
        assert unknown.status_code == 404 and unknown.json()['error']['type'] == 'invalid_request'
    with serving(engine(reply, opens=True), keep_responses_mb=0) as state:
        assert 'response_id' not in httpx.post(state.url + '/api/v1/chat', json=dict(input='a')).json()

def test_a_fault_in_the_middle():
    with serving(failing(4)) as state:
        found = events(state.url, input='x', temperature=0)
        assert found[-1][0] == 'error' and found[-1][1]['error']['type'] == 'internal_error' and 'boom' not in str(found)
        raw = httpx.post(state.url + '/api/v0/chat/completions', json=asked('x', stream=True)).text
        assert '"error"' in raw.split('\n\n')[-3] and raw.endswith('data: [DONE]\n\n') and 'boom' not in raw

def test_who_leaves_is_not_written_for():
    with serving(lambda report: scripted_engine(lambda prompt: 'a' * 3000, gate=slowly(0.01))) as state:
        for path, body in (('/api/v0/chat/completions', asked('x', stream=True)), ('/api/v1/chat', dict(input='x', stream=True))):
            with httpx.stream('POST', state.url + path, json=body) as r: next(r.iter_lines())
        end = time.perf_counter() + 5
        while (state.engine.health().active or state.engine.health().cancelled < 2) and time.perf_counter() < end: time.sleep(0.01)
        assert (state.engine.health().active, state.engine.health().cancelled) == (0, 2)

def test_what_there_is_and_what_is_not(server):
    entry = httpx.get(server.url + '/api/v0/models').json()['data'][0]
    assert entry == httpx.get(server.url + '/api/v0/models/org%2Ftiny').json() and entry['state'] == 'loaded' and entry['max_context_length'] == 4096 and entry['capabilities'] == ['tool_use']
    assert httpx.get(server.url + '/api/v1/models').json()['models'][0]['loaded_instances'][0]['config']['context_length'] == 4096
    for name in ('load', 'unload', 'download'):
        reply = httpx.post(server.url + f'/api/v1/models/{name}', json=dict(model='x'))
        assert reply.status_code == 501 and reply.json()['error']['type'] == 'not_implemented'
    with serving(strict_models=True) as state:
        for path, body, kind in (('/api/v0/chat/completions', asked('greet'), 'invalid_request_error'), ('/api/v1/chat', dict(model='other', input='x'), 'model_not_found')):
            reply = httpx.post(state.url + path, json=body)
            assert reply.status_code == 404 and reply.json()['error']['type'] == kind

CHAT = [dict(messages=[]), dict(messages=[None]), dict(messages=['x']), dict(messages=[123]), dict(messages=[{}]), dict(messages=[dict(role=123, content='a')]), dict(messages=[dict(role='user', content=123)]), dict(messages='x'), dict(messages=[dict(role='user', content='x' * 20000)])]
SHARED = [dict(temperature=3), dict(temperature='0'), dict(max_tokens=0), dict(max_tokens=-2), dict(top_p=2), dict(stop=5), dict(stream='yes'), dict(ttl='x'), dict(draft_model=5), dict(model=5), dict(n=0), dict(seed='x')]
MISTAKES = {'/api/v0/chat/completions': (asked('greet'), CHAT + SHARED), '/api/v0/completions': (dict(prompt='greet'), SHARED + [dict(prompt=[]), dict(prompt=None), dict(prompt=[1, 'a']), dict(prompt='x' * 20000)]),
            '/api/v1/chat': (dict(input='greet'), [dict(input=5), dict(input=[]), dict(input=[None]), dict(input=[dict(type='image', data_url='x')]), dict(input=None), dict(reasoning='very'), dict(reasoning=5), dict(store='yes'), dict(previous_response_id=5), dict(integrations=['x']), dict(context_length=10**9), dict(max_output_tokens=0),
                                                        dict(temperature=3), dict(system_prompt=5), dict(stream='yes'), dict(model=5), dict(top_k='x'), dict(input='x' * 20000)])}

@pytest.mark.parametrize('path', MISTAKES)
def test_mistakes_are_400_in_this_apis_shape_and_the_server_lives(server, path):
    fine, mistakes = MISTAKES[path]
    with httpx.Client(base_url=server.url) as http:
        for body in [json.dumps(dict(fine, **m)).encode() for m in mistakes] + BROKEN:
            reply = http.post(path, content=body)
            assert reply.status_code == 400 and set(reply.json()['error']) >= {'message', 'type', 'param', 'code'}, (body[:100], reply.text[:300])
            if 'v1' in path: assert reply.json()['error']['type'] == 'invalid_request'
        assert http.post(path, json=fine).status_code == 200
