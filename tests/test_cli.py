"The command line as users meet it: processes, pipes, terminals, signals. What one command does is tested in nbs/11_cli.ipynb."
import json, os, re, select, shutil, signal, socket, subprocess, sys, time, urllib.request
from pathlib import Path
import pytest
from sparkinfer.formats.gguf import write_gguf

pytestmark = pytest.mark.skipif(sys.platform == 'win32', reason='terminals and signals of Unix')
COMMAND = [sys.executable, '-m', 'sparkinfer']
SMALL = ['--context', '512']

def sparkinfer(*args, input=None, timeout=300, **kwargs):
    "Run a command line to its end"
    stdin = dict(input=input) if input is not None else dict(stdin=subprocess.DEVNULL)
    return subprocess.run(COMMAND + [str(a) for a in args], capture_output=True, text=True, timeout=timeout, **stdin, **kwargs)

def said(done):
    "What a command wrote to stderr, less the progress that a busy machine shows"
    return ''.join(line for line in done.stderr.splitlines(True) if not line.startswith(('loading ', 'compiling ', 'compiled ')))

@pytest.fixture(scope='module', autouse=True)
def warm():
    "Fetch the model and compile its kernels once, so that the tests below see a warm start"
    done = sparkinfer('warmup')
    assert done.returncode == 0, done.stderr

@pytest.fixture(scope='module')
def files(tmp_path_factory):
    "Files that are not models, by name"
    folder = tmp_path_factory.mktemp('files')
    (folder/'folder.gguf').mkdir()
    (folder/'text.gguf').write_text('once upon a time\n' * 100)
    (folder/'empty.gguf').write_bytes(b'')
    (folder/'short.gguf').write_bytes(b'GGUF\x03\0\0\0')
    write_gguf(folder/'alien.gguf', {'general.architecture': 'alien'}, {})
    (folder/'locked.gguf').write_bytes(b'GGUF')
    (folder/'locked.gguf').chmod(0)
    return folder

# ---- what goes wrong is one line

@pytest.mark.parametrize('name, says', [('nowhere.gguf', 'no such file'), ('folder.gguf', 'folder.gguf'), ('text.gguf', 'text.gguf'), ('empty.gguf', 'empty.gguf'), ('short.gguf', 'short.gguf'),
                                        ('alien.gguf', "'alien' is not supported"), ('locked.gguf', 'locked.gguf')])
@pytest.mark.parametrize('command', ['run', 'chat', 'serve', 'inspect', 'bench'])
def test_a_bad_file_is_one_line(files, command, name, says):
    if name == 'locked.gguf' and os.geteuid() == 0: pytest.skip('root may read everything')
    if (command, name) == ('inspect', 'alien.gguf'): pytest.skip('a file of another architecture can be looked at')
    path = files/name
    done = sparkinfer(*{'run': ['run', 'Hello', '-m', path], 'serve': ['serve', path, '--port', '0']}.get(command, [command, path]))
    assert done.returncode == 1 and done.stdout == ''
    assert re.fullmatch(r'error: .*\n', said(done)) and says in done.stderr

@pytest.mark.parametrize('args, says', [
    (['run', 'word ' * 600, *SMALL], '512'), (['run', 'x', '--context', '1000000'], '--context 1,000,000 is not possible: the largest is 8,192 tokens'), (['run', 'x', '--threads', '0'], 'error: --threads must be'), (['run', 'x', '--temperature', '9', *SMALL], 'temperature'),
    (['run', 'x', '--runner', 'cpu', '--device', 'cuda:0'], 'device cuda:0 and runner cpu contradict each other'), (['serve', 'no-such-model', '--runner', 'cuda', '--device', 'cpu'], 'device cpu and runner cuda contradict'),
    (['warmup', 'no-such-model', '--runner', 'spec', '--device', 'cuda'], 'contradict'), (['bench', 'no-such-model', '--runner', 'cpu-file', '--device', 'cuda:1'], 'contradict'), (['eval', 'kl', '--runner', 'cpu32', '--device', 'cuda'], 'contradict'),
    (['run', '', '--raw', '-m', 'no-such-model'], 'no model is named'), (['rm', 'no-such-model'], 'no model'), (['pull', 'no/such/thing'], 'thing')])
