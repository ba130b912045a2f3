"""Memory driven at random: sequences that open, compute, fork and end in any order, in far too little room, with every free page full of rubbish.

The toy model reads each position through the block table, so whatever memory gets wrong is a wrong token. Each token here is compared with the one that the same
tokens give on a fresh runner without any cache. For a long search: `python tests/test_memory.py 5000`."""
import sys, tempfile
from functools import lru_cache
from pathlib import Path
import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from sparkinfer.errors import FormatError, UnsupportedError
from sparkinfer.memory.host_spill import HostSpill
from sparkinfer.memory.model_memory import ModelMemory
from sparkinfer.models.forward import Batch
from sparkinfer.models.toy_runner import ToyRunner
from sparkinfer.ops.attention import PAGE

CONTEXT, VOCAB = 96, 32
rng = np.random.default_rng(0)
STEMS = [tuple(rng.integers(0, VOCAB, n).tolist()) for n in (1, 2, 15, 16, 17, 33, 40, 48, 63)]

@lru_cache(100_000)
def said(tokens, recurrent):
    "What the model says after `tokens` when nothing is cached, shared or left over"
    return int(ToyRunner(VOCAB, recurrent).load(max_context=256).submit(Batch.of(tokens)).logits[0].argmax())


class Sequence:
    "What an engine does with one lease: compute, stop where it is asked to, and hold every token against a run alone"
    def __init__(self, memory, tokens, marks=()):
        self.memory, self.tokens, self.recurrent = memory, list(tokens), memory.recurrent
        self.lease = memory.open(np.array(tokens, np.int32), marks)
        if self.lease is not None: assert self.lease.cached < len(tokens) and self.lease.length == self.lease.cached

    def step(self, chunk):
        "Up to `chunk` tokens further; False when there is no room. After the last one the next token is known."
        lease, start = self.lease, self.lease.length
        end = min([start + chunk, len(self.tokens)] + [s for s in lease.stops if s > start])
        if not self.memory.extend(lease, end): return False
        logits = self.memory.runner.submit(Batch.of(self.tokens[start:end], start, lease.slot)).logits
        assert int(logits[0].argmax()) == said(tuple(self.tokens[:end]), self.recurrent), f'a wrong token after {end} of {self.tokens}'
        if end in lease.stops: self.memory.checkpoint(lease, self.tokens[:end])
        if end == len(self.tokens): self.tokens.append(int(logits[0].argmax()))
        return True

    def run(self, new=0, chunk=1000):
        "The whole prompt and `new` tokens more"
        goal = len(self.tokens) + new
        while len(self.tokens) <= goal: assert self.step(chunk), 'out of pages'
        return self

    def close(self, publish=True): self.memory.close(self.lease, self.tokens[:self.lease.length], publish)


def poison(memory):
    "What nobody holds is anybody's"
    for page in memory.kv.free_pages(): memory.runner.poison_page(page)
    for slot in memory.slots.free_slots(): memory.runner.poison_state(slot)

def build(recurrent=False, pages=64, slots=4, context=256, **kwargs):
    return ModelMemory(ToyRunner(VOCAB, recurrent).load(max_context=context, num_slots=slots, num_pages=pages), **kwargs)


