"""A vocabulary that spells `<think>` and `<tool_call>` with several tokens, and a limit that falls on each of them in turn: in every API the stream adds up to the whole answer, and half a tag is no text."""
import json
import httpx, pytest
from dialects import SAID, SCHEMA, engine, serving
from support import scripted_engine, thinking_template

FUNCTION = dict(name='weather', description='…', parameters=SCHEMA), dict(name='clock', parameters=dict(type='object', properties={}))
TOOLS = [dict(type='function', function=f) for f in FUNCTION]
FORMS = {'/v1/chat/completions': lambda n: dict(tools=TOOLS, max_tokens=n), '/api/chat': lambda n: dict(model='m', tools=TOOLS, options=dict(temperature=0, num_predict=n)),
         '/v1/messages': lambda n: dict(model='m', max_tokens=n, tools=[dict(name=f['name'], input_schema=f['parameters']) for f in FUNCTION]),
         '/v1/responses': lambda n: dict(max_output_tokens=n, tools=[dict(type='function', **f) for f in FUNCTION])}
PARTS = {'ponder': ('Hm, two and two.', 'It is 4.', []), 'look outside': ('', 'I look.', ['weather']), 'two at once': ('Two of them.', '', ['weather', 'clock']), 'speak after': ('', 'And that is it.', ['clock'])}

@pytest.fixture(scope='module')
def servers():
    "Prompts that open reasoning and prompts that leave it to the model"
    opened = {key: text.removeprefix('<think>\n') if text.startswith('<think>') else '</think>' + text for key, text in SAID.items()}
    with serving(lambda report: scripted_engine(SAID, template=thinking_template(opens=False), markup=())) as own, serving(lambda report: scripted_engine(opened, template=thinking_template(), markup=())) as opens:
        yield {False: (own, SAID), True: (opens, opened)}

def whole(path, reply):
    "(reasoning, text, [name of each call], why it ended) of an answer in one piece"
    if path == '/v1/chat/completions':
        m = reply['choices'][0]['message']
        return m.get('reasoning_content') or '', m['content'] or '', [c['function']['name'] for c in m.get('tool_calls', [])], reply['choices'][0]['finish_reason']
    if path == '/api/chat': return reply['message'].get('thinking', ''), reply['message']['content'], [c['function']['name'] for c in reply['message'].get('tool_calls', [])], reply['done_reason']
    blocks = reply['content'] if path == '/v1/messages' else reply['output']
    of = lambda kind: [b for b in blocks if b['type'] == kind]
    if path == '/v1/messages': return ''.join(b['thinking'] for b in of('thinking')), ''.join(b['text'] for b in of('text')), [b['name'] for b in of('tool_use')], reply['stop_reason']
    text = lambda items: ''.join(part['text'] for item in items for part in item['content'])
    return text(of('reasoning')), text(of('message')), [b['name'] for b in of('function_call')], reply['status']

def joined(path, text):
    "The same from a stream"
    lines = [json.loads(line.removeprefix('data: ')) for line in text.splitlines() if line.startswith(('{', 'data: {'))]
    if path == '/v1/chat/completions':
        deltas = [c['choices'][0]['delta'] for c in lines]
        return ''.join(d.get('reasoning_content', '') for d in deltas), ''.join(d.get('content') or '' for d in deltas), [c['function']['name'] for d in deltas for c in d.get('tool_calls', []) if 'name' in c['function']], lines[-1]['choices'][0]['finish_reason']
    if path == '/api/chat': return ''.join(l['message'].get('thinking', '') for l in lines), ''.join(l['message']['content'] for l in lines), [c['function']['name'] for l in lines for c in l['message'].get('tool_calls', [])], lines[-1]['done_reason']
    if path == '/v1/messages':
        deltas = [l['delta'] for l in lines if l['type'] == 'content_block_delta']
        return ''.join(d.get('thinking', '') for d in deltas), ''.join(d.get('text', '') for d in deltas), [l['content_block']['name'] for l in lines if l['type'] == 'content_block_start' and l['content_block']['type'] == 'tool_use'], lines[-2]['delta']['stop_reason']
    said = lambda kind: ''.join(l['delta'] for l in lines if l['type'] == f'response.{kind}.delta')
    return said('reasoning_text'), said('output_text'), [l['item']['name'] for l in lines if l['type'] == 'response.output_item.added' and l['item']['type'] == 'function_call'], lines[-1]['response']['status']

CASES = [('/v1/chat/completions', prompt, opens) for prompt in PARTS for opens in (False, True)] + [(path, prompt, prompt == 'ponder') for path in list(FORMS)[1:] for prompt in ('ponder', 'two at once')]

@pytest.mark.parametrize('path,prompt,opens', CASES)
def test_every_cut(servers, path, prompt, opens):
    state, said = servers[opens]
    reasoning, content, calls = PARTS[prompt]
    ends = len(said[prompt].encode()) + 1                                                     # the end is a token too
    with httpx.Client(base_url=state.url) as http:
        for n in range(1, ends + 1):
            body = dict(FORMS[path](n), temperature=0, stream=False, **{'input' if path == '/v1/responses' else 'messages': [dict(role='user', content=prompt)]})
            answer = whole(path, http.post(path, json=body).json())
            assert answer == joined(path, http.post(path, json=dict(body, stream=True)).text), n
            assert reasoning.startswith(answer[0].strip()) and content.startswith(answer[1].strip()), (n, answer)      # no piece of a tag in either
            assert calls[:len(answer[2])] == answer[2] and (answer[3] in ('length', 'max_tokens', 'incomplete')) == (n < ends), (n, answer)
        assert (answer[0].strip(), answer[1].strip(), answer[2]) == (reasoning, content, calls)
