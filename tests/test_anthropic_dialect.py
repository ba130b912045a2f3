"""The real `anthropic` client against a live server on a real socket: what it adds up from a stream must be the answer that is not streamed, and what it is strict about must be right"""
import asyncio, itertools, json, threading, time
import anthropic, httpx, openai, pydantic, pytest
from dialects import BROKEN, SAID, SCHEMA, engine, failing, raw_events, requests_seen, serving
from support import slowly

TOOLS = [dict(name='weather', description='…', input_schema=SCHEMA), dict(name='clock', input_schema=dict(type='object', properties={}))]

@pytest.fixture(scope='module')
def server():
    with serving() as state: yield state

@pytest.fixture(scope='module')
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key='none') as c: yield c

def asked(prompt, **knobs):
    extra = {k: knobs.pop(k) for k in ('temperature', 'top_p', 'top_k', 'seed') if k in knobs}       # this client has no words for them, but sends them
    return dict(dict(dict(model='any', max_tokens=500, messages=[dict(role='user', content=prompt)], tools=TOOLS), **knobs), extra_body=dict(dict(temperature=0), **extra))

def told(message):
    "A message without what differs from answer to answer"
    out = message.to_dict(exclude_none=True)
    out.pop('id')
    for block in out['content']: block.pop('id', None)
    return out

def both(client, prompt, **knobs):
    whole = client.messages.create(**asked(prompt, **knobs))
    with client.messages.stream(**asked(prompt, **knobs)) as stream:
        final = stream.get_final_message()
    assert told(final) == told(whole)
    return whole


@pytest.mark.parametrize('prompt', SAID)
def test_streamed_is_whole(client, prompt):
    whole = both(client, prompt)
    kinds = {'ponder': ['thinking', 'text'], 'look outside': ['text', 'tool_use'], 'two at once': ['thinking', 'tool_use', 'tool_use'], 'speak after': ['tool_use', 'text'], 'just a call': ['tool_use']}
    assert [b.type for b in whole.content] == kinds.get(prompt, ['text'])
    assert whole.stop_reason == ('tool_use' if prompt in ('look outside', 'two at once', 'speak after', 'just a call') else 'end_turn') and whole.stop_sequence is None
    if prompt in ('greet', 'family', 'nothing'): assert whole.content[0].text == SAID[prompt]

def test_the_blocks_hold_what_was_said(client):
    thinking, text = both(client, 'ponder').content
    assert (thinking.thinking.strip(), text.text) == ('Hm, two and two.', 'It is 4.') and thinking.signature
    text, use = both(client, 'look outside').content
    assert (text.text.strip(), use.name, use.input) == ('I look.', 'weather', {'city': 'Pa"r\nis é', 'days': [1, {'a': None}]}) and use.id.startswith('toolu_')
    _, first, second = both(client, 'two at once').content
    assert (first.name, first.input, second.name, second.input) == ('weather', {'city': 'Oslo'}, 'clock', {}) and first.id != second.id

@pytest.mark.parametrize('prompt', ['family', 'ponder', 'look outside', 'two at once'])
def test_cut_anywhere(client, prompt):
    "The client raises at a block's end whose joined input is no JSON, so a call that was cut has to be closed"
    for limit in range(1, len(SAID[prompt].encode()) + 1, 3):
        message = both(client, prompt, max_tokens=limit)
        assert message.usage.output_tokens <= limit
        if message.stop_reason == 'max_tokens': assert message.usage.output_tokens == limit
        assert all(isinstance(b.input, dict) for b in message.content if b.type == 'tool_use')
        if limit < 8 and prompt in ('ponder', 'two at once'): assert not any(b.type == 'text' and b.text for b in message.content), 'reasoning that was cut is no text'

@pytest.mark.parametrize('prompt,stop,text', [('letters', 'O P Q', 'L M N '), ('ends in xy', 'xyz', 'some xy'), ('greet', 'there', 'Hello ')])
def test_stop_sequences(client, prompt, stop, text):
    message = both(client, prompt, stop_sequences=[stop, 'never'])
    assert message.content[0].text == text
    assert (message.stop_reason, message.stop_sequence) == (('stop_sequence', stop) if stop in SAID[prompt] else ('end_turn', None))

