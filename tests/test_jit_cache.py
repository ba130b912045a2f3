"The kernel cache with whole processes: read-only places, changed helpers, two processes at once, damaged files, forced CPU levels"
import os, shutil, subprocess, sys, textwrap
from pathlib import Path
import pytest
import sparkinfer
from sparkinfer.jit import CPU_LEVELS, cpu_level, target_features

SOURCE = Path(sparkinfer.__file__).parent
ASK = '''
import warnings; warnings.simplefilter('always')
from sparkinfer.ops.kernel import kernel, made
print(kernel(1), made[0](1), made[1](1), sum(sum(k.stats.cache_hits.values()) for k in (kernel, *made)))
'''

@pytest.fixture
def house(tmp_path):
    "A small package with this package's `jit` and two kernels in two files"
    package = tmp_path/'site'/'sparkinfer'
    (package/'ops').mkdir(parents=True)
    for name in ['__init__.py', 'jit.py', 'errors.py', 'model_store.py']: shutil.copy(SOURCE/name, package/name)
    (package/'__init__.py').write_text('__version__ = "0"\n')
    (package/'ops/__init__.py').touch()
    (package/'ops/helper.py').write_text('from ..jit import jit\nSTEP = 1\n@jit\ndef helper(x): return x + STEP\n')
    (package/'ops/kernel.py').write_text(textwrap.dedent('''
        from ..jit import jit
        from .helper import helper
        @jit
        def kernel(x): return helper(x) * 10
        def make(inner, factor):
            @jit
            def scaled(x): return inner(x) * factor
            return scaled
        made = [make(kernel, 2), make(helper, 3)]
        '''))
    return tmp_path

