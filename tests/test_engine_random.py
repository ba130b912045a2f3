"""The engine driven at random, step by step: requests come, are cancelled, expire, fork into several answers, run out of pages and slots, meet faults, and the whole is restarted from its saved cache.

The engine's thread is put aside and its turns are taken by hand, so a failing history can be replayed and made smaller. The toy model reads every position through the block tables, free pages are full of rubbish, and each answer is compared
with the one that the same request gets alone from a fresh engine without any cache. For a long search: `python tests/test_engine_random.py 3000`."""
import sys, tempfile
from functools import lru_cache
from pathlib import Path
import numpy as np
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from sparkinfer.engine.engine import Engine
from sparkinfer.engine.request import DeadlineExceeded, EngineBusy, ErrorEvent, FinishEvent, Request, SamplingParams
from sparkinfer.engine.scheduler import EngineLimits
from sparkinfer.memory.model_memory import ModelMemory
from sparkinfer.models.toy_runner import ToyRunner
from support import Late, TinyTokenizer

CONTEXT, VOCAB = 96, 260
random = np.random.default_rng(0)
STEMS = [tuple(random.integers(0, 256, n).tolist()) for n in (1, 2, 15, 16, 17, 31, 40, 63)]
PENALTIES = [dict(presence_penalty=1.5), dict(frequency_penalty=1.2, presence_penalty=-.5), dict(repetition_penalty=1.5), dict(repetition_penalty=1.3, frequency_penalty=.4)]
FEW = ((5, 7), (9, 7), (66, 7), (200, 7))           # biases: tokens that are said again and again, so that a penalty decides
TURNS = [(257, *STEMS[4], 258, *STEMS[2], 259), (257, *STEMS[4], 258, *STEMS[3], 259), (258, 7, 259)]     # conversations that begin alike, with tokens that start turns


class HandDriven(Engine):
    "An engine whose turns are taken by the caller"
    def _run(self): pass
    def step(self):
        if self._waiting or self._running or self._calls or self._flights: self._turn()

class LateToy(Late, ToyRunner):
    "Whose tokens come one step late, so that the engine plans with them in flight"

def params(knobs): return SamplingParams(**{**dict(knobs), 'logit_bias': dict(dict(knobs)['logit_bias'])})

def build(recurrent, pages, slots, limits=EngineLimits(), late=False, cache=True):
    runner = (LateToy if late else ToyRunner)(VOCAB, recurrent).load(max_context=CONTEXT, num_slots=slots, num_pages=pages)
    return HandDriven(runner, TinyTokenizer(), limits=limits, memory=ModelMemory(runner, prefix_cache=cache, fingerprint='toy'))

