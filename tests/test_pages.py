"What a reader meets on the pages: links that lead somewhere, openings that say what a chapter knows, and stored outputs that are fit to be read on another machine"
import base64, re
from pathlib import Path
import nbformat, pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if not p.name.startswith(('_', '.')) and '.ipynb_checkpoints' not in p.parts)
LARGEST_PICTURE, LARGEST_PAGE = 60_000, 400_000          # bytes; a book that is cloned with its pictures should stay small
STRANGE = {'a path of the machine that ran it': re.compile(r'(?<![\w.…])/(?:tmp|root|home|work|Users|private/var)/\w'), 'a terminal code (python tools/tidy.py)': re.compile('\x1b')}

@pytest.fixture(scope='module', params=PAGES, ids=[p.relative_to(ROOT).as_posix() for p in PAGES])
def page(request): return request.param, nbformat.read(request.param, 4)

def outputs(notebook): return [(i, output) for i, cell in enumerate(notebook.cells) if cell.cell_type == 'code' for output in cell.outputs]

def test_links_lead_somewhere(page):
    path, notebook = page
    text = '\n'.join(cell.source for cell in notebook.cells if cell.cell_type == 'markdown')
    links = [target for target in re.findall(r'\]\(([^)\s]+)\)', re.sub(r'```.*?```|`[^`\n]*`', '', text, flags=re.DOTALL)) if not target.startswith(('#', 'http:', 'https:'))]
    assert [target for target in links if not (path.parent/target.split('#')[0]).exists()] == []

def test_opening_says_what_the_chapter_knows(page):
    path, notebook = page
    if path.name in ('index.ipynb', '00_tour.ipynb'): pytest.skip('a page about all of it')
    opening = '\n'.join(cell.source for cell in notebook.cells[:6] if cell.cell_type == 'markdown').lower()
    assert opening.startswith('# ') and '\n> ' in opening
    assert [words for words in ('knows', 'does not know', 'used by') if words not in opening] == []

def test_stored_outputs_are_fit_to_be_read(page):
    path, notebook = page
    for i, output in outputs(notebook):
        data = output.get('data', {})
        assert output.output_type != 'error', f'cell {i} stores an error'
        assert not any('widget-view' in kind for kind in data), f'cell {i} stores a live widget: python tools/tidy.py {path.relative_to(ROOT)}'
        text = '\n'.join([output.get('text', ''), *(str(data[kind]) for kind in ('text/plain', 'text/html', 'text/markdown') if kind in data)])
        for what, pattern in STRANGE.items():
            assert not pattern.search(text), f'cell {i} shows {what}: {text[max(0, pattern.search(text).start() - 40):][:120]!r}'

def test_pages_are_small(page):
    path, notebook = page
    assert path.stat().st_size <= LARGEST_PAGE
    pictures = {i: len(base64.b64decode(output.data['image/png'])) for i, output in outputs(notebook) if 'image/png' in output.get('data', {})}
    assert {i: size for i, size in pictures.items() if size > LARGEST_PICTURE} == {}
