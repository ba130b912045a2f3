"""The engine driven hard: many threads at once, cancels at every point, faults at every step, and the real model.

One notebook's business is in nbs/engine; here is what takes threads, time or weights. Every test ends with the leak counters where they began."""
import asyncio, threading, time
from dataclasses import replace
import numpy as np
import pytest
from sparkinfer.engine.engine import Engine
from sparkinfer.engine.request import Completions, EngineBusy, EngineDefaults, ErrorEvent, FinishEvent, Request, SamplingParams, TokenEvent
from sparkinfer.errors import RequestError
from sparkinfer.models.forward import SpecRunner
from support import Late, ScriptedRunner, TinyTokenizer, babble, saying, slowly


def scripted(script, *pieces, gate=None, layer_kinds=('attention',), slots=4, pages=None, **kwargs):
    tokenizer = TinyTokenizer(*pieces)
    return Engine(ScriptedRunner(script if callable(script) else saying(tokenizer, script), tokenizer, gate=gate, layer_kinds=layer_kinds, num_slots=slots, num_pages=pages), tokenizer, **kwargs)

def idle(engine, seconds=2):
    end = time.perf_counter() + seconds
    while (h := engine.health()).active or h.queued:
        assert time.perf_counter() < end, h
        time.sleep(0.002)
    return h

MODEL_ONLY = {i: -100 for i in range(256, 260)}   # no control tokens, so that answers run to their length


def test_many_threads_get_their_own_answers():
    prompts = [[n, n + 1, n + 2] for n in range(24)]
    params = SamplingParams(temperature=1, seed=5, max_tokens=12, logit_bias=MODEL_ONLY)
    with scripted(babble(260)) as engine: alone = [engine.submit(Request(p, params)).collect()[0].token_ids for p in prompts]
    with scripted(babble(260)) as engine:
        answers = {}
        def ask(k): answers[k] = engine.submit(Request(prompts[k], params)).collect()[0].token_ids
        threads = [threading.Thread(target=ask, args=(k,)) for k in range(24)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert [answers[k] for k in range(24)] == alone
        assert idle(engine).finished == 24

def test_first_come_first_served():
    order = []
    with scripted(lambda h: ord('a'), gate=slowly(0.002), slots=1) as engine:
        def follow(k, stream):
            list(stream)
            order.append(k)
        threads = [threading.Thread(target=follow, args=(k, engine.submit(Request([k], SamplingParams(max_tokens=8))))) for k in range(6)]
        for t in threads: t.start()
        for t in threads: t.join()
    assert order == list(range(6))

@pytest.mark.parametrize('chunk', [1, 3, 64])
def test_cancel_at_any_point_leaves_nothing_behind(chunk):
    "Cancel after k events or k milliseconds; what comes next is what a fresh engine would say"
    probe = Request([9, 8, 7], SamplingParams(temperature=1, seed=1, max_tokens=6, logit_bias=MODEL_ONLY))
    with scripted(babble(260)) as engine: want = engine.submit(probe).collect()[0].token_ids
    with scripted(babble(260), gate=slowly(0.0005), step_rows=chunk) as engine:
        for k in range(12):
            stream = engine.submit(Request([9, 8, *range(60)], SamplingParams(temperature=1, seed=k, max_tokens=40, logit_bias=MODEL_ONLY)))
            if k % 2: time.sleep(k * 0.002)
            else:
                for _ in range(k): next(stream)
            begin = time.perf_counter()
            stream.cancel()
            end = list(stream)[-1]
            assert isinstance(end, FinishEvent) and end.reason in ('cancelled', 'length') and time.perf_counter() - begin < 1
            assert engine.submit(probe).collect()[0].token_ids == want
        h = idle(engine)
        assert h.failed == 0 and h.finished + h.cancelled == 24

def test_a_fault_at_every_step_ends_one_request_only():
    with scripted(babble(260), step_rows=4) as engine:
        params = SamplingParams(temperature=1, seed=1, max_tokens=6, logit_bias=MODEL_ONLY)
        want = engine.submit(Request([1] * 10, params)).collect()[0].token_ids
        for step in range(8):   # three prefill chunks, then decode steps
            countdown = iter(range(step))
            def gate(batch):
                if next(countdown, None) is None: raise OSError('device lost')
            engine.runner.gate = gate
            events = list(engine.submit(Request([2 + step] * 10, params)))
            engine.runner.gate = None
            assert isinstance(events[-1], ErrorEvent) and 'device lost' in str(events[-1].error)
            assert engine.submit(Request([1] * 10, params)).collect()[0].token_ids == want
        assert engine.health().ok and engine.health().failed == 8

def test_nan_logits_fail_the_request_and_never_become_token_0():
    with scripted(lambda h: np.full(260, np.nan) if len(h) > 5 else ord('a')) as engine:
        events = list(engine.submit(Request([1, 2, 3], SamplingParams(temperature=0))))
        assert [e.token_id for e in events[:-1]] == [97, 97, 97]
        assert 'NaN' in str(events[-1].error)
        with pytest.raises(Exception, match='NaN'): engine.submit(Request([1] * 9)).collect()

def test_recurrent_models_reuse_only_a_true_beginning():
    params = SamplingParams(temperature=1, seed=1, max_tokens=5, logit_bias=MODEL_ONLY)
    with scripted(babble(260), layer_kinds=('attention', 'delta')) as engine:
        first = engine.submit(Request([1, 2, 3, 4], params)).collect()[0]
        grown = engine.submit(Request([1, 2, 3, 4, *first.token_ids, 5], params)).collect()[0]
        assert grown.usage.cached_tokens == 8
        assert engine.submit(Request([1, 2, 3, 9], params)).collect()[0].usage.cached_tokens == 0

def test_prompt_at_the_edges_of_the_context():
    with scripted(lambda h: ord('a'), max_context=64, step_rows=16) as engine:
        for tokens in (1, 2, 15, 16, 17, 31, 32, 33, 62, 63):
            answer = engine.submit(Request([5] * tokens)).collect()[0]
            assert answer.usage.total_tokens == 64 and answer.reason == 'length', tokens
        for tokens in (64, 65, 1000, 40_000):
            with pytest.raises(RequestError, match='64') as e: engine.submit(Request([5] * tokens))
            assert e.value.code == 'context_length_exceeded' and f'{tokens:,}' in str(e.value)
        for bad in (SamplingParams(logit_bias={260: 1}), SamplingParams(stop_token_ids=(260,))):
            with pytest.raises(RequestError, match='260'): engine.submit(Request([1], bad))
        with pytest.raises(RequestError, match='260'): engine.submit(Request([1, 260]))

def test_knobs_reach_the_sampler():
    "Each sampling field changes an answer that is otherwise the same: none is taken and dropped"
    base = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, max_tokens=30)
    with scripted(lambda h: np.random.default_rng(h[-1]).normal(size=260) * 2 - 9 * (np.arange(260) > 255)) as engine:
        ask = lambda **knobs: engine.submit(Request([1, 2], SamplingParams(**{**base, **knobs}))).collect()[0].token_ids
        plain = ask()
        assert plain == ask()
        for knobs in (dict(temperature=0.3), dict(top_k=3), dict(top_p=0.3), dict(min_p=0.5), dict(repetition_penalty=2.0), dict(presence_penalty=2.0), dict(frequency_penalty=2.0), dict(seed=4), dict(logit_bias={plain[0]: -100})):
            assert ask(**knobs) != plain, knobs
        assert len(ask(stop_token_ids=(plain[4],))) == 4

