"`settings.ini` (what nbdev 2 reads, and people expect) and `pyproject.toml` (what nbdev 3 and pip read) say the same"
import configparser, tomllib
from pathlib import Path
import pytest
import sparkinfer

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT/'pyproject.toml').read_text())
_parser = configparser.ConfigParser(delimiters=['='])
_parser.read(ROOT/'settings.ini')
SETTINGS = _parser['DEFAULT']
NBDEV = PROJECT['tool']['nbdev']

def as_ini(value): return ' '.join(value) if isinstance(value, list) else str(value)

@pytest.mark.parametrize('key', sorted(set(SETTINGS) & set(NBDEV)))
def test_nbdev_key(key): assert SETTINGS[key] == as_ini(NBDEV[key])

def test_name(): assert SETTINGS['lib_name'] == SETTINGS['lib_path'] == PROJECT['project']['name'] == sparkinfer.__name__
def test_description(): assert SETTINGS['description'] == PROJECT['project']['description']
def test_python(): assert f">={SETTINGS['min_python']}" == PROJECT['project']['requires-python']
def test_version(): assert SETTINGS['version'] == sparkinfer.__version__
def test_licence(): assert SETTINGS['license'] == PROJECT['project']['license'].lower()
def test_requirements(): assert SETTINGS['requirements'].split() == PROJECT['project']['dependencies']
def test_dev_requirements(): assert SETTINGS['dev_requirements'].split() == PROJECT['project']['optional-dependencies']['dev']

def test_constraints_allow_the_requirements():
    "Every direct requirement is pinned, so that a CI run of today can be repeated next year; and no pin is below what we ask for"
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version
    pins = dict(line.split('==') for line in (ROOT/'constraints.txt').read_text().split('\n') if line and not line.startswith('#'))
    pins = {canonicalize_name(name): Version(version) for name, version in pins.items()}
    for text in PROJECT['project']['dependencies'] + PROJECT['project']['optional-dependencies']['dev']:
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, text
