#!/usr/bin/env python
"""README.md from nbs/index.ipynb.
  python tools/readme.py           write README.md
  python tools/readme.py --check   exit with 1 if README.md is not what would be written
Markdown cells go over as they are; code cells as a fenced block with their stored output, unless flagged `hide`. The line `<!-- results -->` becomes the newest
comparison with llama.cpp in data/results, as a table, and `<!-- gpu -->` the newest measurements of the runner on a GPU."""
import json, sys
from pathlib import Path
import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTE = '<!-- Made from nbs/index.ipynb by tools/readme.py. Edit the notebook. -->\n\n'

def output_text(output) -> str:
    "One stored output as text: Markdown as Markdown, anything else in a fence"
    data = output.get('data', {})
    if 'text/markdown' in data: return data['text/markdown']
    text = output.get('text') or data.get('text/plain') or ''
    return f'```text\n{text.rstrip()}\n```' if text.strip() else ''

def cell_text(cell) -> str:
    if cell.cell_type == 'markdown': return cell.source
    lines = cell.source.splitlines()
    flags = ' '.join(line.removeprefix('#|') for line in lines if line.startswith('#|')).split()
    if cell.cell_type != 'code' or 'hide' in flags: return ''
    source = '\n'.join(line for line in lines if not line.startswith('#|')).strip()
    return '\n\n'.join(filter(None, [f'```python\n{source}\n```' if source else '', *map(output_text, cell.outputs)]))

COMPARISON = {'what': 'what', 'ours_tok_s': 'sparkinfer, tok/s', 'theirs_tok_s': 'llama.cpp, tok/s', 'ratio': 'ratio'}

def results_table(folder: Path) -> str:
    "The newest saved comparison with llama.cpp for each model, and the machine of the last one. All other records are read where they belong, in the chapters"
    newest = {}
    for path in sorted(folder.glob('bench-compare.*.json')):                   # names end in the time
        record = json.loads(path.read_text())
        newest.pop(record['file'], None)
        newest[record['file']] = record
    if not newest: return ''
    lines = ['| model | ' + ' | '.join(COMPARISON.values()) + ' |', '|---' * (1 + len(COMPARISON)) + '|']
    names = {'d27.gguf': 'qwen3.8-27b'}                                        # what a record's file was called, where that says nothing
    for name, record in sorted(newest.items(), key=lambda item: item[1]['file'] != 'SmolLM2-135M-Instruct.Q4_1.gguf'):
        lines += [f"| {names.get(name, name.removesuffix('.gguf'))} | " + ' | '.join(str(row[key]) for key in COMPARISON) + ' |' for row in record['comparison']]
    machine = record['machine']
    note = (f"Measured with `sparkinfer bench --compare --save` on {machine['cores']} cores of an {machine['cpu']} ({machine['level']}, {machine['memory_gb']:.0f} GB), {record['time'][:10]}, {record['threads']} threads, "
            'the better of flash attention on and off for llama.cpp, medians of rounds in turn (`ratio` is that of the rounds). All but SmolLM2 are noise in the shape of a model (`sparkinfer synth`):')
    return note + '\n\n' + '\n'.join(lines)

def gpu_table(folder: Path) -> str:
    "The newest record of `sparkinfer bench --synthetic` for each shape, alone and with the most sequences"
    newest = {}
    for path in sorted(folder.glob('cuda-runner-*.json')):                     # names end in the time
        record = json.loads(path.read_text())
        if record.get('results') and 'drawn_tokens_a_second' in record['results'][0]: newest[record['shape']] = record
    if not newest: return ''
    lines = ['| shape | sequences | at position | tok/s, waiting for each token | one step ahead | so too, with temperature, top-k, top-p | % of what the card can read |', '|---' * 7 + '|']
    for shape, record in sorted(newest.items(), key=lambda item: item[1]['weight_bytes'], reverse=True):
        for row in (record['results'][0], record['results'][-1]): lines.append(f"| {shape} | {row['sequences']} | {row['position']:,} | {row['tokens_a_second']:,.0f} | {row['ahead_tokens_a_second']:,.0f} | {row['drawn_tokens_a_second']:,.0f} | {row['percent_of_read']:.0f} |")
    return (f"On a GPU (`pip install -e '.[cuda]'`; compute capability 9.0 or newer, driver 580 or newer), one {record['gpu']}, {record['time'][:10]}, noise in the shape of a model (`sparkinfer bench --synthetic SHAPE`). The server works one step ahead: the next step is launched before the tokens of the last one are read:"
            + '\n\n' + '\n'.join(lines))

def readme() -> str:
    notebook = nbformat.read(ROOT/'nbs'/'index.ipynb', 4)
    text = '\n\n'.join(filter(None, map(cell_text, notebook.cells))).strip() + '\n'
    return NOTE + text.replace('<!-- results -->', results_table(ROOT/'data'/'results')).replace('<!-- gpu -->', gpu_table(ROOT/'data'/'results'))

if __name__ == '__main__':
    path, new = ROOT/'README.md', readme()
    if '--check' in sys.argv[1:]:
        if not path.exists() or path.read_text() != new: sys.exit('README.md is not what nbs/index.ipynb says; run: python tools/readme.py')
    else: path.write_text(new)