def test_a_bad_request_is_one_line(args, says):
    done = sparkinfer(*args)
    assert done.returncode == 1 and done.stdout == ''
    assert re.fullmatch(r'error: .*\n', said(done)) and says in done.stderr

def test_debug_shows_the_traceback():
    done = sparkinfer('run', 'x', '-m', 'nowhere.gguf', '--debug')
    assert done.returncode == 1 and 'Traceback' in done.stderr and 'ModelNotFound' in done.stderr

def test_wrong_usage_is_exit_code_2():
    for args in (['run', 'x', '--no-such-option'], ['no-such-command'], ['bench', '--contexts', 'many']):
        done = sparkinfer(*args)
        assert done.returncode == 2 and 'Usage' in done.stderr and 'Traceback' not in done.stderr

def test_too_little_memory_is_one_line():
    "An address space of 1.2 GB: enough for the interpreter and its libraries, not for the weights and a cache of 8,192 positions in float32"
    import resource
    done = sparkinfer('run', 'x', '--runner', 'spec', preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1200 << 20,) * 2), env=os.environ | dict(OPENBLAS_NUM_THREADS='1'))
    assert done.returncode == 1 and re.fullmatch(r'error: not enough memory.*\n', said(done)), done.stderr

def test_a_taken_port_is_one_line():
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        done = sparkinfer('serve', '--port', port, *SMALL, timeout=60)
    lines = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    assert done.returncode == 1 and len(lines) == 1 and str(port) in lines[0] and 'Traceback' not in done.stderr

# ---- serve