def test_defaults_apply_only_where_the_request_is_silent():
    with scripted(babble(260), defaults=EngineDefaults(max_tokens=3, temperature=0)) as engine:
        stream = engine.submit(Request([1], SamplingParams(temperature=0.5, logit_bias=MODEL_ONLY)))
        assert (stream.params.max_tokens, stream.params.temperature) == (3, 0.5)
        assert len(stream.collect()[0].token_ids) == 3

def test_async_readers_of_several_loops_and_a_reader_that_gives_up():
    with scripted(lambda h: ord('a'), gate=slowly(0.002)) as engine:
        async def read(k):
            stream = engine.submit(Request([k], SamplingParams(max_tokens=10)))
            try:
                async with asyncio.timeout(0.001): await anext(stream)   # a reader that was cancelled while it waited loses nothing
            except TimeoutError: pass
            return [e async for e in stream]
        results = []
        threads = [threading.Thread(target=lambda k=k: results.append(asyncio.run(read(k)))) for k in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert all(len(r) in (10, 11) and isinstance(r[-1], FinishEvent) for r in results)
        async def abandon(): await anext(engine.submit(Request([1], SamplingParams(max_tokens=10))))
        asyncio.run(abandon())   # its loop is closed while events still come
        assert idle(engine).failed == 0

def test_closing_while_everything_runs():
    engine = scripted(lambda h: ord('a'), gate=slowly(0.005))
    streams = [engine.submit(Request([1], SamplingParams(max_tokens=300))) for _ in range(5)]
    ends = []
    readers = [threading.Thread(target=lambda s=s: ends.append(list(s)[-1].reason)) for s in streams]
    for r in readers: r.start()
    time.sleep(0.03)
    begin = time.perf_counter()
    assert engine.close() and time.perf_counter() - begin < 2
    for r in readers: r.join(2)
    assert ends == ['cancelled'] * 5 and engine.health().detail == 'closed'
    with pytest.raises(EngineBusy): engine.submit(Request([1]))


# the real model

@pytest.fixture(scope='module')
def smollm2():
    llm = pytest.importorskip('sparkinfer.llm')
    with llm.LLM.load('smollm2', context=768, progress=False) as loaded: yield loaded.engine

def ask(engine, text, **knobs):
    return engine.submit(Request(engine.encode_prompt(text), SamplingParams(**{'temperature': 0, **knobs}))).collect()

def test_smollm2_counts(smollm2):
    answer, = ask(smollm2, '1, 2, 3, 4, 5,', max_tokens=12, logprobs=3)
    assert answer.text.startswith(' 6, 7, 8, 9')
    assert b''.join(smollm2.tokenizer.token_bytes(l.token_id) for l in answer.logprobs).decode() == answer.text
    assert all(l.logprob <= 0 and l.top[0] == (l.token_id, pytest.approx(l.logprob)) and len(l.top) == 3 for l in answer.logprobs)

def test_smollm2_cold_is_warm_is_chunked(smollm2):
    "Ids at temperature 0: from nothing, with the whole prompt in memory, after an edit, and in prefill chunks of odd sizes. One kernel computes all of them, so no tie guard is needed"
    text = 'The quick brown fox jumps over the lazy dog. ' * 12 + 'Once upon a time'
    def cold(text):
        smollm2.forget()
        return ask(smollm2, text, max_tokens=24)[0]
    want = cold(text)
    assert want.usage.cached_tokens == 0
    warm = ask(smollm2, text, max_tokens=24)[0]
    assert warm.token_ids == want.token_ids and warm.usage.cached_tokens == warm.usage.prompt_tokens - 1
    edited = ask(smollm2, text.replace('Once', 'Twice'), max_tokens=24)[0]
    assert 0 < edited.usage.cached_tokens < edited.usage.prompt_tokens - 1
    assert edited.token_ids == cold(text.replace('Once', 'Twice')).token_ids
    limits = smollm2.limits
    try:
        for size in (1, 37, 64):
            smollm2.limits = replace(limits, step_rows=size)
            assert cold(text).token_ids == want.token_ids
    finally: smollm2.limits = limits

def test_smollm2_chat_reuses_its_past(smollm2):
    messages, cached = [dict(role='user', content='Name three colours.')], []
    for turn in ('And three animals.', 'Now one of each.', None):
        answer, = smollm2.submit(Request(smollm2.encode_chat(messages), SamplingParams(temperature=0, max_tokens=20))).collect()
        cached.append((answer.usage.cached_tokens, answer.usage.prompt_tokens))
        messages += [dict(role='assistant', content=answer.text), dict(role='user', content=turn)]
    assert all(0.5 < c / p < 1 for c, p in cached[1:]), cached

def test_smollm2_same_seed_same_text(smollm2):
    first, second = ask(smollm2, 'My favourite', temperature=1, n=2, max_tokens=16)
    again = ask(smollm2, 'My favourite', temperature=1, n=2, max_tokens=16, seed=first.seed)
    assert [a.token_ids for a in again] == [first.token_ids, second.token_ids] and first.token_ids != second.token_ids
    filtered, = ask(smollm2, 'My favourite', temperature=1, max_tokens=1, seed=first.seed, top_k=0, top_p=1, min_p=0)
    assert filtered.token_ids[:1] and filtered.seed == first.seed

def test_smollm2_cancels_in_a_long_prompt(smollm2):
    smollm2.forget()
    stream = smollm2.submit(Request(smollm2.encode_prompt('word ' * 700)[:760], SamplingParams(max_tokens=5)))
    time.sleep(0.02)
    begin = time.perf_counter()
    stream.cancel()
    assert list(stream)[-1].reason == 'cancelled' and time.perf_counter() - begin < 5

def test_a_call_finds_no_step_in_flight():
    "However late it comes: here, after the turn has looked whether there are calls and before it answers them"
    class Behind(Late, ScriptedRunner): pass
    tokenizer = TinyTokenizer()
    with Engine(Behind(babble(260), tokenizer), tokenizer) as engine:
        answer_calls, asked, seen = engine._answer_calls, [], []
        def late():
            if engine._flights and not asked:
                asked.append(threading.Thread(target=lambda: seen.append(engine.call(lambda: len(engine._flights)))))
                asked[0].start()
                while not engine._calls: time.sleep(.001)
            return answer_calls()
        engine._answer_calls = late
        engine.submit(Request([97, 98], SamplingParams(max_tokens=50, seed=1, ignore_eos=True, logit_bias={i: -100 for i in range(256, 260)}))).collect()
        asked[0].join()
    assert seen == [0]
