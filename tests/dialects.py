"""What the tests of the dialects share: scripted answers with reasoning and calls, a server that has the routes, and the bodies that must be refused"""
import json
from contextlib import contextmanager
import httpx
from sparkinfer.serve.app import ServeSettings, background_server
from sparkinfer.engine.engine import Engine
from sparkinfer.text.chat_template import ChatTemplate
from support import ScriptedRunner, TinyTokenizer, TEMPLATE, scripted_engine, thinking_template

def call(name, **arguments): return f'<tool_call>\n{json.dumps(dict(name=name, arguments=arguments), ensure_ascii=False)}\n</tool_call>'

SAID = {   # what the model says to a prompt that holds the key: a token for each byte, so that every character may be cut
    'greet': 'Hello there!', 'family': '👩‍👩‍👧 and 歪 and é', 'letters': 'L M N O P Q R', 'nothing': '', 'name the sky': '{"sky": "blue"}', 'an object': '{"a": [1, "é"]}', 'ends in xy': 'some xy',
    'ponder': '<think>\nHm, two and two.\n</think>\n\nIt is 4.',
    'look outside': 'I look.\n' + call('weather', city='Pa"r\nis é', days=[1, {'a': None}]),
    'two at once': '<think>\nTwo of them.\n</think>\n\n' + call('weather', city='Oslo') + '\n' + call('clock'),
    'speak after': call('clock') + '\nAnd that is it.', 'just a call': call('clock')}
SCHEMA = dict(type='object', properties=dict(city=dict(type='string'), days=dict(type='array')))

def engine(said=SAID, opens=False, **kwargs): return lambda report=None: scripted_engine(said, template=thinking_template(opens=opens), **kwargs)

@contextmanager
def serving(factory=None, wait_ready=True, **settings):
    "A live server; yields its state"
    with background_server(factory or engine(), ServeSettings(port=0, shutdown_seconds=0.5, **settings), wait_ready) as state: yield state

def requests_seen(state): return sum(state.metrics.requests.values())

def raw_events(url, path, body):
    "The events of a stream as they stand on the wire: (name, data)"
    text = httpx.post(url + path, json=dict(body, stream=True), timeout=30).text
    assert text.endswith('\n\n')
    out = []
    for part in text.split('\n\n')[:-1]:
        lines = part.split('\n')
        if lines[0].startswith(':'): continue
        assert [line.partition(': ')[0] for line in lines] == ['event', 'data'], lines
        out.append((lines[0].removeprefix('event: '), json.loads(lines[1].removeprefix('data: '))))
        assert out[-1][0] == out[-1][1]['type']
    return out

def failing(after):
    "An engine whose model breaks after so many tokens of the answer"
    tokenizer = TinyTokenizer()
    def script(history):
        start = max(i for i, t in enumerate(history) if t == tokenizer.control['<|assistant|>']) + 1
        return RuntimeError('boom') if len(history) - start >= after else ord('a')
    return lambda report: Engine(ScriptedRunner(script, tokenizer), tokenizer, ChatTemplate(TEMPLATE), name='org/tiny')

BROKEN = [b'', b'[', b'null', b'"x"', b'5', b'[]', b'{"a": NaN}', b'\xff\xfe{}', b'{"a": "\\ud800"}', b'[' * 10**6, b'{"a":' * 10**5]      # no JSON object at all
