"""What a model and a client can write that no JSON and no HTTP/1.1 has room for: calls that are left unfinished, numbers beyond all bounds, halves of characters, offers of another protocol"""
import json, socket
import httpx, pytest
from sparkinfer.serve.app import HEAD_LIMIT
from dialects import SCHEMA, raw_events, serving, engine
from support import MARKUP, Answering, TinyTokenizer

INSIDE = '<tool_call>\n{"name": "weather", "arguments": {"city": "rm -rf /tm'
SAID = {'greet': 'Hello there!', 'leave it': 'I look.\n' + INSIDE, 'lost sense': INSIDE + '", "days": few}}\n</tool_call>', 'half a pair': INSIDE + '\\ud800", "\\udc00": 1}}\n</tool_call>',
        'too large': INSIDE + '", "days": 1e400}}\n</tool_call>', 'in a string': '<tool_call>\n{"name": "weather", "arguments": "{\\"days\\": NaN}"}\n</tool_call>', 'two calls': '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n' + INSIDE}
UNFINISHED = [('leave it', None), ('leave it', 'rf'), ('lost sense', None), ('too large', None), ('two calls', None)]

@pytest.fixture(scope='module')
def server():
    with serving(engine(SAID)) as state: yield state

def post(server, path, **body):
    answer = httpx.post(server.url + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()

def ask(text): return [dict(role='user', content=text)]
FUNCTION = dict(name='weather', parameters=SCHEMA)
CHAT_TOOLS, FLAT_TOOLS, CLAUDE_TOOLS = [dict(type='function', function=FUNCTION)], [dict(type='function', **FUNCTION)], [dict(name='weather', input_schema=SCHEMA)]

def chat(server, text, stop=None, **more): return post(server, '/v1/chat/completions', messages=ask(text), tools=CHAT_TOOLS, stop=stop, **more)['choices'][0]

@pytest.mark.parametrize('text, stop', UNFINISHED)
def test_an_unfinished_call_is_not_handed_to_a_chat_client(server, text, stop):
    whole = chat(server, text, stop)
    assert whole['finish_reason'] == 'stop' and 'rm -' in whole['message']['content'] and '<tool_call>' in whole['message']['content']
    for call in whole['message'].get('tool_calls', []): assert json.loads(call['function']['arguments']) == dict(city='Oslo')
    if not stop: assert SAID[text].replace('\n', '').endswith(whole['message']['content'].replace('\n', ''))
    lines = httpx.post(server.url + '/v1/chat/completions', json=dict(messages=ask(text), tools=CHAT_TOOLS, stop=stop, stream=True), timeout=30).text.split('\n\n')
    reasons = [json.loads(line[6:])['choices'][0]['finish_reason'] for line in lines if line.startswith('data: {')]
    assert [r for r in reasons if r] == ['stop']

@pytest.mark.parametrize('text, stop', UNFINISHED)
def test_nor_to_an_anthropic_client(server, text, stop):
    body = dict(model='m', messages=ask(text), tools=CLAUDE_TOOLS, max_tokens=500, **(dict(stop_sequences=[stop]) if stop else {}))
    whole = post(server, '/v1/messages', **body)
    assert whole['stop_reason'] == ('stop_sequence' if stop else 'end_turn') and 'rm -' in ''.join(b.get('text', '') for b in whole['content'])
    assert [b['input'] for b in whole['content'] if b['type'] == 'tool_use'] == ([dict(city='Oslo')] if text == 'two calls' else [])
    assert [e['delta']['stop_reason'] for name, e in raw_events(server.url, '/v1/messages', body) if name == 'message_delta'] == [whole['stop_reason']]

@pytest.mark.parametrize('text, stop', UNFINISHED)
def test_nor_lost_by_ollama(server, text, stop):
    body = dict(messages=ask(text), tools=CHAT_TOOLS, options=dict(stop=[stop]) if stop else {})
    whole = post(server, '/api/chat', stream=False, **body)
    lines = [json.loads(line) for line in httpx.post(server.url + '/api/chat', json=body, timeout=30).text.splitlines()]
    assert whole['done_reason'] == 'stop' and 'rm -' in whole['message']['content'] and ''.join(line['message']['content'] for line in lines) == whole['message']['content']
    assert len(whole['message'].get('tool_calls', [])) == (text == 'two calls')

@pytest.mark.parametrize('text, stop', UNFINISHED)
def test_in_a_response_the_item_and_the_whole_are_incomplete(server, text, stop):
    body = dict(input=text, tools=FLAT_TOOLS, **(dict(stop=stop) if stop else {}))
    whole, last = post(server, '/v1/responses', **body), raw_events(server.url, '/v1/responses', body)[-1]
    for document in (whole, last[1]['response']):
        assert (document['status'], document['incomplete_details']) == ('incomplete', dict(reason='unfinished_call'))
        assert [i['status'] for i in document['output'] if i['type'] == 'function_call'][-1] == 'incomplete'
    assert last[0] == 'response.incomplete'

def test_a_limit_still_says_that_it_was_one(server):
    cut = chat(server, 'leave it', max_tokens=60)
    assert cut['finish_reason'] == 'length' and cut['message']['tool_calls'] and cut['message']['content'] == 'I look.'
    assert post(server, '/v1/messages', model='m', messages=ask('leave it'), tools=CLAUDE_TOOLS, max_tokens=60)['stop_reason'] == 'max_tokens'

@pytest.mark.parametrize('text', ['half a pair', 'too large', 'in a string'])
def test_what_json_cannot_carry_fails_in_no_dialect(server, text):
    post(server, '/v1/messages', model='m', messages=ask(text), tools=CLAUDE_TOOLS, max_tokens=500)
    post(server, '/api/chat', messages=ask(text), tools=CHAT_TOOLS, stream=False)
    post(server, '/v1/responses', input=text, tools=FLAT_TOOLS)
    message = chat(server, text)['message']
    for call in message.get('tool_calls', []):
        assert '\ufffd' in json.loads(call['function']['arguments'])['city']
        post(server, '/v1/chat/completions', messages=[*ask(text), message, dict(role='tool', tool_call_id=call['id'], content='x'), *ask('greet')], tools=CHAT_TOOLS)

def test_half_a_pair_in_the_arguments_of_an_earlier_call_is_no_fault_of_the_server(server):
    call = dict(id='a', type='function', function=dict(name='weather', arguments='{"city": "\\ud800", "days": 1e400}'))
    answer = httpx.post(server.url + '/v1/chat/completions', json=dict(messages=[*ask('x'), dict(role='assistant', tool_calls=[call]), dict(role='tool', tool_call_id='a', content='x'), *ask('greet')]), timeout=30)
    assert answer.status_code in (200, 400), answer.text

@pytest.mark.parametrize('stream', [False, True])
def test_a_number_beyond_all_bounds_is_refused_before_anything_is_computed(server, stream):
    body = '{"input": "greet", "stream": %s, "text": {"format": {"type": "text", "x": 1e400}}}' % str(stream).lower()
    answer = httpx.post(server.url + '/v1/responses', content=body, headers={'content-type': 'application/json'}, timeout=30)
    assert answer.status_code == 400 and '1e400' in answer.json()['error']['message']
    answer = httpx.post(server.url + '/v1/responses', content=body.replace('1e400', '1' + '0' * 400), headers={'content-type': 'application/json'}, timeout=30)
    assert answer.status_code == 200

def raw(server, data):
    "Everything that the server says to these bytes until it closes"
    host, port = server.url.removeprefix('http://').split(':')
    with socket.create_connection((host, int(port)), timeout=20) as s:
        s.sendall(data)
        out = b''
        while part := s.recv(65536): out += part
    return out

BODY = json.dumps(dict(prompt='greet', max_tokens=3)).encode()
def request(*headers): return b'\r\n'.join([b'POST /v1/completions HTTP/1.1', b'Host: x', b'Content-Type: application/json', b'Content-Length: %d' % len(BODY), *headers]) + b'\r\n\r\n' + BODY

@pytest.mark.parametrize('protocol', [b'h2c', b'websocket', b'foo/2'])
def test_an_offer_to_upgrade_is_ignored(server, protocol, caplog):
    offer = (b'Upgrade: ' + protocol, b'HTTP2-Settings: AAMAAABkAAQAAP__')
    for data in (request(b'Connection: Upgrade, HTTP2-Settings, close', *offer), request() + request(b'Connection: Upgrade, HTTP2-Settings', *offer) + request(b'Connection: Upgrade', *offer) + request(b'Connection: close')):
        said = raw(server, data)
        assert said.count(b'HTTP/1.1 200 OK') == data.count(b'POST') and b'not valid JSON' not in said, said
    assert 'pgrade' not in caplog.text and 'WebSocket' not in caplog.text

def test_an_offer_that_comes_byte_by_byte(server):
    host, port = server.url.removeprefix('http://').split(':')
    with socket.create_connection((host, int(port)), timeout=20) as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request(b'Connection: Upgrade, close', b'Upgrade: h2c'): s.sendall(bytes([byte]))
        assert s.recv(65536).startswith(b'HTTP/1.1 200 OK')

@pytest.mark.parametrize('size', [HEAD_LIMIT - 1000, HEAD_LIMIT + 1000, 100_000, 200_000])
@pytest.mark.parametrize('form', ['one line', 'many lines', 'path'])
def test_the_limit_of_a_head_counts_however_it_arrives(server, size, form):
    from sparkinfer.serve.app import Connection
    said = []
    for step in (None, 1 << 14):
        line, headers = ('/' + 'a' * size, '') if form == 'path' else ('/health', 'X: ' + 'a' * size + '\r\n' if form == 'one line' else ('X: ' + 'a' * 95 + '\r\n') * (size // 100))
        data = f'GET {line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n'.encode()
        said.append(head_alone(Connection, data, step or len(data)))
    assert said == [size > HEAD_LIMIT] * 2

def head_alone(kind, data, step):
    "Whether a connection refuses this head, fed in steps"
    import asyncio
    from types import SimpleNamespace
    from uvicorn import Config
    from uvicorn.server import ServerState
    async def app(scope, receive, send): pass
    class Transport(asyncio.Transport):
        def __init__(self): self.said, self.closed = b'', False
        def write(self, data): self.said += data
        def close(self): self.closed = True
        def is_closing(self): return self.closed
        def get_extra_info(self, name, default=None): return default
        def pause_reading(self): pass
        def resume_reading(self): pass
        def get_write_buffer_size(self): return 0
    async def feed():
        config = Config(app, http=kind, ws='none', lifespan='off', log_level='critical')
        config.load()
        connection, transport = kind(config=config, server_state=ServerState(), app_state={}), Transport()
        connection.connection_made(transport)
        for at in range(0, len(data), step):
            if not transport.closed: connection.data_received(data[at:at + step])
        refused = b'longer than' in transport.said
        connection._unset_keepalive_if_required()
        return refused
    return asyncio.run(feed())

def test_an_item_is_named_by_a_string(server):
    "A list or an object for the id is no key of a store"
    for id in ([1], {}, None, 5):
        answer = httpx.post(server.url + '/v1/responses', json=dict(input=[dict(type='item_reference', id=id)]), timeout=30)
        assert answer.status_code == 400 and answer.json()['error']['type'] == 'invalid_request_error', answer.text
    kept = post(server, '/v1/responses', input='greet')['id']
    for limit in ('0', '101', '00000000199999', '١'):
        assert httpx.get(f'{server.url}/v1/responses/{kept}/input_items', params=dict(limit=limit), timeout=30).status_code == 400

OFF = {'/v1/chat/completions': [dict(thinking_budget=0), dict(enable_thinking=False), dict(enable_thinking=False, thinking_budget=2), dict(reasoning_effort='none')],
       '/v1/messages': [dict(thinking=dict(type='disabled'), max_tokens=200)], '/api/chat': [dict(think=False, stream=False)], '/v1/responses': [dict(reasoning=dict(effort='none'))]}

def test_reasoning_that_nobody_wants_is_closed_where_it_begins():
    "A model that opens it by itself, against what was asked: `</think>` is forced at once, so nothing of it is computed or shown; where reasoning is wanted it is there, and counted"
    def opens(history, step):
        said = TinyTokenizer(markup=MARKUP).decode(history[len(history) - step:], skip_special=False)
        return (said.split('</think>')[1], 'It is 4.') if '</think>' in said else (said, '<think>Hm, on and on.</think>')
    with serving(engine('ok')) as state:
        model = state.engine.runner
        ids = lambda text: state.engine.tokenizer.encode(text, special=True)
        class Stubborn(Answering):
            def __call__(self, history, step):
                so_far, reply = opens(history, step)
                rest = ids(reply)[len(ids(so_far)):]
                return rest[0] if rest else 256
        model.script = Stubborn(state.engine.tokenizer, '')
        free = post(state, '/v1/chat/completions', messages=ask('x'))
        assert free['choices'][0]['message']['reasoning_content'] == 'Hm, on and on.' and free['usage']['completion_tokens_details']['reasoning_tokens'] == 14
        for path, bodies in OFF.items():
            for body in bodies:
                said = json.dumps(post(state, path, model='m', **({'input': 'x'} if path == '/v1/responses' else {'messages': ask('x')}), **body))
                assert 'It is 4.' in said and 'Hm' not in said and '"reasoning_tokens": 14' not in said, (path, body, said)

def test_half_a_call_is_not_gone_on_with(server):
    "What follows would be half a call too, which nobody could read: as text it would be rubbish, as a call it would lack its name"
    half = '<tool_call>\n{"name": "weather", '
    for path, tools in (('/v1/chat/completions', CHAT_TOOLS), ('/v1/messages', CLAUDE_TOOLS), ('/api/chat', CHAT_TOOLS)):
        for more in ({}, {} if path == '/api/chat' else dict(tool_choice=dict(type='any') if path == '/v1/messages' else 'required')):
            body = dict(model='m', max_tokens=50, stream=False, messages=[*ask('greet'), dict(role='assistant', content=half.rstrip())], tools=tools, **more)
            answer = httpx.post(server.url + path, json=body, timeout=30)
            assert answer.status_code == 400 and 'inside of a tool call' in answer.text, (path, answer.text)
    assert chat(server, 'greet')['finish_reason'] == 'stop'