def test_serve_prints_a_curl_line_that_works_and_ctrl_c_ends_it():
    server = subprocess.Popen(COMMAND + ['serve', '--port', '0', *SMALL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not (lines and 'curl' in lines[-1]):
            lines.append(server.stdout.readline())
            assert lines[-1], server.stderr.read()
        line = lines[-1].strip()
        def ask():
            if shutil.which('curl'): return subprocess.run(['bash', '-c', line], capture_output=True, text=True, timeout=60, check=True).stdout
            url, body = line.split()[1], re.search(r"-d '(.*)'$", line)[1]
            return urllib.request.urlopen(urllib.request.Request(url, body.encode(), {'Content-Type': 'application/json'}), timeout=60).read()
        answers = [json.loads(ask())['choices'][0]['message']['content'] for _ in range(2)]
        assert answers[0] and answers[0] == answers[1]                       # so that it can be held against another machine's
    finally: server.send_signal(signal.SIGINT)
    _, noise = server.communicate(timeout=30)
    assert server.returncode in (0, 130) and 'Traceback' not in noise and 'temperature' in noise       # the defaults are shown

# ---- streams

def test_stdout_is_the_answer_and_stderr_is_silent_when_warm():
    done = sparkinfer('run', '1, 2, 3, 4, 5,', '--raw', '--temperature', '0', '--max-tokens', '10', *SMALL)
    assert done.returncode == 0 and done.stdout.startswith(' 6, 7, 8') and done.stdout.endswith('\n') and said(done) == ''

def test_prompt_from_a_pipe():
    options = ['--raw', '--temperature', '0', '--max-tokens', '8', '--json', *SMALL]
    answers = [sparkinfer('run', '1, 2, 3, 4, 5,', *options), sparkinfer('run', '-', *options, input='1, 2, 3, 4, 5,'), sparkinfer('run', *options, input='1, 2, 3, 4, 5,')]
    texts = {json.loads(done.stdout)['text'] for done in answers}
    assert len(texts) == 1 and len(answers[0].stdout.splitlines()) == 1

@pytest.mark.parametrize('locale', [{}, dict(PYTHONIOENCODING='utf-8:strict')], ids=['any bytes', 'strict'])
def test_what_is_no_text_on_stdin(locale):
    for command in (['run', '-q', '-'], ['chat', '-q']):
        done = subprocess.run([*COMMAND, *command, *SMALL], input=b'\xff\xfehello\n', capture_output=True, timeout=300, env=os.environ | locale)
        assert done.returncode == 1 and done.stderr.decode().endswith('error: what came in on stdin is not UTF-8 text\n'), done.stderr
    done = sparkinfer('run', '-q', '-', input='\n')
    assert done.returncode == 2 and 'the prompt on stdin is empty' in done.stderr

def test_a_reader_that_goes_away():
    "`sparkinfer run … | head -c 3` ends soon and without noise"
    began = time.monotonic()
    writer = subprocess.Popen(COMMAND + ['run', '1, 2, 3, 4, 5,', '--raw', '--temperature', '0', '--max-tokens', '480', '-q', *SMALL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert writer.stdout.read(3) == ' 6,'
    writer.stdout.close()
    noise = writer.stderr.read()
    assert writer.wait(60) != 0 and noise == '' and time.monotonic() - began < 60

def test_a_terminal_that_knows_only_ascii():
    done = sparkinfer('run', 'Ça va? 歪', '--max-tokens', '4', *SMALL, env=os.environ | dict(PYTHONIOENCODING='ascii', PYTHONUTF8='0'))
    assert done.returncode == 0 and 'Error' not in done.stderr

def test_interrupted_run_is_130():
    process = subprocess.Popen(COMMAND + ['run', 'Tell me everything.', '--max-tokens', '480', '--temperature', '0', *SMALL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, noise = process.communicate(timeout=60)
    assert process.returncode in (0, 130) and 'Traceback' not in noise      # 0: the answer was complete before the signal came

def test_interrupted_while_loading_is_130():
    process = subprocess.Popen(COMMAND + ['run', 'Hi', '--runner', 'spec'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(3):                                # a library that is being imported may swallow one
        time.sleep(1.0)                               # the interpreter is up, the answer is far away
        if process.poll() is None: process.send_signal(signal.SIGINT)
    answer, noise = process.communicate(timeout=60)
    assert process.returncode == 130 and answer.strip() == '' and 'Traceback' not in noise and 'File "' not in noise

def test_module_and_version():
    assert re.fullmatch(r'sparkinfer, version \d+\.\d+\.\d+\S*\n', sparkinfer('--version').stdout)

# ---- a terminal

class Terminal:
    "A command in a pseudo-terminal of its own: `expect` text, `send` keys"
    def __init__(self, *args):
        import pty
        self.pid, self.fd = pty.fork()
        if self.pid == 0: os.execvpe(COMMAND[0], COMMAND + list(args), os.environ | dict(TERM='dumb'))
        self.seen = self.all = ''
    def send(self, keys): os.write(self.fd, keys.encode())
    def expect(self, pattern, timeout=60):
        "Wait until `pattern` shows up in what has not been looked at yet"
        end = time.monotonic() + timeout
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f'{pattern!r} did not come; the terminal shows: {self.all!r}'
            if select.select([self.fd], [], [], 0.2)[0]:
                try: part = os.read(self.fd, 4096).decode(errors='replace')
                except OSError: part = ''
                assert part, f'the command has ended before {pattern!r}: {self.all!r}'
                self.seen, self.all = self.seen + part, self.all + part
        self.seen = self.seen[found.end():]
        return found
    def close(self):
        "Wait for the end and return the exit code"
        try:
            while os.read(self.fd, 4096): pass
        except OSError: pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

def test_ctrl_c_stops_the_answer_not_the_chat():
    terminal = Terminal('chat', '--temperature', '0', *SMALL)
    terminal.expect('>>> ')
    terminal.send('Write a very long story about a lighthouse.\r')
    terminal.expect('lighthouse\\.')                 # the echo of what was typed
    terminal.expect(r'\w+ \w+ \w+')                  # the answer has begun
    terminal.send('\x03')
    terminal.expect('>>> ')
    time.sleep(1)                                    # Python's readline misses a signal between its prompt and its wait
    terminal.send('\x03')                            # at the prompt it only says how to leave
    terminal.expect('/exit')
    terminal.expect('>>> ')
    terminal.send('Say hello.\r')
    terminal.expect('hello\\.')
    terminal.expect(r'\w+')
    terminal.expect('>>> ')
    terminal.send('/exit\r')
    assert terminal.close() == 0
    assert 'Traceback' not in terminal.all

def test_chat_ends_at_the_end_of_input():
    done = sparkinfer('chat', '--temperature', '0', '--max-tokens', '4', '-q', *SMALL, input='Hello\n')
    assert done.returncode == 0 and done.stdout.strip() and done.stderr == ''

# ---- what a start costs

HEAVY = ('fastapi', 'starlette', 'uvicorn', 'pydantic', 'rich', 'huggingface_hub', 'matplotlib', 'torch', 'transformers', 'IPython', 'gguf', 'pandas')

@pytest.mark.parametrize('args', [['--help'], ['run', 'Hi', '--max-tokens', '2', '--context', '256']])
def test_heavy_modules_stay_out(args):
    "The web framework and the hub client cost a second, which `run` does not have"
    code = f'''import sys
from sparkinfer.cli import main
try: main({args!r})
except SystemExit: pass
print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.stderr.splitlines()[-1] == '[]', done.stderr

def test_importing_the_package_is_light():
    code = "import sparkinfer, sys; print([m for m in ('numpy', 'numba', 'click') if m in sys.modules]); sparkinfer.LLM; print('numpy' in sys.modules, 'numba' in sys.modules)"
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == '[]', done.stdout + done.stderr

@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='needs /proc')
def test_peak_memory_stays_near_the_file(warm):
    "With compiled code in the cache and a context of 2,048, at most 250 MB more than the file"
    done = sparkinfer('run', 'Hi', '--max-tokens', '4', '--context', '2048', '--stats')
    peak = float(re.search(r'peak memory (\d+) MB', done.stderr)[1])
    size = json.loads(sparkinfer('list', '--json').stdout)
    assert peak <= next(m['size'] for m in size if m['name'] == 'smollm2') / 1e6 + 250, done.stderr

def test_a_full_disk_is_one_line():
    if not os.path.exists('/dev/full'): pytest.skip('needs /dev/full')
    with open('/dev/full', 'w') as full: done = subprocess.run(COMMAND + ['run', 'Hi', '--max-tokens', '2', *SMALL], stdout=full, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and re.fullmatch(r'error: .*no space.*\n', said(done))

# ---- looking into files

def test_inspect_shows_types_and_sizes():
    done = sparkinfer('inspect', 'smollm2')
    assert done.returncode == 0 and 'Q4_1' in done.stdout and 'token_embd.weight' in done.stdout and 'llama' in done.stdout

def test_bench_ends_with_json():
    done = sparkinfer('bench', '--contexts', '16', '--prefill', '16', '--tokens', '4', '--rounds', '2')
    record = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and {r['what'] for r in record['rates']} == {'decode @16', 'prefill @16'} and record['machine']['cpu']

def test_an_empty_prompt_is_told():
    done = sparkinfer('run', '')
    assert done.returncode == 2 and 'the prompt is empty' in done.stderr and done.stdout == ''

def test_an_empty_key_locks_nothing_and_is_refused():
    "An unset secret in a compose file gives exactly this"
    done = sparkinfer('serve', '--port', '0', env=os.environ | {'SPARKINFER_API_KEY': ''}, timeout=60)
    assert done.returncode == 2 and 'SPARKINFER_API_KEY is set and empty' in done.stderr, done.stderr

@pytest.mark.parametrize('command', [['run', 'Hi'], ['chat'], ['warmup'], ['bench'], ['serve']], ids=lambda c: c[0])
def test_the_variable_for_the_device_counts_for_every_command(command):
    "Fault: the README said so, and only `serve` looked: `SPARKINFER_DEVICE=gpu sparkinfer run` answered on the CPU"
    done = sparkinfer(*command, env=os.environ | dict(SPARKINFER_DEVICE='gpu'))
    assert done.returncode == 2 and "Invalid value for 'SPARKINFER_DEVICE': no device is called 'gpu'" in done.stderr, done.stderr

def test_a_flag_wins_over_the_variable_for_the_device():
    done = sparkinfer('run', 'Hi', '--max-tokens', '1', *SMALL, '--device', 'cpu', env=os.environ | dict(SPARKINFER_DEVICE='gpu'))
    assert done.returncode == 0, done.stderr
