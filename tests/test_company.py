"""A sequence's logits do not depend on its company: any mixture of sequences in one step, cut anywhere, in any slots, with any number of threads, gives the bits that each gives alone, token by token.

That is what lets an engine put requests together as they come. Random rounds on two small hybrids, from a seed: `python tests/test_company.py 600 [SEED]` plays more of them than the suite does.
"""
import sys, tempfile
from pathlib import Path

import numpy as np
import pytest

from sparkinfer.formats.gguf import open_gguf
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.convert import convert
from sparkinfer.models.forward import Batch
from sparkinfer.models.weights import Weights
from references import dressed

MODELS = {'dense': 'qwen3_5-r2', 'experts': 'qwen3_5_moe'}
POOL, LONGEST, ROUNDS = 6, 150, 25          # sequences whose logits are known, tokens of each (more than two chunks of the delta rule), rounds for a model and a placement of weights

class Model:
    "A quantised file of a small hybrid, and what each sequence of a pool gives alone"
    def __init__(self, folder, name):
        self.path = Path(folder)/f'{name}.gguf'
        convert(dressed(MODELS[name], folder), self.path, 'Q8_0')
        self.file = open_gguf(self.path)
        self.weights = Weights.from_checkpoint(self.file, ModelConfig.from_checkpoint(self.file))
        random = np.random.default_rng(0)
        self.pool = random.integers(0, self.weights.config.vocab_size, (POOL, LONGEST)).astype(np.int32)
        self.pool[1, :40] = self.pool[0, :40]          # one that begins like another
        runner = self.runner(1, 'repack', 1, 256)
        self.alone = np.stack([self.token_by_token(runner, ids) for ids in self.pool])
        runner.close()

    def runner(self, threads, placement, num_slots, max_rows):
        from sparkinfer.models.cpu_runner import CpuRunner
        return CpuRunner(threads, weights=placement, max_rows=max_rows).load(self.weights, max_context=LONGEST, num_slots=num_slots)

    def token_by_token(self, runner, ids):
        runner.reset(0)
        return np.concatenate([runner.collect(runner.submit(Batch.of(ids[i:i + 1], start=i))).logits for i in range(len(ids))])

@pytest.fixture(scope='module', params=MODELS)
def model(request, tmp_path_factory):
    made = Model(tmp_path_factory.mktemp('company'), request.param)
    yield made
    made.file.close()

def mixed(random, pieces):
    "One batch of pieces {slot: (ids, start)}: one behind the other, or row by row in a random order that keeps each sequence's own; with the row of the pool that each output must equal"
    rows = [slot for slot, (_, ids, _) in pieces.items() for _ in ids]
    if random.random() < .5: random.shuffle(rows)
    at, tokens, positions, known = dict.fromkeys(pieces, 0), [], [], []
    for slot in rows:
        number, ids, start = pieces[slot]
        tokens.append(ids[at[slot]])
        positions.append(start + at[slot])
        known.append((number, positions[-1]))
        at[slot] += 1
    outputs = {0: np.arange(len(rows)), 1: np.flatnonzero(random.random(len(rows)) < .3), 2: np.arange(len(rows))[-1:]}[int(random.integers(3))]
    return Batch(np.array(tokens), np.array(positions), np.array(rows), outputs), [known[i] for i in outputs]

def one_round(model, placement, seed):
    "Sequences come, go on by pieces beside others, are given up or end, and others take their slots. Returns how many logits were compared"
    random = np.random.default_rng(seed)
    num_slots = int(random.integers(1, 6))
    setting = (int(random.integers(1, 4)), placement, num_slots, int(random.choice([4, 8, 20, 256])))
    runner, running, compared = model.runner(*setting), {}, 0
    try:
        for step in range(int(random.integers(2, 9))):
            for slot in range(num_slots):
                if slot not in running and random.random() < .7:
                    if random.random() < .5: runner.reset(slot)          # a row at position 0 begins anew either way
                    running[slot] = [int(random.integers(POOL)), 0, int(random.integers(1, LONGEST + 1))]
            pieces = {}
            for slot, (number, start, end) in running.items():
                size = min(end - start, int(random.choice([0, 1, 1, 1, 2, 3, 7, 63, 64, 65, int(random.integers(1, 100))])))
                if size: pieces[slot] = (number, model.pool[number, start:start + size], start)
            if not pieces: continue
            batch, known = mixed(random, pieces)
            logits = runner.collect(runner.submit(batch)).logits
            for row, (number, position) in zip(logits, known, strict=True):
                assert row.tobytes() == model.alone[number, position].tobytes(), f'seed {seed}, {setting}, step {step}: sequence {number} at position {position}, {len(batch)} rows of {len(pieces)} sequences'
            compared += len(known)
            for slot, (number, ids, start) in pieces.items():
                running[slot][1] += len(ids)
                if running[slot][1] == running[slot][2] or random.random() < .1: del running[slot]       # it ends, or is given up
    finally: runner.close()
    return compared

@pytest.mark.parametrize('placement', ['repack', 'file'])
def test_company_does_not_matter(model, placement):
    "Guards against sums that run in another order for more rows, memory that is found by row, a state that outlives its sequence, and a cut that the mathematics can see"
    assert sum(one_round(model, placement, seed) for seed in range(ROUNDS)) > 20 * ROUNDS

def test_the_pool_could_tell(model):
    "… since rows that are all alike would prove nothing: logits are finite, differ from row to row, and two sequences that begin alike agree just as far as that"
    assert np.isfinite(model.alone).all() and len({row.tobytes() for row in model.alone.reshape(POOL * LONGEST, -1)}) == POOL * LONGEST - 40
    assert (model.alone[0, :40] == model.alone[1, :40]).all() and not (model.alone[0, 40] == model.alone[1, 40]).all()

if __name__ == '__main__':
    rounds, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            model = Model(folder, name)
            for placement in ('repack', 'file'): print(f'{name}, {placement}: {sum(one_round(model, placement, seed) for seed in range(first, first + rounds)):,} rows of logits, every bit as alone')
            model.file.close()
