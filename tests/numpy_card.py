"""A card of NumPy under the CUDA runner: logits are a function of (slot, position, token), and draws are those of `sample_spec`, for the specs whose
records, masks and entries the runner has sent. What is left to test is all that lies between a batch and its answer: pieces, places, rows that are drawn from several times, tokens in flight,
answers that are collected late. Needs NUMBA_ENABLE_CUDASIM=1, which gives the runner memory that NumPy can read"""
from dataclasses import replace
import numpy as np
from sparkinfer.cuda.sampling import DRAW_BYTES, SCORE_BYTES, SCORES, draw_records, needs
from sparkinfer.models.cuda_check import small_hybrid
from sparkinfer.models.cuda_runner import COLUMNS, SIZES, CudaRunner, Pending
from sparkinfer.models.forward import Batch
from sparkinfer.ops.sampling import SampleSpec, SamplingError, noise_key, sample_spec

CONTEXT, VOCABULARY = 48, 24
def row_of(slot, position, token): return np.random.default_rng([slot, position, token]).normal(0, 2, VOCABULARY).astype(np.float32)
def key_of(spec): return int(noise_key(*(np.uint64(v) for v in (spec.seed, spec.choice, spec.step))))
def told(spec, token): return replace(spec, history_ids=np.r_[spec.history_ids[:-1], np.int32(token)]) if len(spec.history_ids) and spec.history_ids[-1] < 0 else spec

