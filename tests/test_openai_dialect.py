"""OpenAI's chat API with reasoning, tools and formats: the real client against a live server whose model says what a script tells it.

For every answer, what the client joins from the stream equals what it gets in one piece."""
import json
from types import SimpleNamespace
import httpx, openai, pytest
from sparkinfer.engine.engine import Engine
from sparkinfer.serve.app import ServeSettings, background_server
from sparkinfer.text.chat_template import ChatTemplate
from support import MARKUP, ScriptedRunner, TinyTokenizer, TEMPLATE, scripted_engine, slowly, thinking_template

def called(name, **arguments): return '<tool_call>\n' + json.dumps(dict(name=name, arguments=arguments), ensure_ascii=False) + '\n</tool_call>'
def tool(name='weather', strict=None, **properties):
    function = dict(name=name, description='what it does', parameters=dict(type='object', properties=properties or dict(city=dict(type='string'))))
    return dict(type='function', function=function | (dict(strict=strict) if strict is not None else {}))

SAID = {   # the prompt ends inside of reasoning
    'emoji': ['Hm', '</think>', '\n\n', b'\xf0', b'\x9f\x91', b'\xa9\xe2\x80', b'\x8d', '👧', ' and ', b'\xc3', b'\xa9'],
    'letters': ['</think>', '\n\n', 'L M', ' N O', ' P', ' Q', ' R'],
    'one call': ['It', ' is', ' asked.', '\n', '</think>', '\n\n', *called('weather', city='Pa"ris €', days=[1, {'a': None}])],
    'two calls': 'Both.\n</think>\n\nLet me see.\n' + called('weather', city='Oslo') + '\n' + called('clock'),
    'straight': 'Hm.\n</think>\n\n' + called('weather', city='Oslo') + '\n' + called('clock'),
    'call in thought': 'I could say ' + called('weather', city='X') + ' but no.\n</think>\n\nNo call.',
    'only thought': 'I think and think',
    'nothing': '</think>\n\n',
    'late tag': '</think>\n\nuse <think> and </think> and <tool_call> tags',
    'plain': 'So.\n</think>\n\nHello there!',
}
TOOLS = [tool(), tool('clock', zone=dict(type='string'))]

@pytest.fixture(scope='module', params=['tokens', 'bytes'])
def server(request):
    "The markup as tokens of the vocabulary, and cut into bytes"
    build = lambda report: scripted_engine(SAID, markup=MARKUP if request.param == 'tokens' else ())
    with background_server(build, ServeSettings(port=0, shutdown_seconds=0.5)) as state: yield state

@pytest.fixture(scope='module')
def client(server):
    with openai.OpenAI(base_url=server.url + '/v1', api_key='none') as c: yield c

