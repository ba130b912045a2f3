"""The real `openai` client's Responses API against a live server on a real socket: its helper is strict about the order of events, so what it adds up must be what the end says"""
import itertools, json, time
import httpx, openai, pytest
from dialects import BROKEN, SAID, SCHEMA, engine, failing, raw_events, requests_seen, serving
from support import slowly

TOOLS = [dict(type='function', name='weather', description='…', parameters=SCHEMA, strict=False), dict(type='function', name='clock', parameters=None, strict=False)]
ENDS = ('response.completed', 'response.incomplete', 'response.failed')

@pytest.fixture(scope='module')
def server():
    with serving() as state: yield state

@pytest.fixture(scope='module')
def client(server):
    with openai.OpenAI(base_url=server.url + '/v1', api_key='none') as c: yield c

def asked(prompt, **knobs):
    extra = {k: knobs.pop(k) for k in ('seed', 'stop') if k in knobs}
    return dict(dict(model='any', input=prompt, temperature=0, tools=TOOLS), **knobs) | (dict(extra_body=extra) if extra else {})

def told(response):
    "A response without what differs from answer to answer"
    out = response.to_dict(exclude_none=True)
    for name in ('id', 'created_at', 'completed_at', 'seed'): out.pop(name, None)
    out['usage'].pop('input_tokens_details')
    for item in out['output']:
        for name in ('id', 'call_id'): item.pop(name, None)
    return out

def added_up(events):
    "The output that raw events add up to, with every rule of the order checked"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ['response.created', 'response.in_progress'] and events[-1].type in ENDS and not any(e.type in ENDS for e in events[:-1])
    items, texts, opened, part = {}, {}, None, None
    for e in events[2:-1]:
        if e.type == 'response.output_item.added':
            assert opened is None and e.output_index == len(items)
            opened, items[e.output_index], texts[e.output_index] = e.output_index, e.item.id, ''
            assert e.item.status == 'in_progress'
            continue
        assert e.output_index == opened and getattr(e, 'item_id', items[opened]) == items[opened]
        if e.type.endswith('part.added'): part = e
        if e.type.endswith('.delta'):
            assert 'arguments' in e.type or part is not None
            texts[opened] += e.delta
            if e.type == 'response.output_text.delta': assert e.content_index == 0 and e.logprobs is not None
        if e.type.endswith(('text.done', 'arguments.done')): assert (e.arguments if 'arguments' in e.type else e.text) == texts[opened]
        if e.type.endswith('part.done'): assert e.part.text == texts[opened]; part = None
        if e.type == 'response.output_item.done':
            assert e.item.id == items[opened] and e.item.status in ('completed', 'incomplete') and e.item.to_dict() == events[-1].response.output[opened].to_dict()
            opened = None
    assert opened is None and len(items) == len(events[-1].response.output)
    assert all(e.response.id == events[0].response.id for e in events if hasattr(e, 'response'))
    return events[-1].response

def both(client, prompt, **knobs):
    whole = client.responses.create(**asked(prompt, **knobs))
    final = added_up(list(client.responses.create(**asked(prompt, **knobs), stream=True)))
    assert told(final) == told(whole)
    return whole


@pytest.mark.parametrize('prompt', SAID)
def test_streamed_is_whole(client, prompt):
    whole = both(client, prompt)
    kinds = {'ponder': ['reasoning', 'message'], 'look outside': ['message', 'function_call'], 'two at once': ['reasoning', 'function_call', 'function_call'], 'speak after': ['function_call', 'message'], 'just a call': ['function_call']}
    assert [i.type for i in whole.output] == kinds.get(prompt, ['message'])
    assert (whole.status, whole.incomplete_details, whole.error) == ('completed', None, None) and whole.completed_at
    if prompt in ('greet', 'family', 'nothing'): assert whole.output_text == SAID[prompt]