def test_the_order_on_the_wire(server):
    for prompt in ('two at once', 'speak after', 'look outside', 'nothing'):
        events = raw_events(server.url, '/v1/messages', dict(model='m', max_tokens=500, temperature=0, messages=[dict(role='user', content=prompt)], tools=TOOLS))
        names = [name for name, _ in events if name != 'ping']
        assert names[0] == 'message_start' and names[-2:] == ['message_delta', 'message_stop']
        start = events[0][1]['message']
        assert start['content'] == [] and start['usage']['input_tokens'] > 0 and start['stop_reason'] is None
        assert events[-2][1]['usage']['output_tokens'] > 0 and events[-2][1]['delta']['stop_reason']
        open_block, seen = None, 0
        for name, data in events[1:-2]:
            if name == 'content_block_start':
                assert open_block is None and data['index'] == seen
                open_block, seen, block = seen, seen + 1, data['content_block']
                assert {'text': '', 'thinking': '', 'input': {}}[{'text': 'text', 'thinking': 'thinking', 'tool_use': 'input'}[block['type']]] == block[{'text': 'text', 'thinking': 'thinking', 'tool_use': 'input'}[block['type']]]
            elif name == 'content_block_delta':
                assert data['index'] == open_block and data['delta']['type'] in {'text': ('text_delta',), 'thinking': ('thinking_delta', 'signature_delta'), 'tool_use': ('input_json_delta',)}[block['type']]
            elif name == 'content_block_stop': assert data['index'] == open_block; open_block = None
        assert open_block is None

def test_no_half_characters(client):
    with client.messages.stream(**asked('family')) as stream:
        assert '\ufffd' not in ''.join(stream.text_stream)

def test_a_conversation_with_tools_goes_on(client, server):
    "What the answer holds is sent back as it is, and the template sees it"
    seen = []
    def reply(prompt):
        if prompt not in seen: seen.append(prompt)
        return SAID['two at once'] if '<tool_response>' not in prompt else 'Sunny, at noon.'
    with serving(engine(reply)) as state, anthropic.Anthropic(base_url=state.url, api_key='none') as c:
        first = c.messages.create(**asked('go'))
        uses = [b for b in first.content if b.type == 'tool_use']
        messages = [dict(role='user', content='go'), first.to_param() if hasattr(first, 'to_param') else dict(role='assistant', content=first.content),
                    dict(role='user', content=[dict(type='tool_result', tool_use_id=uses[1].id, content=[dict(type='text', text='noon')]), dict(type='tool_result', tool_use_id=uses[0].id, content='rain', is_error=True)])]
        second = c.messages.create(**dict(asked(''), messages=messages))
        assert second.content[0].text == 'Sunny, at noon.'
        prompt = seen[-1]
        assert prompt.index('Two of them.') < prompt.index('"Oslo"') < prompt.index('<tool_response>noon') < prompt.index('<tool_response>Error: rain')
        c.messages.count_tokens(model='any', messages=messages, tools=TOOLS)

@pytest.mark.parametrize('thinking,kinds', [(None, ['thinking', 'text']), (dict(type='adaptive'), ['thinking', 'text']), (dict(type='enabled', budget_tokens=1024), ['thinking', 'text']), (dict(type='disabled'), ['text'])], ids=str)
def test_thinking_is_the_templates(thinking, kinds):
    with serving(engine(lambda prompt: 'Hm.\n</think>\n\nYes.' if prompt.endswith('<think>\n') else 'Yes.', opens=True)) as state, anthropic.Anthropic(base_url=state.url, api_key='none') as c:
        message = both(c, 'a', max_tokens=1500, **(dict(thinking=thinking) if thinking else {}))
        assert [b.type for b in message.content] == kinds and message.content[-1].text == 'Yes.'
        assert (message.usage.output_tokens_details.thinking_tokens > 0) == (len(kinds) == 2)
        if thinking and thinking['type'] == 'adaptive':
            hidden = both(c, 'a', thinking=dict(type='adaptive', display='omitted'))
            assert [b.type for b in hidden.content] == kinds and hidden.content[0].thinking == '' and hidden.content[0].signature


