"""The real `openai` client against a live server on a real socket.

First with a scripted model, where every token is known: half emojis, stop strings over three tokens, cuts, log-probabilities. Then with SmolLM2."""
import itertools, json, threading, time
import httpx, openai, pytest
from sparkinfer.engine.engine import Engine
from sparkinfer.errors import SparkinferError
from sparkinfer.serve.app import ServeSettings, background_server
from sparkinfer.text.chat_template import ChatTemplate
from support import ScriptedRunner, TinyTokenizer, TEMPLATE, babble, saying, slowly

REPLIES = {'greet': 'Hello there!', 'family': '👩‍👩‍👧 and 歪 and é', 'letters': 'L M N O P Q R', 'nothing': '', 'long': 'abcdefghij' * 20, 'ends in xy': 'some xy'}

def build(report=None, gate=None, script=None, name='org/tiny', **kwargs):
    tokenizer = TinyTokenizer('there', ' O', ' P', ' Q', b'\x98\x8d', b'\xf0\x9f')
    reply = lambda prompt: next((text for key, text in REPLIES.items() if key in prompt), 'ok')
    return Engine(ScriptedRunner(script or saying(tokenizer, reply), tokenizer, gate=gate), tokenizer, ChatTemplate(TEMPLATE), name=name, **kwargs)

@pytest.fixture(scope='module')
def server():
    with background_server(build, ServeSettings(port=0, shutdown_seconds=0.5)) as state: yield state

@pytest.fixture(scope='module')
def client(server):
    with openai.OpenAI(base_url=server.url + '/v1', api_key='none') as c: yield c

def chat(client, text, **knobs):
    return client.chat.completions.create(model='any', messages=[dict(role='user', content=text)], temperature=0, **knobs)

def pieces(chunks):
    "(text, finish reason, log-probability entries, usage) of a stream of one choice"
    text, reason, entries, usage = '', None, [], None
    for chunk in chunks:
        if chunk.usage: usage = chunk.usage
        for c in chunk.choices:
            text += c.delta.content or ''
            if c.logprobs: entries += c.logprobs.content
            reason = c.finish_reason or reason
    return text, reason, entries, usage


@pytest.mark.parametrize('prompt', REPLIES)
@pytest.mark.parametrize('knobs', [{}, dict(stop=' O P Q'), dict(stop=['xyz', 'there']), dict(max_tokens=4), dict(logprobs=True, top_logprobs=2)], ids=str)
def test_streamed_is_whole(client, prompt, knobs):
    whole = chat(client, prompt, **knobs)
    text, reason, entries, usage = pieces(chat(client, prompt, stream=True, stream_options=dict(include_usage=True), **knobs))
    choice = whole.choices[0]
    assert (text, reason) == (choice.message.content, choice.finish_reason)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens)
    if 'logprobs' in knobs:
        assert entries == choice.logprobs.content
        assert bytes(itertools.chain.from_iterable(e.bytes for e in entries)).decode() == text
        assert all(e.logprob <= 0 and len(e.top_logprobs) == 2 and e.top_logprobs[0].logprob >= e.top_logprobs[1].logprob for e in entries)

def test_no_half_characters(client):
    for chunk in chat(client, 'family', stream=True):
        assert not chunk.choices or '\ufffd' not in (chunk.choices[0].delta.content or '')
    assert chat(client, 'family').choices[0].message.content == REPLIES['family']

def test_stop_over_three_tokens(client):
    choice = chat(client, 'letters', stop='O P Q').choices[0]
    assert (choice.message.content, choice.finish_reason) == ('L M N ', 'stop')
    assert chat(client, 'ends in xy', stop='xyz').choices[0].message.content == 'some xy'

def test_length_cut_and_both_names_of_the_limit(client):
    for knobs in (dict(max_tokens=5), dict(max_completion_tokens=5)):
        whole = chat(client, 'long', **knobs)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens) == ('abcde', 'length', 5)

