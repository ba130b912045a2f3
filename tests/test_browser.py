"""The tour as a reader meets it: JupyterLab in a real browser, all cells run, the temperature slider moved.

Opt-in (SPARKINFER_BROWSER=1), since it wants Node.js, playwright-core and Chromium, which pip does not bring. The README (Contributing) has the line."""
import json, os, secrets, shutil, signal, socket, subprocess, sys, time, urllib.request
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'chrome'))), None)

def missing() -> str:
    "Why this test cannot run here; empty if it can"
    if not os.environ.get('SPARKINFER_BROWSER'): return 'opt-in: set SPARKINFER_BROWSER=1'
    if not CHROMIUM: return 'no Chromium on the PATH (Debian: apt-get install chromium)'
    if not shutil.which('node'): return 'no Node.js on the PATH'
    found = subprocess.run(['node', '-e', 'require("playwright-core")'], cwd=ROOT, capture_output=True)
    return '' if found.returncode == 0 else 'playwright-core is not found: npm install --prefix FOLDER playwright-core, then NODE_PATH=FOLDER/node_modules'

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

@pytest.fixture
def lab(tmp_path):
    "The address of a JupyterLab on a copy of the tour: the lab saves what it runs, and keeps settings, neither of which belongs in the checkout or the home folder"
    (tmp_path/'nbs').mkdir()
    shutil.copy(ROOT/'nbs'/'00_tour.ipynb', tmp_path/'nbs')
    settings = tmp_path/'app'
    settings.mkdir()
    (settings/'overrides.json').write_text(json.dumps({
        '@jupyterlab/apputils-extension:notification': {'fetchNews': 'false', 'checkForUpdates': False},      # no pop-up over the page
        '@jupyterlab/notebook-extension:tracker': {'windowingMode': 'none'}}))                                # cells out of sight are in the page too
    env = dict(os.environ, JUPYTER_CONFIG_DIR=str(tmp_path/'config'), JUPYTERLAB_SETTINGS_DIR=str(tmp_path/'settings'), JUPYTERLAB_WORKSPACES_DIR=str(tmp_path/'workspaces'))
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    token, log = secrets.token_hex(16), tmp_path/'lab.log'
    with log.open('w') as out:
        server = subprocess.Popen([sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={port}', f'--ServerApp.root_dir={tmp_path}',
            f'--IdentityProvider.token={token}', f'--LabApp.app_settings_dir={settings}'], env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        for _ in range(240):
            assert server.poll() is None, log.read_text()
            try: urllib.request.urlopen(f'http://127.0.0.1:{port}/api?token={token}', timeout=2).close(); break
            except OSError: time.sleep(0.25)
        else: pytest.fail('JupyterLab did not start:\n' + log.read_text())
        yield f'http://127.0.0.1:{port}/lab/tree/nbs/00_tour.ipynb?token={token}&reset'
    finally:
        server.send_signal(signal.SIGTERM)                     # the server ends its kernels
        try: server.wait(20)
        except subprocess.TimeoutExpired: os.killpg(server.pid, signal.SIGKILL)

def test_the_tour_and_its_slider(lab, tmp_path):
    shot = tmp_path/'tour.png'
    done = subprocess.run(['node', ROOT/'tools'/'lab.mjs', lab, CHROMIUM, shot], cwd=ROOT, capture_output=True, text=True, timeout=550)
    print('screenshot:', shot)                                 # shown with pytest -s
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen['errors'] == [] and seen['cells'] > 15 and seen['images'] > 5, seen
    assert seen['labels'] == [1.0, 1.5, 1.0], seen             # five presses of an arrow key, there and back
    assert seen['figureChanged'], 'the label moved and the figure did not: the callback is not connected'
    assert seen['figureCameBack'], 'the same temperature drew another figure'
    assert shot.stat().st_size > 20_000
