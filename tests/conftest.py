"""Tests press Ctrl-C in programs that they start. Those would ignore it if pytest itself was started in the background of a shell, which makes it ignored.

The notebooks are the longest tests and need one core each, while the others need one core together: they run beside them, from the beginning of the session, and are asked about at its end."""
import os, signal, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

# what somebody has set for the programs he starts by hand is not meant for those that tests start
READ_BY_TESTS = {'SPARKINFER_CACHE', 'SPARKINFER_CPU', 'SPARKINFER_SLOW', 'SPARKINFER_BROWSER', 'SPARKINFER_TEST_DEVICE'}
for name in [n for n in os.environ if n.startswith('SPARKINFER_') and n not in READ_BY_TESTS]: del os.environ[name]

ROOT = Path(__file__).resolve().parent.parent
# `__wrapped__`, because the plain function, called from `-c`, tests all notebooks whatever it is told
RUN = "import sys; from nbdev.test import nbdev_test as t; t.__wrapped__(path=sys.argv[1], n_workers=0)"

class Chapters:
    "Runs notebooks as `nbdev-test` would (same flags), a process each: one must not see what another imported, and a fork after threads have started is a trap"
    def __init__(self, notebooks, workers):
        self.running, self.over = set(), False
        self.pool = ThreadPoolExecutor(workers)
        self.futures = {n: self.pool.submit(self.run, n) for n in notebooks}

    def run(self, notebook):
        process = subprocess.Popen([sys.executable, '-c', RUN, str(notebook)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.running.add(process)
        if self.over: process.kill()
        try: said, _ = process.communicate(timeout=900)
        finally:
            process.kill()
            self.running.discard(process)
        return process.returncode, said

    def outcome(self, notebook):
        "(exit status, what it said); who asks runs it himself if nobody has begun it"
        return self.run(notebook) if self.futures[notebook].cancel() else self.futures[notebook].result()

    def close(self):
        self.over = True
        for process in list(self.running): process.kill()
        self.pool.shutdown(cancel_futures=True)

def is_chapter(item): return getattr(item, 'originalname', '') == 'test_notebook'

def pytest_collection_modifyitems(items): items.sort(key=is_chapter)      # the others stay in their order

@pytest.fixture(scope='session', autouse=True)
def chapters(request):
    "With other tests beside them a core stays free for those; alone they get all cores, up to four with the one that asks"
    wanted = [item.callspec.params['notebook'] for item in request.session.items if is_chapter(item) and not item.get_closest_marker('skip')]
    made = Chapters(wanted, max(1, min(4, os.cpu_count() or 1) - 1)) if wanted else None
    yield made
    if made: made.close()
