"`LLM` on a model that says what a script tells it: every token is known in advance, so faults come exactly when wanted"
import gc, threading, time, weakref
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
from sparkinfer.engine.engine import Engine
from sparkinfer.errors import RequestError, SparkinferError
from sparkinfer.llm import LLM, Conversation
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
    with pytest.raises(TypeError): llm.generate('=', temprature=1)
    assert str(llm.generate('=', temperature=0)) == 'Hello there.'

def test_close_is_final_and_safe():
    llm = make()
    runner, checkpoint = llm.engine.runner, llm.parts.checkpoint
    llm.close(), llm.close()
    assert runner.closed and checkpoint.closed == 1
    with pytest.raises(SparkinferError, match='shutting down'): llm.generate('=')

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
