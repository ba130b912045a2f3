#!/usr/bin/env python
"""Drop stored outputs that do not belong in a page: `python tools/tidy.py nbs/x.ipynb …`, after `nbdev-test --save` on a notebook with a widget.
A live widget cannot be stored (it becomes a random id and a line of repr), and the shell that runs notebooks leaves terminal codes where a widget clears its output. The picture that the widget drew stays."""
import re, sys
from pathlib import Path
import nbformat

TERMINAL_CODE = re.compile(r'\x1b\[[0-9;?]*[A-Za-z]|\r')

def belongs(output) -> bool:
    if output.output_type == 'stream': return TERMINAL_CODE.sub('', output.text) != ''
    return not any('widget-view' in kind for kind in output.get('data', {}))

def tidy(path: Path) -> int:
    "Number of outputs dropped"
    notebook, dropped = nbformat.read(path, 4), 0
    for cell in notebook.cells:
        if cell.cell_type != 'code': continue
        kept = [o for o in cell.outputs if belongs(o)]
        dropped += len(cell.outputs) - len(kept)
        cell.outputs = kept
    if dropped: path.write_text(nbformat.writes(notebook).rstrip('\n') + '\n')
    return dropped

if __name__ == '__main__':
    for name in sys.argv[1:]: print(f'{name}: {tidy(Path(name))} outputs dropped')
