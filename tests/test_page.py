"""The server's own page in a real Chromium: typing, streaming, stopping, reasoning that is folded, a key, a server that loads, dark and light, a phone.

What needs no browser runs every day; the rest is opt-in (SPARKINFER_BROWSER=1) like tests/test_browser.py, with Node.js, playwright-core (found through NODE_PATH) and Chromium."""
import json, re, subprocess, threading
from pathlib import Path
import httpx, pytest
from sparkinfer.engine.engine import Engine
from sparkinfer.serve.app import ServeSettings, background_server
from sparkinfer.text.chat_template import ChatTemplate
from support import ScriptedRunner, TinyTokenizer, saying, slowly
from test_browser import CHROMIUM, ROOT, missing

PICTURE = 'picture.png'
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{# <think> </think> #}{% if false %}<think></think>{% endif %}"
REPLIES = {'long': 'abcdefghij ' * 30, 'think': '<think>Two words will do.</think>Hello there!', 'code': 'Here it is:\n```python\nprint("hi" * 3)\n```\nThat is all.', 'markup': '<b>bold</b> <img src> <script>hacked()</script>', 'greet': 'Good day, 歪 👍'}
quick = dict(port=0, shutdown_seconds=0.3)

def build(report=None, gate=None, script=None, **kwargs):
    "Answers by the last user message"
    pieces = 'there', ' O'
    def reply(prompt): return next((text for key, text in REPLIES.items() if key in prompt.rpartition('<|user|>')[2]), 'ok')
    class Whole(TinyTokenizer):
        def decode(self, ids, skip_special=True): return super().decode(ids, skip_special=False)
    return Engine(ScriptedRunner(script or saying(Whole(*pieces), reply), TinyTokenizer(*pieces), gate=gate, max_context=2048), TinyTokenizer(*pieces), ChatTemplate(TEMPLATE), name='org/scripted-7b', **kwargs)

def test_who_gets_the_page():
    with background_server(build, ServeSettings(**quick, api_key='k')) as server:
        page = httpx.get(server.url + '/', headers={'Accept': 'text/html,*/*;q=0.8'})
        assert page.status_code == 200 and page.headers['content-type'] == 'text/html; charset=utf-8' and '<title>sparkinfer</title>' in page.text
        assert "connect-src 'self'" in page.headers['content-security-policy'] and "frame-ancestors 'none'" in page.headers['content-security-policy']
        for headers in ({}, {'Accept': '*/*'}): assert 'Ollama is running' in httpx.get(server.url + '/', headers=headers).text
        head = httpx.head(server.url + '/')
        assert head.status_code == 200 and head.content == b''

def test_the_page_is_in_the_package():
    assert (Path(ROOT)/'sparkinfer'/'serve'/'page.html').exists() and 'serve/page.html' in (Path(ROOT)/'pyproject.toml').read_text()

browser = pytest.mark.skipif(bool(missing()), reason=missing())

def drive(url, folder, scene):
    done = subprocess.run(['node', ROOT/'tools'/'page.mjs', url, CHROMIUM, folder, scene], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert 'failed' not in seen and seen['errors'] == [], seen
    assert {re.match(r'https?://[^/]+', r)[0] for r in seen['requests'] if not r.startswith('null')} == {url}, 'something was fetched from elsewhere'
    return seen

@browser
def test_a_conversation_by_keyboard(tmp_path):
    with background_server(lambda report: build(gate=slowly(0.005)), ServeSettings(**quick)) as server: seen = drive(server.url, tmp_path, 'talk')
    print('screenshots:', tmp_path)
    assert seen['focus'] == 'prompt' and seen['user'][0] == 'greet\nplease' and seen['title'] == 'org/scripted-7b'
    assert seen['texts'] == [REPLIES['greet'], 'Hello there!', 'Here it is:\nprint("hi" * 3)That is all.', REPLIES['markup']]
    assert seen['thoughts'] == ['Two words will do.'] and seen['folded'] and seen['unfolded'] and seen['pre'] == ['print("hi" * 3)']
    assert seen['injected'] == 0, 'text of the model became HTML'
    assert all(re.match(r'\d+ tokens · [\d.]+ tok/s · [\d.]+ s to the first$', note) for note in seen['notes']), seen['notes']
    assert seen['cleared'] == []

@browser
def test_stopping_frees_the_model(tmp_path):
    with background_server(lambda report: build(gate=slowly(0.02)), ServeSettings(**quick)) as server:
        seen = drive(server.url, tmp_path, 'stop')
        health = server.engine.health()
    assert 'stopped' in seen['button'] and 'stopped' in seen['key'] and seen['rate'].endswith('tok/s') and (health.cancelled, health.active) == (2, 0)
    assert seen['buttonFocus'] == seen['keyFocus'] == 'prompt'

@browser
def test_a_reload_keeps_the_conversation_and_a_button_forgets_it(tmp_path):
    with background_server(lambda report: build(gate=slowly(0.01)), ServeSettings(**quick)) as server:
        seen = drive(server.url, tmp_path, 'reload')
        assert server.engine.health().active == 0, 'the model goes on with an answer that nobody reads'
    print('screenshots:', tmp_path)
    assert seen['open'] == seen['closed'] > 400 and not seen['panel'], 'the settings take the conversation its room'
    assert seen['before'] == seen['after'] and seen['after']['texts'] == [REPLIES['greet'], 'Hello there!'] and seen['after']['thoughts'] == ['Two words will do.'] and seen['after']['system'] == 'Be brief.'
    half = seen['half']
    assert half['texts'][:2] == seen['before']['texts'] and REPLIES['long'].startswith(half['texts'][2]) and 20 < len(half['texts'][2]) < len(REPLIES['long']) and half['notes'][2].endswith('cut off by a reload') and half['busy'] == 0
    assert seen['asked'] == [dict(role='system', content='Be brief.'), *(dict(role=role, content=text) for question, answer in zip(('greet', 'think', 'long'), half['texts']) for role, text in (('user', question), ('assistant', answer))), dict(role='user', content='greet')]
    assert seen['unanswered']['prompt'] == 'never' and seen['unanswered']['user'] == ['greet', 'think', 'long', 'greet'] and len(seen['unanswered']['texts']) == 4
    assert seen['forgotten'] == dict(user=[], texts=[], thoughts=[], notes=[], prompt=seen['forgotten']['prompt'], system='Be brief.', busy=0)

@browser
def test_a_key_is_asked_for(tmp_path):
    with background_server(build, ServeSettings(**quick, api_key='secret')) as server: seen = drive(server.url, tmp_path, 'key')
    assert 'needs its key' in seen['refused'] and 'HTTP' not in seen['refused'] and 'header' not in seen['refused'] and 'wrong key' in seen['wrong'] and seen['kept'] == 'greet' and seen['texts'] == [REPLIES['greet']] and 'secret' not in seen['url']

@browser
def test_a_model_that_loads(tmp_path):
    def slow(report):
        report('reading weights', 0.25)
        threading.Event().wait(6)
        return build()
    with background_server(slow, ServeSettings(**quick), wait_ready=False) as server: seen = drive(server.url, tmp_path, 'loading')
    assert seen['state'] == 'loading: reading weights 25 %' and seen['disabled'] and seen['enabled']

@browser
def test_a_fault_is_shown(tmp_path):
    script = lambda history: RuntimeError('boom') if len(history) > 8 else ord('a')
    with background_server(lambda report: build(script=script), ServeSettings(**quick)) as server: seen = drive(server.url, tmp_path, 'fault')
    assert 'internal error' in seen['error'] and 'boom' not in seen['error'] and seen['busy'] == 0

@browser
def test_dark_light_wide_and_narrow(tmp_path):
    with background_server(build, ServeSettings(**quick)) as server: seen = drive(server.url, tmp_path, 'looks')
    print('screenshots:', tmp_path)
    assert all(seen[name]['fits'] for name in ('light', 'dark', 'phone', 'phone_dark')), seen
    assert seen['light']['back'] != seen['dark']['back'] and seen['light']['text'] != seen['dark']['text'] and seen['dark'] == seen['phone_dark']