def test_tokens_are_counted_as_they_are_in_an_answer(client):
    for body in (dict(messages=[dict(role='user', content='greet me')]), dict(messages=[dict(role='user', content='a'), dict(role='assistant', content='b'), dict(role='user', content=[dict(type='text', text='c', cache_control=dict(type='ephemeral'))])], system=[dict(type='text', text='S')]),
                 dict(messages=[dict(role='user', content='a')], tools=TOOLS, tool_choice=dict(type='auto'), thinking=dict(type='disabled'))):
        counted = client.messages.count_tokens(model='any', **body).input_tokens
        for _ in range(2):                                                                             # cold and warm: what is in memory already changes nothing
            usage = client.messages.create(model='any', max_tokens=5, **body).usage
            assert usage.input_tokens == counted and usage.cache_read_input_tokens == usage.cache_creation_input_tokens == 0
        with client.messages.stream(model='any', max_tokens=5, **body) as stream: assert stream.get_final_message().usage.input_tokens == counted

def test_the_same_conversation_has_the_same_tokens_elsewhere(client, server):
    counted = client.messages.count_tokens(model='any', system='S', messages=[dict(role='user', content='greet'), dict(role='assistant', content='b'), dict(role='user', content='c')]).input_tokens
    talk = [dict(role='system', content='S'), dict(role='user', content='greet'), dict(role='assistant', content='b'), dict(role='user', content='c')]
    assert httpx.post(server.url + '/v1/chat/completions', json=dict(messages=talk, max_tokens=2)).json()['usage']['prompt_tokens'] == counted
    assert httpx.post(server.url + '/v1/responses', json=dict(input=talk[1:], instructions='S', max_output_tokens=2)).json()['usage']['input_tokens'] == counted
    assert httpx.post(server.url + '/api/chat', json=dict(model='org/tiny', messages=talk, stream=False, options=dict(num_predict=2))).json()['prompt_eval_count'] == counted


DEEP = json.loads('[' * 900 + ']' * 900)
MISTAKES = [dict(tools=[dict(name='f', input_schema=dict(type='object', properties=dict(x=DEEP)))]), dict(messages=[]), dict(messages=[None]), dict(messages=['x']), dict(messages=[123]), dict(messages=[{}]), dict(messages=[dict(role=123, content='a')]), dict(messages=[dict(role='user', content=123)]), dict(messages='x'), dict(messages={}), dict(model=5),
    dict(model=None), dict(max_tokens=0), dict(max_tokens=-1), dict(max_tokens='5'), dict(max_tokens=None), dict(temperature=2.5), dict(temperature='hot'), dict(top_p=-1), dict(stop_sequences='x'), dict(stop_sequences=['']), dict(system=5), dict(system=[5]), dict(thinking=5),
    dict(thinking=dict(type='enabled', budget_tokens=100)), dict(tools=5), dict(tools=[5]), dict(tools=[dict(type='web_search_20250305', name='web_search')]), dict(tool_choice=dict(type='any')), dict(tool_choice=dict(type='tool', name='nobody')), dict(stream='yes'), dict(metadata=5),
    dict(messages=[dict(role='user', content=[dict(type='image', source=dict(type='base64', media_type='image/png', data='AAAA'))])]), dict(messages=[dict(role='user', content='x' * 20000)])]

@pytest.mark.parametrize('path', ['/v1/messages', '/v1/messages/count_tokens'])
def test_mistakes_are_400_in_this_apis_shape_and_the_server_lives(server, path):
    fine = dict(model='m', max_tokens=5, messages=[dict(role='user', content='greet')])
    accepted = 0
    for body in [json.dumps(dict(fine, **m)).encode() for m in MISTAKES] + BROKEN:
        reply = httpx.post(server.url + path, content=body, headers={'content-type': 'application/json'})
        if reply.status_code == 200 and path.endswith('tokens'): accepted += 1; continue             # fields that only an answer has
        assert reply.status_code == 400, (body[:100], reply.text)
        error = reply.json()
        assert set(error) == {'type', 'error', 'request_id'} and error['type'] == 'error' and set(error['error']) == {'type', 'message'} and error['error']['type'] == 'invalid_request_error' and reply.headers['request-id'] == error['request_id']
    assert accepted <= 10
    assert httpx.post(server.url + path, json=fine).status_code == 200