@pytest.mark.parametrize('prompt', SAID)
def test_the_helper_adds_up_the_same(client, prompt):
    with client.responses.stream(**asked(prompt)) as stream: final = stream.get_final_response()
    whole, helped = told(client.responses.create(**asked(prompt))), told(final)
    for item in helped['output']:
        item.pop('parsed_arguments', None)
        for part in item.get('content', []): part.pop('parsed', None)
    assert helped == whole

def test_the_items_hold_what_was_said(client):
    thought, message = both(client, 'ponder').output
    assert (thought.content[0].text.strip(), thought.summary, message.content[0].text, message.content[0].annotations) == ('Hm, two and two.', [], 'It is 4.', [])
    message, call = both(client, 'look outside').output
    assert (call.name, json.loads(call.arguments), call.status) == ('weather', {'city': 'Pa"r\nis é', 'days': [1, {'a': None}]}, 'completed') and call.call_id.startswith('call_') and call.id.startswith('fc_')
    _, first, second = both(client, 'two at once').output
    assert [(c.name, json.loads(c.arguments)) for c in (first, second)] == [('weather', {'city': 'Oslo'}), ('clock', {})] and first.call_id != second.call_id

@pytest.mark.parametrize('prompt', ['family', 'ponder', 'look outside', 'two at once'])
def test_cut_anywhere(client, prompt):
    for limit in range(1, len(SAID[prompt].encode()) + 1, 3):
        whole = both(client, prompt, max_output_tokens=limit)
        assert whole.usage.output_tokens <= limit
        if whole.status == 'incomplete': assert whole.incomplete_details.reason == 'max_output_tokens' and whole.usage.output_tokens == limit and whole.completed_at is None
        else: assert all(i.status == 'completed' for i in whole.output)
        if limit < 8 and prompt in ('ponder', 'two at once'): assert whole.output_text == '', 'reasoning that was cut is no text'

def test_the_helper_wants_a_complete_answer(client):
    "Known: after a cut the helper says that no `response.completed` came. Reading the events shows the answer."
    with pytest.raises(RuntimeError, match='response.completed'), client.responses.stream(**asked('greet', max_output_tokens=3)) as stream: stream.get_final_response()
    assert list(client.responses.create(**asked('greet', max_output_tokens=3), stream=True))[-1].type == 'response.incomplete'

@pytest.mark.parametrize('prompt,stop,text', [('letters', 'O P Q', 'L M N '), ('ends in xy', 'xyz', 'some xy'), ('greet', 'there', 'Hello ')])
def test_stop_strings(client, prompt, stop, text):
    whole = both(client, prompt, stop=[stop])
    assert (whole.output_text, whole.status) == (text, 'completed')

def test_events_are_named_and_comments_are_ignored(server):
    events = raw_events(server.url, '/v1/responses', dict(input='two at once', tools=TOOLS, temperature=0))
    assert [e['sequence_number'] for _, e in events] == list(range(len(events))) and events[-1][0] == 'response.completed'

def test_no_half_characters_and_log_probabilities(client):
    events = list(client.responses.create(**asked('family', top_logprobs=2), stream=True))
    assert all('\ufffd' not in e.delta for e in events if e.type == 'response.output_text.delta')
    part = both(client, 'family', include=['message.output_text.logprobs'], top_logprobs=2).output[0].content[0]
    assert bytes(itertools.chain.from_iterable(t.bytes for t in part.logprobs)).decode() == part.text == SAID['family']
    assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in part.logprobs)
    streamed = [t for e in events if e.type == 'response.output_text.delta' for t in e.logprobs]
    assert len(streamed) == len(part.logprobs)