class Machine(RuleBasedStateMachine):
    @initialize(recurrent=st.booleans(), pages=st.integers(7, 26), slots=st.integers(1, 4), snapshots=st.sampled_from([None, 0, 16, 48]), spill=st.sampled_from([None, 0, 600, 3000]), disk=st.booleans())
    def start(self, recurrent, pages, slots, snapshots, spill, disk):
        self.folder = tempfile.TemporaryDirectory()
        self.options = dict(recurrent=recurrent, pages=pages, slots=slots, context=CONTEXT, snapshot_bytes=snapshots)
        self.spill = lambda: None if spill is None else HostSpill(spill, self.folder.name if disk else None)
        self.memory, self.running, self.texts, self.file = build(spill=self.spill(), **self.options), [], list(STEMS), Path(self.folder.name)/'cache'

    @rule(data=st.data())
    def open(self, data):
        text = data.draw(st.sampled_from(self.texts))
        tokens = list(text[:data.draw(st.integers(1, len(text)))]) + data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=20))
        tokens = tokens[:self.memory.capacity - 1]
        before, slots = self.memory.stats(), self.memory.free_slots
        sequence = Sequence(self.memory, tokens, data.draw(st.lists(st.integers(0, CONTEXT), max_size=2)))
        if sequence.lease is not None: self.running.append(sequence)
        else:
            assert self.memory.stats()['held_pages'] == before['held_pages'] and self.memory.free_slots == slots, 'a refused prompt took something'
            assert self.running, 'refused although nothing runs'

    @rule(data=st.data(), turns=st.integers(1, 3), chunk=st.sampled_from([5, 16, 64]), seed=st.integers(0, 3))
    def conversation(self, data, turns, chunk, seed):
        "Turn after turn, each with the whole history before it; two with the same beginning and seed are the same"
        rng, text = np.random.default_rng(seed), data.draw(st.sampled_from(STEMS))
        for turn in range(turns):
            text = [*text, *rng.integers(0, VOCAB, 5).tolist()]
            if len(text) + 4 > self.memory.capacity: return
            sequence = Sequence(self.memory, text, [len(text) - 5])
            if sequence.lease is None: return
            self.running.append(sequence)
            while len(sequence.tokens) < len(text) + 4 and sequence.step(chunk): pass
            self.running.remove(sequence)
            sequence.close()
            text = sequence.tokens[:-1]

    def one(self, data): return data.draw(st.sampled_from(self.running))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.sampled_from([1, 3, 16, 17, 64]), steps=st.integers(1, 4))
    def step(self, data, chunk, steps):
        sequence = self.one(data)
        for _ in range(steps):
            if len(sequence.tokens) > self.memory.capacity: return
            usable = self.memory.usable_pages
            if not sequence.step(chunk):
                assert usable < -(-chunk // PAGE) + 1 and self.memory.usable_pages == usable, 'refused although there was room'
                if len(self.running) == 1: raise AssertionError('one sequence alone ran out of pages below the capacity')
                return

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def checkpoint(self, data):
        sequence = self.one(data)
        if sequence.lease.length: self.memory.checkpoint(sequence.lease, sequence.tokens[:sequence.lease.length])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.one(data)
        child = self.memory.fork(parent.lease, parent.tokens[:parent.lease.length])
        if child is None: return
        copy = Sequence.__new__(Sequence)
        copy.memory, copy.recurrent, copy.lease = self.memory, parent.recurrent, child
        copy.tokens = parent.tokens[:child.length] + [data.draw(st.integers(0, VOCAB - 1))]
        self.running.append(copy)
        if child.length < self.memory.capacity: copy.step(1)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), publish=st.booleans())
    def close(self, data, publish):
        sequence = self.one(data)
        self.running.remove(sequence)
        self.texts = (self.texts + [tuple(sequence.tokens)])[-30:]
        sequence.close(publish)

    @rule(certain=st.sampled_from([True, False, False, False]))
    def clear(self, certain):
        if certain: self.memory.clear()

    @rule(wanted=st.integers(1, 8))
    def pressure(self, wanted):
        "Somebody takes pages and gives them back"
        pages = self.memory._take(min(wanted, self.memory.usable_pages))
        self.memory.kv.drop(pages)

    @rule(budget=st.sampled_from([None, 700]), certain=st.sampled_from([True, False, False, False]))
    def restart(self, budget, certain):
        if not certain: return
        self.memory.save(self.file, budget)
        for sequence in self.running: sequence.close()
        self.running, fresh = [], build(spill=self.spill(), **self.options)
        fresh.load(self.file)
        self.memory = fresh

    @rule()
    def load_again(self):
        if self.file.exists(): self.memory.load(self.file)

    @invariant()
    def consistent(self):
        if not hasattr(self, 'memory'): return
        poison(self.memory)
        self.memory.check()

    def teardown(self):
        if not hasattr(self, 'memory'): return
        for sequence in self.running: sequence.close()
        memory = self.memory
        memory.check()
        assert memory.usable_pages == memory.num_pages and memory.free_slots == memory.num_slots
        memory.clear()
        assert memory.free_pages == memory.num_pages and memory.stats()['snapshots'] == memory.stats()['spilled'] == memory.stats()['blocks'] == 0
        self.folder.cleanup()


def search(examples, **more): run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), **more))

def test_any_order_of_events(): search(120)

if __name__ == '__main__': search(int(sys.argv[1]))
