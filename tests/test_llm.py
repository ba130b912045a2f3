"`LLM` on a model that says what a script tells it: every token is known in advance, so faults come exactly when wanted"
import gc, importlib.util, io, json, os, subprocess, sys, threading, time, weakref
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
from sparkinfer.engine.engine import Engine
from sparkinfer.errors import RequestError, SparkinferError
import sparkinfer.llm as llm_module
from sparkinfer.llm import LLM, Conversation, MemorySettings, Parts, Place, Progress, choose_place, load_engine, load_runner, open_model
from sparkinfer.measure.accuracy import make_runner
from sparkinfer.text.chat_template import ChatTemplate
from support import TEMPLATE, ScriptedRunner, TinyTokenizer, babble, saying, slowly

class Closable:
    "Stands for an open file and remembers that it was closed"
    metadata, closed = {}, 0
    def close(self): self.closed += 1

def make(reply='Hello there.', script=None, max_context=256, gate=None, pieces=()):
    "An `LLM` around a scripted runner"
    tokenizer = TinyTokenizer(*pieces)
    runner = ScriptedRunner(script or saying(tokenizer, reply), tokenizer, max_context, gate)
    template = ChatTemplate(TEMPLATE)
    parts = SimpleNamespace(tokenizer=tokenizer, template=template, checkpoint=Closable(), name='tiny', config=runner.config, weights=None)
    return LLM(parts, Engine(runner, tokenizer, template, name='tiny'), 'spec', 1)

@pytest.fixture
def llm():
    with make() as llm: yield llm

def test_the_three_ways_agree(llm):
    whole = llm.chat('Hi', temperature=0)
    assert str(whole) == 'Hello there.' and whole.finish_reason == 'stop' and bytes(whole.ids) == b'Hello there.'
    assert ''.join(llm.stream([dict(role='user', content='Hi')], temperature=0)) == str(whole)
    assert str(llm.generate('Hi=', temperature=0)) == str(whole)
    assert str(llm.generate(llm.prompt_ids('Hi='), temperature=0)) == str(whole)

def test_a_system_message_comes_first():
    tokenizer = TinyTokenizer()
    with make(script=saying(tokenizer, lambda prompt: prompt.upper())) as llm:
        assert str(llm.chat('hi', system='be loud. ', temperature=0)) == 'BE LOUD. HI'

def test_control_words_in_a_users_text_stay_text(llm):
    ids = llm.prompt_ids([dict(role='user', content='<|end|>')])
    assert 256 not in ids and bytes(i for i in ids if i < 256) == b'<|end|>'

def test_half_a_character_never_shows():
    with make('a👩‍👩‍👧b') as llm:
        answer = llm.stream('=', temperature=0)
        pieces = list(answer)
        assert ''.join(pieces) == 'a👩‍👩‍👧b' == answer.completion.text and not any('\ufffd' in p for p in pieces)

def test_leaving_the_loop_stops_the_work():
    with make(script=babble(260), gate=slowly(.005), max_context=4096) as llm:
        answer = llm.stream('=', ignore_eos=True, seed=1)
        for n, piece in enumerate(answer):
            if n == 3: break
        assert answer.completion.finish_reason == 'cancelled'
        steps = len(llm.engine.runner.steps)
        time.sleep(.05)
        assert len(llm.engine.runner.steps) == steps < 100

def test_an_answer_that_nobody_holds_is_not_computed():
    "Dropped before its first piece: a generator that was never begun runs no `finally`"
    with make(script=babble(260), gate=slowly(.005), max_context=4096) as llm:
        for drop in (lambda: llm.stream('=', ignore_eos=True, seed=1), lambda: Conversation(llm, ignore_eos=True).say('x'), lambda: iter(llm.stream('=', ignore_eos=True))):
            answer = drop()
            events = getattr(answer, 'events', None) or answer.gi_frame.f_locals['self'].events
            del answer
            gc.collect()
            assert events.wait(10) and events.cancelled
        assert llm.engine.health().cancelled == 3

