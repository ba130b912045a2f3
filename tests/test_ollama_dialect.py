"""The real `ollama` client against a live server on a real socket: what it adds up from the lines must be the answer that is not streamed, and what it is strict about must be right"""
import json, re, time
from contextlib import contextmanager
import httpx, ollama, pytest
from dialects import BROKEN, SAID, SCHEMA, engine, failing
from sparkinfer.serve.app import ServeSettings, background_server
from support import TEMPLATE, scripted_engine, slowly

TOOLS = [dict(type='function', function=dict(name='weather', description='…', parameters=SCHEMA)), dict(type='function', function=dict(name='clock', parameters=dict(type='object', properties={})))]

@contextmanager
def serving(factory=None, **settings):
    "A live server; yields its state"
    with background_server(factory or engine(), ServeSettings(port=0, shutdown_seconds=0.5, **settings)) as state: yield state

@contextmanager
def talking(factory=None, **settings):
    with serving(factory, **settings) as state: yield state, ollama.Client(state.url, timeout=60)

@pytest.fixture(scope='module')
def server():
    with serving() as state: yield state

@pytest.fixture(scope='module')
def client(server): return ollama.Client(server.url, timeout=60)

def asked(text, options={}, **knobs): return dict(dict(model='any', messages=[dict(role='user', content=text)], tools=TOOLS), options=dict(dict(temperature=0, seed=1), **options), **knobs)

def added_up(parts):
    "What a program that reads the stream has in the end: (last part, thinking, content, calls, log-probabilities)"
    parts = list(parts)
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True] and all(p.message.role == 'assistant' for p in parts)
    calls = [c for p in parts for c in p.message.tool_calls or []]
    return parts[-1], ''.join(p.message.thinking or '' for p in parts), ''.join(p.message.content or '' for p in parts), calls, [e for p in parts for e in p.logprobs or []]

def both(client, text, **knobs):
    whole = client.chat(**asked(text, **knobs), stream=False)
    last, *streamed = added_up(client.chat(**asked(text, **knobs), stream=True))
    assert streamed == [whole.message.thinking or '', whole.message.content, list(whole.message.tool_calls or []), list(whole.logprobs or [])]
    for name in ('done_reason', 'prompt_eval_count', 'eval_count', 'model'): assert getattr(last, name) == getattr(whole, name), name
    for p in (last, whole): assert p.total_duration == pytest.approx(p.load_duration + p.prompt_eval_duration + p.eval_duration, abs=10) and p.total_duration > 0
    return whole


@pytest.mark.parametrize('prompt', SAID)
def test_streamed_is_whole(client, prompt):
    whole = both(client, prompt)
    assert [c.function.name for c in whole.message.tool_calls or []] == re.findall(r'<tool_call>\n{"name": "(\w+)"', SAID[prompt]) and whole.done_reason == 'stop'
    if prompt in ('greet', 'family', 'nothing', 'letters'): assert whole.message.content == SAID[prompt]

def test_the_message_holds_what_was_said(client):
    m = both(client, 'ponder').message
    assert (m.thinking.strip(), m.content) == ('Hm, two and two.', 'It is 4.')
    m = both(client, 'look outside').message
    assert m.content.strip() == 'I look.' and m.tool_calls[0].function.arguments == {'city': 'Pa"r\nis é', 'days': [1, {'a': None}]}
    assert [dict(c.function.arguments) for c in both(client, 'two at once').message.tool_calls] == [{'city': 'Oslo'}, {}]

@pytest.mark.parametrize('prompt', ['family', 'ponder', 'two at once'])
def test_cut_anywhere(client, prompt):
    "A call that was cut cannot be said as an object, so there is none; and reasoning that was cut is no content"
    for limit in range(1, len(SAID[prompt].encode()) + 1, 9):
        whole = both(client, prompt, options=dict(num_predict=limit))
        assert whole.eval_count <= limit
        if whole.done_reason == 'length': assert whole.eval_count == limit
        if limit < 8 and prompt != 'family': assert not whole.message.content