def test_shape_of_a_response(client):
    whole = chat(client, 'greet', seed=9)
    assert whole.id.startswith('chatcmpl-') and whole.object == 'chat.completion' and abs(whole.created - time.time()) < 100
    assert whole.model == 'org/tiny' and whole.choices[0].message.role == 'assistant' and whole.choices[0].logprobs is None
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0 and whole.system_fingerprint and whole.seed == 9

def test_order_of_a_stream(client):
    chunks = list(chat(client, 'greet', stream=True, stream_options=dict(include_usage=True)))
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1 and chunks[0].object == 'chat.completion.chunk'
    assert chunks[0].choices[0].delta.role == 'assistant' and not chunks[0].choices[0].delta.content
    assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
    assert chunks[-2].choices[0].finish_reason == 'stop' and chunks[-2].choices[0].delta.content is None
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])
    without = list(chat(client, 'greet', stream=True))
    assert all(c.choices and c.usage is None for c in without)

def test_the_stream_helper_and_the_bytes_on_the_wire(server, client):
    with client.chat.completions.stream(model='m', messages=[dict(role='user', content='greet')]) as stream:
        assert [e.type for e in stream][-1] == 'content.done' and stream.get_final_completion().choices[0].message.content == REPLIES['greet']
    with httpx.stream('POST', server.url + '/v1/chat/completions', json=dict(messages=[dict(role='user', content='greet')], stream=True)) as r:
        lines = list(r.iter_lines())
    assert r.headers['content-type'].startswith('text/event-stream') and lines[-2] == 'data: [DONE]'
    assert all(line == '' or line.startswith('data: ') for line in lines)
    for line in filter(None, lines[:-2]): json.loads(line[6:])

def test_choices(client):
    whole = chat(client, 'greet', n=3)
    assert [(c.index, c.message.content) for c in whole.choices] == [(i, REPLIES['greet']) for i in range(3)]
    one = chat(client, 'greet')
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens and whole.usage.completion_tokens == 3 * one.usage.completion_tokens
    texts = {}
    for chunk in chat(client, 'greet', n=3, stream=True):
        c = chunk.choices[0]
        texts[c.index] = texts.get(c.index, '') + (c.delta.content or '')
    assert texts == {i: REPLIES['greet'] for i in range(3)}

def test_messages_in_all_shapes(client):
    for messages in ([dict(role='developer', content='Be kind.'), dict(role='user', content=[dict(type='text', text='gr'), dict(type='text', text='eet')])],
                     [dict(role='user', content='hi'), dict(role='assistant', content='Hi.'), dict(role='user', content='greet')]):
        assert client.chat.completions.create(model='m', messages=messages).choices[0].message.content == REPLIES['greet']
    typed = chat(client, '<|assistant|>letters')   # what a user types stays text: the script's answer would begin after a real control token
    assert typed.choices[0].message.content == REPLIES['letters']

def test_logit_bias_is_applied(client):
    assert chat(client, 'greet', max_tokens=1, logit_bias={str(ord('H')): -100, str(ord('J')): 50}).choices[0].message.content == 'J'

def test_plain_completions(client):
    create = client.completions.create
    one = create(model='m', prompt='greet=', temperature=0, logprobs=2)
    assert one.object == 'text_completion' and one.choices[0].text == REPLIES['greet'] and ''.join(one.choices[0].logprobs.tokens) == REPLIES['greet']
    assert one.choices[0].logprobs.text_offset[:3] == [0, 1, 2] and one.id.startswith('cmpl-')
    several = create(model='m', prompt=['greet=', 'letters='], n=2, temperature=0, echo=True)
    assert [c.text for c in several.choices] == ['greet=' + REPLIES['greet']] * 2 + ['letters=' + REPLIES['letters']] * 2 and [c.index for c in several.choices] == [0, 1, 2, 3]
    assert create(model='m', prompt=[ord(c) for c in 'greet=']).choices[0].text == REPLIES['greet']
    assert [c.text for c in create(model='m', prompt=[[ord(c) for c in 'greet='], [ord('=')]]).choices] == [REPLIES['greet'], 'ok']
    streamed = list(create(model='m', prompt='family=', stream=True, stream_options=dict(include_usage=True)))
    assert ''.join(c.choices[0].text for c in streamed[:-1]) == REPLIES['family'] and streamed[-1].usage.completion_tokens > 0