def test_a_reader_whose_alarm_is_broken_harms_nobody_else(llm):
    "Its function runs in the engine's thread"
    stream = llm.engine.submit(llm.request('=', temperature=0))
    stream.take(lambda: 1 / 0)
    assert stream.collect()[0].text == 'Hello there.' and str(llm.generate('=', temperature=0)) == 'Hello there.' and llm.engine.health().ok

def test_an_interrupt_inside_the_loop_stops_the_work():
    with make(script=babble(260), gate=slowly(.005), max_context=4096) as llm:
        answer = llm.stream('=', ignore_eos=True, seed=1)
        with pytest.raises(KeyboardInterrupt):
            for n, piece in enumerate(answer):
                if n == 3: raise KeyboardInterrupt
        assert answer.cancel().finish_reason == 'cancelled' and answer.cancel() is answer.completion

def test_an_engine_fault_is_raised_and_the_next_answer_works():
    faults = [RuntimeError('the step failed')]
    def gate(batch):
        if faults: raise faults.pop()
    with make(gate=gate) as llm:
        with pytest.raises(RuntimeError, match='the step failed'): llm.generate('=', temperature=0)
        assert str(llm.generate('=', temperature=0)) == 'Hello there.'

def test_usage_and_seed(llm):
    done = llm.generate('abc=', temperature=0, max_tokens=5)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.finish_reason) == (4, 5, 'length')
    again = llm.generate('abc=', temperature=0, max_tokens=5)
    assert again.usage.cached_tokens == 3 and again.timings.prompt_tokens == 1
    with make(script=babble(260)) as noisy:
        told = noisy.generate('=', max_tokens=8, temperature=1)
        assert noisy.generate('=', max_tokens=8, temperature=1, seed=told.seed).ids == told.ids

def test_several_prompts_and_several_answers(llm):
    assert [str(c) for c in llm.generate(['=', 'x='], temperature=0)] == ['Hello there.'] * 2
    assert len(llm.generate('=', n=3, max_tokens=2)) == 3
    with pytest.raises(RequestError): llm.stream('=', n=2)

def test_bad_requests_name_the_parameter(llm):
    for call, param in ((lambda: llm.generate('=', temperature=9), 'temperature'), (lambda: llm.generate([]), 'prompt'), (lambda: llm.chat([]), 'messages'), (lambda: llm.generate([10**6]), 'prompt'),
                        (lambda: llm.generate('x' * 300), 'messages')):
        with pytest.raises(RequestError) as caught: call()
        assert caught.value.param == param
    with pytest.raises(RequestError, match="did you mean 'temperature'"): llm.generate('=', temprature=1)
    assert str(llm.generate('=', temperature=0)) == 'Hello there.'

def test_fields_of_http_lead_to_the_grammar_of_python(llm):
    "Fault: who knows the server wrote response_format=…, and was given a list of 19 names"
    for more in (dict(response_format=dict(type='json_object')), dict(guided_regex='a+'), dict(grammar='root ::= "a"')):
        with pytest.raises(RequestError, match='from sparkinfer.engine.request import Grammar') as caught: llm.chat('=', **more)
        assert caught.value.param == next(iter(more))

def test_what_is_no_prompt_is_refused_in_one_line(llm):
    "Guards against bytes taken for token ids, and a lone message for a list of texts"
    for ask, wrong in ((llm.generate, b'hi'), (llm.generate, None), (llm.generate, 7), (llm.chat, None), (llm.chat, dict(role='user', content='x')), (llm.chat, ['a', 'b']), (llm.chat, []), (llm.chat, 5)):
        with pytest.raises(RequestError, match='a prompt is|a conversation'): ask(wrong)

