"""Memory driven at random: sequences that open, compute, fork and end in any order, in far too little room, with every free page full of rubbish.

The toy model reads each position through the block table, so whatever memory gets wrong is a wrong token. Each token here is compared with the one that the same
tokens give on a fresh runner without any cache. For a long search: `python tests/test_memory.py 5000`."""
import os, subprocess, sys, tempfile
from functools import lru_cache
from pathlib import Path
import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from sparkinfer.errors import FormatError, SparkinferError, UnsupportedError
from sparkinfer.memory.host_spill import HostSpill
from sparkinfer.memory.model_memory import ModelMemory, weights_fingerprint
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



LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192)     # around pages, and around the chunks of recurrent kernels
def words(n, seed=1): return np.random.default_rng([n, seed]).integers(0, VOCAB, n).tolist()
def both(f): return pytest.mark.parametrize('recurrent', [False, True], ids=['attention', 'recurrent'])(f)

@both
@pytest.mark.parametrize('length', LENGTHS)
def test_a_second_turn_computes_only_what_is_new(recurrent, length):
    "Fault A1: every turn reprocessed the whole prompt. Fault A5: attention's keys were reused and the state was not"
    memory = build(recurrent)
    first = Sequence(memory, words(length)).run(new=5)
    computed = first.lease.length
    first.close()
    second = Sequence(memory, first.tokens[:computed] + words(7, 2))
    assert second.lease.cached == computed == length + 5
    second.run(new=3, chunk=3)
    memory.check()

@both
def test_an_edited_middle_goes_back_to_the_last_place_that_can_be_gone_back_to(recurrent):
    "Fault A1, AAAABBBB then AAAACBBBB: attention keeps all before the edit, a recurrence its last snapshot before it"
    memory, text = build(recurrent), words(80)
    Sequence(memory, text, marks=[21, 50]).run(new=2, chunk=16).close()
    edited = text[:40] + [(text[40] + 1) % VOCAB] + text[41:]
    sequence = Sequence(memory, edited)
    assert sequence.lease.cached == (21 if recurrent else 40) and sequence.lease.stops == ([40] if recurrent else [])
    sequence.run(new=2).close()
    assert Sequence(memory, text[:40] + words(9, 3)).lease.cached == 40          # the edit was discovered: now there is a snapshot

def test_a_prefix_that_nobody_marked_is_found_by_the_third_conversation():
    "Fault A2: the cache did nothing on hybrid models, and said nothing"
    memory, system = build(recurrent=True), words(70)
    cached = []
    for i in range(3):
        sequence = Sequence(memory, system + words(10, i + 5))
        cached.append(sequence.lease.cached)
        sequence.run(new=2).close()
    assert cached == [0, 0, 70] and (memory.stats()['hits'], memory.stats()['misses'], memory.stats()['hit_tokens']) == (1, 2, 70)

@pytest.mark.parametrize('length', LENGTHS)
def test_a_restored_state_is_the_one_that_was_computed(length):
    "Fault A7: the snapshot of another position was restored, or one of less precision: bit for bit, at the mark, however prefill was cut"
    memory, text = build(recurrent=True, context=256), words(210)
    Sequence(memory, text, marks=[length]).run(chunk=50).close()
    straight = ToyRunner(VOCAB, True).load(max_context=256)
    straight.submit(Batch.of(text[:length]))
    again = memory.open(np.array(text[:length] + [5, 6]))
    assert again.cached == length and again.stops == []
    assert (memory.runner.read_state(again.slot) == straight.read_state(0)).all()
    assert memory.runner.history(again.slot, length) == text[:length]

