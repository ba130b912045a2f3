"What people install is the wheel, not this checkout: build it, install it in a clean environment, and serve a model from it"
import json, os, shutil, socket, subprocess, sys, sysconfig, time, urllib.error, urllib.request, zipfile
from pathlib import Path
import pytest
import sparkinfer

ROOT = Path(__file__).resolve().parent.parent

def run(*command, **kw) -> str:
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, **kw)
    assert done.returncode == 0, f'{command}\n{done.stdout}{done.stderr}'
    return done.stdout

@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> Path:
    "Built from a copy, so that the checkout is not written to"
    source, out = tmp_path_factory.mktemp('source'), tmp_path_factory.mktemp('dist')
    for name in ['pyproject.toml', 'README.md', 'LICENSE']: shutil.copy(ROOT/name, source/name)
    shutil.copytree(ROOT/'sparkinfer', source/'sparkinfer', ignore=shutil.ignore_patterns('__pycache__'))
    run(sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', out, source)
    return next(out.glob('*.whl'))

@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory) -> Path:
    "The `bin` folder of a virtual environment that has the wheel. Its dependencies are borrowed from this environment: a path in a .pth file makes them importable, but does not run this environment's own .pth files, so not the editable install."
    folder = tmp_path_factory.mktemp('clean')/'v'
    run(sys.executable, '-m', 'venv', '--without-pip', folder)
    python = folder/'bin'/'python'
    site = Path(run(python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))').strip())
    (site/'borrowed.pth').write_text('\n'.join(dict.fromkeys([sysconfig.get_path('purelib'), sysconfig.get_path('platlib')])) + '\n')
    run(sys.executable, '-m', 'pip', '--python', python, 'install', '--no-deps', '--no-index', '--quiet', wheel)
    assert site in Path(run(python, '-c', 'import sparkinfer; print(sparkinfer.__file__)', cwd=folder, env=clean_env()).strip()).parents
    return folder/'bin'

def clean_env() -> dict: return {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'PYTHONHOME', 'VIRTUAL_ENV')}

def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split('/')[0] for n in names} == {'sparkinfer', f'sparkinfer-{sparkinfer.__version__}.dist-info'}
    modules = {p.relative_to(ROOT).as_posix() for pattern in ('*.py', '*.html') for p in (ROOT/'sparkinfer').rglob(pattern)}
    assert modules == {n for n in names if n.startswith('sparkinfer/')}            # a wing without __init__.py would be left out in silence
    assert any(n.endswith('licenses/LICENSE') for n in names)

def test_every_module_imports(installed):
    "On a machine with the base dependencies and no GPU; `cuda` is imported by those who have one"
    code = '''
import importlib, pkgutil, sparkinfer
for m in pkgutil.walk_packages(sparkinfer.__path__, 'sparkinfer.'):
    if '.cuda' not in m.name and not m.name.endswith('__main__'): importlib.import_module(m.name)
print('all')'''
    assert run(installed/'python', '-c', code, cwd=installed, env=clean_env()).strip().endswith('all')

def test_command_line(installed):
    assert sparkinfer.__version__ in run(installed/'sparkinfer', '--version', cwd=installed, env=clean_env())
    assert run(installed/'python', '-m', 'sparkinfer', '--help', cwd=installed, env=clean_env()).count('serve')

def free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def get(url: str, body=None) -> dict:
    request = urllib.request.Request(url, data=body and json.dumps(body).encode(), headers={'Content-Type': 'application/json'})
    with urllib.request.urlopen(request, timeout=120) as answer: return json.load(answer)

def wait_until_healthy(url: str, process, seconds: float = 240):
    "A server that is loading answers 503, one that is not listening yet refuses the connection"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, 'the server ended'
        try: return get(f'{url}/health')
        except (urllib.error.URLError, ConnectionError): time.sleep(0.2)
    raise TimeoutError(url)

def test_serve_from_the_wheel(installed, tmp_path):
    "The README's first command, from the installed wheel: the default model, /health, one completion"
    port = free_port()
    url = f'http://127.0.0.1:{port}'
    log = open(tmp_path/'log', 'w+')
    process = subprocess.Popen([str(installed/'sparkinfer'), 'serve', 'smollm2', '--port', str(port)], cwd=tmp_path, env=clean_env(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_healthy(url, process)
        answer = get(f'{url}/v1/completions', dict(model='anything', prompt='1, 2, 3, 4, 5,', max_tokens=4, temperature=0))
        assert answer['choices'][0]['text'].strip().startswith('6'), answer
        assert answer['usage']['completion_tokens'] == 4
    except BaseException:
        log.seek(0)
        print(log.read())
        raise
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()

def test_an_editable_install_is_found_from_the_folder_above(tmp_path):
    "The checkout is a folder named like the package. Started beside it, Python must not take that folder for the package"
    build = "import setuptools.build_meta as b, sys; print(b.build_editable(sys.argv[1]))"
    copy = tmp_path/'beside'/'sparkinfer'
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.git', '.venv', 'nbs', 'data', 'tests', '*.egg-info', 'build'))
    done = subprocess.run([sys.executable, '-c', build, str(tmp_path)], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as wheel: names = wheel.namelist()
    assert any(n.endswith('.pth') and str(copy) in zipfile.ZipFile(next(tmp_path.glob('*.whl'))).read(n).decode() for n in names), names