def start(house: Path, code: str = ASK, **env) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in ('SPARKINFER_CPU', 'NUMBA_CACHE_DIR')} | dict(PYTHONPATH=str(house/'site'), SPARKINFER_CACHE=str(house/'cache'), TMPDIR=str(house)) | env
    return subprocess.Popen([sys.executable, '-c', code], env=env, cwd=house, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def ask(house: Path, code: str = ASK, **env) -> tuple[str, str]:
    process = start(house, code, **env)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip(), err

def kernels(house: Path, cache='cache') -> list[Path]: return sorted((house/cache).rglob('*.kernel'))

def test_second_process_compiles_nothing(house):
    assert ask(house)[0] == '20 40 6 0'
    assert len(kernels(house)) == 4                           # helper, kernel and both made kernels
    assert ask(house)[0] == '20 40 6 3'                       # kernels that captured kernels are found again too

@pytest.mark.parametrize('edit', [('x + STEP', 'x + 2*STEP'), ('STEP = 1', 'STEP = 2')], ids=['code', 'constant'])
def test_changed_helper_is_never_stale(house, edit):
    ask(house)
    helper = house/'site/sparkinfer/ops/helper.py'
    times = helper.stat()
    helper.write_text(helper.read_text().replace(*edit))
    os.utime(helper, ns=(times.st_atime_ns, times.st_mtime_ns))            # as a checkout or an unpacked archive may leave it
    shutil.rmtree(house/'site/sparkinfer/ops/__pycache__', ignore_errors=True)
    assert ask(house)[0] == '30 60 9 0'

def test_new_file_in_a_wing_changes_the_digest(house):
    ask(house)
    (house/'site/sparkinfer/formats').mkdir()
    (house/'site/sparkinfer/formats/blocks.py').write_text('BLOCK = 32\n')
    assert ask(house)[0] == '20 40 6 0'

def test_file_outside_the_wings_does_not(house):
    ask(house)
    (house/'site/sparkinfer/cli.py').write_text('# no kernel can see this\n')
    assert ask(house)[0] == '20 40 6 3'

def test_moved_package_keeps_its_cache(house):
    "An image is built in one place and run in another; the path is no part of the key"
    ask(house)
    (house/'site').rename(house/'moved')
    assert ask(house, PYTHONPATH=str(house/'moved'))[0] == '20 40 6 3'

def test_install_that_cannot_be_written(house):
    "Nothing is ever written beside the sources"
    site = house/'site'
    before = sorted(p.relative_to(site) for p in site.rglob('*'))
    for folder in [site, *(p for p in site.rglob('*') if p.is_dir())]: folder.chmod(0o555)
    try:
        assert ask(house, PYTHONDONTWRITEBYTECODE='1')[0] == '20 40 6 0'
        assert ask(house, PYTHONDONTWRITEBYTECODE='1')[0] == '20 40 6 3'
        assert sorted(p.relative_to(site) for p in site.rglob('*')) == before
    finally:
        for folder in [site, *(p for p in site.rglob('*') if p.is_dir())]: folder.chmod(0o755)

def test_cache_that_cannot_be_written_falls_back_to_the_temporary_folder(house):
    (house/'file').touch()
    assert ask(house, SPARKINFER_CACHE=str(house/'file'/'cache'))[0] == '20 40 6 0'
    out, err = ask(house, SPARKINFER_CACHE=str(house/'file'/'cache'))
    assert out == '20 40 6 3' and 'Warning' not in err
    folder = next(house.glob('sparkinfer-kernels-*'))
    assert folder.stat().st_mode & 0o777 == 0o700

@pytest.mark.skipif(not hasattr(os, 'getuid'), reason='POSIX permissions')
def test_temporary_folder_of_somebody_else_is_not_trusted(house):
    "Compiled kernels are code. Another user of the machine could have made the folder first, to have us run theirs."
    (house/'file').touch()
    folder = house/f'sparkinfer-kernels-{os.getuid()}'
    folder.mkdir()
    folder.chmod(0o777)
    out, err = ask(house, SPARKINFER_CACHE=str(house/'file'/'cache'))
    assert out == '20 40 6 0' and not list(folder.iterdir())
    assert err.count('compiled kernels cannot be kept') == 1 and 'set SPARKINFER_CACHE' in err        # one warning for four kernels

def test_read_only_cache_is_read(house):
    "A container image with its kernels compiled, run read-only"
    ask(house)
    kept = kernels(house)
    for p in (house/'cache').rglob('*'): p.chmod(0o555 if p.is_dir() else 0o444)
    assert ask(house)[0] == '20 40 6 3'
    assert kernels(house) == kept

def test_two_processes_at_once(house):
    "Both start with nothing and compile the same kernels; neither fails, and what they leave is whole"
    both = [start(house) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and out.startswith('20 40 6'), err
    assert len(kernels(house)) == 4 and not list((house/'cache').rglob('*.draft'))
    assert ask(house)[0] == '20 40 6 3'

@pytest.mark.parametrize('damage', [lambda b: b'', lambda b: b[:len(b)//2], lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b'not a kernel' * 100], ids=['empty', 'half', 'bit', 'other'])
def test_damaged_file_is_compiled_again(house, damage):
    ask(house)
    for path in kernels(house): path.write_bytes(damage(path.read_bytes()))
    assert ask(house)[0] == '20 40 6 0'
    assert ask(house)[0] == '20 40 6 3'                       # and was written over

def test_well_formed_file_with_a_foreign_pickle_is_compiled_again(house):
    ask(house)
    spoil = "import sys, pathlib, pickle, sparkinfer.jit as j\nfor p in pathlib.Path('cache').rglob('*.kernel'): j.write_kernel(p, pickle.dumps(('from another Numba',)))"
    ask(house, spoil)
    assert ask(house)[0] == '20 40 6 0'

def test_each_cpu_level_has_its_own_code(house):
    levels = [name for name, needs in CPU_LEVELS.items() if needs <= target_features()]
    for level in levels: assert ask(house, SPARKINFER_CPU=level)[0] == '20 40 6 0'
    assert sorted(p.name for p in (house/'cache/kernels').glob('*/*')) == sorted(levels)
    assert ask(house, SPARKINFER_CPU='portable')[0] == '20 40 6 3'

def test_generic_cpu_is_portable(house):
    "With NUMBA_CPU_NAME=generic a kernel that names an AVX2 instruction would end the process"
    assert ask(house, 'from sparkinfer.jit import cpu_level; print(cpu_level())', NUMBA_CPU_NAME='generic')[0] == 'portable'

def test_without_jit_kernels_are_plain_python(house):
    code = 'from sparkinfer.ops.kernel import kernel; print(kernel(1), type(kernel).__name__)'
    assert ask(house, code, NUMBA_DISABLE_JIT='1')[0] == '20 function'

def test_level_of_this_machine_is_one_it_has(): assert CPU_LEVELS[cpu_level()] <= target_features()

def test_closures_from_different_processes_do_not_share_a_name(tmp_path):
    "Kernels of two weight formats are closures of one function. Each compiled by its own process, both loaded by a third: two addresses, or one format computes with the other's kernel and nobody is told"
    code = 'import sys; from sparkinfer.ops import linear as l; print(*(l.open_door(int(kind), door) for door in ("matvec", "matmul") for kind in sys.argv[1:]))'
    def addresses(*kinds):
        done = subprocess.run([sys.executable, '-c', code, *kinds], env=os.environ | {'SPARKINFER_CACHE': str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()
    addresses('3'), addresses('5'), addresses('35')
    assert len(set(addresses('3', '5', '35'))) == 6
