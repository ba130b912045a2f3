#!/usr/bin/env python
"""README.md from nbs/index.ipynb.
  python tools/readme.py           write README.md
  python tools/readme.py --check   exit with 1 if README.md is not what would be written
Markdown cells go over as they are; code cells as a fenced block with their stored output, unless flagged `hide`. The line `<!-- results -->` becomes the newest
record of each kind in data/results, as a table."""
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

def number(value) -> str: return f'{value:,.2f}'.rstrip('0').rstrip('.') if isinstance(value, float) else f'{value:,}' if isinstance(value, int) and not isinstance(value, bool) else str(value)

def tables_of(record: dict) -> dict:
    "The record's tables: every entry that is a list of flat dicts"
    return {key: value for key, value in record.items() if isinstance(value, list) and value and all(isinstance(row, dict) for row in value)}

def results_table(folder: Path) -> str:
    "Figures that were measured and saved (`--save`): the newest record of each bench, as tables, with the machine it was measured on"
    newest = {}
    for path in sorted(folder.glob('*.json')):                              # names end in the time
        record = json.loads(path.read_text())
        if isinstance(record, dict) and tables_of(record): newest[record.get('bench', path.name.split('.')[0])] = record
    return '\n\n'.join(record_text(bench, record) for bench, record in sorted(newest.items()))

def record_text(bench: str, record: dict) -> str:
    machine = record.get('machine', {})
    where = ', '.join(str(v) for v in [machine.get('cpu'), f"{machine['cores']} cores" if machine.get('cores') else None, record.get('time', '')[:10]] if v)
    return '\n\n'.join([f'**{bench}**' + (f' ({where})' if where else ''), *map(table_text, tables_of(record).values())])

def table_text(rows: list) -> str:
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, (dict, list))))
    lines = ['| ' + ' | '.join(c.replace('_', ' ') for c in columns) + ' |', '|' + '---|' * len(columns)]
    return '\n'.join(lines + ['| ' + ' | '.join(number(row[c]) if row.get(c) is not None else '' for c in columns) + ' |' for row in rows])

def readme() -> str:
    notebook = nbformat.read(ROOT/'nbs'/'index.ipynb', 4)
    text = '\n\n'.join(filter(None, map(cell_text, notebook.cells))).strip() + '\n'
    return NOTE + text.replace('<!-- results -->', results_table(ROOT/'data'/'results'))

if __name__ == '__main__':
    path, new = ROOT/'README.md', readme()
    if '--check' in sys.argv[1:]:
        if not path.exists() or path.read_text() != new: sys.exit('README.md is not what nbs/index.ipynb says; run: python tools/readme.py')
    else: path.write_text(new)
