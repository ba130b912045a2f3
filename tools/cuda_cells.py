"""Run the notebooks named on the command line on a machine that has a GPU but perhaps no Jupyter, cells flagged `#| cuda` included, and store what those print.

    python tools/cuda_cells.py nbs/cuda/07_graphs.ipynb [--to FOLDER]     # FOLDER: write the notebooks there, not over the originals
"""
import contextlib, io, json, sys
from pathlib import Path

def run(path: Path, target: Path):
    notebook, space = json.loads(path.read_text()), {'__name__': '__main__'}
    for cell in notebook['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] != 'code': continue
        flagged, printed = source.lstrip().startswith('#| cuda'), io.StringIO()
        with contextlib.redirect_stdout(printed): exec(compile(source, f'{path.name} cell {cell.get("id")}', 'exec'), space)
        if flagged:
            cell['outputs'] = [dict(name='stdout', output_type='stream', text=printed.getvalue().splitlines(keepends=True))]
            print(f'--- {path.name} cell {cell.get("id")}\n{printed.getvalue()}', flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + '\n')

if __name__ == '__main__':
    arguments = sys.argv[1:]
    folder = Path(arguments.pop(at + 1)) if '--to' in arguments and (at := arguments.index('--to')) >= 0 else None
    failed = 0
    for path in (Path(a) for a in arguments if a != '--to'):
        try: run(path, folder/path.name if folder else path)
        except Exception as error:
            failed += 1
            print(f'{path}: {type(error).__name__}: {error}', flush=True)
    sys.exit(failed)