@both
def test_only_what_was_written_is_published(recurrent):
    "Fault A9: a checkpoint was published whose write a mixed step had skipped. A long prefill beside a sequence that decodes; a third one asks for the same prompt midway"
    memory, text = build(recurrent), words(150)
    talker, reader = Sequence(memory, words(5)).run(), Sequence(memory, text, marks=[100])
    for step in range(5):
        assert memory.extend(reader.lease, reader.lease.length + 23) and memory.extend(talker.lease, talker.lease.length + 1)
        start = reader.lease.length
        batch = Batch.join([Batch.of(text[start:start + 23], start, reader.lease.slot), Batch.of(talker.tokens[-1:], talker.lease.length, talker.lease.slot)])
        logits = memory.runner.submit(batch).logits
        assert [int(row.argmax()) for row in logits] == [said(tuple(text[:start + 23]), recurrent), said(tuple(talker.tokens), recurrent)]
        talker.tokens.append(int(logits[1].argmax()))
        poison(memory)
        other = Sequence(memory, text)
        written = reader.lease.length - 23                                       # known to be written when the last step was begun
        assert other.lease.cached == (0 if recurrent else written // PAGE * PAGE)
        memory.check()
        if step < 4: other.close(publish=False)
    other.run(chunk=40)

@both
@pytest.mark.parametrize('done', [1, 16, 37, 70])
def test_a_cancelled_sequence_leaves_nothing_behind(recurrent, done):
    "Fault A11: slot aliasing, a slot not given back, a state not reset. X is cancelled midway, untrusted; Y gets its slot and pages"
    memory = build(recurrent, pages=8, slots=1)
    cancelled = Sequence(memory, words(70))
    cancelled.step(done)
    slot = cancelled.lease.slot
    cancelled.close(publish=False)
    assert memory.usable_pages == 8 and memory.free_slots == 1
    fresh = Sequence(memory, words(90, 4))
    assert fresh.lease.slot == slot and fresh.lease.cached == 0
    fresh.run(new=4, chunk=30)

@both
def test_choices_share_whole_pages_and_nothing_else(recurrent):
    "Four answers to one prompt of 40 tokens: two pages shared by all, each its own copy of the third"
    memory = build(recurrent)
    parent = Sequence(memory, words(40)).run()
    leases = [memory.fork(parent.lease, parent.tokens[:40]) for _ in range(3)]
    assert memory.free_slots == 0 and memory.fork(parent.lease, parent.tokens[:40]) is None
    assert memory.num_pages - memory.free_pages == 2 + 4
    for i, lease in enumerate([parent.lease, *leases]):
        tokens = parent.tokens[:40]
        for j in range(10):
            tokens.append((i + j) % VOCAB)
            assert memory.extend(lease, len(tokens))
            assert int(memory.runner.submit(Batch.of(tokens[-1:], len(tokens) - 1, lease.slot)).logits[0].argmax()) == said(tuple(tokens), recurrent)
    memory.check()

def test_limits():
    "Fault G5: a request that can never fit waited for ever. Too long is an error with both numbers; the longest that fits is taken even when the cache is full"
    memory = build(pages=6, context=512)
    assert memory.capacity == 96
    with pytest.raises(ValueError, match='97.*96'): memory.open(np.zeros(97, np.int32))
    with pytest.raises(ValueError, match='0 tokens'): memory.open(np.zeros(0, np.int32))
    for seed, length in enumerate((95, 60, 96, 95, 96)):
        sequence = Sequence(memory, words(length, seed % 2))
        assert sequence.lease is not None
        sequence.run(chunk=40)
        if length == 96:
            with pytest.raises(ValueError, match='97 positions.*96'): memory.extend(sequence.lease, 97)
        sequence.close()
        assert memory.usable_pages == 6
    with pytest.raises(ValueError, match='closed before'): sequence.close()

def test_room_is_refused_and_comes_back():
    "open and extend say no without taking anything; a sequence that ends makes room"
    memory = build(pages=6, slots=4, context=512)
    a, b = Sequence(memory, words(40)).run(), Sequence(memory, words(20, 2)).run()
    before = memory.stats()
    assert memory.open(np.array(words(3, 3))) is None and memory.stats() == before                  # 5 pages are held: one for the prompt, none for what follows
    assert memory.extend(a.lease, 64) and not memory.extend(b.lease, 33) and memory.usable_pages == 0
    a.close()
    assert memory.extend(b.lease, 33) and memory.open(np.array(words(3, 3))) is not None
    memory.check()

def test_the_least_recently_used_leaf_goes_first_and_nothing_that_is_held():
    memory = build(pages=12, slots=3)
    texts = [words(48, seed) for seed in range(3)]
    for text in texts: Sequence(memory, text).run().close()
    Sequence(memory, texts[0]).run().close()                                                        # used again: the second one is the oldest
    held = Sequence(memory, texts[2])
    memory.kv.drop(memory._take(5))                                                                 # 2 are free, so 3 must go
    cached = [memory.cache.match(np.array(t).astype('>i4').tobytes()).position for t in texts]
    assert [n // PAGE * PAGE for n in cached] == [48, 0, 48], cached
    memory.kv.drop(memory._take(memory.usable_pages))
    assert memory.cache.match(np.array(texts[0]).astype('>i4').tobytes()).position < PAGE
    held.run(new=2)
    memory.check()

def test_idle_pages_behind_a_leaf_that_is_held_can_be_had():
    "Two sequences compute one prompt at the same time; the tree has the first one's pages and, behind them, one of the second's. When the first has ended, its pages must be usable"
    memory = build(pages=8, slots=2)
    text = words(32)
    a, b = Sequence(memory, text), Sequence(memory, text + words(16, 2))
    a.run(), b.run()
    a.close()
    memory.checkpoint(b.lease, b.tokens[:48])
    assert memory.free_pages == 3 and memory.usable_pages == 5
    pages = memory._take(5)
    assert pages is not None and memory.free_pages == 0
    memory.kv.drop(pages)
    memory.check()
    b.run(new=3)

def test_a_snapshot_may_go_while_its_pages_stay():
    memory = build(recurrent=True, snapshot_bytes=32)                                               # room for two
    for seed in range(4): Sequence(memory, words(40, seed)).run().close()
    stats = memory.stats()
    assert (stats['snapshots'], stats['snapshot_bytes'], stats['snapshot_evictions']) == (2, 32, 2)
    assert [Sequence(memory, words(40, seed) + [1]).lease.cached for seed in range(4)] == [0, 0, 40, 40]
    none = build(recurrent=True, snapshot_bytes=0)
    Sequence(none, words(40), marks=[20]).run().close()
    assert none.stats()['snapshots'] == 0 and Sequence(none, words(40) + [1]).lease.cached == 0

def test_without_a_cache_everything_comes_back():
    memory = build(prefix_cache=False)
    for _ in range(2):
        sequence = Sequence(memory, words(40))
        assert sequence.lease.cached == 0
        sequence.run(new=2).close()
    assert memory.free_pages == memory.num_pages and memory.stats()['hits'] == memory.stats()['misses'] == 0


@both
@pytest.mark.parametrize('disk', [False, True], ids=['memory', 'disk'])
def test_what_was_spilled_comes_back_bit_for_bit(recurrent, disk, tmp_path):
    memory = build(recurrent, pages=10, snapshot_bytes=16, spill=HostSpill(100_000, tmp_path if disk else None))
    texts = [words(60 + seed, seed) for seed in range(4)]
    before = {}
    for text in texts:
        sequence = Sequence(memory, text).run()
        before[tuple(text)] = [memory.runner.read_page(p).tobytes() for p in sequence.lease.pages[:3]], memory.runner.read_state(sequence.lease.slot).tobytes()
        sequence.close()
    assert memory.stats()['spills'] > 5 and memory.stats()['restores'] == 0
    for text in texts:
        sequence = Sequence(memory, text + [3])
        assert sequence.lease.cached == len(text)
        assert [memory.runner.read_page(p).tobytes() for p in sequence.lease.pages[:3]] == before[tuple(text)][0] and memory.runner.read_state(sequence.lease.slot).tobytes() == before[tuple(text)][1]
        sequence.run(new=2).close()
        poison(memory); memory.check()
    assert memory.stats()['restores'] > 5 and list(tmp_path.iterdir()) == []                        # the file has no name, so nothing is left when the process dies

@both
def test_a_disk_that_fails_costs_time_and_nothing_else(recurrent, tmp_path):
    spill = HostSpill(100_000, tmp_path)
    memory = build(recurrent, pages=10, snapshot_bytes=16, spill=spill)
    texts = [words(60, seed) for seed in range(4)]
    for text in texts: Sequence(memory, text).run().close()
    spill.file.seek(0)
    spill.file.write(bytes(spill._end // 2)), spill.file.flush()
    for text in texts: Sequence(memory, text + [3]).run(new=2).close(); memory.check()
    assert memory.stats()['damaged'] > 0
    spill.file.close()                                                                              # from now on every read and write fails
    for text in texts: Sequence(memory, text + [4]).run(new=2).close(); memory.check()

SMALL_DISK = '''
import resource, signal, sys, numpy as np
from sparkinfer.memory.host_spill import HostSpill
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)                # from here on a write beyond the limit is an error, as on a full disk
size = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (10 * size + 100, resource.RLIM_INFINITY))
spill, data = HostSpill(100 * size, sys.argv[1]), [np.full(size, i, np.uint8) for i in range(20)]
pieces = [spill.put(d, i) for i, d in enumerate(data)]
def good(): return sum(bool((p.read() == d).all()) for p, d in zip(pieces, data) if p is not None)
assert sum(p is not None for p in pieces) == 10 == good() and spill.failures == 10
pieces[3].drop(); pieces[3] = spill.put(data[3], 3)          # a hole is no larger than what was there
assert good() == 10
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert good() == 10 and spill.put(data[0], 0) is not None
spill.close()
'''

@pytest.mark.parametrize('size', [512, 9000, 200_000])
def test_a_full_disk_takes_nothing_with_it_that_was_kept(size, tmp_path):
    "Fault: Python's buffer kept what the disk had refused, and each later read failed on it"
    done = subprocess.run([sys.executable, '-c', SMALL_DISK, tmp_path, str(size)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def test_no_room_to_spill_is_no_error(monkeypatch):
    "Fault: the MemoryError of a copy that is only kept for speed ended the request"
    spill = HostSpill(1000)
    kept = spill.put(np.arange(9, dtype=np.uint8), 0)
    def full(*args): raise MemoryError
    monkeypatch.setattr(np, 'array', full)
    assert spill.put(np.zeros(9, np.uint8), 1) is None and spill.failures == 1 and (len(spill), spill.nbytes) == (1, 9) and kept.read()[5] == 5

def test_a_runner_that_fails_midway_leaves_the_counts_right():
    memory = build(recurrent=True)
    Sequence(memory, words(40)).run().close()
    for name in ('copy_page', 'write_state', 'reset'):
        def fail(*args): raise OSError('device lost')
        setattr(memory.runner, name, fail)
        with pytest.raises(OSError, match='device lost'): memory.open(np.array(words(40) + [1]))
        delattr(memory.runner, name)
        memory.check()
        assert memory.usable_pages == memory.num_pages and memory.free_slots == memory.num_slots, name
    Sequence(memory, words(40) + [1]).run(new=2)

def failing(memory, name, error=OSError('device lost')):
    "A runner whose method `name` fails from here on; `delattr` mends it"
    def fail(*args): raise error
    setattr(memory.runner, name, fail)

@pytest.mark.parametrize('recurrent, name', [(False, 'copy_page'), (False, 'set_length'), (True, 'copy_page'), (True, 'set_length'), (True, 'copy_state')])
def test_a_fork_that_fails_gives_everything_back(recurrent, name):
    "Fault: page, slot and holds of the child were lost for good, and one more of each with each try"
    memory = build(recurrent, pages=8)
    parent = Sequence(memory, words(40)).run()
    before = memory.usable_pages, memory.free_slots
    failing(memory, name)
    for _ in range(5):
        with pytest.raises(OSError, match='device lost'): memory.fork(parent.lease, parent.tokens[:40])
        memory.check()
    assert (memory.usable_pages, memory.free_slots) == before
    delattr(memory.runner, name)
    child = memory.fork(parent.lease, parent.tokens[:40])
    memory.close(child, parent.tokens[:40])
    parent.run(new=3)

@pytest.mark.parametrize('recurrent, name', [(False, 'copy_page'), (True, 'copy_page'), (True, 'read_state')])
def test_what_fails_while_publishing_is_counted_and_costs_nothing(recurrent, name):
    "Fault: a checkpoint that failed lost a page and ended the request; a close that failed raised, although the answer was complete"
    memory = build(recurrent, pages=8)
    sequence = Sequence(memory, words(40)).run()
    failing(memory, name)
    memory.checkpoint(sequence.lease, sequence.tokens[:40])
    assert memory.stats()['publish_faults'] == 1
    memory.check()
    sequence.run(new=3).close()
    assert memory.stats()['publish_faults'] == (2 if name == 'read_state' else 1)                   # closing copies no page
    memory.check()
    assert memory.usable_pages == memory.num_pages and memory.free_slots == memory.num_slots
    delattr(memory.runner, name)
    Sequence(memory, words(40) + [1]).run(new=2).close()

@both
def test_a_spill_that_fails_costs_the_copy_only(recurrent):
    "Fault: the request that needed the room failed, and the leaf that should have made it was never found again"
    spill = HostSpill(100_000)
    memory = build(recurrent, pages=10, snapshot_bytes=16, spill=spill)
    def full(data, owner): raise MemoryError
    spill.put = full
    for seed in range(5): Sequence(memory, words(60, seed)).run().close(); memory.check()
    assert memory.stats()['spill_faults'] > 5 and memory.stats()['spills'] == 0
    del spill.put
    failing(memory, 'read_page')
    for seed in range(5): Sequence(memory, words(60, seed)).run().close(); memory.check()
    assert memory.stats()['publish_faults'] == 0 and memory.usable_pages == memory.num_pages

def test_opening_that_fails_takes_nothing():
    "Fault: marks that are no numbers were found after the lease was made. A page that cannot be brought back must not be lost either"
    memory = build(pages=10, spill=HostSpill(100_000))
    for seed in range(4): Sequence(memory, words(60, seed)).run().close()
    with pytest.raises(ValueError): memory.open(np.array(words(60)), marks=['x'])
    failing(memory, 'write_page')
    with pytest.raises(OSError, match='device lost'): memory.open(np.array(words(60) + [1]))
    memory.check()
    assert memory.usable_pages == memory.num_pages and memory.free_slots == memory.num_slots
    delattr(memory.runner, 'write_page')
    assert Sequence(memory, words(60) + [1]).run(new=2).lease.cached == 60

def test_a_conversation_of_thousands_of_blocks_can_be_forgotten():
    "Recursion over a chain of blocks ends at Python's limit"
    memory = build(pages=2100, slots=1, context=2100 * PAGE)
    text = np.random.default_rng(0).integers(0, VOCAB, 2000 * PAGE)
    lease = memory.open(text)
    assert memory.extend(lease, len(text))
    memory.runner.set_length(lease.slot, len(text))
    memory.close(lease, text)
    assert memory.stats()['blocks'] == 2000
    memory.clear()
    assert memory.free_pages == 2100


def talk(memory, seeds=range(3)):
    for seed in seeds: Sequence(memory, words(30)[:20] + words(40, seed), marks=[20, 33]).run(new=3).close()

@both
def test_a_restart_keeps_everything(recurrent, tmp_path):
    memory = build(recurrent)
    talk(memory)
    running = Sequence(memory, words(50, 9)).run()                                                  # saving disturbs nobody
    memory.save(tmp_path/'cache')
    running.run(new=2)
    again = build(recurrent)
    assert again.load(tmp_path/'cache') == again.stats()['blocks'] > 9 and again.free_pages == again.num_pages and again.stats()['restores'] == 0
    for seed in range(3):
        text = words(30)[:20] + words(40, seed)
        sequence = Sequence(again, text + [3])
        assert sequence.lease.cached == (33 if recurrent else 60)
        sequence.run(new=2).close()
    again.check()
    again.save(tmp_path/'cache')                                                                    # over the file that it still reads from
    third = build(recurrent)
    third.load(tmp_path/'cache')
    assert Sequence(third, words(30)[:20] + words(40, 1) + [3]).run(new=1).lease.cached == 60                    # on the second one, 60 was discovered
    assert sorted(p.name for p in tmp_path.iterdir()) == ['cache']
    from safetensors import safe_open
    with safe_open(tmp_path/'cache', 'np') as file: assert file.metadata()['page'] == '16' and file.get_tensor('pages').shape[1] == memory.runner.page_bytes

def test_a_budget_keeps_what_was_used_last(tmp_path):
    memory = build()
    talk(memory)
    Sequence(memory, words(30)[:20] + words(40, 1)).run().close()
    memory.save(tmp_path/'cache', budget_bytes=4 * memory.runner.page_bytes)
    again = build()
    assert again.load(tmp_path/'cache') == 4
    assert [again.open(np.array(words(30)[:20] + words(40, seed) + [1])).cached for seed in range(3)] == [20, 60, 20]

def test_another_model_is_refused_and_both_are_named(tmp_path):
    "A cache of another model gives fluent nonsense"
    memory = build()
    talk(memory)
    memory.save(tmp_path/'cache')
    other = ModelMemory(ToyRunner(VOCAB, seed=7).load(max_context=256, num_slots=4, num_pages=64))
    with pytest.raises(UnsupportedError, match='fingerprint.*seed=0.*seed=7'): other.load(tmp_path/'cache')
    changed = build()
    changed.runner.kv_type = 'int8'
    with pytest.raises(UnsupportedError, match="kv_type is 'u64' there and 'int8' here"): changed.load(tmp_path/'cache')
    changed.runner.kv_type = 'u64'
    larger = (tmp_path/'cache').read_bytes().replace(b'"page": "16"', b'"page": "32"')
    (tmp_path/'larger').write_bytes(larger)
    with pytest.raises(UnsupportedError, match="page is '32' there and '16' here"): changed.load(tmp_path/'larger')
    recurrent = build(recurrent=True)
    with pytest.raises(UnsupportedError, match='fingerprint'): recurrent.load(tmp_path/'cache')
    unknown = build()
    unknown.fingerprint = None
    with pytest.raises(UnsupportedError, match='no fingerprint'): unknown.save(tmp_path/'x')
    for m in (other, changed, recurrent): m.check(); assert m.stats()['blocks'] == 0

@both
def test_a_damaged_file_does_no_harm(recurrent, tmp_path):
    "Cut anywhere, or one byte wrong: refused whole, or the damaged block alone is computed anew. Never a wrong token, and never another error"
    memory, path = build(recurrent), tmp_path/'cache'
    talk(memory)
    memory.save(path)
    good, refused, rng = path.read_bytes(), 0, np.random.default_rng(0)
    spoiled = [good[:n] for n in (0, 7, 8, 100, len(good) // 2, len(good) - 1)] + [good + b'x']
    for place in rng.integers(0, len(good), 120).tolist(): spoiled.append(good[:place] + bytes([good[place] ^ 1 << int(rng.integers(8))]) + good[place + 1:])
    for data in spoiled:
        path.write_bytes(data)
        victim = build(recurrent)
        Sequence(victim, words(44, 8)).run().close()
        try: victim.load(path)
        except (FormatError, UnsupportedError) as error: refused, _ = refused + 1, str(error).index('cache')
        victim.check()
        for seed in range(3): Sequence(victim, words(30)[:20] + words(40, seed) + [3]).run(new=1).close()
        assert Sequence(victim, words(44, 8) + [1]).lease.cached == 44
        victim.check()
    assert 10 < refused < len(spoiled)

SPARSE = '''
import resource, sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_memory import build
from sparkinfer.errors import SparkinferError
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
with open(sys.argv[2], 'wb') as file: file.write((1000).to_bytes(8, 'little') + b'{'); file.truncate(1 << 40)
try: build().load(sys.argv[2])
except SparkinferError as error: print('refused:', error)
'''

def test_what_is_no_readable_file_is_one_line_and_no_oserror(tmp_path):
    "Fault: raw OSErrors for a folder, for nothing, and for a huge file of holes, which was mapped as a whole. A pipe would have been waited for"
    memory = build()
    memory.save(tmp_path/'cache')
    os.mkfifo(tmp_path/'pipe')
    (tmp_path/'loop').symlink_to(tmp_path/'loop')
    for name, said in (('', 'is not a file'), ('pipe', 'is not a file'), ('nope', 'No such file'), ('loop', 'symbolic links'), ('cache/x', 'Not a directory')):
        with pytest.raises(SparkinferError, match=said) as caught: memory.load(tmp_path/name)
        assert '\n' not in str(caught.value)
    for place in ('no/such/folder', 'cache/x', ''):
        with pytest.raises(SparkinferError, match='cannot be written'): memory.save(tmp_path/place if place else tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['cache', 'loop', 'pipe']
    done = subprocess.run([sys.executable, '-c', SPARSE, Path(__file__).parent, tmp_path/'sparse'], capture_output=True, text=True)
    assert done.stdout.startswith('refused:'), done.stderr[-500:]

def test_a_length_without_axes_is_refused(tmp_path):
    "Fault: IndexError. With one block, a scalar has as many bytes as the list that belongs there"
    memory = build()
    Sequence(memory, words(3)).run().close()
    memory.save(tmp_path/'cache')
    data = (tmp_path/'cache').read_bytes()
    at = data.index(b'"block_lengths"')
    where = data.index(b'[1]', at)
    (tmp_path/'cache').write_bytes(data[:where] + b'[ ]' + data[where + 3:])
    with pytest.raises(FormatError, match='is not I32'): build().load(tmp_path/'cache')

def test_a_saved_file_is_closed_with_the_last_page_that_lies_in_it(tmp_path):
    "Fault: each load kept its file open until the process ended"
    def still_open(): return sum(os.path.realpath(f'/proc/self/fd/{n}').startswith(str(tmp_path)) for n in os.listdir('/proc/self/fd'))
    memory = build()
    talk(memory)
    memory.save(tmp_path/'cache')
    again = build()
    again.load(tmp_path/'cache'), again.load(tmp_path/'cache')
    assert still_open() == 1                                                                        # the second one brought nothing new
    again.clear()
    assert still_open() == 0

def test_a_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    memory = build()
    talk(memory)
    memory.save(tmp_path/'cache')
    old = (tmp_path/'cache').read_bytes()
    Sequence(memory, words(50, 7)).run().close()
    monkeypatch.setattr(memory.runner, 'read_page', lambda page: 1 / 0)
    with pytest.raises(ZeroDivisionError): memory.save(tmp_path/'cache')
    assert (tmp_path/'cache').read_bytes() == old and [p.name for p in tmp_path.iterdir()] == ['cache']


@lru_cache(None)
def tiny(name):
    import json
    from sparkinfer.formats.safetensors import open_folder
    from sparkinfer.models.config import ModelConfig
    from sparkinfer.models.weights import Weights
    folder = Path(__file__).resolve().parent.parent/'data/reference/tiny'/name
    checkpoint = open_folder(folder)
    return Weights.from_checkpoint(checkpoint, ModelConfig.from_hf(json.loads((folder/'config.json').read_text()), checkpoint.tensors))

def real(kind, weights, **options):
    from sparkinfer.models.cpu_runner import CpuRunner
    from sparkinfer.models.forward import SpecRunner
    runner = SpecRunner() if kind == 'spec' else CpuRunner(1, kv_type=kind)
    return ModelMemory(runner.load(weights, max_context=144, num_slots=2, num_pages=14), fingerprint=weights_fingerprint(weights), **options)

def answer(memory, prompt, marks=()):
    "The last token's logits, and how many tokens were known"
    lease = memory.open(prompt, marks)
    while (start := lease.length) < len(prompt):
        end = min([start + 40, len(prompt)] + [s for s in lease.stops if s > start])
        assert memory.extend(lease, end)
        result = memory.runner.collect(memory.runner.submit(Batch.of(prompt[start:end], start, lease.slot)))
        if end in lease.stops: memory.checkpoint(lease, prompt[:end])
    memory.close(lease, prompt)
    return result.logits[0], lease.cached

@pytest.mark.parametrize('name, kind', [('llama', 'spec'), ('qwen3_next', 'spec'), ('qwen3_5-r2', 'spec'), ('llama', 'f16'), ('qwen3_5-r2', 'f16'), ('llama', 'int8')])
def test_real_runners_go_on_from_what_was_kept(name, kind, tmp_path):
    "Cold, warm, pushed out to the host and read from a file after a restart: the same logits"
    weights, spill = tiny(name), HostSpill(10_000_000)
    prompts = [np.random.default_rng(seed).integers(0, weights.config.vocab_size, 70 + seed) for seed in range(4)]
    for p in prompts: p[:37] = prompts[0][:37]
    cold = real(kind, weights, prefix_cache=False)
    want = [answer(cold, p)[0] for p in prompts]
    memory = real(kind, weights, spill=spill, snapshot_bytes=3 * cold.runner.state_bytes)
    for turn in range(3):
        for i, p in enumerate(prompts):
            logits, cached = answer(memory, p, marks=[37, len(p) - 1])
            assert cached == (len(p) - 1 if turn else 37 if i else 0)
            np.testing.assert_allclose(logits, want[i], atol=1e-4 if kind == 'spec' else 2e-2, rtol=0)
    assert memory.stats()['restores'] > 0 and memory.stats()['damaged'] == 0
    memory.save(tmp_path/'cache')
    again = real(kind, weights)
    again.load(tmp_path/'cache')
    logits, cached = answer(again, prompts[2])
    assert cached == len(prompts[2]) - 1
    np.testing.assert_allclose(logits, want[2], atol=1e-4 if kind == 'spec' else 2e-2, rtol=0)
    for m in (memory, again, cold): m.check(); m.runner.close()
    with pytest.raises(UnsupportedError, match='fingerprint'): real('spec', tiny('llama' if name != 'llama' else 'qwen3')).load(tmp_path/'cache')
    if kind != 'spec':
        with pytest.raises(UnsupportedError, match="runner is 'CpuRunner' there and 'SpecRunner' here"): real('spec', weights).load(tmp_path/'cache')

def search(examples, **more): run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), **more))

def test_any_order_of_events(): search(120)

if __name__ == '__main__': search(int(sys.argv[1]))