@pytest.mark.parametrize('prompt,stop,text', [('letters', 'O P Q', 'L M N '), ('ends in xy', 'xyz', 'some xy'), ('greet', 'there', 'Hello ')])
def test_stop(client, prompt, stop, text):
    whole = both(client, prompt, options=dict(stop=[stop, 'never']))
    assert (whole.message.content, whole.done_reason) == (text, 'stop')

def test_no_half_characters(client): assert '\ufffd' not in ''.join(p.message.content for p in client.chat(**asked('family'), stream=True))

def test_logprobs(client):
    whole = both(client, 'family', logprobs=True, top_logprobs=2)
    assert all(e.logprob <= 0 and len(e.top_logprobs) == 2 for e in whole.logprobs)
    names = [e.token for e in whole.logprobs]
    assert ' ' in names and names[0] == r'bytes:\xf0'

def test_generate(server, client):
    for prompt in ('greet', 'family', 'ponder'):
        whole = client.generate('any', prompt, options=dict(temperature=0), stream=False)
        parts = list(client.generate('any', prompt, options=dict(temperature=0), stream=True))
        assert ''.join(p.response for p in parts) == whole.response and ''.join(p.thinking or '' for p in parts) == (whole.thinking or '') and parts[-1].eval_count == whole.eval_count
    assert whole.response == 'It is 4.' and whole.thinking.strip() == 'Hm, two and two.'
    assert client.generate('any', 'greet', raw=True, options=dict(temperature=0)).prompt_eval_count == len('greet')
    assert httpx.post(server.url + '/api/generate', json=dict(model='m', prompt='greet', options=dict(temperature=0))).text.count('\n') > 5     # a stream unless it says no

def test_loading_and_unloading(client):
    assert (client.generate('any').done_reason, client.generate('any', keep_alive=0).done_reason, client.chat('any', keep_alive='0s').done_reason) == ('load', 'unload', 'unload')
    assert client.chat(**asked('greet', keep_alive='10m')).message.content == 'Hello there!'

@pytest.mark.parametrize('think,kinds', [(None, (True, 'default')), (True, (True, 'on')), (False, (False, 'off')), ('low', (True, 'low')), ('high', (True, 'high'))], ids=str)
def test_thinking_is_the_templates(think, kinds):
    seen = []
    def reply(prompt): seen.append(prompt); return 'Hm.\n</think>\n\nYes.' if prompt.endswith('<think>\n') else 'Yes.'
    with talking(engine(reply, opens=True)) as (_, client):
        m = both(client, 'a', think=think).message
        assert (bool(m.thinking), m.content) == (kinds[0], 'Yes.')
        assert ('Effort: ' + str(think) in seen[-1]) == isinstance(think, str)

def test_a_conversation_with_tools_goes_on():
    seen = []
    def reply(prompt): seen.append(prompt); return SAID['two at once'] if '<tool_response>' not in prompt else 'Sunny, at noon.'
    with talking(engine(reply)) as (_, client):
        first = client.chat(**asked('go')).message
        messages = [dict(role='user', content='go'), first, dict(role='tool', tool_name='clock', content='noon'), dict(role='tool', tool_name='weather', content='rain')]
        assert client.chat('any', messages, tools=TOOLS, options=dict(temperature=0)).message.content == 'Sunny, at noon.'
        assert seen[-1].index('Two of them.') < seen[-1].index('"Oslo"') < seen[-1].index('noon') < seen[-1].index('rain')

def test_formats():
    with talking(engine('Sure: {"a": 1}')) as (_, client):
        assert isinstance(json.loads(client.chat('any', [dict(role='user', content='x')], format='json', options=dict(temperature=0, num_predict=200)).message.content), dict)
        schema = dict(type='object', properties=dict(a=dict(type='integer', enum=[12])), required=['a'], additionalProperties=False)
        assert json.loads(client.generate('any', 'x', format=schema, options=dict(temperature=0, num_predict=200)).response) == {'a': 12}
        with pytest.raises(ollama.ResponseError) as e: client.chat('any', [dict(role='user', content='x')], format=dict(type='object', properties=dict(a=dict(type='string', pattern='('))))
        assert e.value.status_code == 400