def test_a_mistake_is_sent_once_and_its_reason_arrives(client, server):
    for wrong, words in ((dict(max_tokens=0), 'max_tokens'), (dict(messages=[dict(role='user', content=[dict(type='image', source=dict(type='url', url='x'))])]), 'text only'), (dict(tool_choice=dict(type='tool', name='nobody')), 'nobody'),
                         (dict(messages=[dict(role='user', content='x' * 20000)]), 'prompt is too long: ')):
        before = requests_seen(server)
        with pytest.raises(anthropic.BadRequestError, match=words) as e: client.messages.create(**dict(asked('a'), **wrong))
        assert e.value.type == 'invalid_request_error' if hasattr(e.value, 'type') else True
        assert requests_seen(server) == before + 1

def test_what_the_client_refuses_by_itself(client, server):
    before = requests_seen(server)
    with pytest.raises(ValueError, match='[Ss]treaming'): client.messages.create(**asked('a', max_tokens=30_000))
    assert requests_seen(server) == before

def test_keys():
    with serving(api_key='k') as state:
        for right in (dict(api_key='k'), dict(auth_token='k', api_key=None)):
            with anthropic.Anthropic(base_url=state.url, **right) as c: assert c.messages.create(**asked('greet')).content[0].text == 'Hello there!'
        with anthropic.Anthropic(base_url=state.url, api_key='wrong') as c, pytest.raises(anthropic.AuthenticationError): c.messages.create(**asked('greet'))
        body = dict(model='m', max_tokens=5, messages=[dict(role='user', content='greet')])
        assert httpx.post(state.url + '/v1/messages', json=body, headers={'x-api-key': 'k'}).status_code == 200
        assert httpx.post(state.url + '/v1/messages', json=body).json()['error']['type'] == 'authentication_error'

def test_other_statuses():
    with serving(strict_models=True, body_limit_mb=0.01) as state, anthropic.Anthropic(base_url=state.url, api_key='k') as c:
        with pytest.raises(anthropic.NotFoundError): c.messages.create(**asked('a'))
        with pytest.raises(anthropic.APIStatusError) as e: c.messages.create(**dict(asked('a'), messages=[dict(role='user', content='x' * 20_000)]))
        assert e.value.status_code == 413 and e.value.body['error']['type'] == 'request_too_large'
        assert httpx.post(state.url + '/v1/messages', json=dict(model='org/tiny', max_tokens=5, messages=[dict(role='user', content='greet')])).status_code == 200


def test_a_failure_in_the_middle_of_a_stream(caplog):
    with serving(failing(3)) as state, anthropic.Anthropic(base_url=state.url, api_key='none', max_retries=0) as c:
        with pytest.raises(anthropic.APIStatusError) as e, c.messages.stream(**asked('a', tools=[])) as stream: stream.until_done()
        assert e.value.status_code == 200 and e.value.body['error']['type'] == 'api_error' and 'boom' not in str(e.value)
        with pytest.raises(anthropic.InternalServerError): c.messages.create(**asked('a', tools=[]))

def test_a_client_that_leaves_stops_the_answer_and_a_quiet_stream_pings():
    with serving(engine({'long': 'abcdefghij' * 40}, gate=slowly(0.02)), keep_alive_seconds=0.01) as state:
        with httpx.stream('POST', state.url + '/v1/messages', json=dict(model='m', max_tokens=400, stream=True, messages=[dict(role='user', content='long')])) as r:
            lines = list(itertools.islice(r.iter_lines(), 30))
        end = time.perf_counter() + 1
        while state.engine.health().active: assert time.perf_counter() < end; time.sleep(0.005)
        assert state.engine.health().cancelled == 1
        assert 'event: ping' in lines
        with anthropic.Anthropic(base_url=state.url, api_key='none') as c, c.messages.stream(**asked('long', max_tokens=5)) as stream: assert stream.get_final_text() == 'abcde'


