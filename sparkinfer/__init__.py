"LLM inference that you can read as a book and run for real: `from sparkinfer import LLM`"
__version__ = "0.1.0"

def __getattr__(name):      # importing the package stays cheap; the engine is imported when somebody asks for it
    if name == 'LLM':
        from sparkinfer.llm import LLM
        return LLM
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

def __dir__(): return [*globals(), 'LLM']