def test_a_summary_is_the_reasoning_and_encrypted_reasoning_comes_back(client):
    thought = both(client, 'ponder', reasoning=dict(summary='auto'), include=['reasoning.encrypted_content'], store=False).output[0]
    assert thought.summary[0].text.strip() == 'Hm, two and two.' and not thought.content and thought.encrypted_content
    again = client.responses.create(**asked([dict(role='user', content='ponder'), dict(type='reasoning', id=thought.id, summary=[], encrypted_content=thought.encrypted_content), dict(role='assistant', content='4'), dict(role='user', content='greet')]))
    plain = client.responses.create(**asked([dict(role='user', content='ponder'), dict(type='reasoning', id='rs_x', summary=[], content=[dict(type='reasoning_text', text=thought.summary[0].text)]), dict(role='assistant', content='4'), dict(role='user', content='greet')]))
    assert again.usage.input_tokens == plain.usage.input_tokens


def test_a_conversation_with_tools_goes_on_in_three_ways():
    "The model sees the same prompt when the client sends everything back, when the server remembers, and when it refers to items"
    seen = []
    def reply(prompt):
        if prompt not in seen: seen.append(prompt)
        return SAID['two at once'] if '<tool_response>' not in prompt else 'Sunny, at noon.'
    with serving(engine(reply)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none') as c:
        first = c.responses.create(**asked('go'))
        results = [dict(type='function_call_output', call_id=i.call_id, output='noon') for i in first.output if i.type == 'function_call']
        ways = [c.responses.create(**asked([dict(role='user', content='go'), *(i.to_dict() for i in first.output), *results])), c.responses.create(**asked(results, previous_response_id=first.id)),
                c.responses.create(**asked([dict(role='user', content='go'), *(dict(type='item_reference', id=i.id) for i in first.output), *results]))]
        assert {w.output_text for w in ways} == {'Sunny, at noon.'} and len({w.usage.input_tokens for w in ways}) == 1 and len(seen) == 2
        assert seen[1].index('Two of them.') < seen[1].index('"Oslo"') < seen[1].index('<tool_response>noon')
        with pytest.raises(openai.BadRequestError, match='has no result'): c.responses.create(**asked('and?', previous_response_id=first.id))

def test_what_is_kept(client, server):
    first = client.responses.create(**asked('greet', metadata=dict(topic='x'), instructions='Be brief.'))
    second = client.responses.create(**asked([dict(role='user', content='letters')], previous_response_id=first.id))
    kept = client.responses.retrieve(first.id)
    assert kept.to_dict() == first.to_dict() and kept.usage == first.usage and kept.metadata == dict(topic='x')
    items = client.responses.input_items.list(second.id, order='asc').data
    assert [(i.role, i.content[0].text) for i in items] == [('user', 'greet'), ('assistant', 'Hello there!'), ('user', 'letters')] and all(i.id for i in items)
    assert [i.id for i in client.responses.input_items.list(second.id, limit=1)] == [i.id for i in reversed(items)]          # page after page
    streamed = list(client.responses.create(**asked('greet', previous_response_id=second.id), stream=True))[-1].response
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    client.responses.delete(first.id)
    for gone in (lambda: client.responses.retrieve(first.id), lambda: client.responses.delete(first.id), lambda: client.responses.input_items.list(first.id), lambda: client.responses.cancel(first.id),
                 lambda: client.responses.create(**asked('a', previous_response_id=first.id)), lambda: client.responses.retrieve(client.responses.create(**asked('greet', store=False)).id)):
        before = requests_seen(server)
        with pytest.raises(openai.NotFoundError): gone()
        assert requests_seen(server) - before <= 2
    assert client.responses.create(**asked('greet', previous_response_id=second.id)).output_text == 'Hello there!'           # the younger does not need the older
    with pytest.raises(openai.BadRequestError, match='background'): client.responses.cancel(second.id)
    assert client.responses.input_tokens.count(model='any', input='greet', tools=TOOLS).input_tokens == client.responses.create(**asked('greet')).usage.input_tokens

def test_the_memory_is_bounded_and_guarded():
    with serving(keep_responses_mb=0.01, api_key='k') as state, openai.OpenAI(base_url=state.url + '/v1', api_key='k') as c:
        first, *others = [c.responses.create(model='m', input='greet ' + 'x' * 500, temperature=0) for _ in range(10)]
        assert 2 <= len(state.store) < 10 and state.store.size <= 10_000
        assert c.responses.retrieve(others[-1].id).output_text == 'Hello there!'
        with pytest.raises(openai.NotFoundError, match='forgotten'): c.responses.retrieve(first.id)
        for method, path in (('GET', ''), ('DELETE', ''), ('GET', '/input_items'), ('POST', '/cancel')): assert httpx.request(method, f'{state.url}/v1/responses/{others[-1].id}{path}').status_code == 401
    with serving(keep_responses_mb=0) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='k') as c:
        whole = c.responses.create(model='m', input='greet', temperature=0)
        assert whole.output_text == 'Hello there!' and whole.store is False
        with pytest.raises(openai.NotFoundError): c.responses.create(model='m', input='a', previous_response_id=whole.id)