def test_close_is_final_and_safe():
    llm = make()
    runner, checkpoint = llm.engine.runner, llm.parts.checkpoint
    llm.close(), llm.close()
    assert runner.closed and checkpoint.closed == 1
    with pytest.raises(SparkinferError, match='this model is closed'): llm.generate('=')

def test_a_dropped_model_is_closed():
    llm = make()
    runner, gone = llm.engine.runner, weakref.ref(llm)
    llm.generate('=', temperature=0)
    del llm
    gc.collect()
    assert gone() is None and runner.closed

def test_a_conversation_grows_and_keeps_what_was_seen():
    tokenizer = TinyTokenizer()
    with make(script=saying(tokenizer, lambda prompt: f'{len(prompt)}.')) as llm:
        talk = Conversation(llm, system='S', temperature=0)
        assert [''.join(talk.say(x)) for x in ('ab', 'cd')] == ['3.', '7.']
        assert [m['content'] for m in talk.messages] == ['S', 'ab', '3.', 'cd', '7.']
        with pytest.raises(RequestError): talk.say('x' * 300)
        assert len(talk.messages) == 5
        talk.clear()
        assert talk.messages == [dict(role='system', content='S')]

def test_two_threads_each_get_their_own_answer():
    tokenizer = TinyTokenizer()
    with make(script=saying(tokenizer, lambda prompt: prompt[:-1].upper())) as llm:
        said = {}
        threads = [threading.Thread(target=lambda k=k: said.update({k: str(llm.generate(f'prompt {k}=', temperature=0))})) for k in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert said == {k: f'PROMPT {k}' for k in range(8)}

def test_speed_so_far_adds_up(llm):
    for _ in range(3): llm.generate('=', temperature=0)
    assert llm.answers['answers'] == 3 and llm.answers['decode_tokens'] == 3 * len('Hello there.')

def test_many_prompts_are_computed_together():
    "More prompts than may wait: the call waits for its own, refuses none, and each answer is the one that the prompt gets alone"
    prompts, knobs = [f'prompt {k}=' for k in range(20)], dict(temperature=1, seed=3, max_tokens=6, ignore_eos=True)
    with make(script=babble(260), max_context=512) as llm:
        alone = [llm.generate(p, **knobs).ids for p in prompts]
        steps = len(llm.engine.runner.steps)
        assert [c.ids for c in llm.generate(prompts, **knobs)] == alone and len(llm.engine.runner.steps) - steps < steps / 2
        llm.engine.limits = replace(llm.engine.limits, max_queue=2)
        assert [c.ids for c in llm.generate([llm.prompt_ids(p) for p in prompts], **knobs)] == alone
        pairs = llm.generate(prompts[:3], n=2, **knobs)
        assert [[c.ids for c in pair][0] for pair in pairs] == alone[:3] and llm.engine.health().active == 0
        with pytest.raises(RequestError): llm.generate([*prompts[:5], [10**6]], **knobs)
        assert llm.engine.health().queued == 0


def parts_of(folder='llama'):
    "A small real model beside a scripted tokenizer; `checkpoint.closed` counts"
    from pathlib import Path
    from sparkinfer.formats.safetensors import open_folder
    from sparkinfer.models.config import ModelConfig
    from sparkinfer.models.weights import Weights
    folder = Path(__file__).resolve().parent.parent/'data/reference/tiny'/folder
    files = open_folder(folder)
    weights = Weights.from_checkpoint(files, ModelConfig.from_hf(json.loads((folder/'config.json').read_text()), files.tensors))
    return Parts(folder, Closable(), weights, TinyTokenizer(*(f'<{i}>' for i in range(weights.config.vocab_size - TinyTokenizer().vocab_size))), None)

SMALL = dict(context=64, slots=1, kv_tokens=64, runner='spec')

def load(parts=None, **settings):
    "An `LLM` of a small real model, and what the loading said"
    said = io.StringIO()
    parts = parts or parts_of()
    engine, threads = load_engine(parts, progress=Progress('tiny', said, enabled=False), **{**SMALL, **settings})
    return LLM(parts, engine, 'spec', threads), said.getvalue()

@pytest.fixture
def runners(monkeypatch):
    "Every runner that is made, and how often each was closed"
    from sparkinfer.models.forward import SpecRunner
    made, load, close = {}, SpecRunner.load, SpecRunner.close
    def counted_load(self, *args, **kwargs): made[self] = 0; return load(self, *args, **kwargs)
    def counted_close(self): made[self] += 1; return close(self)
    monkeypatch.setattr(SpecRunner, 'load', counted_load)
    monkeypatch.setattr(SpecRunner, 'close', counted_close)
    return made

def test_a_cache_file_that_cannot_be_used_costs_one_line(tmp_path):
    "Fault: a file that was cut short, or that of another model, kept the model from loading until somebody deleted it"
    file, prompt = tmp_path/'cache', list(range(1, 41))
    llm, said = load(cache_file=str(file))
    answer = llm.generate(prompt, temperature=0, max_tokens=4)
    llm.close()
    good, other = file.read_bytes(), load(parts_of('qwen3'), cache_file=str(tmp_path/'other'))[0]
    other.generate(prompt, temperature=0, max_tokens=4), other.close()
    assert said == '' and len(good) > 1000
    for data, why in ((good[:-10], 'bytes are missing'), (b'', 'empty'), ((tmp_path/'other').read_bytes(), 'fingerprint')):
        file.write_bytes(data)
        llm, said = load(cache_file=str(file))
        assert said.count('\n') == 1 and str(file) in said and why in said and 'written anew' in said, said
        again = llm.generate(prompt, temperature=0, max_tokens=4)
        assert again.ids == answer.ids and again.usage.cached_tokens == 0
        llm.close()
        assert file.read_bytes()[:64] == good[:64]
    llm, said = load(cache_file=str(file))
    with llm: assert said == '' and llm.generate(prompt, temperature=0, max_tokens=4).usage.cached_tokens == 39
    file.write_text('years of work')                                        # nothing says that it is ours: it is not replaced
    with pytest.raises(SparkinferError, match='another kind'): load(cache_file=str(file))
    assert file.read_text() == 'years of work'

def test_settings_of_a_wrong_kind_or_name_are_one_line():
    "Fault: TypeErrors of Python, some of them after the weights were touched"
    for name, value in (('slots', 2.5), ('slots', True), ('slots', '4'), ('kv_tokens', 100.5), ('kv_type', ['f16']), ('cache_file', ''), ('nonsense', 1)):
        with pytest.raises(SparkinferError, match=name): load(**{name: value})

def test_a_cache_file_in_a_wrong_place_is_found_at_the_start(tmp_path, runners):
    "Fault: an hour of talking, then an OSError when the cache was to be written. A model's file given by mistake would have been replaced"
    (tmp_path/'text').write_text('x')
    model = tmp_path/'model.safetensors'
    model.write_bytes((parts_of().path/'model.safetensors').read_bytes())
    (tmp_path/'model.gguf').write_bytes(b'GGUF' + bytes(100))
    for name, why in (('', 'not a file'), ('no/such/cache', 'No such file'), ('text/cache', 'Not a directory'), (model.name, 'another kind'), ('model.gguf', 'another kind')):
        parts = parts_of()
        with pytest.raises(SparkinferError, match=why) as caught: load(parts, cache_file=str(tmp_path/name))
        assert 'cache_file' in str(caught.value) and '\n' not in str(caught.value) and parts.checkpoint.closed == 1
    for folder, why in ((tmp_path/'nope', 'No such file'), (model, 'Not a directory')):
        with pytest.raises(SparkinferError, match=why) as caught: load(spill_mb=1, spill_folder=str(folder))
        assert str(folder) in str(caught.value)
    assert not runners and sorted(p.name for p in tmp_path.iterdir()) == ['model.gguf', 'model.safetensors', 'text']

@pytest.mark.parametrize('where', ['sparkinfer.memory.model_memory.ModelMemory', 'sparkinfer.engine.engine.Engine', 'sparkinfer.memory.model_memory.ModelMemory._identity'])
def test_a_failure_after_the_weights_are_loaded_frees_them(where, runners, monkeypatch, tmp_path):
    "Fault: each load that failed late left a runner with its weights and threads behind"
    def fail(*args, **kwargs): raise SparkinferError('made to fail')
    monkeypatch.setattr(where, fail)
    parts = parts_of()
    with pytest.raises(SparkinferError, match='made to fail') as caught: load(parts, cache_file=str(tmp_path/'cache'), spill_mb=1, spill_folder=str(tmp_path))     # `caught` keeps what was made alive
    assert not any(os.path.realpath(f'/proc/self/fd/{n}').startswith(str(tmp_path)) for n in os.listdir('/proc/self/fd')), caught
    assert list(runners.values()) == [1] and parts.checkpoint.closed == 1

def test_the_model_file_is_closed_when_the_cache_cannot_be_written(tmp_path):
    folder = tmp_path/'folder'
    folder.mkdir()
    llm, _ = load(cache_file=str(folder/'cache'))
    folder.rmdir()
    with pytest.raises(SparkinferError, match='cannot be written'): llm.close()
    assert llm.parts.checkpoint.closed == 1

# ---- CPU or GPU

needs_numba_cuda = pytest.mark.skipif(importlib.util.find_spec('numba_cuda') is None, reason='numba-cuda comes with the cuda and dev extras')

@pytest.fixture
def two_cards(monkeypatch):
    "A machine with an old GPU and one that will do; the free memory of each"
    from sparkinfer.cuda import graphs
    free = [8 << 30, 8 << 30]
    monkeypatch.setattr('sparkinfer.llm.has_driver', lambda: True)
    monkeypatch.setattr(graphs, 'cards', lambda: (graphs.Card(0, 'NVIDIA T4', (7, 5)), graphs.Card(1, 'NVIDIA H200', (9, 0))))
    monkeypatch.setattr(graphs, 'free_bytes', lambda number: free[number])
    monkeypatch.setattr(graphs._Taken, 'number', None)
    return free

@needs_numba_cuda
def test_auto_takes_the_first_gpu_that_will_do(two_cards):
    "Fault: an old GPU was taken, or a good one left"
    said, weights = [], parts_of().weights
    assert choose_place(weights, say=said.append) == Place('cuda', 1, 'NVIDIA H200') and said == []
    with pytest.raises(SparkinferError, match='another card needs a process of its own'): choose_place(weights, device='cuda:0')
    two_cards[0] = two_cards[1] = 0                                            # this process has its card, and what it holds there is not free any more
    assert choose_place(weights, device='cuda:1').device == 'cuda:1'

@needs_numba_cuda
def test_why_a_gpu_was_not_taken_is_one_line(two_cards):
    "Fault: a model ran on the CPU beside an idle GPU, and nobody knew why"
    two_cards[1], said, weights = 1 << 20, [], parts_of().weights
    assert choose_place(weights, say=said.append) == Place('cpu')
    assert len(said) == 1 and all(words in said[0] for words in ('computing on the CPU', 'cuda:0 (NVIDIA T4)', '7.5', 'cuda:1 (NVIDIA H200): not enough memory', '1.0 MB are free')) and '\n' not in said[0], said
    two_cards[1] = 8 << 30
    assert choose_place(weights, settings=MemorySettings(kv_type='bf16'), say=said.append) == Place('cpu') and 'f16, int8' in said[1]
    with pytest.raises(SparkinferError, match=r'there is no cuda:2; this machine has 2 cards: cuda:0 \(NVIDIA T4\), cuda:1 \(NVIDIA H200\)'): choose_place(weights, device='cuda:2')
    for runner in ('cpu', 'spec'): assert choose_place(weights, runner, say=said.append) == Place(runner) and len(said) == 2

def test_without_a_gpu_nothing_of_cuda_is_imported():
    "Fault: half a second and two hundred megabytes for a look whether there is a GPU"
    from sparkinfer.llm import has_driver
    if has_driver(): pytest.skip('there is a GPU here')
    code = '''
import sys
sys.path.insert(0, "tests")
from test_llm import load
llm, said = load(runner="auto")
print(llm.info, said, [m for m in sys.modules if m.startswith(("sparkinfer.cuda.", "sparkinfer.models.cuda", "numba_cuda", "cuda."))])
'''
    done = subprocess.run([sys.executable, '-c', code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == '' and "'device': 'cpu'" in done.stdout and done.stdout.rstrip().endswith('[]'), done.stdout + done.stderr

def test_what_is_in_force_is_told():
    llm, _ = load()
    with llm:
        assert llm.engine.place == llm.place == Place('spec') and llm.info['runner'] == 'spec' and llm.info['device'] == 'cpu' and llm.info['capacity']['slots'] == 1
        from sparkinfer.serve.app import info
        told = info(None, SimpleNamespace(engine=llm.engine, state=SimpleNamespace(shown=[], strange=[])))
        assert (told['runner'], told['device'], told['card']) == ('spec', 'cpu', None)
        assert dict(llm.facts())['device'].startswith('cpu with') and 'spec with' in repr(llm)
    with pytest.raises(SparkinferError, match='device cuda:0 and runner spec contradict'): load(device='cuda:0')

def test_a_wrong_type_is_one_line(llm):
    "Guards against a TypeError from somewhere inside"
    for call in (lambda: LLM.load(None), lambda: LLM.load(7), lambda: MemorySettings(cache_file=5), lambda: MemorySettings(cache_file='a\0b'), lambda: MemorySettings(spill_mb=1, spill_folder='')):
        with pytest.raises(SparkinferError, match='a model is a name|must be the name of'): call()
    for knobs in (dict(stop_token_ids=None), dict(stop_token_ids=5), dict(stop_token_ids='5'), dict(variables=[1]), dict(variables={5: 5})):
        with pytest.raises(RequestError, match='stop_token_ids|variables'): llm.chat('x', **knobs)
    for name, value in (('context', '512'), ('threads', '2'), ('threads', True), ('context', 0)):
        with pytest.raises(RequestError, match=f'{name} must be a whole number'): LLM.load('smollm2', progress=False, **{name: value})

# ---- on a GPU

class Asked(Exception): "What a scripted runner on a GPU was told when it was to load"

@pytest.mark.parametrize('keep', [False, True])
@pytest.mark.parametrize('load', [lambda keep: LLM.load('smollm2', context=256, progress=False, keep_packed=keep),
                                  lambda keep: load_runner(open_model('smollm2'), 256, keep_packed=keep),
                                  lambda keep: make_runner('cuda', open_model('smollm2').weights, 256, keep_packed=keep)], ids=['LLM.load', 'load_runner', 'make_runner'])
def test_keep_packed_reaches_a_runner_on_a_gpu(monkeypatch, load, keep):
    class Scripted:
        def load(self, *args, **kwargs): raise Asked(self.keep_packed)
        def close(self): pass
    monkeypatch.setattr(llm_module, 'choose_place', lambda *args: Place('cuda', 0, 'scripted'))
    monkeypatch.setitem(llm_module.RUNNERS, 'cuda', llm_module.RunnerKind(lambda threads, kv_type: Scripted(), ('f16',), lambda weights: 0, 'scripted'))
    monkeypatch.setitem(sys.modules, 'sparkinfer.models.cuda_runner', SimpleNamespace(CudaRunner=Scripted))
    with pytest.raises(Asked) as asked: load(keep)
    assert asked.value.args == (keep,)