def joined(chunks):
    "What clients make of a stream: the message of each choice, its reason and log-probabilities; and the usage"
    choices, usage = {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for c in chunk.choices:
            m = choices.setdefault(c.index, SimpleNamespace(role='', content='', reasoning='', calls=[], reason=None, entries=[], order=[]))
            m.role += c.delta.role or ''
            for name, kind in (('content', 'content'), ('reasoning_content', 'reasoning')):
                if text := getattr(c.delta, name, None): setattr(m, kind, getattr(m, kind) + text); m.order.append(kind)
            for part in c.delta.tool_calls or []:
                m.order.append('call')
                if part.index == len(m.calls):
                    assert part.id and part.type == 'function' and part.function.name and part.function.arguments == ''
                    m.calls.append([part.id, part.function.name, ''])
                else: assert part.index == len(m.calls) - 1 and part.id is None and part.function.name is None and part.type is None
                m.calls[part.index][2] += part.function.arguments or ''
            if c.logprobs: m.entries += c.logprobs.content
            if c.finish_reason: assert m.reason is None; m.reason = c.finish_reason
            else: assert m.reason is None, 'a piece after the end'
    return choices, usage

def both(client, prompt, **knobs):
    "The first choice, the same streamed and whole"
    ask = dict(model='any', messages=[dict(role='user', content=prompt)], temperature=0, **knobs)
    whole = client.chat.completions.create(**ask)
    choices, usage = joined(client.chat.completions.create(**ask, stream=True, stream_options=dict(include_usage=True)))
    assert sorted(choices) == list(range(len(whole.choices)))
    for c in whole.choices:
        m, message = choices[c.index], c.message
        assert (m.role, m.content, m.reasoning, m.reason) == (message.role, message.content or '', getattr(message, 'reasoning_content', ''), c.finish_reason)
        assert [call[1:] for call in m.calls] == [[t.function.name, t.function.arguments] for t in message.tool_calls or []]
        assert len({call[0] for call in m.calls}) == len(m.calls) and message.refusal is None
        assert m.entries == (c.logprobs.content if c.logprobs else [])
        order = [k for k, before in zip(m.order, ['', *m.order]) if k != before]
        if c.finish_reason == 'length' and order[-2:] == ['call', 'content']: order.pop()                      # half a tag, where a tag is several tokens
        assert order == ['reasoning'][:bool(m.reasoning)] + ['content'][:'content' in order] + ['call'][:bool(m.calls)]
    counts = lambda u: (u.prompt_tokens, u.completion_tokens, u.total_tokens, u.completion_tokens_details.reasoning_tokens)
    assert counts(usage) == counts(whole.usage)
    return choices[0], whole

@pytest.mark.parametrize('prompt', SAID)
@pytest.mark.parametrize('knobs', [{}, dict(tools=TOOLS), dict(tools=TOOLS, parallel_tool_calls=False), dict(tools=TOOLS, tool_choice='none'), dict(n=2, tools=TOOLS), dict(logprobs=True, top_logprobs=2, tools=TOOLS), dict(stop=['N O P', 'there'])], ids=lambda k: '+'.join(k) or 'bare')
def test_streamed_is_whole(client, prompt, knobs): both(client, prompt, **knobs)

def test_what_is_said(client):
    answer = lambda prompt, **knobs: (lambda m: (m.reasoning, m.content, [(c[1], json.loads(c[2])) for c in m.calls], m.reason))(both(client, prompt, tools=TOOLS, **knobs)[0])
    assert answer('emoji') == ('Hm', '👩\u200d👧 and é', [], 'stop')
    assert answer('one call') == ('It is asked.', '', [('weather', dict(city='Pa"ris €', days=[1, {'a': None}]))], 'tool_calls')
    assert answer('two calls') == ('Both.', 'Let me see.', [('weather', dict(city='Oslo')), ('clock', {})], 'tool_calls')
    assert answer('two calls', parallel_tool_calls=False)[2] == [('weather', dict(city='Oslo'))]
    assert answer('call in thought') == ('I could say ' + called('weather', city='X') + ' but no.', 'No call.', [], 'stop')
    assert answer('only thought') == ('I think and think', '', [], 'stop') and answer('nothing')[1] == ''
    assert answer('letters', stop='N O P') == ('', 'L M ', [], 'stop')
    assert both(client, 'one call')[0].content.startswith('<tool_call>')                       # nobody offered tools: it is text

@pytest.mark.parametrize('prompt', ['one call', 'two calls', 'emoji', 'call in thought'])
def test_cut_after_every_token(client, prompt):
    full = both(client, prompt, tools=TOOLS)[1]
    seen = set()
    for limit in range(1, full.usage.completion_tokens, 1 if full.usage.completion_tokens < 40 else 7):
        m, whole = both(client, prompt, tools=TOOLS, max_tokens=limit)
        assert m.reason == 'length' and whole.usage.completion_tokens == limit
        assert '</think>' not in m.reasoning + m.content and '<tool_call>' not in m.content
        whole_text, text = full.choices[0].message.content or '', m.content.rstrip('\ufffd')       # a cut may fall into a character or, byte by byte, into a tag
        assert whole_text.startswith(text.rstrip()) or any(text.endswith('<tool_call>'[:k]) and whole_text.startswith(text[:-k].rstrip()) for k in range(1, 11))
        seen.add('call' if m.calls else 'content' if m.content else 'reasoning')
    assert 'reasoning' in seen

def test_log_probabilities_spell_the_whole_text(client):
    m = both(client, 'emoji', logprobs=True)[0]
    text = b''.join(bytes(e.bytes) for e in m.entries).decode()
    assert text == 'Hm</think>\n\n👩\u200d👧 and é' and any(e.token.startswith('bytes:') for e in m.entries)

def test_reasoning_switches(client):
    seen = lambda **knobs: both(client, 'plain', **knobs)[0]
    assert (seen().reasoning, seen().content) == ('So.', 'Hello there!')
    for off in (dict(reasoning_effort='none'), dict(extra_body=dict(chat_template_kwargs=dict(enable_thinking=False))), dict(extra_body=dict(enable_thinking=False)), dict(extra_body=dict(reasoning=dict(enabled=False))), dict(extra_body=dict(thinking=dict(type='disabled'))), dict(extra_body=dict(thinking_budget=0))):
        assert seen(**off).reasoning == '' and seen(**off).content.startswith('So.'), off      # the script goes on as before: it shows what the template wrote
    for hidden in (dict(exclude=True), ):
        m, whole = both(client, 'plain', extra_body=dict(reasoning=hidden))
        assert (m.reasoning, m.content) == ('', 'Hello there!') and whole.usage.completion_tokens_details.reasoning_tokens > 0
    m, whole = both(client, 'only thought', extra_body=dict(reasoning=dict(max_tokens=4)), max_tokens=40)
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens <= 4 and len(m.reasoning) == 4
    prompt = lambda **body: httpx.post(str(client.base_url).replace('/v1/', '/apply-template'), json=dict(messages=[dict(role='user', content='x')], **body)).json()['prompt']
    assert 'Effort: low' in prompt(reasoning_effort='low') and prompt().endswith('<think>\n') and prompt(enable_thinking=False).endswith('</think>\n\n')

def test_required_and_named_calls_hold_a_model_that_would_not(client):
    exact = [tool('pick', which=dict(enum=['left']))]
    exact[0]['function']['parameters'] |= dict(required=['which'], additionalProperties=False)
    for choice in ('required', dict(type='function', function=dict(name='pick'))):
        m, whole = both(client, 'plain', tools=exact, tool_choice=choice, parallel_tool_calls=False, max_tokens=1000)
        assert (m.reasoning, m.content, m.reason) == ('So.', '', 'tool_calls') and [(c[1], json.loads(c[2])) for c in m.calls] == [('pick', dict(which='left'))]

def test_formats_hold_too(client):
    exact = dict(type='object', properties=dict(x=dict(const=5)), required=['x'], additionalProperties=False)
    for knobs in (dict(response_format=dict(type='json_schema', json_schema=dict(name='x', schema=exact, strict=True))), dict(extra_body=dict(guided_json=exact)), dict(extra_body=dict(structured_outputs=dict(json=exact))), dict(extra_body=dict(json_schema=exact))):
        m = both(client, 'plain', max_tokens=1000, **knobs)[0]
        assert m.reasoning == 'So.' and json.loads(m.content) == dict(x=5) and m.reason == 'stop'
    for knobs, text in ((dict(guided_choice=['blue']), 'blue'), (dict(guided_regex='a{3}'), 'aaa'), (dict(grammar='root ::= "yes"'), 'yes'), (dict(guided_grammar='start: "no"'), 'no')):
        assert both(client, 'plain', max_tokens=1000, extra_body=knobs)[0].content == text
    raw = client.completions.create(model='m', prompt='plain', temperature=0, extra_body=dict(guided_regex='a{3}'))
    assert raw.choices[0].text == 'aaa'

def test_tools_and_a_format(client):
    "Either calls or text of that format: frameworks ask for both, an agent's tools and the shape of its last word"
    exact = dict(type='object', properties=dict(x=dict(const=5)), required=['x'], additionalProperties=False)
    knobs = dict(tools=TOOLS, response_format=dict(type='json_schema', json_schema=dict(name='x', schema=exact)), max_tokens=1000)
    m = both(client, 'plain', logit_bias={str(ord('<')): -9}, **knobs)[0]                     # where all that is allowed is equally likely, the first byte would be that of a tag
    assert json.loads(m.content) == dict(x=5) and m.calls == [] and m.reason == 'stop'
    m = both(client, 'plain', tool_choice='none', **knobs)[0]
    assert json.loads(m.content) == dict(x=5)
    m = both(client, 'straight', **knobs)[0]
    assert [(c[1], json.loads(c[2])) for c in m.calls] == [('weather', dict(city='Oslo')), ('clock', {})] and m.content == '' and m.reason == 'tool_calls'

MISTAKES = [   # (fields, param)
    (dict(tools=5), 'tools'), (dict(tools=[None]), 'tools'), (dict(tools=[{}]), 'tools'), (dict(tools=[dict(type='web_search')]), 'tools'), (dict(tools=[tool('a b')]), 'tools'), (dict(tools=[tool(), tool()]), 'tools'), (dict(tools=[tool(x=5)]), 'tools'), (dict(tools=[tool(x=dict(type='text'))]), 'tools'),
    (dict(tool_choice='required'), 'tool_choice'), (dict(tools=TOOLS, tool_choice='any'), 'tool_choice'), (dict(tools=TOOLS, tool_choice=dict(type='function', function=dict(name='other'))), 'tool_choice'), (dict(tools=TOOLS, tool_choice=5), 'tool_choice'), (dict(parallel_tool_calls='x'), 'parallel_tool_calls'),
    (dict(response_format=dict(type='json_schema')), 'response_format'), (dict(response_format=dict(type='json_schema', json_schema=dict(name='x'))), 'response_format'), (dict(response_format=dict(type='json_schema', json_schema=dict(name='x', schema=dict(type='nonsense')))), 'response_format'), (dict(guided_regex='('), 'response_format'),
    (dict(grammar='root ::='), 'response_format'), (dict(guided_json={}, guided_regex='a'), 'guided_regex'), (dict(reasoning_effort='absurd'), 'reasoning_effort'), (dict(reasoning=dict(max_tokens='x')), 'reasoning'), (dict(thinking='x'), 'thinking'), (dict(thinking_budget=-9), 'thinking_budget'), (dict(chat_template_kwargs=dict(messages=[])), 'chat_template_kwargs'),
    (dict(messages=[dict(role='assistant', tool_calls=[dict(id='1', type='function', function=dict(name='f', arguments='{'))])]), 'messages'), (dict(messages=[dict(role='tool', content=5)]), 'messages'),
]

@pytest.mark.parametrize('fields, param', MISTAKES, ids=str)
def test_mistakes_are_seen_once_and_named(server, fields, param):
    seen = []
    with httpx.Client(event_hooks=dict(request=[lambda r: seen.append(r.url.path)])) as http, openai.OpenAI(base_url=server.url + '/v1', api_key='none', http_client=http) as client:
        for stream in (False, True):
            seen.clear()
            ask = dict(dict(model='m', messages=[dict(role='user', content='plain')]), **{k: v for k, v in fields.items() if k == 'messages'})
            with pytest.raises(openai.BadRequestError) as e: client.chat.completions.create(**ask, stream=stream, extra_body={k: v for k, v in fields.items() if k != 'messages'})
            assert e.value.param == param and e.value.type == 'invalid_request_error' and len(seen) == 1, e.value
    assert server.engine.health().failed == 0

def test_an_agents_loop(client):
    "A call, its result, an answer: what the client was sent can be sent back"
    messages = [dict(role='user', content='one call')]
    for streamed in (False, True):
        if streamed:
            with client.chat.completions.stream(model='m', messages=messages, tools=TOOLS, temperature=0) as stream: message = stream.get_final_completion().choices[0].message
        else: message = client.chat.completions.create(model='m', messages=messages, tools=TOOLS, temperature=0).choices[0].message
        back = messages + [message.model_dump(exclude_none=True), dict(role='tool', tool_call_id=message.tool_calls[0].id, content='sunny; plain')]
        prompt = httpx.post(str(client.base_url).replace('/v1/', '/apply-template'), json=dict(messages=json.loads(json.dumps(back)), tools=TOOLS)).json()['prompt']
        assert '<think>\nIt is asked.\n</think>' in prompt and '"city": "Pa' in prompt and '<tool_response>sunny; plain</tool_response>' in prompt
        assert client.chat.completions.create(model='m', messages=back, tools=TOOLS, temperature=0).usage.prompt_tokens > 0

def test_xml_calls():
    said = dict(go='Hm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo "x"\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>')
    tools = [tool(city=dict(type='string'), days=dict(type='integer'))]
    with background_server(lambda report: scripted_engine(said, template=thinking_template('qwen_xml')), ServeSettings(port=0, shutdown_seconds=0.5)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none') as client:
        m, _ = both(client, 'go', tools=tools)
        assert [(c[1], json.loads(c[2])) for c in m.calls] == [('weather', dict(city='Oslo "x"', days=3))] and m.reason == 'tool_calls'

def test_a_model_that_opens_its_reasoning_itself():
    with background_server(lambda report: scripted_engine(dict(first='<think>\nHm.\n</think>\n\nYes.', second='No.'), template=thinking_template(opens=False)), ServeSettings(port=0, shutdown_seconds=0.5)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none') as client:
        assert [(m.reasoning, m.content) for m in (both(client, p)[0] for p in ('first', 'second'))] == [('Hm.', 'Yes.'), ('', 'No.')]
        m = both(client, 'first', extra_body=dict(guided_choice=['blue']), max_tokens=60)[0]
        assert (m.reasoning, m.content) == ('Hm.', 'blue')

def test_tools_of_a_model_that_has_none_are_refused():
    with background_server(lambda report: scripted_engine('x', template=TEMPLATE), ServeSettings(port=0, shutdown_seconds=0.5)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none') as client:
        with pytest.raises(openai.BadRequestError) as e: client.chat.completions.create(model='m', messages=[dict(role='user', content='x')], tools=TOOLS)
        assert e.value.param == 'tools' and e.value.code == 'unsupported_parameter'

def test_what_a_retry_would_not_mend_is_not_retried():
    "The client sends what failed with 5xx three times in all, unless told not to"
    with background_server(lambda report: scripted_engine('abc' * 200, gate=slowly(0.005)), ServeSettings(port=0, shutdown_seconds=0.2)) as state:
        seen = []
        with httpx.Client(event_hooks=dict(request=[lambda r: seen.append(r.url.path)])) as http, openai.OpenAI(base_url=state.url + '/v1', api_key='none', http_client=http) as client:
            with pytest.raises(openai.InternalServerError) as e: client.chat.completions.create(model='m', messages=[dict(role='user', content='x')], extra_body=dict(max_seconds=0.05))
            assert e.value.status_code == 504 and len(seen) == 1
    with background_server(lambda report: scripted_engine(lambda prompt: 1 / 0), ServeSettings(port=0, shutdown_seconds=0.2)) as state:
        seen.clear()
        with httpx.Client(event_hooks=dict(request=[lambda r: seen.append(r.url.path)])) as http, openai.OpenAI(base_url=state.url + '/v1', api_key='none', http_client=http) as client:
            with pytest.raises(openai.InternalServerError): client.chat.completions.create(model='m', messages=[dict(role='user', content='x')])
            assert len(seen) == 1

def test_tokens_both_ways(server, client):
    post = lambda path, **body: httpx.post(server.url + path, json=body)
    messages = [dict(role='user', content='plain 👍')]
    for path in ('/v1/tokenize', '/tokenize'):
        counted = post(path, messages=messages, tools=TOOLS).json()
        assert counted['count'] == len(counted['tokens']) == client.chat.completions.create(model='m', messages=messages, tools=TOOLS, max_tokens=1).usage.prompt_tokens and counted['max_context'] == 4096
    ids = post('/tokenize', content='é<think>').json()['tokens']
    assert post('/detokenize', tokens=ids).json()['content'] == 'é<think>' and post('/v1/detokenize', tokens=ids).json()['prompt'] == 'é<think>'
    assert post('/v1/tokenize').status_code == post('/detokenize', tokens=[10**9]).status_code == post('/detokenize', tokens='x').status_code == post('/tokenize', messages=[]).status_code == 400
    assert httpx.get(server.url + '/props').json()['default_generation_settings']['n_ctx'] == 4096
