"LLM inference that you can read as a book and run for real: `from sparkinfer import LLM`"
__version__ = "0.1.0"

_HOMES = {'LLM': 'sparkinfer.llm', 'AsyncEngine': 'sparkinfer.engine.async_engine', 'Request': 'sparkinfer.engine.request', 'SamplingParams': 'sparkinfer.engine.request'}

def __getattr__(name):      # importing the package stays cheap; the engine is imported when somebody asks for it
    if name in _HOMES:
        from importlib import import_module
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

def __dir__(): return [*globals(), *_HOMES]