def test_the_model_is_described(server, client):
    shown, listed, running = client.show('any'), client.list().models, client.ps().models
    assert set(shown.capabilities) == {'completion', 'tools', 'thinking'} and shown.template and shown.modelinfo['general.architecture'] and shown.details.format
    assert [m.model for m in listed] == [m.model for m in running] == ['org/tiny:latest'] and len(listed[0].digest) == 64
    assert running[0].context_length == 4096 and running[0].expires_at.year > 2100 and listed[0].modified_at.year > 2000
    assert httpx.get(server.url + '/api/version').json()['version'].count('.') == 2

def test_an_unknown_model_is_404_where_names_are_strict():
    with talking(strict_models=True) as (state, client):
        for ask in (lambda: client.chat('m', [dict(role='user', content='greet')]), lambda: client.show('m'), lambda: client.generate('m', 'greet'), lambda: next(iter(client.chat('m', [dict(role='user', content='x')], stream=True)))):
            with pytest.raises(ollama.ResponseError) as e: ask()
            assert (e.value.status_code, e.value.error) == (404, "model 'm' not found")
        assert client.chat('org/tiny:latest', [dict(role='user', content='greet')], options=dict(temperature=0)).message.content == 'Hello there!'
        assert sum(state.metrics.requests.values()) == 5                          # a mistake is sent once

def test_what_a_one_model_server_cannot_do(client):
    for ask in (lambda: client.pull('m'), lambda: client.push('m'), lambda: client.create('m', from_='x'), lambda: client.copy('m', 'n'), lambda: client.delete('m')):
        with pytest.raises(ollama.ResponseError) as e: ask()
        assert e.value.status_code == 501 and 'one model' in e.value.error

def test_a_fault_in_the_middle_is_a_line():
    with talking(failing(4)) as (state, client):
        got = []
        with pytest.raises(ollama.ResponseError) as e:
            for p in client.chat('m', [dict(role='user', content='x')], stream=True, options=dict(temperature=0)): got.append(p.message.content)
        assert e.value.status_code == -1 and 'boom' not in e.value.error and ''.join(got) == 'aaaa'
        with httpx.stream('POST', state.url + '/api/generate', json=dict(prompt='x')) as r: assert r.status_code == 200 and set(json.loads(list(r.iter_lines())[-1])) == {'error'}
        with pytest.raises(ollama.ResponseError) as e: client.chat('m', [dict(role='user', content='x')])
        assert e.value.status_code == 500

def test_a_quiet_stream_has_no_other_lines():
    "This client parses every line, so there can be no comment that keeps a connection open"
    with serving(engine(gate=slowly(0.1)), keep_alive_seconds=0.02) as state:
        r = httpx.post(state.url + '/api/chat', json=dict(asked('greet'), options=dict(temperature=0, num_predict=5)), timeout=30)
        assert r.headers['content-type'] == 'application/x-ndjson' and r.text.endswith('\n')
        assert [json.loads(line)['done'] for line in r.text[:-1].split('\n')][-1] is True

def test_who_leaves_is_not_written_for():
    with talking(lambda report: scripted_engine(lambda prompt: 'a' * 3000, gate=slowly(0.01))) as (state, client):
        for p in client.chat('m', [dict(role='user', content='x')], stream=True): break
        del p, client
        end = time.perf_counter() + 5
        while state.engine.health().active and time.perf_counter() < end: time.sleep(0.01)
        assert (state.engine.health().active, state.engine.health().cancelled) == (0, 1)