@lru_cache(10_000)
def alone(prompt, recurrent, knobs):
    "What each of the answers says when nothing else is there"
    engine = build(recurrent, pages=3 * CONTEXT // 16, slots=3, cache=False)
    stream = engine.submit(Request(list(prompt), params(knobs)))
    for _ in range(500): engine.step()
    return [(tuple(c.token_ids), c.reason, c.logprobs) for c in stream.collect()]


class Machine(RuleBasedStateMachine):
    @initialize(recurrent=st.booleans(), pages=st.integers(6, 26), slots=st.integers(1, 5), rows=st.sampled_from([1, 3, 16, 40, 256]), queue=st.sampled_from([0, 2, 64]), late=st.booleans())
    def start(self, recurrent, pages, slots, rows, queue, late):
        self.folder, self.options = tempfile.TemporaryDirectory(), (recurrent, pages, slots, EngineLimits(step_rows=rows, mixed_rows=max(1, rows // 3), max_queue=queue, priority_seconds=.001), late)
        self.engine, self.streams, self.faults = build(*self.options), [], 0
        self.file = Path(self.folder.name)/'cache'

    @rule(stem=st.sampled_from(STEMS + TURNS), extra=st.lists(st.integers(0, 255), max_size=6), tokens=st.integers(1, 30), n=st.sampled_from([1, 1, 1, 2, 4]), seed=st.integers(0, 2), priority=st.integers(-2, 2), penalty=st.sampled_from([{}, {}, {}, *PENALTIES, dict(logprobs=2)]))
    def submit(self, stem, extra, tokens, n, seed, priority, penalty):
        prompt, knobs = (*stem, *extra), tuple(dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, n=n, max_tokens=tokens, logit_bias=FEW if penalty else (), **penalty).items())
        if len(prompt) + tokens > self.engine.max_context: return
        try: stream = self.engine.submit(Request(list(prompt), params(knobs), priority=priority))
        except EngineBusy as busy: assert busy.code == 'queue_full'
        else: self.streams.append((stream, prompt, knobs, []))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel(self, data): data.draw(st.sampled_from(self.streams))[0].cancel()

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def expire(self, data):
        data.draw(st.sampled_from(self.streams))[0].max_seconds = 0
        self.engine._next_look = 0

    @rule(turns=st.integers(1, 12))
    def work(self, turns):
        for _ in range(turns): self.engine.step()
        self.read()

    @rule()
    def fault(self):
        "The next step fails as a whole, whoever takes part"
        runner, self.faults = self.engine.runner, self.faults + 1
        def broken(batch, sampling=None):
            del runner.submit
            raise ZeroDivisionError('a broken step')
        runner.submit = broken
        self.engine.step()
        runner.__dict__.pop('submit', None)
        self.read()

    @precondition(lambda self: self.options[4])
    @rule()
    def late_fault(self):
        "A step fails when its tokens are fetched; another may have been begun on top of it"
        self.faults, self.engine.runner.broken = self.faults + 1, ZeroDivisionError('a broken step')
        for _ in range(2): self.engine.step()
        self.engine.runner.broken = None
        self.read()

    @rule()
    def forget(self):
        self.engine._land()                                                     # as before any call
        self.engine.memory.clear()

    @rule()
    def restart(self):
        "Finish what runs, save, and go on with a new engine that has only the file"
        self.drain()
        self.engine.memory.save(self.file)
        self.engine = build(*self.options)
        self.engine.memory.load(self.file)

    def drain(self):
        for _ in range(20_000):
            if not self.engine._streams and not self.engine._flights: break
            self.engine.step()
        assert not self.engine._streams, f'requests that never end: {self.engine.stats()}'
        self.read()
        assert not self.streams
        memory = self.engine.memory
        assert memory.free_slots == memory.num_slots and memory.stats()['held_pages'] == 0 and not self.engine._waiting and not self.engine._running

    def read(self):
        "Take the events that are there; an answer that is complete must be the one that it is alone, one that is cut short a beginning of it"
        for entry in list(self.streams):
            stream, prompt, knobs, events = entry
            while stream._events: events.append(next(stream))
            if stream.closed: self.streams.remove(entry)
            want = alone(prompt, self.options[0], knobs)
            for choice in {e.choice for e in events}:
                ids = tuple(e.token_id for e in events if e.choice == choice and hasattr(e, 'token_id'))
                end = [e for e in events if e.choice == choice and isinstance(e, (FinishEvent, ErrorEvent))]
                if end and isinstance(end[0], ErrorEvent): assert isinstance(end[0].error, (DeadlineExceeded, ZeroDivisionError)), end[0].error
                elif end and end[0].reason != 'cancelled': assert (ids, end[0].reason) == want[choice][:2], f'{ids} is not {want[choice]}'
                assert ids == want[choice][0][:len(ids)], f'{ids} does not begin {want[choice]}'
                assert [e.logprob for e in events if e.choice == choice and getattr(e, 'logprob', None)] == want[choice][2][:len(ids)], 'log-probabilities of other tokens'
            if stream.closed: assert sum(isinstance(e, (FinishEvent, ErrorEvent)) for e in events) >= 1

    @invariant()
    def nothing_leaks(self):
        if not hasattr(self, 'engine'): return
        memory = self.engine.memory
        memory.check()
        for page in memory.kv.free_pages(): memory.runner.poison_page(page)
        for slot in memory.slots.free_slots(): memory.runner.poison_state(slot)
        assert len(self.engine._running) == memory.num_slots - memory.free_slots

    def teardown(self):
        if not hasattr(self, 'engine'): return
        self.drain()
        health = self.engine.health()
        assert health.failed <= self.faults + 1_000 and health.active == health.queued == 0
        self.folder.cleanup()


def search(examples): run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=examples <= 100))

def test_engine_at_random(): search(60)

if __name__ == '__main__': search(int(sys.argv[1]) if len(sys.argv) > 1 else 3000)
