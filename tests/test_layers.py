"The floors of the house: exported code of a lower floor never imports from a higher one, not even inside a function"
import ast
from pathlib import Path
import pytest
import sparkinfer
from sparkinfer.jit import KERNEL_WINGS

PACKAGE = Path(sparkinfer.__file__).parent
FLOORS = {'errors': 0, 'model_store': 0, 'jit': 0, 'formats': 0, 'text': 0, 'measure.speed': 0, 'ops': 1, 'cuda': 1, 'models': 2, 'memory': 3, 'engine': 4,
          'serve': 5, 'measure': 5, 'llm': 6, 'cli': 6, '__init__': 6, '__main__': 6}
GROUND = ('errors', 'model_store', 'jit')
MODULES = sorted(p for p in PACKAGE.rglob('*.py') if p.name != '_modidx.py' and not (p.name == '__init__.py' and p.parent != PACKAGE))

def module_name(path: Path) -> str: return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)

def floor(module: str) -> int:
    "By the longest entry of FLOORS that the name begins with: `measure.speed` before `measure`"
    parts = module.split('.')
    for n in range(len(parts), 0, -1):
        if (name := '.'.join(parts[:n])) in FLOORS: return FLOORS[name]
    raise KeyError(f'{module} has no floor: add its wing to FLOORS')

def imports(path: Path) -> set[str]:
    "The modules of this package that a file imports anywhere, as names below `sparkinfer`"
    found, here = set(), ['sparkinfer', *module_name(path).split('.')]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import): found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = '.'.join(here[:-node.level] if node.level else []) + ('.' if node.level and node.module else '') + (node.module or '')
            found |= {f'{base}.{alias.name}' for alias in node.names}          # `from sparkinfer.ops import linear` names a module, `from …linear import gemv` does not: both begin with it
    return {name.removeprefix('sparkinfer.') for name in found if name.startswith('sparkinfer.') and name != 'sparkinfer.__version__'}

@pytest.mark.parametrize('path', MODULES, ids=map(module_name, MODULES))
def test_imports_go_down(path):
    module = module_name(path)
    up = sorted(name for name in imports(path) if floor(name) > floor(module))
    assert not up, f'{module} (floor {floor(module)}) imports from above: {up}'

def kernel_circle() -> list:
    "The modules that define kernels, and all modules of the kernel wings that those import, directly or not: what a kernel can see"
    paths = {module_name(p): p for p in MODULES if module_name(p).split('.')[0] in KERNEL_WINGS}
    todo, seen = [name for name, path in paths.items() if '@jit' in path.read_text() or '@intrinsic' in path.read_text()], set()
    while todo:
        if (name := todo.pop()) in seen: continue
        seen.add(name)
        todo += [other for other in paths if any(i == other or i.startswith(other + '.') for i in imports(paths[name]))]
    return sorted(paths[name] for name in seen)

@pytest.mark.parametrize('path', kernel_circle(), ids=module_name)
def test_kernels_see_hashed_sources_only(path):
    "The kernel cache hashes the sources of KERNEL_WINGS. A kernel that called a helper in another wing could run stale code."
    outside = sorted(name for name in imports(path) if name.split('.')[0] not in KERNEL_WINGS + GROUND)
    assert not outside, f'{module_name(path)} imports {outside}; the kernel cache does not look there'

def test_the_circle_has_the_kernels_and_what_they_call():
    names = {module_name(p) for p in kernel_circle()}
    assert {'ops.simd', 'ops.linear', 'models.cpu_runner', 'models.forward', 'formats.blocks', 'formats.fast_decode'} <= names

def test_the_test_sees_relative_imports(tmp_path, monkeypatch):
    "Exported modules import relatively; a check that only reads absolute names would pass anything"
    monkeypatch.setitem(globals(), 'PACKAGE', tmp_path)
    (tmp_path/'ops').mkdir()
    (tmp_path/'ops/x.py').write_text('from ..engine.engine import Engine\nfrom . import linear\nfrom .. import serve\ndef f():\n    import sparkinfer.models.config\n')
    assert imports(tmp_path/'ops/x.py') == {'engine.engine.Engine', 'ops.linear', 'serve', 'models.config'}