def test_the_same_conversation_has_the_same_tokens_elsewhere(server, client):
    talk = [dict(role='system', content='S'), dict(role='user', content='greet'), dict(role='assistant', content='b'), dict(role='user', content='c')]
    counted = client.chat('any', talk, options=dict(num_predict=2)).prompt_eval_count
    assert httpx.post(server.url + '/v1/chat/completions', json=dict(messages=talk, max_tokens=2)).json()['usage']['prompt_tokens'] == counted
    assert client.chat('any', talk, options=dict(num_predict=2)).prompt_eval_count == counted       # warm

def test_a_model_without_thinking_and_tools_says_so():
    with talking(lambda report: scripted_engine('ok', template=TEMPLATE)) as (_, client):
        for knobs, words in ((dict(think=True), 'does not support thinking'), (dict(tools=TOOLS), 'does not support tools')):
            with pytest.raises(ollama.ResponseError, match=words) as e: client.chat('m', [dict(role='user', content='x')], **knobs)
            assert e.value.status_code == 400
        assert client.show('m').capabilities == ['completion'] and client.chat('m', [dict(role='user', content='x')], think=False).message.content == 'ok'


SHARED = [dict(model=5), dict(stream='yes'), dict(options=5), dict(options=[]), dict(options=dict(temperature=5)), dict(options=dict(temperature='0')), dict(options=dict(num_predict=0)), dict(options=dict(num_ctx=10**9)), dict(options=dict(mirostat=2)), dict(options=dict(temprature=1)),
    dict(options=dict(stop=5)), dict(options=dict(stop=[''])), dict(options=dict(repeat_penalty=1.3, repeat_last_n=32)), dict(format='yaml'), dict(format=5), dict(format=dict(type='nonsense')), dict(think='very'), dict(think=1), dict(keep_alive='soon'), dict(keep_alive=[]),
    dict(logprobs='yes'), dict(top_logprobs=2), dict(logprobs=True, top_logprobs=21)]
MISTAKES = {'/api/chat': [*SHARED, dict(messages=[None]), dict(messages=['x']), dict(messages=[123]), dict(messages=[{}]), dict(messages=[dict(role=123, content='a')]), dict(messages=[dict(role='user', content=123)]), dict(messages=[dict(role='user', content=[])]), dict(messages='x'), dict(messages={}),
                          dict(messages=[dict(role='nobody', content='a')]), dict(messages=[dict(role='user', content='a', images=['aGk='])]), dict(messages=[dict(role='assistant', content='', tool_calls=[dict(function=dict(name='f', arguments='{}'))])]), dict(tools=5), dict(tools=[5]), dict(tools=[{}]),
                          dict(tools=[dict(type='function', function=dict(name='f', parameters=5))]), dict(messages=[dict(role='user', content='x' * 20000)])],
            '/api/generate': [*SHARED, dict(prompt=5), dict(prompt=['a']), dict(suffix='x'), dict(template='x'), dict(context=[1]), dict(images=['aGk=']), dict(raw=True, system='S'), dict(raw='yes'), dict(system=5), dict(prompt='x' * 20000)],
            '/api/show': [dict(model=5), dict(verbose='yes')]}

@pytest.mark.parametrize('path', MISTAKES)
def test_mistakes_are_400_in_this_apis_shape_and_the_server_lives(server, client, path):
    fine = {'/api/chat': dict(model='m', messages=[dict(role='user', content='greet')]), '/api/generate': dict(model='m', prompt='greet'), '/api/show': dict(model='m')}[path]
    with httpx.Client() as http:
        for body in [json.dumps(dict(fine, **m)).encode() for m in MISTAKES[path]] + BROKEN:
            reply = http.post(server.url + path, content=body, headers={'content-type': 'application/json'})
            assert reply.status_code == 400, (body[:100], reply.text[:300])
            assert set(reply.json()) == {'error'} and isinstance(reply.json()['error'], str)
        assert http.get(server.url + path).status_code == 405 and isinstance(http.get(server.url + '/api/nowhere').json()['error'], str)
    assert client.chat(**asked('greet')).message.content == 'Hello there!'