def test_truncation():
    with serving(engine({'end': 'ok'}, max_context=512)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none') as c:
        long = [dict(role=role, content=f'{n}' * 60) for n in range(8) for role in ('user', 'assistant')] + [dict(role='user', content='end')]
        with pytest.raises(openai.BadRequestError) as e: c.responses.create(model='m', input=long)
        assert (e.value.code, e.value.param) == ('context_length_exceeded', 'input')
        shorter = c.responses.create(model='m', input=long, truncation='auto', temperature=0)
        assert (shorter.output_text, shorter.truncation) == ('ok', 'auto') and 300 < shorter.usage.input_tokens < 512


DEEP = json.loads('[' * 900 + ']' * 900)
MISTAKES = [dict(tools=[dict(type='function', name='f', x=DEEP)]), dict(input=[dict(role='user', content='a', x=DEEP)]), dict(text=dict(x=DEEP)), dict(input=None), dict(input=5), dict(input=[]), dict(input={}), dict(input=[None]), dict(input=['x']), dict(input=[123]), dict(input=[{}]), dict(input=[dict(role=123, content='a')]), dict(input=[dict(role='user', content=123)]), dict(input=[dict(role='user')]), dict(model=5),
    dict(max_output_tokens=0), dict(max_output_tokens=-1), dict(max_output_tokens='5'), dict(temperature=2.5), dict(temperature='hot'), dict(top_p=-1), dict(top_logprobs=21), dict(instructions=5), dict(tools=5), dict(tools=[5]), dict(tools=[dict(type='web_search')]), dict(tools=[dict(type='file_search')]),
    dict(tools=[dict(type='mcp', server_label='x')]), dict(tools=[dict(type='custom', name='x')]), dict(tool_choice='required'), dict(tool_choice=dict(type='function', name='nobody')), dict(tool_choice=dict(type='web_search')), dict(stream='yes'), dict(metadata=5), dict(metadata=dict(a=5)), dict(store='yes'),
    dict(previous_response_id=5), dict(truncation='some'), dict(reasoning=5), dict(reasoning=dict(effort='most')), dict(text=5), dict(text=dict(format=dict(type='json_schema', name='x'))), dict(text=dict(format='json')), dict(background=True), dict(conversation='c'), dict(prompt=dict(id='p')), dict(include=5),
    dict(input=[dict(role='user', content=[dict(type='input_image', image_url='data:image/png;base64,AAAA')])]), dict(input=[dict(type='computer_call')]), dict(input='x' * 20000), dict(seed=2**70), dict(stop=5)]

@pytest.mark.parametrize('path', ['/v1/responses', '/v1/responses/input_tokens'])
def test_mistakes_are_400_and_the_server_lives(server, path):
    for body in [json.dumps(dict(dict(input='greet'), **m)).encode() for m in MISTAKES] + BROKEN:
        reply = httpx.post(server.url + path, content=body, headers={'content-type': 'application/json'})
        if path.endswith('tokens') and b'x' * 20000 in body: assert reply.json()['input_tokens'] > 20000; continue      # its length is what the client wants to know
        assert reply.status_code == 400, (body[:100], reply.text)
        assert {'message', 'type', 'param', 'code'} <= set(reply.json()['error'])
    assert httpx.post(server.url + path, json=dict(input='greet')).status_code == 200

def test_a_mistake_is_sent_once_and_its_reason_arrives(client, server):
    for wrong, words in ((dict(max_output_tokens=0), 'max_output_tokens'), (dict(tools=[dict(type='web_search')]), 'web_search'), (dict(background=True), 'background'), (dict(input='x' * 20000), 'context')):
        before = requests_seen(server)
        with pytest.raises(openai.BadRequestError, match=words): client.responses.create(**dict(asked('a'), **wrong))
        assert requests_seen(server) == before + 1

def test_a_failure_in_the_middle_of_a_stream():
    with serving(failing(3)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none', max_retries=0) as c:
        events = list(c.responses.create(**asked('a', tools=[]), stream=True))
        assert events[-1].type == 'response.failed' and (events[-1].response.status, events[-1].response.error.code) == ('failed', 'server_error') and 'boom' not in events[-1].to_json()
        assert events[-1].response.output[0].content[0].text == 'aaa' and events[-1].response.output[0].status == 'incomplete'
        assert c.responses.retrieve(events[-1].response.id).status == 'failed'
        with pytest.raises(openai.InternalServerError): c.responses.create(**asked('a', tools=[]))

def test_a_client_that_leaves_stops_the_answer():
    with serving(engine({'long': 'abcdefghij' * 40}, gate=slowly(0.02))) as state:
        with httpx.stream('POST', state.url + '/v1/responses', json=dict(input='long', stream=True)) as r: list(itertools.islice(r.iter_lines(), 20))
        end = time.perf_counter() + 1
        while state.engine.health().active: assert time.perf_counter() < end; time.sleep(0.005)
        assert state.engine.health().cancelled == 1 and len(state.store) == 0

def test_a_schema_is_kept_and_a_wrong_one_is_refused(client):
    schema = dict(type='object', properties=dict(sky=dict(enum=['blue', 'grey'])), required=['sky'], additionalProperties=False)
    for prompt in ('greet', 'ponder'):                                                                 # after the reasoning, not within it
        whole = both(client, prompt, text=dict(format=dict(type='json_schema', name='sky', schema=schema, strict=True)), tools=[], max_output_tokens=1500)
        assert json.loads(whole.output_text)['sky'] in ('blue', 'grey')
    assert json.loads(both(client, 'an object', text=dict(format=dict(type='json_object')), tools=[]).output_text) == {'a': [1, 'é']}
    with pytest.raises(openai.BadRequestError) as e: client.responses.create(**asked('a', text=dict(format=dict(type='json_schema', name='x', schema=dict(type='string', pattern='['))), tools=[]))
    assert e.value.param == 'text.format'

def test_choices_of_tools(client):
    kinds = lambda response: [i.type for i in response.output]
    assert kinds(both(client, 'two at once', parallel_tool_calls=False)).count('function_call') == 1
    assert 'function_call' not in kinds(both(client, 'two at once', tool_choice='none'))
    for choice in ('required', dict(type='function', name='clock'), dict(type='allowed_tools', mode='required', tools=[dict(type='function', name='clock')])):
        assert [i.name for i in both(client, 'just a call', tool_choice=choice).output if i.type == 'function_call'] == ['clock']
    with pytest.raises(openai.BadRequestError, match=r"'tools\[0\].parameters'"): client.responses.create(**asked('a', tools=[dict(type='function', name='f', parameters=dict(type='string'))]))
    with pytest.raises(openai.BadRequestError, match=r"'tools\[0\].name'"): client.responses.create(**asked('a', tools=[dict(type='function', name='no name')]))

def test_effort_and_verbosity_reach_the_template():
    with serving(engine(lambda prompt: prompt.partition('Effort: ')[2][:4] or 'none')) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none') as c:
        assert [c.responses.create(**asked('a', **more)).output_text for more in (dict(reasoning=dict(effort='high')), {})] == ['high', 'none']