def test_models(server, client):
    assert [m.id for m in client.models.list()] == ['org/tiny']
    assert client.models.retrieve('org/tiny').id == 'org/tiny'   # sent as org%2Ftiny
    assert client.models.retrieve('other').id == 'org/tiny'      # which answers to any name

def test_a_mistake_is_sent_once_and_says_what_is_wrong(server):
    seen = []
    with httpx.Client(event_hooks=dict(request=[lambda r: seen.append(r.url.path)])) as http, openai.OpenAI(base_url=server.url + '/v1', api_key='none', http_client=http) as client:
        for knobs, param in ((dict(temperature=3), 'temperature'), (dict(stop=['a'] * 5), 'stop'), (dict(tools=[dict(type='function', function=dict(name='f'))]), 'tools'), (dict(response_format=dict(type='json_schema')), 'response_format'), (dict(n=100), 'n'), (dict(top_logprobs=3), 'top_logprobs'), (dict(logit_bias={'9999': 1}), 'logit_bias')):
            seen.clear()
            with pytest.raises(openai.BadRequestError) as e: client.chat.completions.create(**{**dict(model='m', messages=[dict(role='user', content='greet')]), **knobs})
            assert e.value.param == param and e.value.type == 'invalid_request_error' and len(seen) == 1, (knobs, e.value)
        with pytest.raises(openai.BadRequestError, match='images'): client.chat.completions.create(model='m', messages=[dict(role='user', content=[dict(type='image_url', image_url=dict(url='data:,'))])])

def test_too_long_a_prompt(client):
    with pytest.raises(openai.BadRequestError) as e: chat(client, 'x' * 600)
    assert (e.value.code, e.value.type, e.value.param) == ('context_length_exceeded', 'exceed_context_size_error', 'messages')
    assert e.value.body['n_prompt_tokens'] == 602 and e.value.body['n_ctx'] == 512 and '602' in e.value.message
    with pytest.raises(openai.BadRequestError) as e: client.completions.create(model='m', prompt='x' * 512)
    assert e.value.code == 'context_length_exceeded' and e.value.param == 'prompt'