class NumpyCard(CudaRunner):
    asked = {}                                                                       # {key of a draw: its spec}

    def inputs(self): return dict(zip(COLUMNS, self.buffers['inputs'].read(np.int32, (len(COLUMNS), SIZES[-1]))))
    def newest(self): return self.last.read(np.int32, self.num_slots + 1)

    def launch_rows(self, n, runs, decode, fed=False):
        given, last = self.inputs(), self.newest()
        tokens = [max(0, last[s]) if fed and t < 0 else t for t, s in zip(given['tokens'], given['slots'])]
        self.rows = list(zip(given['slots'], given['positions'], tokens))[:n]

    def launch_head(self, n, everything, drawing=None):
        given, last = self.inputs(), self.newest()
        logits = np.stack([row_of(*self.rows[i]) for i in (range(n) if everything else given['picks'][:n])])
        self.buffers['logits'].write(logits)
        if drawing is None: return
        records, drawn = self.buffers['draws'].read(np.uint8, (SIZES[-1], DRAW_BYTES)), np.zeros(SIZES[-1], np.int32)
        reported, latest = np.full((SIZES[-1], SCORE_BYTES // 4), 0xdead, np.uint32), last.copy()
        for i in range(n):
            spec = self.sent(records[i], drawing)
            try: one = sample_spec(logits[i], told(spec, max(0, last[given['owners'][i]])))
            except SamplingError: drawn[i] = -2
            else:
                drawn[i], floats, count = one.token, reported[i].view(np.float32), len(one.top_ids)
                if spec.num_logprobs >= 0: floats[0], reported[i, 1:1 + count], floats[1 + SCORES:1 + SCORES + count] = one.logprob, one.top_ids, one.top_logprobs
            latest[given['owners'][i]] = drawn[i]
        for name, array in (('drawn', drawn), ('reported', reported)): self.buffers[name].write(array)
        self.last.write(latest)

    def sent(self, record, drawing):
        "The spec that a record is of, after a look at all that belongs to it"
        if not record.any(): return SampleSpec()
        spec, (at, count), mask = self.asked[int(record[:8].view(np.uint64)[0])], record[40:48].view(np.int32), int(record[60:64].view(np.uint32)[0])
        (want,), entries = draw_records([spec])
        bare = [np.delete(r, np.r_[40:48, 60:64]) for r in (record, want)]
        assert (bare[0] == bare[1]).all() and all(d or not n for n, d in zip(needs([spec]), drawing)), 'a record of another draw, or a launch that is left out'
        assert (self.buffers['entries'].read(np.uint32, (at + count, 4))[at:] == entries).all(), "another row's entries"
        assert (mask > 0) == bool(len(spec.allowed)) and (not mask or self.buffers['masks'].read(np.uint32, mask)[mask - 1] == spec.allowed[0]), "another row's mask"
        return spec

def random_spec(rng, in_flight):
    knobs = dict(temperature=float(rng.choice([0, 0, 1, .7])), seed=int(rng.integers(1 << 60)), num_logprobs=int(rng.choice([-1, -1, 0, 3, 100, 101], p=[.3, .3, .13, .13, .13, .01])))
    if rng.random() < .3: knobs |= dict(top_k=int(rng.integers(2, 70)), top_p=.9)
    if rng.random() < .3: knobs |= dict(allowed=rng.integers(0, 1 << 24, 1).astype(np.uint32) * np.uint32(rng.random() < .9))
    if rng.random() < .4: knobs |= dict(history_ids=np.r_[rng.integers(0, VOCABULARY, 9), [-1] * in_flight].astype(np.int32), prompt_length=3, presence_penalty=1.5)
    return SampleSpec(**knobs)

class Search:
    def __init__(self, seed, slots=70):
        self.rng, self.runner = np.random.default_rng(seed), NumpyCard(kv_type='f32').load(small_hybrid(), max_context=CONTEXT, num_slots=slots)
        self.known, self.waiting, self.seen = {}, [], dict(pending=0, host=0, repeated=0, several=0, many=0)

    def batch(self):
        "Some sequences go on, with a token or several or one in flight, in any order; their last rows are wanted, or all, some, some several times, none"
        rng, runner, rows = self.rng, self.runner, []
        for slot in rng.permutation(runner.num_slots)[:rng.choice([1, 2, 5, 31, 33, 60])]:
            count = int(rng.choice([1, 1, 1, 2, 7, 20]))
            if runner.lengths[slot] + count >= CONTEXT: runner.reset(slot), self.known.pop(slot, None)
            flies = count == 1 and slot in self.known and rng.random() < .5
            rows += [(-1 if flies else int(rng.integers(VOCABULARY)), runner.lengths[slot] + j, slot) for j in range(count)]
        if rng.random() < .5: rows = [rows[i] for i in rng.permutation(len(rows))]
        rows.sort(key=lambda row: row[1])                                            # of one sequence in the order of positions
        tokens, positions, slots = np.array(rows).T
        ends = np.array([np.flatnonzero(slots == s)[-1] for s in dict.fromkeys(slots.tolist())])
        outputs = (ends, np.arange(len(rows)), rng.permutation(len(rows))[:rng.integers(1, len(rows) + 1)], rng.choice(ends, rng.integers(1, 60)), ends[:0])[rng.integers(5)]
        return Batch(tokens, positions, slots, outputs)

    def step(self):
        batch, rng = self.batch(), self.rng
        plain = rng.random() < .2
        specs = [SampleSpec() if plain else random_spec(rng, int(batch.tokens[row] < 0)) for row in batch.output_rows]
        self.runner.asked.update({key_of(s): s for s in specs})
        tokens = [max(0, self.known[s]) if t < 0 else t for t, s in zip(batch.tokens.tolist(), batch.slots.tolist())]
        expected = [(row_of(batch.slots[row], batch.positions[row], tokens[row]), told(s, max(0, self.known.get(batch.slots[row], 0)))) for row, s in zip(batch.output_rows, specs)]
        handle, drawn_from = self.runner.submit(batch, specs), batch.slots[batch.output_rows].tolist()
        late, last = isinstance(handle, Pending), self.runner.newest()
        for slot in drawn_from: self.known.pop(slot, None)
        if late: self.known |= {slot: int(last[slot]) for slot in drawn_from if drawn_from.count(slot) == 1}
        for name, counts in (('pending', late), ('host', not late), ('repeated', late and len(set(batch.output_rows.tolist())) < len(specs) and not plain),
                             ('several', len(self.runner.last_pieces) > 1),
                             ('many', late and len(set(batch.output_rows.tolist())) < len(specs) > 32 and not plain)): self.seen[name] += counts
        self.waiting.append((handle, expected))
        while len(self.waiting) > rng.integers(3): self.verify(*self.waiting.pop(0))

    def verify(self, handle, expected):
        done = self.runner.collect(handle)
        for i, (row, spec) in enumerate(expected):
            try: want = sample_spec(row, spec)
            except SamplingError: assert 'rules out every token' in str(done.errors[i]); continue
            assert (not done.errors or done.errors[i] is None) and done.tokens[i] == want.token, (i, done.tokens[i], want.token)
            np.testing.assert_allclose([done.logprobs[i], *done.top[i][1]], [want.logprob, *want.top_logprobs], atol=1e-4)
            np.testing.assert_array_equal(done.top[i][0], want.top_ids)

def search(steps, seed):
    machine = Search(seed)
    for _ in range(steps): machine.step()
    for waiting in machine.waiting: machine.verify(*waiting)
    assert machine.seen.pop('many') and min(machine.seen.values()) >= steps // 50, machine.seen
    return machine.seen