def test_models_in_this_apis_form(client):
    "Other clients of the same path do not send `anthropic-version`, and see OpenAI's form"
    page = client.models.list()
    assert [m.id for m in page] == ['org/tiny'] and page.data[0].type == 'model' and page.data[0].created_at.year > 2020 and page.data[0].max_input_tokens == 4096
    assert client.models.retrieve('org/tiny').display_name == 'org/tiny'
    assert client.models.retrieve('nobody').id == 'org/tiny'     # which answers to any name

def test_a_schema_is_kept_and_a_wrong_one_is_refused(client):
    schema = dict(type='object', properties=dict(sky=dict(enum=['blue', 'grey'])), required=['sky'], additionalProperties=False)
    for prompt in ('greet', 'ponder'):                                                                 # after the reasoning, not within it
        message = both(client, prompt, output_config=dict(format=dict(type='json_schema', schema=schema)), tools=[], max_tokens=1500)
        assert json.loads(message.content[-1].text)['sky'] in ('blue', 'grey')
    with pytest.raises(anthropic.BadRequestError, match='the schema cannot be used'): client.messages.create(**asked('a', output_config=dict(format=dict(type='json_schema', schema=dict(type='string', pattern='['))), tools=[]))

def test_choices_of_tools(client):
    assert [b.type for b in both(client, 'two at once', tool_choice=dict(type='auto', disable_parallel_tool_use=True)).content].count('tool_use') == 1
    assert not any(b.type == 'tool_use' for b in both(client, 'two at once', tool_choice=dict(type='none')).content)
    for choice in (dict(type='any'), dict(type='tool', name='clock')):
        message = both(client, 'just a call', tool_choice=choice)
        assert [b.name for b in message.content if b.type == 'tool_use'] == ['clock'] and message.stop_reason == 'tool_use'
    with pytest.raises(anthropic.BadRequestError, match=r"'tools\[0\].input_schema'|tools\[0\]"): client.messages.create(**asked('a', tools=[dict(name='f', input_schema=dict(type='string'))]))
    with pytest.raises(anthropic.BadRequestError, match=r"'tools\[0\].name'"): client.messages.create(**asked('a', tools=[dict(name='no name', input_schema=dict(type='object'))]))

def test_a_budget_ends_the_thinking():
    with serving(engine({'long': '<think>\n' + 'hm. ' * 400 + '\n</think>\n\nSo.'})) as state, anthropic.Anthropic(base_url=state.url, api_key='none') as c:
        free = c.messages.create(**asked('long', max_tokens=3000, thinking=dict(type='adaptive')))
        bound = both(c, 'long', max_tokens=3000, thinking=dict(type='enabled', budget_tokens=1024))
        assert free.usage.output_tokens_details.thinking_tokens > 1500 and len(bound.content[0].thinking) <= 1024 <= bound.usage.output_tokens

def test_the_effort_reaches_the_template():
    with serving(engine(lambda prompt: prompt.partition('Effort: ')[2][:4] or 'none')) as state, anthropic.Anthropic(base_url=state.url, api_key='none') as c:
        assert c.messages.create(**asked('a', output_config=dict(effort='high'))).content[0].text == 'high'
        assert c.messages.create(**asked('a')).content[0].text == 'none'

def test_the_name_of_a_request_is_one_everywhere(client):
    assert client.messages.create(**asked('greet'))._request_id.startswith('req_')
    with pytest.raises(anthropic.BadRequestError) as e: client.messages.create(**asked('a', max_tokens=0))
    assert e.value.request_id == e.value.body['request_id'] == e.value.response.headers['x-request-id']

