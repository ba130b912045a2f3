"""Pages and states of a runner, on a checkpoint of each kind of memory: where a page lies must not matter, and a copy must be the whole of it.

The families are those of data/reference/tiny: attention only, attention beside recurrent layers, and the same with experts.
"""
import numpy as np
import pytest

from sparkinfer.models.cpu_runner import CpuRunner
from sparkinfer.models.forward import Batch, Runner, SpecRunner
from sparkinfer.ops.attention import KV_TYPES, PAGE
from test_families import feed, folder_weights, record

NAMES = ('llama', 'qwen3_5-r2', 'qwen3_5_moe')
KINDS = {'spec': lambda: SpecRunner(np.float64), 'cpu': lambda: CpuRunner(2, max_rows=32), 'cpu-int8': lambda: CpuRunner(2, kv_type='int8', max_rows=32)}
each = pytest.mark.parametrize('kind, name', [(kind, name) for kind in KINDS for name in NAMES])

def text_of(name, count=100):
    ids = np.concatenate([record(name)['ids']] * 3)
    return ids[:count].astype(np.int32)

def poisoned(kind, name, num_slots=3, max_context=144, spare=8):
    "A runner whose memory is NaN in every number, whose tables are a permutation with slots' pages between each other, and its free pages"
    runner = KINDS[kind]()
    each = -(-max_context // PAGE)
    runner.load(folder_weights(name), max_context=max_context, num_slots=num_slots, num_pages=num_slots * each + spare)
    assert isinstance(runner, Runner) and not runner.block_tables.any() and runner.block_tables.shape == (num_slots, each) and runner.block_tables.dtype == np.int32
    for page in range(runner.num_pages): runner.write_page(page, np.full(runner.page_bytes, 255, np.uint8))
    for slot in range(num_slots): runner.write_state(slot, np.full(runner.state_bytes, 255, np.uint8))
    order = np.random.default_rng(1).permutation(runner.num_pages)
    runner.block_tables[:] = order[:num_slots * each].reshape(each, num_slots).T
    return runner, order[num_slots * each:].tolist()

def same(kind, a, b):
    "Bit for bit; BLAS sums in another order for another number of rows, so the spec is held to rounding"
    if kind == 'spec': return np.abs(a - b).max() < 1e-5 * np.abs(b).max()
    return np.array_equal(a, b)

@each
def test_where_pages_lie_does_not_matter(kind, name):
    plain = KINDS[kind]().load(folder_weights(name), max_context=144, num_slots=3)
    scattered, _ = poisoned(kind, name)
    ids = text_of(name)
    for slot, cuts in ((0, ()), (2, (1, 15, 17, 64, 65)), (1, (70,))):
        want = feed(plain, ids, cuts, slot=slot)
        assert np.isfinite(want).all() and np.array_equal(feed(scattered, ids, cuts, slot=slot), want)
    step = Batch.join([Batch.of([3], len(ids), 1), Batch.of(ids[:20], len(ids), 0, 'all'), Batch.of([5], len(ids), 2)])
    assert np.array_equal(scattered.submit(step).logits, plain.submit(step).logits)
    plain.close(); scattered.close()

@each
@pytest.mark.parametrize('length', [40, 48, 64])
def test_a_fork_goes_on_as_if_alone(kind, name, length):
    "One that shares whole pages and copies the last, partial one, and one that was written out and read back into other pages and another slot"
    runner, spare = poisoned(kind, name)
    ids, whole = text_of(name, 120), length // PAGE
    feed(runner, ids[:length])
    runner.block_tables[1, :whole] = runner.block_tables[0, :whole]
    if length % PAGE: runner.copy_page(runner.block_tables[0, whole], runner.block_tables[1, whole])
    runner.copy_state(0, 1)
    runner.set_length(1, length)
    pages, state = [runner.read_page(p) for p in runner.block_tables[0, :-(-length // PAGE)]], runner.read_state(0)
    assert (pages[0].shape, state.shape, pages[0].dtype) == ((runner.page_bytes,), (runner.state_bytes,), np.uint8)
    ways = {0: ids[length:length + 30], 1: ids[50:80][::-1], 2: ids[30:60]}
    first = runner.submit(Batch.join(Batch.of(ways[slot], length, slot, 'all') for slot in (0, 1))).logits
    for page, data in zip(spare, pages): runner.write_page(page, data)
    runner.block_tables[2, :len(pages)] = spare[:len(pages)]
    runner.write_state(2, state)
    runner.set_length(2, length)
    found = {0: first[:30], 1: first[30:], 2: feed(runner, ways[2], start=length, slot=2)}
    alone = KINDS[kind]().load(folder_weights(name), max_context=144)
    for slot, way in ways.items():
        alone.reset(0)
        feed(alone, ids[:length])
        assert same(kind, found[slot], feed(alone, way, start=length)), slot
    runner.close(); alone.close()

@each
def test_a_slot_begins_again_from_nothing(kind, name):
    "Position 0 after somebody else's text, without a word to the runner"
    runner, _ = poisoned(kind, name)
    ids = text_of(name)
    want = feed(runner, ids[:30], slot=1)
    feed(runner, ids[40:90], slot=0)
    assert np.array_equal(feed(runner, ids[:30], slot=0), want)
    runner.close()

def test_pages_that_nobody_wrote_cost_nothing():
    "A pool of 800 MB, of which one page is written"
    import resource
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = folder_weights('llama')
    small = CpuRunner(1).load(weights, max_context=64)
    runner = CpuRunner(1).load(weights, max_context=64, num_pages=800_000_000 // small.page_bytes)
    runner.block_tables[:] = runner.num_pages - 1 - np.arange(4)
    assert np.isfinite(feed(runner, text_of('llama', 10))).all() and runner.pages.nbytes > 790_000_000
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 100_000_000
    small.close(); runner.close()

@pytest.mark.parametrize('kv_type', KV_TYPES)
def test_every_type_of_cache_predicts_the_same(kv_type):
    weights = folder_weights('qwen3_5-r2')
    runner, exact = CpuRunner(2, kv_type=kv_type).load(weights, max_context=144), SpecRunner(np.float64).load(weights, max_context=144)
    a, b = (feed(r, text_of('qwen3_5-r2')) for r in (runner, exact))
    assert np.linalg.norm(a - b, axis=-1).max() < .05 * np.linalg.norm(b, axis=-1).min()
    assert runner.page_bytes == {'f32': 4, 'f16': 2, 'bf16': 2, 'int8': 1}[kv_type] * 2 * PAGE * weights.config.kv_size * weights.config.layer_kinds.count('attention') + (
        8 * PAGE * weights.config.num_kv_heads * weights.config.layer_kinds.count('attention') if kv_type == 'int8' else 0)
    runner.close()

@pytest.mark.parametrize('kind, name', [(kind, name) for kind in ('spec', 'cpu') for name in NAMES[:2]])
def test_a_manager_of_memory_on_a_real_model(kind, name):
    "A sequence, a fork of it, and a third that finds both in the cache: each as if it were alone. The manager's own tests use a toy model"
    from sparkinfer.memory.model_memory import ModelMemory
    ids, weights = text_of(name, 130), folder_weights(name)
    plain, runner = KINDS[kind]().load(weights, max_context=144), KINDS[kind]().load(weights, max_context=144, num_slots=3, num_pages=20)
    want, memory = feed(plain, ids[:121]), ModelMemory(runner)
    one = memory.open(ids[:60])
    assert one.cached == 0 and memory.extend(one, 60) and same(kind, feed(runner, ids[:60], slot=one.slot), want[:60])
    two = memory.fork(one, ids[:60])
    assert memory.extend(one, 120) and memory.extend(two, 100)
    together = runner.submit(Batch.join([Batch.of(ids[60:120], 60, one.slot, 'all'), Batch.of(ids[60:100], 60, two.slot, 'all')])).logits
    assert same(kind, together[:60], want[60:120]) and same(kind, together[60:], want[60:100])
    memory.close(two, ids[:100]); memory.close(one, ids[:120]); memory.check()
    three = memory.open(ids[:121])
    assert three.cached >= 96 and memory.extend(three, 121)
    assert same(kind, feed(runner, ids[three.cached:121], start=three.cached, slot=three.slot)[-1], want[-1])
    memory.close(three, ids[:121]); memory.check()
    plain.close(); runner.close()