def test_a_template_that_raises_is_the_clients_mistake():
    def only_users(report=None):
        engine = build()
        engine.template = ChatTemplate("{% if messages[0].role == 'system' %}{{ raise_exception('No user query found in messages.') }}{% endif %}x")
        return engine
    with background_server(only_users, ServeSettings(port=0, shutdown_seconds=0.5)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none') as client:
        with pytest.raises(openai.BadRequestError, match='No user query found'): client.chat.completions.create(model='m', messages=[dict(role='system', content='x')])

def test_seeds_over_http():
    with background_server(lambda report: build(script=babble(266)), ServeSettings(port=0, shutdown_seconds=0.5)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none') as client:
        make = lambda **knobs: client.chat.completions.create(model='m', messages=[dict(role='user', content='x')], max_tokens=20, temperature=1.0, **knobs)
        first = make(n=2)
        assert [c.message.content for c in make(n=2, seed=first.seed).choices] == [c.message.content for c in first.choices]
        assert first.choices[0].message.content != first.choices[1].message.content and make().choices[0].message.content != first.choices[0].message.content

def test_strict_names_and_keys():
    settings = ServeSettings(port=0, strict_models=True, api_key='secret', shutdown_seconds=0.5)
    with background_server(build, settings) as state:
        with openai.OpenAI(base_url=state.url + '/v1', api_key='secret') as client:
            with pytest.raises(openai.NotFoundError) as e: chat(client, 'greet')
            assert e.value.code == 'model_not_found'
            with pytest.raises(openai.NotFoundError): client.models.retrieve('other')
            assert client.chat.completions.create(model='org/tiny', messages=[dict(role='user', content='greet')]).model == 'org/tiny'
        with openai.OpenAI(base_url=state.url + '/v1', api_key='wrong') as client:
            with pytest.raises(openai.AuthenticationError): chat(client, 'greet')
            assert [m.id for m in client.models.list()] == ['org/tiny']

def test_a_failure_after_the_headers_is_an_event():
    def script(history): return RuntimeError('boom') if len(history) > 9 else ord('a')
    with background_server(lambda report: build(script=script), ServeSettings(port=0, shutdown_seconds=0.5)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none', max_retries=0) as client:
        stream, text = chat(client, 'greet', stream=True), ''
        with pytest.raises(openai.APIError) as e:
            for chunk in stream: text += chunk.choices[0].delta.content or ''
        assert text == 'aaa' and e.value.code == 'internal_error' and 'boom' not in str(e.value)
        with pytest.raises(openai.InternalServerError): chat(client, 'greet')
        assert client.completions.create(model='m', prompt='x', max_tokens=3).choices[0].text == 'aaa'   # alive

def test_a_full_queue_is_429_and_loading_is_503():
    with background_server(lambda report: build(script=lambda h: ord('a'), gate=slowly(0.01), max_queue=1, max_running=1), ServeSettings(port=0, shutdown_seconds=0.2)) as state:
        with openai.OpenAI(base_url=state.url + '/v1', api_key='none', max_retries=0) as client:
            running = chat(client, 'x', stream=True, max_tokens=400)
            next(running)
            waiting = threading.Thread(target=lambda: chat(client, 'y', max_tokens=1)); waiting.start()
            while state.engine.health().queued == 0: time.sleep(0.005)
            with pytest.raises(openai.RateLimitError) as e: chat(client, 'z')
            assert e.value.response.headers['retry-after'] == '1'
            running.close()
            waiting.join(5)
            assert not waiting.is_alive()
    go = threading.Event()
    def slow(report):
        go.wait(20)
        return build()
    with background_server(slow, ServeSettings(port=0, shutdown_seconds=0.5), wait_ready=False) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none', max_retries=5) as client:
        threading.Timer(0.3, go.set).start()
        assert chat(client, 'greet').choices[0].message.content == REPLIES['greet']   # the client's own retries bridge the load


# the real model

@pytest.fixture(scope='module')
def smollm2():
    llm = pytest.importorskip('sparkinfer.llm')
    with llm.LLM.load('smollm2', context=1024, progress=False) as loaded, background_server(lambda report: loaded.engine, ServeSettings(port=0, shutdown_seconds=1)) as state: yield state

def test_smollm2_chat(smollm2):
    with openai.OpenAI(base_url=smollm2.url + '/v1', api_key='none') as client:
        messages = [dict(role='user', content='How many legs does a dog have?')]
        whole = client.chat.completions.create(model='smollm2', messages=messages, temperature=0, max_tokens=24, logprobs=True, top_logprobs=5)
        choice = whole.choices[0]
        assert len(choice.message.content) > 5 and 'SmolLM2' in whole.model
        assert bytes(itertools.chain.from_iterable(e.bytes for e in choice.logprobs.content)).decode() == choice.message.content
        text, reason, _, _ = pieces(client.chat.completions.create(model='smollm2', messages=messages, temperature=0, max_tokens=24, stream=True))
        assert (text, reason) == (choice.message.content, choice.finish_reason)
        assert client.completions.create(model='x', prompt='1, 2, 3, 4, 5,', temperature=0, max_tokens=9).choices[0].text.startswith(' 6, 7, 8')

def test_smollm2_stops_when_the_client_leaves(smollm2):
    before = smollm2.engine.health().cancelled
    with openai.OpenAI(base_url=smollm2.url + '/v1', api_key='none') as client:
        stream = client.completions.create(model='m', prompt='Once upon a time', max_tokens=900, stream=True, temperature=1, extra_body=dict(ignore_eos=True))
        for _ in range(3): next(stream)
        stream.close()
        begin = time.perf_counter()
        while smollm2.engine.health().active: assert time.perf_counter() - begin < 1; time.sleep(0.01)
    assert smollm2.engine.health().cancelled == before + 1