def test_a_full_queue_and_a_model_that_loads():
    with serving(engine({'long': 'abcdefghij' * 40}, gate=slowly(0.01), max_queue=1, max_running=1)) as state, anthropic.Anthropic(base_url=state.url, api_key='none', max_retries=0) as c:
        with c.messages.create(**asked('long'), stream=True) as first:
            next(iter(first))
            with c.messages.create(**asked('long'), stream=True):
                with pytest.raises(anthropic.RateLimitError) as e: c.messages.create(**asked('long'))
                assert e.value.body['error']['type'] == 'rate_limit_error' and e.value.response.headers['retry-after']
    go = threading.Event()
    def loading(report):
        go.wait(20)
        return engine()(report)
    with serving(loading, wait_ready=False) as state, anthropic.Anthropic(base_url=state.url, api_key='none', max_retries=0) as c:
        with pytest.raises(anthropic.APIStatusError) as e: c.messages.create(**asked('greet'))
        assert (e.value.status_code, e.value.body['error']['type']) == (503, 'overloaded_error')
        go.set(); state.changed.wait(20)
        assert c.messages.create(**asked('greet')).content[0].text == 'Hello there!'

def test_a_request_as_coding_agents_send_it(client):
    "Everything marked for caching, fields of later versions, a system of several blocks, words of the system in between, results before the user's words"
    marked = dict(cache_control=dict(type='ephemeral', ttl='1h'))
    message = client.messages.create(model='claude-x', max_tokens=300, system=[dict(type='text', text='You code.'), dict(type='text', text='Be brief.', **marked)], metadata=dict(user_id='u'),
        tools=[dict(name='clock', description='…', input_schema={'$schema': 'http://json-schema.org/draft-07/schema#', 'type': 'object', 'properties': {}, 'additionalProperties': False}, **marked)], thinking=dict(type='adaptive'), output_config=dict(effort='medium'),
        messages=[dict(role='user', content=[dict(type='text', text='<reminder>'), dict(type='text', text='what time?', **marked)]), dict(role='assistant', content=[dict(type='thinking', thinking='hm', signature='Eq…'), dict(type='tool_use', id='toolu_1', name='clock', input={}, **marked)]),
                  dict(role='user', content=[dict(type='tool_result', tool_use_id='toolu_1', content=[dict(type='text', text='noon')], is_error=False, **marked), dict(type='text', text='greet me', **marked)])],
        extra_body=dict(context_management=dict(edits=[dict(type='clear_thinking_20251015', keep='all')]), temperature=1, betas=['x']), extra_query=dict(beta='true'))
    assert message.stop_reason in ('end_turn', 'max_tokens', 'tool_use')

XML = '<think>\nTwo.\n</think>\n\nI look.\n<tool_call>\n<function=weather>\n<parameter=city>\nPa"r\nis é 👍\n</parameter>\n<parameter=days>\n[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>'

def test_calls_written_as_xml_become_json_and_may_be_cut_anywhere():
    from support import scripted_engine, thinking_template
    with serving(lambda report: scripted_engine({'go': XML}, template=thinking_template('qwen_xml', opens=False))) as state, anthropic.Anthropic(base_url=state.url, api_key='none') as c:
        for limit in range(3, len(XML.encode()) - 20, 7): both(c, 'go', max_tokens=limit)
        whole = both(c, 'go')
        assert [b.type for b in whole.content] == ['thinking', 'text', 'tool_use'] and whole.content[2].input == {'city': 'Pa"r\nis é 👍', 'days': [1, {'a': None}]}

def test_many_streams_of_two_apis_at_once_and_the_helpers_that_parse(server, client):
    class Thing(pydantic.BaseModel): sky: str
    assert client.messages.parse(**dict(asked('name the sky', tools=[]), output_format=Thing)).parsed_output.sky == 'blue'
    with openai.OpenAI(base_url=server.url + '/v1', api_key='none') as c: assert c.responses.parse(model='m', input='name the sky', text_format=Thing, temperature=0).output_parsed.sky == 'blue'
    async def many():
        async with openai.AsyncOpenAI(base_url=server.url + '/v1', api_key='none') as ours, anthropic.AsyncAnthropic(base_url=server.url, api_key='none') as theirs:
            async def one(number):
                if number % 2:
                    async with theirs.messages.stream(**asked('family')) as stream: return await stream.get_final_text()
                async with ours.responses.stream(model='m', input='family', temperature=0) as stream: return (await stream.get_final_response()).output_text
            return await asyncio.gather(*map(one, range(40)))
    assert set(asyncio.run(many())) == {SAID['family']}
